"""How an import says that a model cannot be taken."""

from __future__ import annotations


class ImportRefused(ValueError):
    """A model cannot be imported; the message names cause and remedy in one sentence."""
