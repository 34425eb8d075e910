"""The four processes of a node, one folder each; start one with `python -m services.<name>`.

They communicate only through messages: no service imports another.
"""

import os
import signal

if os.getpid() == 1:
    # The first process of a container gets no signal that it does not handle. A service handles
    # SIGTERM once it runs; until then, while torch is imported for seconds, nothing is at stake,
    # and ending at once beats being killed after the grace period.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
