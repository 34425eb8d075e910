"""Names under which a machine reaches itself and nobody else does."""

from __future__ import annotations

LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
