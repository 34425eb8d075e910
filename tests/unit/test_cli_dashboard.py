"""`swarm dashboard`: which processes it scrapes, what its page draws, and what it says when it
cannot start.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml
from msgspec import structs

from monitoring.dashboards import dashboards
from monitoring.rules import RULES, rule_file
from shared.contracts.control import ServiceStatus
from shared.roles import ROLES
from swarm_cli.dashboard.command import PATIENCE, SHOWN
from swarm_cli.dashboard.nats_figures import _numbers, figures
from swarm_cli.dashboard.prometheus import INSTALL, SCRAPE_S, Prometheus, installed_prometheus
from swarm_cli.dashboard.scraping import Scraping
from swarm_cli.dashboard.server import FILES, PAGE, PageServer, page_panels
from swarm_cli.dashboard.targets import expected, left_out, process_exists, run_is_over, target_groups, write_targets
from swarm_cli.errors import CommandError
from swarm_cli.local.ports import check_ports
from swarm_cli.nats_monitor import monitor_of
from swarm_cli.observe.view import NodeView
from tests.monitoring.promql import substituted
from tests.nats_server import find_binary

NOW = 1_000_000.0


def status(
    role: str, port: float | None, *, node: str = "alpha", host: str = "here", age_s: float = 1.0, state: str = "x"
) -> ServiceStatus:
    return ServiceStatus(
        node=node,
        role=role,  # type: ignore[arg-type]
        replica="0",
        pid=1,
        host=host,
        state=state,
        started_at=NOW - 100,
        updated_at=NOW - age_s,
        figures={} if port is None else {"http_port": port},
    )


def seen(*statuses: ServiceStatus) -> list[NodeView]:
    nodes = {status.node for status in statuses}
    return [NodeView(node, tuple(status for status in statuses if status.node == node)) for node in sorted(nodes)]


def groups(*statuses: ServiceStatus, hosts: tuple[str, ...] = ()) -> list[tuple[str, str, str]]:
    found = target_groups(seen(*statuses), NOW, here="here", hosts=hosts)
    return [(group["targets"][0], group["labels"]["node"], group["labels"]["role"]) for group in found]


def test_every_process_is_a_target_with_its_node_and_role() -> None:
    assert groups(status("generator", 9400), status("trainer", 9403), status("trainer", 9413, node="beta")) == [
        ("127.0.0.1:9400", "alpha", "generator"),
        ("127.0.0.1:9403", "alpha", "trainer"),
        ("127.0.0.1:9413", "beta", "trainer"),
    ]


def test_a_process_on_another_machine_is_scraped_there_if_whoever_looks_has_named_it() -> None:
    assert groups(status("trainer", 9403, host="gpu7"), hosts=("gpu7",)) == [("gpu7:9403", "alpha", "trainer")]


def test_a_status_that_anybody_may_have_written_makes_no_request_to_another_machine_and_that_is_said(tmp_path: Path) -> None:
    forged = [status("trainer", 80, host=f"169.254.169.{number}") for number in range(254, 248, -1)]
    assert groups(*forged, status("verifier", 9401)) == [("127.0.0.1:9401", "alpha", "verifier")]
    assert groups(status("verifier", 9401, host="localhost")) == [("127.0.0.1:9401", "alpha", "verifier")]
    assert left_out(seen(*forged), NOW, "here") == (6, sorted(each.host for each in forged))
    now = time.time()
    written = [structs.replace(each, updated_at=now, started_at=now) for each in forged]
    page = Page()
    told = Scraping(None, "nats://127.0.0.1:1", tmp_path).saw(seen(*written), page)  # type: ignore[arg-type]
    assert "found 0 processes" in told and page.expected == []
    assert "6 more report that they are on 169.254.169.249, " in told and told.endswith("name it with --scrape")


class Page:
    """What the list of targets needs of the page's server."""

    expected: list[dict[str, str]] | None = None

    def expect(self, processes: list[dict[str, str]]) -> None:
        self.expected = processes


