"""The documentation's site beyond docs/: a hook of MkDocs (`make docs`).

Pages link to files all over the repository, as on a code host. On the site the README and its like
are pages of their own, a linked source file or folder becomes a page that shows it, and a linked
image is copied. `llms.txt` lists all pages of the navigation, in the form of llmstxt.org, with
their Markdown beside them.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "experiments/README.md": "experiments.md",
}
"""Files outside docs/ that become pages of the site."""
IMAGES = {".png", ".svg"}
LANGUAGES = {".py": "python", ".toml": "toml", ".yaml": "yaml", ".conf": "text", ".md": "markdown"}
MOST_SHOWN = 12
"""A linked folder with at most this many files is shown with their contents, a larger one with
their names only.
"""
LINK = re.compile(r"(?P<head>\]\()(?P<target>[^)\s#]+)(?P<anchor>#[^)\s]*)?(?=\))")
FENCED = re.compile(r"^(?P<fence>```+).*?^(?P=fence)$", re.MULTILINE | re.DOTALL)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add the runbooks to the navigation by name, so that mkdocs.yml need not list them."""
    alerts = next(section["Alerts"] for section in config.nav or [] if "Alerts" in section)
    names = sorted(file.name for file in (ROOT / "docs" / "runbooks").glob("*.md"))
    alerts.extend(f"runbooks/{name}" for name in names if name != "README.md")
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files that pages link to, and the pages that are outside docs/."""
    for source, target in PAGES.items():
        files.append(File.generated(config, target, content=(ROOT / source).read_text(encoding="utf-8")))
    for page in list(files.documentation_pages()):
        for match in LINK.finditer(without_code(page.content_string)):
            there = in_repository(repository_path(page.src_uri), match["target"])
            if there is None or there in PAGES or (there.startswith("docs/") and not there.startswith("docs/examples")):
                continue
            address = site_path(there)
            if files.get_file_from_path(address) is not None:
                continue
            path = ROOT / there
            if path.suffix in IMAGES:
                files.append(File.generated(config, address, abs_src_path=str(path)))
            else:
                shown = File.generated(config, address, content=shown_as_page(path))
                shown.inclusion = InclusionLevel.NOT_IN_NAV
                files.append(shown)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links that lead out of docs/ at the page or copy on the site."""
    here = repository_path(page.file.src_uri)

    def moved(match: re.Match[str]) -> str:
        there = in_repository(here, match["target"])
        if there is None or page.file.src_uri.startswith("source/"):
            return match[0]
        address = posixpath.relpath(site_path(there), posixpath.dirname(page.file.src_uri) or ".")
        return f"{match['head']}{address}{match['anchor'] or ''}"

    return outside_code(markdown, lambda prose: LINK.sub(moved, prose))


def on_post_build(config: MkDocsConfig) -> None:
    """Write `llms.txt`, and each page's Markdown beside its HTML."""
    site = Path(config.site_dir)
    lines = [f"# {config.site_name}", "", f"> {config.site_description}", ""]
    for title, pages in _sections:
        lines += [f"## {title}", ""]
        for page in pages:
            text = site / page.file.src_uri
            text.parent.mkdir(parents=True, exist_ok=True)
            text.write_text(page.markdown or "", encoding="utf-8")
            lines.append(f"- [{page.title}]({page.file.src_uri}): {opening(page.markdown or '')}")
        lines.append("")
    (site / "llms.txt").write_text("\n".join(lines), encoding="utf-8")


_sections: list[tuple[str, list[Page]]] = []


def on_env(env: Any, config: MkDocsConfig, files: Files) -> Any:
    """Record the navigation's pages for `llms.txt`; this is the last event that sees them all."""
    by_path = {file.src_uri: file.page for file in files.documentation_pages() if file.page is not None}
    _sections.clear()
    for section in config.nav or []:
        for title, entries in section.items():
            paths = [path for entry in entries for path in (entry.values() if isinstance(entry, dict) else [entry])]
            _sections.append((title, [by_path[path] for path in paths]))
    return env


def repository_path(src_uri: str) -> str:
    """The repository path of a page's text."""
    return next((source for source, page in PAGES.items() if page == src_uri), f"docs/{src_uri}")


def in_repository(page: str, target: str) -> str | None:
    """The repository path that a link on `page` leads to; None for one to another host. Raises
    PluginError if nothing is there.
    """
    if re.match(r"[a-z]+:", target):
        return None
    there = posixpath.normpath(posixpath.join(posixpath.dirname(page), target))
    if not (ROOT / there).exists():
        raise PluginError(f"{page}: the link to {target} leads nowhere")
    return there


def site_path(there: str) -> str:
    """The site's source path for a file or folder of the repository."""
    if there in PAGES:
        return PAGES[there]
    if (ROOT / there / "README.md").exists() and there.startswith("docs/") and "examples" not in there:
        return f"{there.removeprefix('docs/')}/README.md"
    if there.startswith("docs/") and not there.startswith("docs/examples"):
        return there.removeprefix("docs/")
    return f"source/{there}" + ("" if PurePosixPath(there).suffix in IMAGES else ".md")


def shown_as_page(path: Path) -> str:
    """The text of a page that shows a file, or a folder with its files."""
    name = path.relative_to(ROOT).as_posix()
    head = f"---\nsearch:\n  exclude: true\n---\n\n# {name}\n"
    if path.is_file():
        return head + fenced(path)
    files = sorted(file for file in path.rglob("*") if file.is_file() and "__pycache__" not in file.parts)
    if len(files) > MOST_SHOWN or any(file.suffix not in LANGUAGES for file in files):
        return head + "\n" + "".join(f"- `{file.relative_to(path).as_posix()}`\n" for file in files)
    return head + "".join(f"\n## {file.relative_to(path).as_posix()}\n{fenced(file)}" for file in files)


def fenced(file: Path) -> str:
    """A file's text as a code block, with a fence longer than any in the file."""
    text = file.read_text(encoding="utf-8")
    fence = "`" * max(3, *(len(run) + 1 for run in re.findall(r"`+", text) or ["``"]))
    return f"\n{fence}{LANGUAGES.get(file.suffix, 'text')}\n{text.rstrip()}\n{fence}\n"


def outside_code(markdown: str, change: Any) -> str:
    """`markdown` with `change` applied to everything except fenced code."""
    parts, at = [], 0
    for match in FENCED.finditer(markdown):
        parts += [change(markdown[at : match.start()]), match[0]]
        at = match.end()
    return "".join([*parts, change(markdown[at:])])


def without_code(markdown: str) -> str:
    """`markdown` without its fenced code."""
    return FENCED.sub("", markdown)


def opening(markdown: str) -> str:
    """The first sentence of a page's first paragraph, as plain text."""
    for block in re.split(r"\n\s*\n", FENCED.sub("", markdown)):
        text = " ".join(block.split())
        if text and not text.startswith(("#", "!", "|", "<", "---", "-")):
            plain = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text).replace("**", "").replace("`", "")
            return re.split(r"(?<=[.:?!])\s", plain, maxsplit=1)[0]
    return ""
