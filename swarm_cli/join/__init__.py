"""`swarm join`: from a token to a running node, with one command on the newcomer's machine."""