def test_a_silent_process_stays_a_target_for_a_day_and_a_stopped_one_does_not() -> None:
    assert groups(status("trainer", 9403, age_s=60)) == [("127.0.0.1:9403", "alpha", "trainer")]
    assert groups(status("trainer", 9403, age_s=3600)) == [("127.0.0.1:9403", "alpha", "trainer")], "longer than any alert's hold"
    assert groups(status("trainer", 9403, age_s=25 * 3600)) == []
    assert groups(status("trainer", 9403, state="stopped")) == []
    assert groups(status("trainer", None)) == []


@pytest.mark.parametrize("port", [0.0, -1.0, 70_000.0, 1e30])
def test_a_status_whose_port_is_none_makes_no_target(port: float) -> None:
    assert groups(status("trainer", port), status("verifier", 9401)) == [("127.0.0.1:9401", "alpha", "verifier")]


@pytest.mark.parametrize("host", ["evil/x", "a b", "x@y", "\x1b[2J", "http://x", "", "-x", "x:80/admin?"])
def test_a_status_whose_host_is_none_makes_no_target(host: str) -> None:
    assert groups(status("trainer", 9403, host=host), status("verifier", 9401)) == [("127.0.0.1:9401", "alpha", "verifier")]


def test_a_host_may_be_an_address() -> None:
    hosts = ("10.0.0.7", "fd00::7")
    assert groups(status("trainer", 9403, host="10.0.0.7"), status("verifier", 9401, host="fd00::7"), hosts=hosts) == [
        ("10.0.0.7:9403", "alpha", "trainer"),
        ("[fd00::7]:9401", "alpha", "verifier"),
    ]


def test_who_took_over_a_port_is_the_one_that_is_scraped() -> None:
    assert groups(status("trainer", 9403, age_s=60), status("trainer", 9403, node="beta")) == [
        ("127.0.0.1:9403", "beta", "trainer")
    ]


def test_the_target_file_is_replaced_only_when_it_changes(tmp_path: Path) -> None:
    file = tmp_path / "targets.json"
    write_targets([], file)
    first = file.stat().st_ino
    write_targets([], file)
    assert file.stat().st_ino == first
    write_targets([{"targets": ["127.0.0.1:1"], "labels": {}}], file)
    assert json.loads(file.read_text())[0]["targets"] == ["127.0.0.1:1"]
    assert [path.name for path in tmp_path.iterdir()] == ["targets.json"]


def test_prometheus_is_told_the_targets_and_the_clusters_rules(tmp_path: Path) -> None:
    prometheus = Prometheus("prometheus", tmp_path, 1, rule_file())
    config = yaml.safe_load((tmp_path / "prometheus.yml").read_text())
    (rules,) = config["rule_files"]
    shipped = yaml.safe_load(RULES.read_text())["groups"]
    assert {group.pop("interval") for group in shipped} == {"30s"}, "which here would be slower than the page's own"
    assert yaml.safe_load(Path(rules).read_text())["groups"] == shipped
    files = {job["job_name"]: job["file_sd_configs"][0]["files"] for job in config["scrape_configs"]}
    assert files == {"swarm": [str(prometheus.targets)], "nats": [str(prometheus.nats_targets)]}


def test_what_should_be_there_counts_roles_that_never_came() -> None:
    def roles(*statuses: ServiceStatus) -> list[str]:
        views = [NodeView("alpha", statuses)]
        return [each["role"] for each in expected(views, target_groups(views, NOW, here="here"))]

    assert roles(status("generator", 9400), status("verifier", 9401), status("trainer", 9403, age_s=900)) == [*ROLES]
    assert roles(status("verifier", 9401)) == ["generator", "verifier"], "its policy is trained elsewhere"
    assert roles(status("trainer", 9403, state="stopped")) == [], "the node has ended in order"


def test_a_run_is_over_when_its_server_and_all_its_processes_are_gone() -> None:
    views = [NodeView("alpha", (status("trainer", 9403), status("verifier", 9401, state="stopped")))]
    assert run_is_over(views, "here", lambda pid: False)
    assert not run_is_over(views, "here", lambda pid: True), "only the server is gone: that is to be told"
    assert not run_is_over(views, "elsewhere", lambda pid: False), "nobody here knows"
    assert process_exists(os.getpid()) and not process_exists(2**31 - 1)


