"""`python -m swarm_cli`, the same as `swarm`."""

from swarm_cli.app import main

main()
