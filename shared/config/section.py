"""The base class of all sections of a node's configuration, and the dtypes that settings and
commands choose from, by name (torch's are in `shared.model.loading`); and names of settings for
people, who count from 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict

from shared.text import visible, without_secrets

Dtype = Literal["float32", "bfloat16", "float16"]
AnyDtype = Literal["auto", Dtype]
"""`auto`: what fits the device, or another setting's."""


def _base_url(value: str) -> str:
    if value != without_secrets(value):
        raise ValueError(
            "an address with a name, a password or a query in it, which logs would show: name the environment variable with the "
            "key (key_variable, generator.openai_key_variable)"
        )
    if value and not value.startswith(("http://", "https://")):
        raise ValueError(f"{visible(value, 200)!r} is not a server's address: write http://HOST:PORT/v1 or https://HOST/v1")
    return value


BaseUrl = Annotated[str, AfterValidator(_base_url)]
"""Base URL of a server that is asked over HTTP, without secrets; may be empty."""


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
