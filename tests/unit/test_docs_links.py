"""Links between the pages: the file is there, the section too, and what a page sends a reader for is on the page it names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), ROOT / "experiments" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def anchors(page: Path) -> set[str]:
    """Of a page's headings, as GitHub makes them."""
    prose = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#{1,6} (.+)$", prose, flags=re.MULTILINE)
    texts = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading) for heading in headings]
    return {re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", "-") for text in texts}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_of_a_page_leads_to_a_file_and_a_section_that_are_there(page: Path) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8"))
    broken = []
    for link in links:
        file, _, section = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        if "://" not in link and (not target.exists() or (section and section not in anchors(target))):
            broken.append(link)
    assert broken == []


@pytest.mark.parametrize("arm", ["4-0-reuse", "likelihood_far"])
def test_the_page_on_sampling_sends_the_reader_where_the_arm_is_measured(arm: str) -> None:
    sampling = (ROOT / "docs" / "sampling.md").read_text(encoding="utf-8")
    line = next(line for line in sampling.splitlines() if arm in line and "result" in line)
    pages = [ROOT / "docs" / name for name in re.findall(r"\]\((results[\w-]*\.md)", line)]
    assert any(arm in page.read_text(encoding="utf-8") for page in pages)
