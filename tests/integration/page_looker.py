"""A real browser for tests of the swarm's page. Screenshots stay in `build/page`."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import pytest

ROOT = Path(__file__).parents[2]
CHROMIUM = shutil.which("chromium")
AXE = ROOT / ".venv" / "axe" / "node_modules" / "axe-core" / "axe.min.js"
SHOTS = ROOT / "build" / "page"
WAIT_MS = 60_000
COVERED = """
[...document.querySelectorAll("svg.chart")].flatMap((chart) => {
  const texts = [...chart.querySelectorAll("text")].map((text) => {
    const { left, right, top, height } = text.getBoundingClientRect();
    return { words: text.textContent, left, right, top: top + height / 4, bottom: top + height * 3 / 4 };
  });
  return texts.flatMap((one, index) => texts.slice(index + 1)
    .filter((other) => one.left < other.right && other.left < one.right && one.top < other.bottom && other.top < one.bottom)
    .map((other) => `${one.words} and ${other.words}`));
})
"""
"""Pairs of a chart's labels that cover each other. A line's box is twice as high as a digit."""
_RESTING: WeakKeyDictionary[Any, list[Any]] = WeakKeyDictionary()
"""Tabs that nobody looks at, by their browser. A new one costs Chromium a second of a core."""
LOOKS = [(1280, "light"), (390, "dark")]
OTHER_LOOKS = [(1280, "dark"), (390, "light")]


@contextmanager
def a_browser() -> Iterator[Any]:
    """Chromium, for the length of the block. The test is skipped where there is none."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright comes with the extra `test`")
    if CHROMIUM is None:
        pytest.skip("no chromium on the PATH (Debian's package chromium)")
    SHOTS.mkdir(parents=True, exist_ok=True)
    with playwright.sync_playwright() as driver:
        running = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-dev-shm-usage"])
        yield running
        # Once for all, because Playwright opens every address that a tab has seen.
        for tab in _RESTING.get(running, []):
            assert tab.context.storage_state() == {"cookies": [], "origins": []}, "a page keeps something in the browser"
        running.close()


class Looker:
    """A tab of the browser that notes what a page must never do.

    A tab that was closed in order is looked through again, at another address: the pages of these
    tests keep nothing in a browser.
    """

    def __init__(self, browser: Any, width: int = 1280, scheme: str = "light", allowed: str = "503") -> None:
        resting = _RESTING.setdefault(browser, [])
        self._browser = browser
        self.page = resting.pop() if resting else browser.new_page(reduced_motion="reduce")
        self.page.set_viewport_size({"width": width, "height": 900})
        self.page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
        self.page.set_default_timeout(WAIT_MS)
        self.problems: list[str] = []
        self._allowed = allowed
        self._listeners: list[tuple[str, Callable[[Any], None]]] = []
        self.listen("pageerror", lambda error: self.problems.append(str(error)))
        self.listen("dialog", lambda dialog: self.problems.append(f"dialog {dialog.message}"))
        self.listen("console", self._noted)
        self.listen("request", lambda request: self.problems.append(request.url) if "127.0.0.1" not in request.url else None)

    def listen(self, event: str, listener: Callable[[Any], None]) -> None:
        """As Playwright's `page.on`, until this is closed."""
        self.page.on(event, listener)
        self._listeners.append((event, listener))

    def _noted(self, message: Any) -> None:
        # Prometheus is not installed in these tests: its API says so with 503.
        if message.type == "error" and self._allowed not in message.text:
            self.problems.append(message.text)

    def open(self, url: str) -> Any:
        self.page.goto(url)
        self.page.wait_for_selector("html[data-ready] main h1")
        return self.page

    def shot(self, name: str) -> None:
        self.page.screenshot(path=str(SHOTS / f"{name}.png"), full_page=True)

    def check(self) -> None:
        """Nothing of a foreign text ran, nothing came from elsewhere, nothing is wider than the
        window, and no label of a chart covers another.
        """
        assert self.problems == []
        assert self.page.evaluate("window.hacked") is None
        assert self.page.evaluate(COVERED) == []
        width, window = self.page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
        assert width <= window, f"the page is {width} px wide in a window of {window} px"

    def axe(self) -> list[str]:
        """Return what axe-core finds wrong, by WCAG 2.1 A and AA and its own best practices."""
        self.page.evaluate(AXE.read_text())
        found = self.page.evaluate("axe.run(document).then(({violations}) => violations)")
        return [f"{each['id']}: {[node['html'][:120] for node in each['nodes'][:3]]}" for each in found]

    def close(self) -> None:
        for event, listener in self._listeners:
            self.page.remove_listener(event, listener)
        self._listeners = []
        self.page.mouse.move(0, 0)
        self.page.goto("about:blank")
        _RESTING[self._browser].append(self.page)


def written(coroutine: Coroutine[Any, Any, None]) -> None:
    """Run it in a thread of its own: Playwright's loop runs in this one."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(asyncio.run, coroutine).result(WAIT_MS / 1000)
