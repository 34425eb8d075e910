"""Views of nodes and runs: `swarm status`, `top`, `observe`, `progress` and `plot`, and the code
that reads their data.
"""
