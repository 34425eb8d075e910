"""`swarm invite` and `swarm join`: one token from the operator, one line on the newcomer's
machine.
"""
