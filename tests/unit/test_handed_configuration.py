"""A configuration that somebody else made names files and addresses: no check and no service reads
a file without an end, and no key goes where it does not belong.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from shared.config import NodeConfig, load_config
from shared.identity.keys import KeyFileError, load, new_seed
from shared.identity.roster import RosterError, read_roster
from shared.tasks.file_formats import FileSourceError
from shared.tasks.file_source import load_rows
from shared.transport.base import AccessDenied
from shared.transport.nats.credentials import credential_settings
from swarm_cli import task_probe
from swarm_cli.app import app
from swarm_cli.config_commands import key_file_problems
from swarm_cli.risky_settings import risky_settings


def configured(**sections: Any) -> NodeConfig:
    return load_config(overrides={"tasks": [{"dataset": "gcd"}], **sections})


def openai(key: str = "", **other: str) -> NodeConfig:
    generator = {"engine": "openai", "openai_url": "https://example.org/v1", "openai_key_variable": key}
    return configured(generator=generator | other)


def of_file(setting: str, file: str) -> NodeConfig:
    if setting == "roster_file":
        return configured(verifier={"trust": "roster", "roster_file": file})
    if setting == "signing_key_file":
        return configured(verifier={"signing_key_file": file})
    return configured(nats={setting: file})


SETTINGS = (
    "node_key_file",
    "swarm_key_file",
    "node_ca_file",
    "swarm_ca_file",
    "signing_key_file",
    "roster_file",
)


@pytest.fixture(params=["large", "pipe", "device"])
def endless(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, str]:
    """A file that must not be read, and why."""
    file = tmp_path / "file"
    if request.param == "pipe":
        os.mkfifo(file, 0o600)
    elif request.param == "large":
        file.touch(mode=0o600)
        os.truncate(file, 2**40)
    else:
        file.symlink_to("/dev/zero")
    # Of root the device is a key that others can read, which is looked at first.
    why = {"large": "larger than", "pipe": "not a regular file", "device": "not a regular file|readable by other"}
    return str(file), why[request.param]


@pytest.mark.parametrize("setting", SETTINGS)
def test_config_check_reads_no_file_without_an_end(endless: tuple[str, str], setting: str) -> None:
    file, why = endless
    told = key_file_problems(of_file(setting, file))
    assert told and all(setting in each and re.search(why, each) for each in told), told


@pytest.mark.parametrize(
    ("reading", "error"),
    [
        (lambda file: load(Path(file)), KeyFileError),
        (lambda file: read_roster(Path(file)), RosterError),
        (lambda file: credential_settings(file, None), AccessDenied),
        (lambda file: credential_settings(None, file), AccessDenied),
    ],
    ids=["signing key", "roster", "nats key", "authority"],
)
def test_no_service_reads_a_file_without_an_end(
    endless: tuple[str, str], reading: Callable[[str], object], error: type[Exception]
) -> None:
    file, why = endless
    with pytest.raises(error, match=why):
        reading(file)


def test_rows_are_not_read_from_a_device(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").symlink_to("/dev/zero")
    spec = configured(tasks=[{"source": "file", "path": str(tmp_path / "rows.jsonl")}]).tasks[0]
    with pytest.raises(FileSourceError, match="is a pipe or a device"):
        load_rows(spec)


def test_a_key_behind_a_link_is_read_as_in_a_mounted_secret(tmp_path: Path) -> None:
    (tmp_path / "..data").mkdir()
    seed = tmp_path / "..data" / "node.nk"
    seed.write_bytes(new_seed() + b"\n")
    seed.chmod(0o600)
    (tmp_path / "node.nk").symlink_to("..data/node.nk")
    assert key_file_problems(of_file("node_key_file", str(tmp_path / "node.nk"))) == []
    assert credential_settings(str(tmp_path / "node.nk"), None)["nkeys_seed_str"] == seed.read_text().strip()


def test_a_key_that_is_sent_over_a_network_unencrypted_is_warned_of() -> None:
    (told,) = risky_settings(openai("KEY", openai_url="http://example.org:8000/v1"))
    assert "the key of openai_key_variable is sent there unencrypted" in told


@pytest.mark.parametrize("url", ["http://127.0.0.1:8000/v1", "http://localhost/v1", "https://example.org/v1", "http://[bad"])
def test_of_a_key_to_this_machine_or_over_tls_nothing_is_warned(url: str) -> None:
    assert risky_settings(openai("KEY", openai_url=url)) == []
    assert risky_settings(openai(openai_url="http://example.org/v1")) == [], "no key is sent"


FOR_EVER = """[node]
id = "alpha"
[[tasks]]
dataset = "chain_sum"
config = { min_terms = 400000000, max_terms = 400000000, min_digits = 1, max_digits = 1 }
"""
OVERLAY = """apiVersion: v1
kind: ConfigMap
metadata: {name: NODE-config}
data: {node.toml: FILE}
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: NODE-generator, labels: {swarm-rl.dev/node: NODE}}
spec:
  template:
    spec:
      containers:
      - name: generator
        image: localhost/swarm:0.1.0
        env: [{name: SWARM_CONFIG, value: /etc/swarm/node.toml}]
        volumeMounts: [{name: c, mountPath: /etc/swarm}]
      volumes: [{name: c, configMap: {name: NODE-config}}]
