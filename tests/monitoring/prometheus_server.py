"""A real Prometheus for tests, which is asked over HTTP."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import yaml

from tests.nats_server import free_port

START_TIMEOUT_S = 120.0
QUICK = {"scrape_interval": "2s", "scrape_timeout": "2s", "evaluation_interval": "1s"}


def prometheus_is_here() -> bool:
    return shutil.which("prometheus") is not None


class PrometheusServer:
    """One process. `jobs`: a list of (address, labels) each, read from files. `pace`: how often
    it scrapes and evaluates.
    """

    def __init__(
        self, folder: Path, rules: Path, jobs: dict[str, list[tuple[str, dict[str, str]]]], pace: dict[str, str] = QUICK
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._port = free_port()
        self._process: subprocess.Popen[bytes] | None = None
        config = {
            "global": pace,
            "rule_files": [str(rules)],
            "scrape_configs": [
                {"job_name": job, "file_sd_configs": [{"files": [str(folder / f"{job}.json")], "refresh_interval": "2s"}]}
                for job in jobs
            ],
        }
        for job, targets in jobs.items():
            self.discover(job, targets)
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))

    def discover(self, job: str, targets: list[tuple[str, dict[str, str]]]) -> None:
        """These are the job's targets from now on."""
        written = self._folder / f"{job}.new"
        written.write_text(json.dumps([{"targets": [address], "labels": labels} for address, labels in targets]))
        written.replace(self._folder / f"{job}.json")

    def start(self) -> PrometheusServer:
        command = [
            "prometheus",
            f"--config.file={self._folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={self._folder / 'tsdb'}",
            f"--web.listen-address=127.0.0.1:{self._port}",
        ]
        with (self._folder / "prometheus.log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/-/ready", timeout=2):
                    return self
            except OSError:
                time.sleep(0.1)
        raise RuntimeError(f"prometheus did not start: {(self._folder / 'prometheus.log').read_text()[-2000:]}")

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(10)

    def ask(self, path: str, **parameters: str) -> Any:
        """The `data` of an answer of the HTTP API; an AssertionError with Prometheus's own words
        when it refuses.
        """
        url = f"http://127.0.0.1:{self._port}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=30) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{parameters}: {error.read().decode()[:500]}") from None

    def values(self, expr: str) -> list[tuple[dict[str, str], float]]:
        """Return what an expression gives now, as (labels, value); a scalar has no labels."""
        data = self.ask("query", query=expr)
        if data["resultType"] == "scalar":
            return [({}, float(data["result"][1]))]
        return [(series["metric"], float(series["value"][1])) for series in data["result"]]

    def history(self, selector: str, window: str) -> list[tuple[float, float]]:
        """The samples of the one series that a selector names, as (Unix time, value), the oldest
        first; none before its first scrape.
        """
        found = self.ask("query", query=f"{selector}[{window}]")["result"]
        assert len(found) <= 1, f"{selector} names {len(found)} series"
        return [(float(at), float(value)) for series in found for at, value in series["values"]]

    def finite(self, expr: str) -> list[tuple[dict[str, str], float]]:
        """The same without NaN."""
        return [(labels, value) for labels, value in self.values(expr) if not math.isnan(value)]