def test_a_server_s_monitoring_address_is_read_from_its_own_note_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own, gift = tmp_path / "runs" / "own", tmp_path / "runs" / "gift"
    for run in (own, gift):
        run.mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    command = [find_binary(), "-a", "127.0.0.1", "-p", "-1", "-m", "-1", "--ports_file_dir", "runs/own"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            deadline = time.monotonic() + 120
            while not list(own.glob("*.ports")) or not (note := next(own.glob("*.ports")).read_text()).endswith("}"):
                assert time.monotonic() < deadline, "it starts"
                time.sleep(0.02)
            told = json.loads(note)
            url, monitor = told["nats"][0], told["monitoring"][0]
            port = int(url.rpartition(":")[2])
            forged = f'{{"nats":["nats://127.0.0.1:{port}"],"monitoring":["http://127.0.0.1:1"]}}'
            for number in (7, server.pid, os.getpid()):
                (gift / f"nats-server_{number}.ports").write_text(forged)
            (own / "nats-server_7.ports").write_text(forged)
            (own / "nats-server_x.ports").write_text(forged)
            (own / "nats-server_8.ports").write_text('{"nats":')
            (own / "nats-server_9.ports").write_text('{"nats":' + "[" * 60_000)
            os.mkfifo(own / "nats-server_10.ports")
            assert monitor_of(f"nats://localhost:{port}", tmp_path) == monitor
            assert monitor_of(f"nats://localhost:{port ^ 1}", tmp_path) is None
            next(own.glob(f"*_{server.pid}.ports")).write_text(
                json.dumps(told | {"monitoring": ["http://example.org:1", "file:///x"]})
            )
            assert monitor_of(url, tmp_path) is None, "it is not on this machine"
        finally:
            server.kill()


def test_a_figure_s_name_cannot_hold_another_figure() -> None:
    answer = {"connections": 3, 'x 1\nswarm_forged{node="alpha"}': 7, "http_req_stats": {"/varz": 2, "a\n": 1}}
    assert dict(_numbers(answer)) == {"connections": 3, "http_req_stats__varz": 2}


def test_a_hung_server_is_told_as_unreachable() -> None:
    assert figures("http://127.0.0.1:1") == 'nats_healthz_status_value{server_id="", value="unreachable"} 0.0\n'


def test_patience_shortens_what_is_to_be_told_soon_and_nothing_else() -> None:
    def rules(scale: float) -> dict[tuple[str, str], dict[str, str]]:
        groups = yaml.safe_load(rule_file(scale=scale))["groups"]
        return {(rule["alert"], rule["labels"]["severity"]): rule for group in groups for rule in group["rules"] if "alert" in rule}

    whole, half = rules(1.0), rules(0.5)
    stalled = ("SwarmTrainerStalled", "critical")
    assert (whole[stalled]["for"], half[stalled]["for"]) == ("1m", "30000ms")
    assert "seconds > 120)" in whole[stalled]["expr"] and "seconds > 60)" in half[stalled]["expr"]
    assert "[2m]" in whole["SwarmFlood", "warning"]["expr"] and "[60000ms]" in half["SwarmFlood", "warning"]["expr"]
    changed = {name for (name, _), rule in half.items() if rule not in whole.values()}
    assert {"SwarmTrainerStalled", "SwarmRoleMissing", "SwarmStreamsLost", "NatsDown", "TargetDown"} < changed
    assert not {"SwarmNotReady", "SwarmDeadLetters", "NatsStreamNearlyFull"} & changed
    writes = half["SwarmWritesFailing", "warning"]
    assert _told_s(writes, PATIENCE) <= 170, "a full disk is looked into long before five minutes have passed"
    for name in ("SwarmTrainerStalled", "NatsDown", "SwarmFlood"):
        told_s = [_told_s(scaled, scale) for key, scaled in half.items() if key[0] == name for scale in (PATIENCE,)]
        assert told_s and max(told_s) <= 120, "in the local page"
        assert max(_told_s(rule, 1.0) for key, rule in whole.items() if key[0] == name) <= 300, "in a cluster"


def _told_s(rule: dict[str, str], scale: float) -> float:
    """From the fault to the alert at the latest: threshold, hold, a scrape and two evaluations."""
    hold = rule["for"]
    held_s = int(hold[:-2]) / 1000 if hold.endswith("ms") else 60.0 * int(hold[:-1])
    silent_s = [float(found) for found in re.findall(r"seconds > (\d+)\) >", rule["expr"])]
    between_s = SCRAPE_S + 2 * 5 if scale != 1.0 else 30 + 2 * 30
    return max(silent_s, default=0.0) + held_s + between_s


def test_without_prometheus_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert installed_prometheus() is None
    assert re.search(r"(?s)has no panels and alerts.*apt-get install.*brew install.*prometheus.io/download", INSTALL)


def test_a_taken_port_is_named_with_its_purpose_and_the_remedy() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(CommandError, match=rf"(?s)port {port}, needed for the page.*--port"):
            check_ports({port: "the page"}, "choose another with --port")


def test_the_page_gets_every_panel_of_the_dashboards_and_can_draw_each_kind() -> None:
    drawn = page_panels([dashboards()[name] for name in SHOWN], 2)
    for name, dashboard in zip(SHOWN, drawn["dashboards"], strict=True):
        titles = [panel["title"] for row in dashboard["rows"] for panel in row["panels"]]
        assert titles == [panel.title for panel in dashboards()[name].panels()]
        assert all(query["expr"] for row in dashboard["rows"] for panel in row["panels"] for query in panel["queries"])
    script = (PAGE / "page.js").read_text()
    assert all(re.search(rf"\b{kind}: this\.{kind}\b", script) for kind in ("timeseries", "stat", "table"))


def test_the_page_knows_every_unit_that_a_panel_uses() -> None:
    units = (PAGE / "units.js").read_text()
    used = {
        text
        for name in SHOWN
        for panel in dashboards()[name].panels()
        for text in (panel.unit, *(q.unit for q in panel.queries))
        if text
    }
    for unit in used:
        assert unit == "short" or unit.startswith("suffix:") or f'unit === "{unit}"' in units, unit


def test_the_page_needs_nothing_from_elsewhere_and_carries_the_licence_of_what_it_ships() -> None:
    for name, _ in FILES.values():
        text = (PAGE / name).read_text()
        loaded = re.findall(r"""(?:src|href|import|fetch|url)\s*[=(]\s*["'`]?(https?:)?//""", text)
        assert not loaded, f"{name} loads something from another host"
    assert "MIT License" in (PAGE / "uPlot.LICENSE").read_text()
    assert "v1.6.32" in (PAGE / "uPlot.iife.min.js").read_text()[:100]
    assert {path.name for path in PAGE.iterdir()} == {name for name, _ in FILES.values()}


@pytest.mark.slow
def test_the_page_is_served_to_this_machine_and_says_when_prometheus_is_away() -> None:
    server = PageServer(0, "http://127.0.0.1:9", {"dashboards": []})
    try:
        with urllib.request.urlopen(server.url, timeout=5) as answer:
            assert b"swarm.js" in answer.read()
        with urllib.request.urlopen(server.url + "panels.json", timeout=5) as answer:
            assert json.load(answer) == {"dashboards": []}
        host, port = server.url.removeprefix("http://").rstrip("/").split(":")
        for path, name, status_code in (
            ("/api/v1/query?query=up", f"localhost:{port}", 502),
            ("/swarm.json", f"localhost:{port}", 404),
            ("/panels", f"localhost:{port}", 200),
            ("/api/v1/admin/tsdb/snapshot", f"localhost:{port}", 404),
            ("/../dashboard.py", f"localhost:{port}", 404),
            ("/", f"elsewhere.example:{port}", 403),
        ):
            connection = http.client.HTTPConnection(host, int(port), timeout=5)
            connection.request("GET", path, headers={"Host": name})
            answer = connection.getresponse()
            assert (path, answer.status) == (path, status_code)
            if status_code == 502:
                assert "does not answer" in json.load(answer)["error"]
            connection.close()
    finally:
        server.close()


def test_an_address_that_is_not_ascii_is_refused_and_a_browser_that_goes_away_is_no_error(
    capfd: pytest.CaptureFixture[str],
) -> None:
    server = PageServer(0, "http://127.0.0.1:9", {"dashboards": []}, ask=reset_by_peer)
    host, port = server.url.removeprefix("http://").rstrip("/").split(":")
    try:
        for path in (b"/prometheus/\xe9", b"/api/v1/query?query=\xe9", b"/swarm.json"):
            with socket.create_connection((host, int(port)), timeout=5) as line:
                line.sendall(b"GET " + path + b" HTTP/1.0\r\nHost: localhost:1\r\n\r\n")
                answer = line.makefile("rb").read()
            assert answer.startswith(b"HTTP/1.1 400 ") if b"\xe9" in path else answer == b""
    finally:
        server.close()
    assert "Traceback" not in capfd.readouterr().err


def reset_by_peer(path: str, query: Mapping[str, str]) -> None:
    raise ConnectionResetError


@pytest.mark.skipif(shutil.which("node") is None, reason="no node on the PATH, which would run the page's own functions")
def test_the_page_fills_in_queries_and_writes_values_as_it_should() -> None:
    expressions = [query.expr for name in SHOWN for panel in dashboards()[name].panels() for query in panel.queries]
    values = [
        [0.625, "percentunit"],
        [0.0042, "s"],
        [7200, "s"],
        [3 * 2**20, "bytes"],
        [12345, "short"],
        [1.5, "suffix: /s"],
        [None, "s"],
    ]
    script = f"""{(PAGE / "units.js").read_text()}
const chosen = {json.dumps({"__rate_interval": "15s", "node": "alpha", "job": "swarm"})};
const filled = {json.dumps(expressions)}.map((expr) => substituted(expr, chosen));
const written = {json.dumps(values)}.map(([value, unit]) => inUnit(value, unit));
const legend = legendText("p95 {{{{task}}}}", {{ task: "gcd" }});
console.log(JSON.stringify([filled, written, legend, tickText(1.25, "suffix: /s", 0.25)]));"""
    answer = subprocess.run(["node", "-"], input=script, capture_output=True, text=True, timeout=180, check=True)
    filled, written, legend, tick = json.loads(answer.stdout)
    assert filled == [substituted(expr, rate_interval="15s", values={"node": "alpha", "job": "swarm"}) for expr in expressions]
    assert written == ["63 %", "4.20 ms", "2 h", "3 MiB", "12.3k", "1.50/s", "–"]
    assert (legend, tick) == ("p95 gcd", "1.25/s")


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Dest": "image"}, 403),
        ({"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Dest": "iframe", "Sec-Fetch-Mode": "navigate"}, 403),
        ({"Sec-Fetch-Site": "same-site", "Sec-Fetch-Dest": "script"}, 403),
        ({"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Dest": "document", "Sec-Fetch-Mode": "navigate"}, 200),
        ({"Sec-Fetch-Site": "same-origin", "Sec-Fetch-Dest": "empty"}, 200),
        ({"Sec-Fetch-Site": "none", "Sec-Fetch-Dest": "document"}, 200),
        ({}, 200),
    ],
)
def test_another_sites_page_has_a_browser_ask_for_nothing(headers: dict[str, str], status: int) -> None:
    """As a picture it could not read a group, but have one after the other read here."""
    asked = []

    def ask(path: str, query: Mapping[str, str]) -> tuple[int, bytes]:
        asked.append(path)
        return 200, b"{}"

    server = PageServer(0, "", {"dashboards": []}, ask=ask)
    try:
        line = http.client.HTTPConnection("127.0.0.1", int(server.url.rpartition(":")[2].strip("/")), timeout=5)
        line.request("GET", "/group.json?node=alpha&step=1&place=0", headers=headers)
        assert line.getresponse().status == status and len(asked) == (status == 200)
        line.close()
    finally:
        server.close()
