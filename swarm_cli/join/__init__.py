"""`swarm join`: from a token to a running node, with one line on the newcomer's machine."""
