"""Which servers a look at a run asks, and with which key."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from shared.config import NodeConfig, load_config
from swarm_cli.local.run_note import write_note
from swarm_cli.looking.target import looking_at
from swarm_cli.running import RunNote

HUB, STRANGER = "tls://hub.example.org:4222", "nats://stranger.example.org:4222"


@pytest.fixture
def given(tmp_path: Path) -> Callable[[str], None]:
    """Makes a run that ended, whose note says that its swarm is at a server."""

    def make(swarm_url: str) -> None:
        folder = tmp_path / "runs" / "given"
        (folder / "jetstream" / "$G" / "streams").mkdir(parents=True)
        write_note(folder, RunNote("nats://127.0.0.1:4222", swarm_url, "swarm up --run given"))

    return make


def config(var_dir: Path, **nats: str) -> NodeConfig:
    return load_config(overrides={"node": {"var_dir": var_dir}, "nats": nats, "tasks": [{"dataset": "gcd"}]})


def test_a_key_is_shown_to_no_server_that_only_a_runs_note_names(
    tmp_path: Path, given: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    given(STRANGER)
    operator = config(tmp_path, swarm_url=HUB, swarm_key_file="operator.nk")
    with looking_at(operator, "given", "") as target:
        assert target.swarm_url is None
    assert f"--swarm-url {STRANGER}" in capsys.readouterr().err
    with looking_at(operator, "given", "", STRANGER) as target:  # a person named it
        assert target.swarm_url == STRANGER


def test_the_hub_that_the_configuration_names_is_asked_and_without_a_key_any(tmp_path: Path, given: Callable[[str], None]) -> None:
    given(HUB)
    with looking_at(config(tmp_path, swarm_url=HUB, swarm_key_file="operator.nk"), "given", "") as target:
        assert target.swarm_url == HUB
    with looking_at(config(tmp_path), "given", "") as target:
        assert target.swarm_url == HUB


def test_a_server_that_only_a_copied_runs_note_names_is_not_asked_without_a_key_either(
    tmp_path: Path, given: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    given(STRANGER)
    copied(tmp_path / "runs" / "given")
    with looking_at(config(tmp_path), "given", "") as target:
        assert target.swarm_url is None
    assert f"--swarm-url {STRANGER}" in capsys.readouterr().err
    with looking_at(config(tmp_path, swarm_url=STRANGER), "given", "") as target:
        assert target.swarm_url == STRANGER
    with looking_at(config(tmp_path), "given", "", STRANGER) as target:
        assert target.swarm_url == STRANGER


def copied(folder: Path) -> None:
    """Puts a copy in the run's place, as whoever unpacks an archive does."""
    shutil.copytree(folder, folder.with_name("copy"))
    shutil.rmtree(folder)
    folder.with_name("copy").rename(folder)


def test_a_run_without_a_hub_has_its_swarm_in_the_copy(tmp_path: Path, given: Callable[[str], None]) -> None:
    given("nats://127.0.0.1:4222")
    with looking_at(config(tmp_path, swarm_url=HUB, swarm_key_file="operator.nk"), "given", "") as target:
        assert target.swarm_url == target.node_url
