"""Runs a module as `python -m` does, in a process whose files cannot grow beyond a size, as on a
full disk: `python -m tests.small_files BYTES MODULE [ARGUMENT...]`.
"""

from __future__ import annotations

import runpy
import sys

from tests.full_disk import no_file_above

if __name__ == "__main__":
    size_bytes, module = sys.argv[1:3]
    sys.argv = sys.argv[2:]
    with no_file_above(int(size_bytes)):
        runpy.run_module(module, run_name="__main__", alter_sys=True)
