"""What docs/kubernetes-trouble.md quotes of Kubernetes: each quote of a first column, and
whether a run has shown it.
"""

from __future__ import annotations

import re

from tests.k8s.manifests import REPOSITORY

PAGE = REPOSITORY / "docs" / "kubernetes-trouble.md"
SERVICES = "## CrashLoopBackOff"
"""From there on, services and NATS speak (test_last_words.py)."""
NOT_SHOWN = "†"


def quoted() -> dict[str, bool]:
    """Every quote, and whether it has no mark: a run has shown it."""
    found = {}
    for line in PAGE.read_text().split(SERVICES)[0].splitlines():
        if not line.startswith("| ") or line.startswith("| event") or line.split(" |")[0] in ("| it says", "| `describe` says"):
            continue
        for words, mark in re.findall(rf"`([^`]+)`({NOT_SHOWN}?)", line.split(" | ")[0]):
            found[words] = not mark
    return found


def row_of(words: str) -> list[str]:
    """All quotes of the row that has this one: versions of Kubernetes say it differently."""
    rows = (line.split(" | ")[0] for line in PAGE.read_text().splitlines() if line.startswith("| "))
    return next(found for row in rows if words in (found := re.findall(r"`([^`]+)`", row)))
