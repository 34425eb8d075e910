"""Finds the swarm that a command looks at: the servers of a running one, those of the next run, or
a copy of what an ended run's server had stored. `observe`, `dashboard`, `rollouts` and `trace` show
its contents.
"""
