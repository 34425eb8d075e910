"""From the wheel to the first foreign group, as a newcomer in another network does it: a hub with
TLS, a key for each node and a roster, and nothing of the repository on the newcomer's side.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shared.contracts.status_figures import StatusFigure
from shared.identity import keys
from swarm_cli.installation import DEMO_CONFIG
from tests.e2e.networks import HUB_PORT, Networks, promised_s, two_networks, until
from tests.e2e.processes import REPO, NodeProcesses
from tests.nats_server import find_binary
from tests.package import Installed, source_in, wheel_of
from tests.secured_server import make_certificates

NODE_PORT = 4333
"""Of alpha's own server, beside the hub."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture
def networks(tmp_path: Path) -> Iterator[Networks]:
    with two_networks(tmp_path) as found:
        yield found


class Operator:
    """Whoever runs the hub: its keys, its certificate, its roster and its server."""

    def __init__(self, networks: Networks, folder: Path) -> None:
        self.networks, self.folder = networks, folder
        self.url = f"tls://{networks.hub_address}:{HUB_PORT}"
        self.authority, certificate, key = make_certificates(folder / "tls", networks.hub_address)
        self.keys = folder / "keys"
        self.swarm("nats", "keys", "alpha", "operator", "--folder", str(self.keys))
        signs = keys.load_or_create(folder / "alpha-signs.nk").public_key
        self.roster = folder / "roster.txt"
        self.swarm("roster", "add", "alpha", signs, "--file", str(self.roster))
        self.token = self.swarm(
            *("invite", "--url", self.url, "--ca", str(self.authority), "--node", "nova"),
            *("--roster", str(self.roster), "--folder", str(self.keys)),
        ).strip()
        hub = folder / "hub.conf"
        self.swarm(
            *("nats", "config", "--plane", "swarm", "--nodes", "alpha,nova", "--folder", str(self.keys), "--host", "0.0.0.0"),
            *("--tls-cert", str(certificate), "--tls-key", str(key), "--store-dir", str(folder / "hub"), "--out", str(hub)),
        )
        self._start(hub)
        operator = self.keys / "operator" / "swarm.nk"
        self.swarm("nats", "init", "--plane", "swarm", "--key", str(operator), "--config", str(DEMO_CONFIG), **self.settings)

    @property
    def settings(self) -> dict[str, str]:
        """Of alpha, the node that is there before the newcomer."""
        return {
            "SWARM_NODE__ID": "alpha",
            "SWARM_NATS__NODE_URL": f"nats://127.0.0.1:{NODE_PORT}",
            "SWARM_NATS__SWARM_URL": self.url,
            "SWARM_NATS__SWARM_KEY_FILE": str(self.keys / "{node}" / "swarm.nk"),
            "SWARM_NATS__SWARM_CA_FILE": str(self.authority),
            "SWARM_VERIFIER__SIGNING_KEY_FILE": str(self.folder / "alpha-signs.nk"),
            "SWARM_MODEL__PATH": str(REPO / "models" / "base"),
            "SWARM_EVAL__TASKS": "0",
        }

    def swarm(self, *arguments: str, **settings: str) -> str:
        """Return what a command prints in the hub's network."""
        given = (f"{name}={value}" for name, value in settings.items())
        return self.networks.call("hub", "env", *given, sys.executable, "-m", "swarm_cli", *arguments)

    def _start(self, file: Path) -> None:
        log = file.with_suffix(".log")
        self.networks.start("hub", find_binary(), "-c", str(file), log=log)
        until(f"{file} serves", lambda: "Server is ready" in log.read_text(), 120, log)

    def start_own(self) -> None:
        """Alpha's own server: on loopback, without keys, as `swarm join` makes one."""
        file = self.folder / "own.conf"
        file.write_text(
            f"host: 127.0.0.1\nport: {NODE_PORT}\nmax_payload: 8MB\nmax_pending: 96MB\n"
            f'jetstream {{ store_dir: "{self.folder / "own"}", max_file_store: 1TB, sync_interval: 10s }}\n'
            "feature_flags { js_ack_fc_v2: false }\n"
        )
        self._start(file)


def test_a_newcomer_with_the_wheel_alone_accepts_a_group_of_a_secured_swarm_within_two_minutes(
    networks: Networks, tmp_path: Path
) -> None:
    for folder in ("source", "wheel", "operator", "home"):
        (tmp_path / folder).mkdir()
    wheel = wheel_of(source_in(tmp_path / "source"), tmp_path / "wheel")
    operator = Operator(networks, tmp_path / "operator")
    operator.start_own()
    alpha = NodeProcesses("alpha", "test", tmp_path, operator.settings, DEMO_CONFIG, network=networks.network.namespace("hub"))
    alpha.start("generator", "verifier", "trainer")
    join_log = tmp_path / "join.log"
    try:
        until(
            "alpha shares",
            lambda: alpha.check_alive() or networks.view("hub", "alpha", NODE_PORT).figure("verifier", StatusFigure.SHARED),
            240.0,
            tmp_path / "logs" / "alpha-verifier.log",
        )
        began = time.monotonic()
        installed = Installed(tmp_path / "environment", wheel)
        installed_s = time.monotonic() - began
        joining = networks.start(
            *("newcomer", installed.swarm, "join", "-", "--model", str(REPO / "models" / "base")),
            log=join_log,
            told=operator.token,
            cwd=tmp_path / "home",
            environment=installed.environment,
        )

        def accepted() -> bool:
            assert joining.poll() is None, join_log.read_text()[-4000:]
            return networks.view("newcomer", "nova").figure("verifier", StatusFigure.ACCEPTED) > 0

        until("nova accepts a group of alpha", accepted, promised_s(), join_log)
        print(
            f"first foreign group accepted {time.monotonic() - began:.1f} s after `pip install` began, "
            f"which took {installed_s:.1f} s of them; load {os.getloadavg()[0]:.1f}"
        )

        told = join_log.read_text()
        assert "node nova joins" in told and " NO " not in told, told
        config = (tmp_path / "newcomer" / "joined" / "swarm" / "node.toml").read_text()
        assert operator.url in config and 'trust = "roster"' in config
        code = Path(os.readlink(f"/proc/{joining.pid}/cwd"))
        assert code == tmp_path / "home" and not [line for line in told.splitlines() if str(REPO / "swarm_cli") in line]
        assert "tls" in (tmp_path / "operator" / "hub.conf").read_text()
        joining.send_signal(signal.SIGINT)
        assert joining.wait(60) == 130, join_log.read_text()[-4000:]
    finally:
        alpha.kill_all()
