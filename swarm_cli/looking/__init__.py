"""Finds the swarm that a command looks at: the servers of a running one, those of the next run, or
the records of a run that has ended. `observe`, `dashboard`, `rollouts` and `trace` show its
contents.
"""
