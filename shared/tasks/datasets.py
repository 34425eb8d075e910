"""reasoning-gym's datasets, imported without matplotlib.

Two of them use cellpylib, which imports matplotlib to draw what is never drawn here. Without it a
scorer process starts in two thirds of the time and takes 30 MB less.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

_DRAWING = (
    "matplotlib",
    "matplotlib.animation",
    "matplotlib.collections",
    "matplotlib.pyplot",
    "mpl_toolkits",
    "mpl_toolkits.mplot3d",
)
"""What cellpylib imports in order to draw."""


def datasets() -> dict[str, tuple[Any, Any]]:
    """reasoning-gym's registry: a dataset's name to its class and the class of its config. The
    first call imports all of reasoning-gym, which takes most of a second.
    """
    if "reasoning_gym" not in sys.modules:
        with _without_drawing():
            import reasoning_gym  # noqa: F401  # importing it fills the registry
    from reasoning_gym.factory import DATASETS

    registry: dict[str, tuple[Any, Any]] = DATASETS
    return registry


@contextmanager
def _without_drawing() -> Iterator[None]:
    """Let imports of matplotlib find empty modules. Afterwards it can be imported as ever."""
    if any(name in sys.modules for name in _DRAWING):
        yield  # it is there already, or somebody is importing it
        return
    empty = {name: ModuleType(name) for name in _DRAWING}
    empty["mpl_toolkits.mplot3d"].Axes3D = None  # type: ignore[attr-defined]  # imported by name
    sys.modules.update(empty)
    try:
        yield
    finally:
        for name in _DRAWING:
            sys.modules.pop(name, None)
