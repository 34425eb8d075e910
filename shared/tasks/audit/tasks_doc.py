"""Writes the table of `docs/tasks.md` from the forms and an audit: `python -m
shared.tasks.audit.tasks_doc`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

from shared.contracts.messages import TaskRef
from shared.tasks.audit.run import Finding, audit
from shared.tasks.derive import REFUSED_DATASETS, REFUSED_SETTINGS, dataset_names
from shared.tasks.forms import form_of
from shared.tasks.sandbox import ScorerPool

PAGE = Path(__file__).resolve().parents[3] / "docs" / "tasks.md"
BEGIN, END = "<!-- begin: table of forms -->", "<!-- end: table of forms -->"
SEED, TASKS, THOROUGH = 9, 10, 3
"""The audit uses this many tasks of each dataset in its default configuration. All get the
constants as answers; the first `THOROUGH` get all candidates.
"""
ANSWER_TIMEOUT_S = 60.0
"""Generous, because on a loaded machine one second of work may take many."""


async def audit_defaults(thorough: int = THOROUGH) -> dict[str, Finding]:
    """The audit that the table's last column comes from, which needs the constants only.

    `thorough`: how many tasks of each dataset get all candidates.
    """
    refs = [TaskRef(dataset=name, seed=SEED, index=index) for name in dataset_names() for index in range(TASKS)]
    async with ScorerPool(workers=1, answer_timeout_s=ANSWER_TIMEOUT_S, memory_mb=2048) as pool:
        return await audit(pool, refs, thorough)


def table(findings: Mapping[str, Finding]) -> str:
    """Markdown table with one row per dataset; the last column is empty for a dataset without a
    finding.
    """
    rows = ["| dataset | full marks also for | stricter than reasoning-gym's scorer | best constant |", "|---|---|---|---|"]
    for name in sorted({*dataset_names(), *REFUSED_DATASETS}):
        if name in REFUSED_DATASETS:
            rows.append(f"| `{name}` | refused: {_cell(REFUSED_DATASETS[name])} | | |")
            continue
        form = form_of(name)
        refused = "; ".join(f"refuses the setting `{key}`" for key in REFUSED_SETTINGS.get(name, {}))
        stricter = "; ".join(part for part in (form.stricter, refused) if part)
        rows.append(f"| `{name}` | {_cell(form.also_paid)} | {_cell(stricter)} | {_constant(findings.get(name))} |")
    return "\n".join(rows)


def written(page: str, findings: Mapping[str, Finding]) -> str:
    """`page` with the table between its two markers replaced."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table(findings)}\n{END}{after}"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _constant(finding: Finding | None) -> str:
    name, mean = finding.best_constant() if finding is not None else ("", 0.0)
    shown = name if name[:1] not in ("'", '"') else f"`{name[1:-1]}`" if name[1:-1] else "an empty answer"
    return f"{_cell(shown)}: {mean:.2f}" if mean >= 0.005 else ""


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8"), asyncio.run(audit_defaults())), encoding="utf-8")
