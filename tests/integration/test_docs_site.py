"""The site that `make docs` builds: strict, whole, and asking no other host for anything."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urldefrag

import pytest

REPOSITORY = Path(__file__).parents[2]
LOADS = re.compile(r"<(?:script|link|img|iframe|source|video)\b[^>]*?\b(?:src|href)\s*=\s*\"?([^\s\">]+)", re.IGNORECASE)
LINKS = re.compile(r"<a\b[^>]*?\bhref\s*=\s*\"?([^\s\">]+)", re.IGNORECASE)


def build(folder: Path, into: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(into)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        env={"PATH": "/usr/bin:/bin", "NO_MKDOCS_2_WARNING": "1"},
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    into = tmp_path_factory.mktemp("docs") / "site"
    done = build(REPOSITORY, into)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr, done.stderr
    return into


def pages(site: Path) -> Iterator[tuple[Path, str]]:
    for page in sorted(site.rglob("*.html")):
        yield page, page.read_text(encoding="utf-8")


@pytest.mark.slow
def test_every_page_and_runbook_is_on_the_site_and_in_llms_txt(site: Path) -> None:
    listed = (site / "llms.txt").read_text(encoding="utf-8")
    wanted = [
        path.relative_to(REPOSITORY / "docs").as_posix()
        for path in (REPOSITORY / "docs").rglob("*.md")
        if "examples" not in path.parts
    ]
    for name in [*wanted, "index.md", "contributing.md", "changelog.md", "experiments.md"]:
        assert f"]({name}): " in listed, name
        assert (site / name).is_file(), name
    assert not re.search(r"^- .*: $", listed, re.MULTILINE), "a page without an opening sentence"


@pytest.mark.slow
def test_every_link_of_the_site_leads_to_a_file_of_it(site: Path) -> None:
    seen = 0
    for page, text in pages(site):
        for target in LINKS.findall(text):
            if re.match(r"[a-z]+:", target) or page.name == "404.html":
                continue
            path, _ = urldefrag(unquote(target))
            assert not path or (page.parent / path).resolve().exists(), f"{page.relative_to(site)}: {target}"
            seen += 1
    assert seen > 1000


@pytest.mark.slow
def test_a_reader_offline_misses_nothing(site: Path) -> None:
    for page, text in pages(site):
        for target in LOADS.findall(text):
            assert not re.match(r"(https?:)?//", target), f"{page.relative_to(site)} loads {target}"
    for style in site.rglob("*.css"):
        assert not re.search(r"url\(\s*['\"]?(https?:)?//", style.read_text(encoding="utf-8")), style


@pytest.mark.slow
@pytest.mark.parametrize("broken", ["[gone](nowhere.md)", "[gone](../services/nowhere.py)", "[gone](design.md#nowhere)"])
def test_a_link_that_leads_nowhere_fails_the_build(tmp_path: Path, broken: str) -> None:
    for entry in REPOSITORY.iterdir():
        if entry.name in {"docs", "scripts"}:
            shutil.copytree(entry, tmp_path / entry.name)
        elif entry.name not in {".git", ".venv", "build", "var"}:
            (tmp_path / entry.name).symlink_to(entry)
    with (tmp_path / "docs" / "glossary.md").open("a", encoding="utf-8") as page:
        page.write(f"\n{broken}\n")
    done = build(tmp_path, tmp_path / "site")
    assert done.returncode != 0
    assert "nowhere" in done.stderr
