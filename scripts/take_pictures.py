"""Takes pictures for docs/images from a run of the demo with three nodes: of `swarm top`, and of
the page in all states but empty, finished and unsigned, which the page's tests take.

    python -m scripts.take_pictures [STEPS]

Run it in the repository. It needs Chromium, Prometheus and the extra `test`, and takes about ten
minutes on two cores. The run's files stay in var/runs/pictures-TIME.
"""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Page, sync_playwright
from rich.console import Console
from rich.text import Text

from tests.integration.local_swarm import free_port_range
from tests.nats_server import free_port

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs" / "images"
DEADLINE_S = 1800.0
COLUMNS = 100
WIDE, NARROW = (1280, "light"), (390, "dark")


class Demo:
    """The run and its page."""

    def __init__(self, steps: int) -> None:
        self.run = f"pictures-{int(time.time())}"
        self.steps = steps
        page, node = free_port_range(), free_port()
        self.node_url, self.page_url = f"nats://127.0.0.1:{node}", f"http://127.0.0.1:{page}/"
        ports = ("--nats-port", str(node), "--base-port", str(free_port_range()))
        self.up = _start("up", "--run", self.run, "--nodes", "3", "--steps", str(steps), *ports)
        self.dashboard = _start("dashboard", "--port", str(page), "--folder", f"var/runs/{self.run}/watch")

    def told(self) -> dict[str, Any]:
        """What the page shows, as data; empty before it answers."""
        try:
            with urllib.request.urlopen(f"{self.page_url}swarm.json", timeout=30) as answer:
                return dict(json.load(answer))
        except OSError:
            return {}

    def until(self, holds: Callable[[dict[str, Any]], object], what: str) -> dict[str, Any]:
        """Wait for the page's data to be so."""
        give_up_at = time.monotonic() + DEADLINE_S
        while not holds(told := self.told()):
            if time.monotonic() > give_up_at or self.dashboard.poll() is not None:
                raise SystemExit(f"{what} was not seen: {json.dumps(told)[:2000]}")
            time.sleep(0.5)
        return told

    def pid(self, of: str, node: str = "") -> int:
        """The process id of a service, or of the server."""
        for process in Path("/proc").glob("[0-9]*"):
            try:
                command, environment = (process / "cmdline").read_bytes(), (process / "environ").read_bytes()
            except OSError:
                continue
            ours = self.run.encode() in command + environment
            if ours and of.encode() in command and (not node or f"SWARM_NODE__ID={node}".encode() in environment):
                return int(process.name)
        raise SystemExit(f"no process {of} {node}")

    def end(self) -> None:
        """End the run and its page, if they have not ended."""
        for process in (self.dashboard, self.up):
            process.send_signal(signal.SIGINT)
        for process in (self.dashboard, self.up):
            process.wait(300)


def _start(*arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", "swarm_cli", *arguments], cwd=ROOT)


def _top(node_url: str) -> str:
    """What a terminal shows of `swarm top`, with its colours."""
    asked = [sys.executable, "-m", "swarm_cli", "top", "--once", "--node-url", node_url]
    environment = {**os.environ, "FORCE_COLOR": "1", "COLUMNS": str(COLUMNS), "LINES": "60"}
    return subprocess.run(asked, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout


def _picture_of_terminal(browser: Browser, shown: str, file: Path) -> None:
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    console.print(Text.from_ansi(shown))
    page = browser.new_page(viewport={"width": 1000, "height": 900})
    page.set_content(console.export_svg(title="swarm top"))
    page.locator("svg").screenshot(path=str(file))
    page.close()


@contextmanager
def _opened(browser: Browser, url: str, look: tuple[int, str]) -> Iterator[Page]:
    width, scheme = look
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme="dark" if scheme == "dark" else "light")
    page.goto(url)
    page.wait_for_selector("html[data-ready] main h1")
    yield page
    page.close()


def _shoot(browser: Browser, url: str, name: str, look: tuple[int, str] = WIDE, *, most_px: int = 1800) -> None:
    with _opened(browser, url, look) as page:
        if "group" in name:
            page.get_by_role("radio", name="weight").check()
        height = page.evaluate("document.documentElement.scrollHeight")
        shown: Any = {"x": 0, "y": 0, "width": look[0], "height": min(height, most_px)}
        page.screenshot(path=str(IMAGES / f"{name}.png"), full_page=True, clip=shown)


@contextmanager
def _stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def _trained_group(told: dict[str, Any]) -> str:
    """The address of a foreign group with right and wrong answers that its node has trained on."""
    steps = {node["node"]: node["step"] for node in told["nodes"]}
    for group in told["groups"]:
        mixed = 0 < sum(reward >= 1 for reward in group["rewards"]) < len(group["rewards"])
        if mixed and group["sender"] != group["taker"] and group["step"] <= steps[group["taker"]]:
            return f"#/group/{group['taker']}/{group['step']}/{group['place']}"
    return ""


def main(steps: int) -> None:
    """Take the pictures during a run of so many steps."""
    demo = Demo(steps)
    try:
        with sync_playwright() as driver:
            browser = driver.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
            _take(demo, browser)
    finally:
        demo.end()


def _take(demo: Demo, browser: Browser) -> None:
    demo.until(lambda told: told.get("state") == "starting" and len(told["nodes"]) == 3, "the start")
    _shoot(browser, demo.page_url, "page-starting")
    half = demo.steps // 2
    demo.until(lambda told: told.get("nodes") and all(node["step"] >= half for node in told["nodes"]), "half of the run")
    group = demo.until(_trained_group_of, "a foreign group with right and wrong answers")
    _shoot(browser, demo.page_url, "page")
    _shoot(browser, demo.page_url, "page-narrow", NARROW)
    _shoot(browser, f"{demo.page_url}#/node/alpha", "page-node", most_px=1100)
    _shoot(browser, demo.page_url + _trained_group(group), "page-group", most_px=1000)
    _picture_of_terminal(browser, _top(demo.node_url), IMAGES / "top.png")
    with _stopped(demo.pid("services.sampler", "alpha")):
        demo.until(lambda told: told.get("state") == "failed", "a silent process")
        _shoot(browser, demo.page_url, "page-failed", most_px=1100)
    demo.until(lambda told: told.get("state") == "running", "that it goes on")
    with _stopped(demo.pid("nats-server")):
        demo.until(lambda told: told.get("state") == "lost", "a server that is gone")
        _shoot(browser, demo.page_url, "page-lost", most_px=1100)
    demo.until(lambda told: told.get("state") == "ended", "the run's end")
    _shoot(browser, demo.page_url, "page-ended", most_px=1100)


def _trained_group_of(told: dict[str, Any]) -> str:
    return _trained_group(told) if told.get("groups") else ""


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 200)
