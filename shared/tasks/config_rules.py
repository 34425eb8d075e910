"""Rules for which dataset configurations are allowed.

A foreign node chooses the configuration of its tasks, and reasoning-gym passes some of its texts to
`eval` or sympy's parser (`basic_arithmetic` evaluates expressions built from `operators`; the
integration scorers parse expressions built from `symbols`). So a text in a configuration must be a
word or an operator sign, never anything that can be called.
"""

from __future__ import annotations

import json
import re
from typing import Any

MAX_CONFIG_DEPTH = 4
MAX_LIST = 1000
MAX_MAGNITUDE = 10**12

REFUSED_DATASETS = {
    "composite": "it nests other datasets and their scorers; give each of them its own [[tasks]] entry with a weight",
}

REFUSED_SETTINGS = {
    "figlet_font": {"static_word": "it makes one word the answer of every task"},
    "polynomial_equations": dict.fromkeys(
        ("exp_distance_factor", "penalty_missing_factor", "penalty_extra_factor"),
        "it says how wrong an answer may be, which is for the node that scores and not for the one that sends",
    ),
}
"""Settings that no configuration may contain, by dataset, because with them a sender would choose
the answer or the scorer's tolerance.
"""

_WORD = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_ -]{0,62}[A-Za-z0-9_])?(\.[A-Za-z0-9]{1,8})?")
_SIGN = re.compile(r"[-+*/%^&|<>=,.:; ]{0,3}")


def parse_config(config: str, dataset: str = "") -> dict[str, Any]:
    """The configuration of a task reference as keyword arguments for this dataset.

    Raises:
        ValueError: the text is not a JSON object, or contains something that no dataset needs (see
            the module's docstring).
    """
    try:
        values = json.loads(config, parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(values, dict):
        raise ValueError("not a JSON object")
    if "seed" in values:
        raise ValueError("`seed` belongs to the task reference, not to the configuration")
    refused = REFUSED_SETTINGS.get(dataset, {})
    for key, value in values.items():
        if not key.isidentifier() or key.startswith("_") or len(key) > 64:
            raise ValueError(f"{key[:64]!r} is not the name of a setting")
        if key in refused:
            raise ValueError(f"{key} may not be set: {refused[key]}; omit it")
        _check(key, value, 0)
    return values


def _check(key: str, value: Any, depth: int) -> None:
    """A sender chooses this configuration, and every verifier builds the dataset from it. Without
    these limits a stranger would choose how large the dataset is.
    """
    if depth > MAX_CONFIG_DEPTH:
        raise ValueError(f"{key}: nested more than {MAX_CONFIG_DEPTH} deep")
    if isinstance(value, str):
        if not _WORD.fullmatch(value) and not _SIGN.fullmatch(value):
            raise ValueError(f"{key}: {value[:40]!r} is neither a plain word nor an operator sign")
    elif isinstance(value, bool) or value is None:
        return
    elif isinstance(value, int | float):
        if abs(value) > MAX_MAGNITUDE:
            raise ValueError(f"{key}: magnitude above {MAX_MAGNITUDE:.0e}")
    elif isinstance(value, list):
        if len(value) > MAX_LIST:
            raise ValueError(f"{key}: more than {MAX_LIST} entries")
        for item in value:
            _check(key, item, depth + 1)
    elif isinstance(value, dict):
        for name, item in value.items():
            _check(f"{key}.{name[:64]}", name, depth + 1)
            _check(f"{key}.{name[:64]}", item, depth + 1)


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")
