"""The error for a model that cannot be imported."""

from __future__ import annotations


class ImportRefused(ValueError):
    """A model cannot be imported; the message names the cause and the remedy in one sentence."""
