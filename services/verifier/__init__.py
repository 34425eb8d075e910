"""The border of the node: scores local groups, shares them signed, and accepts foreign groups that
pass every check.

`shared.tasks.sandbox` derives tasks and scores answers. Nothing here imports torch or loads a
model.
"""
