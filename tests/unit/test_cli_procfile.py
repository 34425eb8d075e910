"""The lines that `swarm up` and `honcho start` run."""

from __future__ import annotations

import shlex
from pathlib import Path

from shared.config import load_config
from swarm_cli.local.procfile import ROLES, Layout, node_name, process_lines, render_procfile
from swarm_cli.local.up import swarm_of_run

ROOT = Path(__file__).parents[2]


def environment_of(line: str) -> dict[str, str]:
    words = shlex.split(line.split(" exec ")[0])
    return dict(word.split("=", 1) for word in words)


def test_the_checked_in_procfile_is_the_rendering_for_two_nodes() -> None:
    assert (ROOT / "Procfile").read_text() == render_procfile(Layout(nodes=2)), "run: swarm up --print-procfile > Procfile"


def test_a_swarm_of_three_has_a_server_four_services_a_node_and_the_progress_view() -> None:
    lines = process_lines(Layout(nodes=3))
    services = [f"{node}-{role}" for node in ("alpha", "beta", "gamma") for role in ROLES]
    assert list(lines) == ["nats", *services, "progress"]
    assert lines["progress"].endswith("swarm_cli watch alpha beta gamma")


def test_every_service_has_a_port_of_its_own_and_all_are_checked() -> None:
    layout = Layout(nodes=3, nats_port=4333, base_port=9500)
    assert set(layout.ports) == {4333, *range(9500, 9504), *range(9510, 9514), *range(9520, 9524)}
    assert environment_of(process_lines(layout)["gamma-sampler"])["SWARM_HTTP__BASE_PORT"] == "9520"


def test_the_variables_of_a_line_are_a_configuration(monkeypatch, tmp_path) -> None:  # type: ignore[no-untyped-def]
    for name, value in environment_of(process_lines(Layout(nats_port=4333, base_port=9500))["beta-trainer"]).items():
        if name.startswith("SWARM_") and not value.startswith("${"):
            monkeypatch.setenv(name, value)
    config = load_config(ROOT / "config" / "demo.toml")
    assert (config.node.id, config.nats.node_url, config.http_port("trainer")) == ("beta", "nats://127.0.0.1:4333", 9513)


def test_another_server_is_used_and_not_started() -> None:
    lines = process_lines(Layout(nats_url="nats://elsewhere:4222"))
    assert "nats" not in lines
    assert environment_of(lines["alpha-verifier"])["SWARM_NATS__NODE_URL"] == "nats://elsewhere:4222"


def test_names_never_run_out_or_repeat() -> None:
    names = [node_name(position) for position in range(64)]
    assert len(set(names)) == 64
    assert names[:4] == ["alpha", "beta", "gamma", "delta"]
    assert names[24] == "node25"


def test_a_run_on_a_server_of_its_own_is_a_swarm_of_its_own_and_on_another_s_part_of_that_one() -> None:
    plain = load_config(overrides={"node": {"run": "monday"}, "tasks": [{"dataset": "gcd"}]})
    named = load_config(overrides={"nats": {"swarm_id": "ours"}, "tasks": [{"dataset": "gcd"}]})
    assert swarm_of_run(plain, Layout()) == {"SWARM_NATS__SWARM_ID": "monday"}
    assert swarm_of_run(plain, Layout(nats_url="nats://elsewhere:4222")) == {}
    assert swarm_of_run(named, Layout()) == {}
