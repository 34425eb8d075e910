"""Exits of a process that cannot continue."""

from __future__ import annotations

EXIT_CONFIG = 78
"""Exit code (`EX_CONFIG` of sysexits.h) for a failure that a restart would only repeat; the
supervisor does not restart the process.
"""


class FatalError(Exception):
    """The process cannot continue and a restart would not help. The message names the cause and the
    remedy; no traceback is shown.
    """
