"""`swarm model` and `swarm eval`: import models, estimate their memory, export and
evaluate them.
"""