---
"""


@pytest.mark.slow
def test_config_check_of_a_task_that_takes_for_ever_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task_probe, "DEADLINE_S", 1.0)
    monkeypatch.setattr(task_probe, "LATE_S", 0.0)
    monkeypatch.setattr(task_probe, "CALLS", 0)
    (tmp_path / "node.toml").write_text(FOR_EVER)
    done = CliRunner().invoke(app, ["config", "check", "--config", str(tmp_path / "node.toml")])
    said = f"{done.output}{done.exception}"
    assert done.exit_code and "longer than 1 s (chain_sum; the settings of one may demand too much)" in said
    assert "make the sizes in its `config` smaller; if this machine was busy, try again" in said


@pytest.mark.slow
def test_k8s_check_of_tasks_that_take_for_ever_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task_probe, "DEADLINE_S", 1.0)
    monkeypatch.setattr(task_probe, "LATE_S", 0.0)
    monkeypatch.setattr(task_probe, "CALLS", 0)
    files = {"alpha": FOR_EVER, "beta": FOR_EVER.replace("alpha", "beta").replace("max_digits = 1", "max_digits = 2")}
    text = "".join(OVERLAY.replace("NODE", node).replace("FILE", json.dumps(file)) for node, file in files.items())
    (tmp_path / "rendered.yaml").write_text(text)
    done = CliRunner().invoke(app, ["k8s", "check", "--no-cluster", str(tmp_path / "rendered.yaml")])
    alpha, beta = (line for line in done.output.splitlines() if line.startswith("stops"))
    assert done.exit_code == 1 and "alpha-generator" in alpha and "longer than 1 s (chain_sum;" in alpha
    assert "beta-generator" in beta and "longer than 1 s (chain_sum;" in beta


HELD = """apiVersion: v1
kind: ConfigMap
metadata: {name: settings}
data:
  l0: &l0 FIRST
"""


def k8s_check(file: Path) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["k8s", "check", "--no-cluster", str(file)])
    return done.exit_code, f"{done.output}{done.exception}"


def rendered(tmp_path: Path, text: str) -> Path:
    (tmp_path / "rendered.yaml").write_text(text)
    return tmp_path / "rendered.yaml"


def test_k8s_check_expands_no_aliases(tmp_path: Path) -> None:
    """A hundred kilobytes of aliases of aliases stand for more than any memory holds."""
    lines = (f"  l{n}: &l{n} [{', '.join([f'*l{n - 1}'] * 20)}]\n" for n in range(1, 6))
    code, said = k8s_check(rendered(tmp_path, HELD.replace("FIRST", "[lol, lol, lol, lol]") + "".join(lines)))
    assert code and "has an alias" in said and len(said) < 1000


@pytest.mark.slow
def test_k8s_check_of_deep_nesting_is_a_sentence(tmp_path: Path) -> None:
    assert "nested too deep" in k8s_check(rendered(tmp_path, "[" * 20_000))[1]


def test_k8s_check_reads_no_file_without_an_end(tmp_path: Path) -> None:
    file = rendered(tmp_path, "a" * (16 * 2**20 + 1))
    assert "more than 16,777,216 characters" in k8s_check(file)[1]


def test_values_that_are_not_text_are_told_as_kubernetes_would(tmp_path: Path) -> None:
    code, said = k8s_check(rendered(tmp_path, HELD.replace("FIRST", "[a, b]") + "  port: 8000\n  fine: '8000'\n"))
    assert code and "ConfigMap settings: l0, ConfigMap settings: port: put each value in quotes" in said
    variable = OVERLAY.replace("FILE", "''").replace("NODE", "alpha").replace("value: /etc/swarm/node.toml", "value: 1")
    assert "Deployment alpha-generator: SWARM_CONFIG: put each" in k8s_check(rendered(tmp_path, variable))[1]


def test_k8s_check_says_that_a_folder_is_fetched_from_elsewhere() -> None:
    said = " ".join(CliRunner().invoke(app, ["k8s", "check", "--help"]).output.split())
    assert "kustomize fetches what it names" in said and "Only reads" not in said


@pytest.mark.slow  # it fills a gibibyte
def test_a_task_that_takes_too_much_memory_is_a_sentence() -> None:
    large = {"dataset": "graph_color", "config": {"min_num_vertices": 1_000_000_000, "max_num_vertices": 1_000_000_000}}
    (said,) = task_probe.begin_deriving(configured(tasks=[large]).tasks, 0, "REMEDY", (), 600.0)().problems
    assert "graph_color" in said and "longer than" not in said
