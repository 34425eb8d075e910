"""The command line: `swarm up`, `swarm status`, `swarm plot` and the rest.

It may use anything in `shared` and `services`; neither of them knows of it. Importing it is cheap:
torch, transformers and matplotlib are imported inside the commands that need them.
"""

import os
import signal

from swarm_cli.app import main

if os.getpid() == 1:
    # The first process of a container ignores signals that it has no handler for: `swarm join`
    # would look at the swarm, and `swarm nats init` wait for its server, until they are killed.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(128 + signal.SIGTERM))

__all__ = ["main"]
