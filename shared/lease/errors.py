"""Why a process may not start under a node's name."""

from __future__ import annotations


class NameTaken(Exception):
    """Another run or process has the name; the message says which, and what to do."""
