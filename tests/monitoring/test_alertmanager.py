"""The sample configuration of Alertmanager, in a real one: one cause is one page, and what has
another cause is still told.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from monitoring.rules import COMPONENT, RULES
from tests.nats_server import free_port

PROGRAM = shutil.which("prometheus-alertmanager") or shutil.which("alertmanager")
pytestmark = pytest.mark.skipif(PROGRAM is None, reason="no Alertmanager: scripts/test-packages installs Debian's")
START_S, TOLD_S = 60.0, 60.0
_RULES = [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]
ALERTS = {rule["alert"]: rule for rule in _RULES if "alert" in rule}


def ask(port: int, path: str, given: object = None) -> Any:
    data = None if given is None else json.dumps(given).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}/api/v2/{path}", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=10) as answer:
        return json.loads(answer.read() or b"null")


@pytest.fixture
def port(tmp_path: Path) -> Iterator[int]:
    assert PROGRAM is not None
    for name in ("alertmanager.yml", "alertmanager.tmpl"):
        shutil.copy(COMPONENT / name, tmp_path)
    number = free_port()
    options = [f"--config.file={tmp_path}/alertmanager.yml", f"--storage.path={tmp_path}/data", "--cluster.listen-address="]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            [PROGRAM, *options, f"--web.listen-address=127.0.0.1:{number}"], stdout=log, stderr=subprocess.STDOUT
        )
    try:
        deadline = time.monotonic() + START_S
        while True:
            try:
                ask(number, "status")
                break
            except OSError:
                assert process.poll() is None and time.monotonic() < deadline, (tmp_path / "log").read_text()[-2000:]
                time.sleep(0.1)
        yield number
    finally:
        process.kill()
        process.wait(10)


def alert(name: str, **labels: str) -> dict[str, Any]:
    rule = ALERTS[name]
    return {"labels": {"alertname": name, **rule["labels"], **labels}, "annotations": rule["annotations"]}


def told(port: int, sent: list[dict[str, Any]], most: int) -> list[tuple[str, str]]:
    """(name, node) of the alerts that are told, once no more than `most` are."""
    ask(port, "alerts", sent)
    deadline = time.monotonic() + TOLD_S
    while True:
        found = ask(port, "alerts?active=true&inhibited=false")
        if 0 < len(found) <= most or time.monotonic() > deadline:
            return sorted((each["labels"]["alertname"], each["labels"].get("node", "")) for each in found)
        time.sleep(0.1)


def test_nats_down_under_three_nodes_is_one_page_and_another_nodes_own_trouble_is_still_told(port: int) -> None:
    consequences = ("SwarmNatsDisconnected", "SwarmNotReady", "SwarmTrainerStalled", "SwarmGeneratorStalled", "SwarmStoreSlow")
    nodes = [
        alert(name, job="swarm", node=node, role=role, plane="node", severity="critical")
        for node in ("alpha", "beta", "gamma")
        for name in consequences
        for role in ("trainer", "verifier")
    ]
    down = [alert("NatsDown", job="nats", instance=f"nats-{number}") for number in range(2)]
    exporters = [alert("TargetDown", job="nats", instance=f"nats-{number}") for number in range(2)]
    own = [alert("SwarmTrainerStalled", job="swarm", node="delta"), alert("SwarmHeldOutBelowBase", job="swarm", node="alpha")]
    assert told(port, [*nodes, *down, *exporters, *own], 4) == [
        ("NatsDown", ""),
        ("NatsDown", ""),
        ("SwarmHeldOutBelowBase", "alpha"),
        ("SwarmTrainerStalled", "delta"),
    ]
    deadline = time.monotonic() + TOLD_S
    pages: list[Any] = []
    while len(pages) != 3 and time.monotonic() < deadline:
        groups = ask(port, "alerts/groups?active=true&inhibited=false&receiver=pager")
        pages = [each for each in groups if each["alerts"]]
        time.sleep(0.1)
    assert sorted(len(each["alerts"]) for each in pages) == [1, 1, 2], "both servers are one page"


def test_every_alert_that_the_sample_names_exists() -> None:
    text = (COMPONENT / "alertmanager.yml").read_text()
    names = {name for line in text.splitlines() for name in line.replace('"', " ").replace("|", " ").replace("]", " ").split()}
    named = {name.strip(",") for name in names if name.startswith(("Swarm", "Nats", "Target")) and name != "Nats.+,"}
    assert named and named <= ALERTS.keys() | {"Nats.+"}, named - ALERTS.keys()
