"""The base class of all sections of a node's configuration, and the dtypes that settings and
commands choose from, by name (torch's are in `shared.model.loading`); and names of settings for
people, who count from 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict

from shared.text import visible

Dtype = Literal["float32", "bfloat16", "float16"]
AnyDtype = Literal["auto", Dtype]
"""`auto`: what fits the device, or another setting's."""


class Section(BaseModel):
    """Base of every section: unknown keys are refused, values do not change after loading, and
    numbers are finite.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


_TABLES = ("tasks", "nodes", "sets")
"""Lists whose entries are tables of their own, `[[tasks]]`; other lists hold plain values."""
_LONGEST = 120
"""Characters shown of a key: those of a file may be anything."""


SETS = ("eval", "sets")
"""The list of evaluation sets."""


def entry_lines(problems: Iterable[tuple[int, str]], table: tuple[str, ...] = ("tasks",)) -> list[str]:
    """Problems of task sources: the number of each source's entry in its list, and what is wrong. A
    problem of several lines becomes several.
    """
    return [f"{setting_name((*table, place))}: {line}" for place, problem in problems for line in problem.split("\n")]


def sources_message(lines: Iterable[str]) -> str:
    """Lines of task sources' entries as a message."""
    return "\n".join(["task sources cannot be used:", *(f"  {line}" for line in lines)])


def setting_name(location: Sequence[str | int]) -> str:
    """The name of the setting at `location`, in which places in lists count from 0.

    >>> setting_name(("tasks", 1, "weight"))
    '[[tasks]] 2: weight'
    >>> setting_name(("trainer", "constants", "betas", 0))
    'trainer.constants.betas, value 1'
    """
    parts: list[str] = []
    table: list[str] = []
    for part in location:
        if isinstance(part, str):
            table.append(visible(part, _LONGEST))
        elif table and table[-1] in _TABLES:
            parts.append(f"[[{'.'.join(table)}]] {part + 1}")
            table = []
        else:
            table = [f"{'.'.join(table)}, value {part + 1}"]
    return ": ".join([*parts, *([".".join(table)] if table else [])])
