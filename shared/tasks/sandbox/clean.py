"""Resets the process state that datasets and scorers change, so that an answer's reward does not
depend on earlier ones.

A scorer may set the precision of decimals, and code that `codeio` runs may change anything;
`derive_item` itself resets what deriving sets. For local groups a reset is enough, and costs half a
microsecond per group. Foreign groups choose their configuration, so each gets its own process
(`shared.tasks.sandbox.forker`), which starts without any leftover state.
"""

from __future__ import annotations

import decimal
import random
import sys

import numpy as np

RECURSION_LIMIT = 1000
INTEGER_DIGITS = 4300
"""Python's default. Converting longer integers takes quadratic time."""


def clean_numbers() -> None:
    """Reset precision, rounding and flags of decimals, and the limits on recursion and on the
    length of integers in text. Called before each group.
    """
    # Set a copy, so that nobody changes the template.
    decimal.setcontext(decimal.DefaultContext)
    sys.setrecursionlimit(RECURSION_LIMIT)
    sys.set_int_max_str_digits(INTEGER_DIGITS)


def clean_random() -> None:
    """Seed the global generators, including sympy's. Datasets do not draw from them unseeded, but a
    user's own verifier may.
    """
    random.seed(0)
    np.random.seed(0)
    sympys = sys.modules.get("sympy.core.random")
    if sympys is not None:
        sympys.seed(0)
