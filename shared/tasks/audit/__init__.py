"""Tests whether a verifier gives full marks to wrong answers: makes wrong answers for each task and
scores them like any other.

`candidates` makes them, `witnesses` finds a right answer if a dataset gives none, `run` scores
them, `tasks_doc` writes the table of `docs/tasks.md`. A running node uses none of this.
"""
