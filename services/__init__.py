"""The four processes of a node, one folder each; start one with `python -m services.<name>`.

They communicate only through messages: no service imports another.
"""

import os
import signal

if os.getpid() == 1:
    # The first process of a container ignores signals that it has no handler for. A service handles
    # SIGTERM once it runs. Until then, while torch is imported for seconds, there is nothing to
    # save, and ending at once is better than being killed after the grace period.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
