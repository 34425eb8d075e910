"""Finds arms whose runs are equal to the last digit: the settings that differ had no effect."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from lab.records import records_digest
from lab.runs import RunFolder


def same_records(folders: Iterable[RunFolder]) -> list[dict[str, Any]]:
    """Sets of arms whose records are the same, apart from the seconds they took, with the seeds for
    which they are.

    Raises:
        ValueError: records are incomplete.
    """
    arms_of: dict[tuple[int, str], list[str]] = defaultdict(list)
    for folder in folders:
        arms_of[folder.seed, records_digest(folder.records)].append(folder.arm)
    seeds_of: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for (seed, _), arms in arms_of.items():
        if len(arms) > 1:
            seeds_of[tuple(arms)].append(seed)
    return [{"arms": list(arms), "seeds": sorted(seeds)} for arms, seeds in sorted(seeds_of.items())]


def same_records_text(found: Sequence[dict[str, Any]]) -> str:
    """A sentence for each such set of arms; empty if there is none."""
    return "\n".join(
        f"Arms {' and '.join(each['arms'])} have the same records, apart from timings (seeds "
        f"{', '.join(map(str, each['seeds']))}): the settings in which they differ had no effect.\n"
        for each in found
    )
