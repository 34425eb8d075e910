"""The findings of a part of the check, and the page made of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

TITLE = "What was checked on a GPU"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The device and the size of the check. model: a folder; empty for a random model with the
    shapes of SmolLM2-135M. short: takes seconds instead of minutes, with a tiny model.
    """

    device: str
    folder: Path
    model: str = ""
    short: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line of the page. held: whether the bar was met; None for a figure without a bar."""

    part: str
    measured: str
    found: str
    bar: str = ""
    held: bool | None = None

    def to_builtins(self) -> dict[str, Any]:
        """The finding in plain types, to be passed from a part's process to the page."""
        return asdict(self)


def page(
    findings: Sequence[Finding], failures: Mapping[str, str], facts: Mapping[str, str], *, date: str, command: str, seconds: float
) -> str:
    """The text of `var/gpu-check.md`."""
    judged = [finding for finding in findings if finding.held is not None]
    kept = sum(1 for finding in judged if finding.held)
    lines = [
        f"# {TITLE}",
        "",
        f"Written by `{command}` on {date} in {seconds:.0f} s. {kept} of {len(judged)} bars kept"
        + (f", {len(failures)} parts not run to their end." if failures else "."),
        "",
        *(f"- {name}: {value}" for name, value in facts.items()),
        "",
        "| part | measured | found | bar | |",
        "|---|---|---|---|---|",
    ]
    verdicts = {True: "kept", False: "**not kept**", None: ""}
    lines += [
        f"| {finding.part} | {finding.measured} | {finding.found} | {finding.bar} | {verdicts[finding.held]} |"
        for finding in findings
    ]
    lines += [f"| {part} | not run to its end | {cause} | | **failed** |" for part, cause in failures.items()]
    return "\n".join(lines) + "\n"
