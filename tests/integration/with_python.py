"""Runs a module as `python -m` does, in a process that takes another program for its Python.

`python -m tests.integration.with_python PYTHON MODULE [ARGUMENT...]`
"""

from __future__ import annotations

import runpy
import sys

if __name__ == "__main__":
    sys.executable, module = sys.argv[1:3]
    sys.argv = sys.argv[2:]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
