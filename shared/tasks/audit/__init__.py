"""Does a verifier pay in full for what is not right? Wrong answers made from each task, scored as
any other answer.

`candidates` makes them, `witnesses` finds a right answer where a dataset gives none, `run` scores
them, `tasks_doc` keeps the table of `docs/tasks.md`. Nothing here is used when a node runs.
"""
