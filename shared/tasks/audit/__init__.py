"""Tests whether a verifier gives wrong answers full marks: makes wrong answers from each task and
scores them like any other.

`candidates` makes them, `witnesses` finds a right answer where a dataset gives none, `run` scores
them, `tasks_doc` writes the table of `docs/tasks.md`. A running node uses none of this.
"""
