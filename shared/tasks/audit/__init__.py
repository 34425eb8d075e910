"""Tests whether a verifier gives full marks to wrong answers: makes wrong answers for each task and
scores them like any other.

`candidates` makes them and `run` scores them. A running node uses none of this.
"""
