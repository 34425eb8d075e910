"""Runs a Prometheus for the dashboard: finds, configures, starts and ends the program.

It answers only this process (`swarm_cli.local.loopback_tls`). The page's server, which checks the
Host header, passes its pages on.
"""

from __future__ import annotations

import shutil
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import yaml

from shared.runtime.parent_death import ending_with_parent
from swarm_cli.errors import CommandError
from swarm_cli.local.loopback_tls import LoopbackTls

PREFIX = "/prometheus"
"""The path of Prometheus' own pages, both on its port and on the page's server."""
SCRAPE_S = 2
READY_S = 60.0
STOP_S = 15.0
RETENTION = "3d"
INSTALL = """\
prometheus is not on the PATH, so the page has no panels and alerts. To install it:
  Debian, Ubuntu   apt-get install --no-install-recommends prometheus
  macOS            brew install prometheus
  others           unpack the archive for your system from https://prometheus.io/download/ and put its folder on the PATH"""


def installed_prometheus() -> str | None:
    """Path of the program; None if it is not installed."""
    return shutil.which("prometheus")


def prometheus_config(targets: Path, rules: Path, nats_targets: Path) -> dict[str, Any]:
    """Prometheus' configuration: the swarm's targets as job `swarm`, its NATS server as job `nats`,
    and the rules of the cluster's monitoring.
    """
    return {
        "global": {"scrape_interval": f"{SCRAPE_S}s", "scrape_timeout": f"{SCRAPE_S}s", "evaluation_interval": "5s"},
        "rule_files": [str(rules)],
        "scrape_configs": [
            {"job_name": job, "file_sd_configs": [{"files": [str(file)], "refresh_interval": "5s"}]}
            for job, file in (("swarm", targets), ("nats", nats_targets))
        ],
    }


class Prometheus:
    """One Prometheus process with its files in `folder`, listening on loopback.

    `rules`: the text of a rule file. `page`: the address at which browsers reach its pages, such as
    `http://127.0.0.1:8400`.
    """

    def __init__(self, program: str, folder: Path, port: int, rules: str, page: str = "http://127.0.0.1") -> None:
        self._program = program
        self._folder = folder
        self._port = port
        self._page = page
        self._log = folder / "prometheus.log"
        self._process: subprocess.Popen[bytes] | None = None
        folder.mkdir(parents=True, exist_ok=True)
        self.targets = folder / "targets.json"
        self.nats_targets = folder / "nats.json"
        self._config = folder / "prometheus.yml"
        self._web_config = folder / "web.yml"
        rule_file = folder / "rules.yml"
        rule_file.write_text(rules)
        tls = LoopbackTls(folder)
        self._web_config.write_text(yaml.safe_dump(tls.web_config()))
        self.client = tls.client()
        self._config.write_text(
            yaml.safe_dump(prometheus_config(self.targets.resolve(), rule_file.resolve(), self.nats_targets.resolve()))
        )

    @property
    def url(self) -> str:
        """Base of its HTTP API, for requests through `client`."""
        return f"https://127.0.0.1:{self._port}{PREFIX}"

    def start(self) -> None:
        """Start it. It ends with this process, however this one ends. `wait_ready` waits until it
        answers.
        """
        command = [
            self._program,
            f"--config.file={self._config}",
            f"--storage.tsdb.path={self._folder / 'tsdb'}",
            f"--storage.tsdb.retention.time={RETENTION}",
            f"--web.listen-address=127.0.0.1:{self._port}",
            f"--web.config.file={self._web_config}",
            f"--web.external-url={self._page}{PREFIX}",
            f"--web.route-prefix={PREFIX}",
            "--log.level=warn",
        ]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True, preexec_fn=ending_with_parent()
            )

    def check_running(self) -> None:
        """Raises CommandError with the end of its log if it has ended by itself."""
        if self._process is not None and self._process.poll() is not None:
            words = self._log.read_text(errors="replace").strip().splitlines()[-5:]
            raise CommandError(f"prometheus ended with code {self._process.returncode}; {self._log} ends with\n" + "\n".join(words))

    def ready(self) -> bool:
        """Whether it answers queries."""
        try:
            with urllib.request.urlopen(f"{self.url}/-/ready", timeout=2, context=self.client) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def wait_ready(self, timeout_s: float = READY_S) -> None:
        """Wait until it answers queries. Raises CommandError if it ends, or does not answer within
        `timeout_s`.
        """
        deadline = time.monotonic() + timeout_s
        while not self.ready():
            self.check_running()
            if time.monotonic() > deadline:
                raise CommandError(f"prometheus was not ready within {timeout_s:.0f} s: see {self._log}")
            time.sleep(0.1)

    def stop(self) -> None:
        """End it, by a signal first and by force if that takes too long."""
        if self._process is None or self._process.poll() is not None:
            return
        self._process.terminate()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(STOP_S)
