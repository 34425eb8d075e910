"""Tests whether a verifier gives full marks to wrong answers: makes wrong answers for each task and
scores them like any other.

`candidates` makes them, `run` scores them, `tasks_doc` writes the table of `docs/tasks.md`. A
running node uses none of this.
"""
