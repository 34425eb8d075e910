"""The border of the node: scores this node's groups, shares them signed, and lets foreign groups in
after every check.

Deriving tasks and scoring happen in `shared.tasks.sandbox`. Nothing here imports torch or loads a
model.
"""
