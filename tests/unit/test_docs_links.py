"""Links between the pages: the file is there, the section too, and what a page sends a reader for
is on the page it names.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

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


TOP = "services|shared|swarm_cli|lab|benchmarks|monitoring|tests|scripts|config|k8s|docs|requirements"


def test_every_file_that_a_page_names_is_there() -> None:
    """The tests behind the promises of docs/design.md too, which are named by file alone."""
    named = {file.name for file in (ROOT / "tests").rglob("test_*.py")}
    gone = {}
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        files = [file for file in re.findall(rf"`((?:{TOP})/[\w/.-]+)`", text) if not (ROOT / file).exists()]
        tests = [test for test in re.findall(r"`(test_\w+\.py)`", text) if test not in named]
        if page.name != "CHANGELOG.md" and (files or tests):
            gone[page.name] = [*files, *tests]
    assert gone == {}
    assert "`tests/chaos`" in (ROOT / "docs" / "design.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("arm", ["replay", "rescue"])
def test_the_pages_on_sampling_and_training_send_the_reader_where_the_arm_is_measured(arm: str) -> None:
    text = "\n\n".join((ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("sampling.md", "training.md"))
    paragraph = next(text for text in text.split("\n\n") if arm in text and "](results" in text)
    pages = [ROOT / "docs" / name for name in re.findall(r"\]\((results[\w-]*\.md)", paragraph)]
    assert any(arm in page.read_text(encoding="utf-8") for page in pages)


def test_prose_of_the_pages_wraps_at_a_hundred_columns() -> None:
    written_by_commands = {"settings.md", "metrics.md"}
    for page in PAGES:
        if page.name in written_by_commands:
            continue
        prose = re.sub(r"^ *(```+).*?^ *\1$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
        for line in prose.splitlines():
            free = line.lstrip()
            if line.startswith("    ") or free.startswith(("|", "#", "![", "<")):
                continue
            breakable = re.sub(r"^([-*]|\d+\.) +|`[^`]*`|\[[^\]]*\]\([^)]*\)", "_", free)
            assert len(line) <= 100 or " " not in breakable, f"{page.name}: {line}"


def run_together(text: str) -> list[str]:
    """Paragraphs that hold a heading, a row of a table, an image with text after it or an item of a
    list: what is left of these when a paragraph is wrapped without the blank line around it.
    """
    found = []
    for token in MarkdownIt("commonmark").enable("table").parse(text):
        children = token.children or []
        prose = "".join(each.content if each.type == "text" else f"<{each.type}>" for each in children)
        if re.search(r"\S\s*#{2,6} \S|\|\s*-{3,}\s*\||\S(<softbreak>|\s)- (<strong_open>|\*\*)|<image>\s?\w", prose):
            found.append(token.content)
    return found


def test_no_heading_table_image_or_list_has_run_into_a_paragraph() -> None:
    table = "| a | b |\n|---|---|\n| 1 | 2 |\n"
    assert not run_together(f"Text `| --- |`.\n\n## Title\n\nText.\n\n{table}\nText.\n\n- **one**: x\n- **two**: y\n")
    for wrapped in ("Text ### Title and text.", f"Text {' '.join(table.split())}", "![a](b.png) Text.", "Text. - **one**: x"):
        assert run_together(wrapped) == [wrapped]
    assert {page.name: found for page in PAGES if (found := run_together(page.read_text(encoding="utf-8")))} == {}


def test_of_an_experiments_plots_only_those_that_a_page_shows_are_kept() -> None:
    """`swarm experiment report` draws the others again; all of them were 21 MB."""
    listed = subprocess.run(["git", "ls-files", "experiments/*.png"], cwd=ROOT, capture_output=True, text=True, check=True)
    kept = {ROOT / name for name in listed.stdout.splitlines()}
    shown = {
        (page.parent / link).resolve()
        for page in PAGES
        for link in re.findall(r"\]\(([^)\s]+\.png)\)", page.read_text(encoding="utf-8"))
    }
    assert kept and not [str(file.relative_to(ROOT)) for file in kept - shown]
    assert not [file.name for file in kept if file.stat().st_size > 150_000], "draw it with a palette (lab/plots.py)"
