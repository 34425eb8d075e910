"""Figures of a full run, kept in `var/chaos/figures.json` and written to the end of
`docs/reliability.md` by the suite itself.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lab.runs import code_commit
from tests.chaos.scale import SCALE

REPO = Path(__file__).resolve().parents[2]
ROWS = REPO / "var" / "chaos" / "figures.json"
PAGE = REPO / "docs" / "reliability.md"
BEGIN = "<!-- begin: written by make chaos -->"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One fault of a run. `sent`, `lost` and `duplicated` count what `counted` names; None where
    the fault has no such count.
    """

    fault: str
    injected: int
    counted: str = ""
    sent: int | None = None
    lost: int | None = None
    duplicated: int | None = None
    refused: Mapping[str, int] = field(default_factory=dict)
    recovery_s: Sequence[float] = ()
    remark: str = ""


def note(row: Row) -> None:
    """Print what was measured; in a full run, also keep it and write the page anew."""
    print(f"\n[chaos] {_cells(asdict(row))}")
    if SCALE.name != "full":
        return
    rows = json.loads(ROWS.read_text()) if ROWS.exists() else {}
    rows[row.fault] = {**asdict(row), "measured_at": time.time(), "commit": code_commit()}
    ROWS.parent.mkdir(parents=True, exist_ok=True)
    ROWS.write_text(json.dumps(rows, indent=1))
    PAGE.write_text(page(rows))


def page(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """The text of `docs/reliability.md` with these figures; rows may be of different commits."""
    times = [row["measured_at"] for row in rows.values()]
    first, last = (time.strftime("%Y-%m-%d %H:%M", time.gmtime(moment)) for moment in (min(times), max(times)))
    commits = sorted({row.get("commit", "not recorded") for row in rows.values()})
    lines = [
        f"{PAGE.read_text().partition(BEGIN)[0]}{BEGIN}",
        "",
        f"Counts of the newest full run of each fault, from {first} to {last} UTC.",
        f"Machine: {machine()}. Commit: {', '.join(commits)}.",
        "",
        "| fault | injected | sent | lost | duplicated | recovery s, median / worst |",
        "|---|---:|---|---:|---:|---|",
        *(f"| {' | '.join(_shown(row))} |" for _, row in sorted(rows.items())),
    ]
    return "\n".join(lines) + "\n"


def _shown(row: Mapping[str, Any]) -> list[str]:
    """The cells of a row on the page; refusals by reason and remarks are printed and kept."""
    fault, injected, counted, sent, lost, duplicated, _, recovery, _ = _cells(row)
    return [fault, injected, f"{sent} {counted}" if sent else "", lost, duplicated, recovery]


def _cells(row: Mapping[str, Any]) -> list[str]:
    refused = ", ".join(f"{reason} {count}" for reason, count in sorted(row["refused"].items()) if count)
    seconds = row["recovery_s"]
    recovery = f"{statistics.median(seconds):.1f} / {max(seconds):.1f}" if seconds else ""
    counts = ["" if row[name] is None else f"{row[name]:,}" for name in ("sent", "lost", "duplicated")]
    return [row["fault"], f"{row['injected']:,}", row["counted"], *counts, refused, recovery, row["remark"]]


def machine() -> str:
    """The processor, cores and memory, so that seconds can be judged."""
    processor = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.partition(":")[2].strip() for line in processor if line.startswith("model name")), platform.machine())
    memory_gb = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{os.cpu_count()} cores ({model}), {memory_gb:.0f} GB, Linux {platform.release().split('-')[0]}"
