"""The command line: `swarm up`, `swarm watch`, `swarm status`, `swarm plot` and the rest.

It may use anything in `shared` and `services`; neither of them knows of it. Importing it is cheap:
torch, transformers and matplotlib are imported inside the commands that need them.
"""

from swarm_cli.app import main

__all__ = ["main"]
