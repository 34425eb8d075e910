"""The lines that `swarm up` and `honcho start` run."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from shared.config import NodeConfig, load_config
from shared.roles import ROLES
from shared.runtime.exits import EXIT_CONFIG
from swarm_cli.errors import CommandError
from swarm_cli.installation import DEMO_CONFIG, NATS_CONFIG
from swarm_cli.local.procfile import Layout, node_name, process_lines, render_procfile
from swarm_cli.local.up import checked_run, chosen_names, chosen_roles, configured_base_port, start_options, swarm_of_run

ROOT = Path(__file__).parents[2]


def environment_of(line: str) -> dict[str, str]:
    words = shlex.split(line.split(" exec ")[0])
    return dict(word.split("=", 1) for word in words)


def test_the_checked_in_procfile_is_the_rendering_for_two_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert (ROOT / "Procfile").read_text() == render_procfile(Layout(nodes=2)), "run: swarm up --print-procfile > Procfile"


def test_a_swarm_of_three_has_a_server_four_services_a_node_and_the_progress_view() -> None:
    lines = process_lines(Layout(nodes=3))
    services = [f"{node}-{role}" for node in ("alpha", "beta", "gamma") for role in ROLES]
    assert list(lines) == ["nats", *services, "progress"]
    assert lines["progress"].endswith("swarm_cli progress alpha beta gamma")


def test_every_service_has_a_port_of_its_own_and_all_are_checked() -> None:
    layout = Layout(nodes=3, nats_port=4333, base_port=9500)
    assert set(layout.ports) == {4333, *range(9500, 9504), *range(9510, 9514), *range(9520, 9524)}
    assert environment_of(process_lines(layout)["gamma-sampler"])["SWARM_HTTP__BASE_PORT"] == "9520"


def test_the_variables_of_a_line_are_a_configuration(monkeypatch, tmp_path) -> None:  # type: ignore[no-untyped-def]
    for name, value in environment_of(process_lines(Layout(nats_port=4333, base_port=9500))["beta-trainer"]).items():
        if name.startswith("SWARM_") and not value.startswith("${"):
            monkeypatch.setenv(name, value)
    config = load_config(DEMO_CONFIG)
    assert (config.node.id, config.nats.node_url, config.http_port("trainer")) == ("beta", "nats://127.0.0.1:4333", 9513)


def test_nodes_have_the_names_that_they_are_given() -> None:
    names = chosen_names(["gamma", "site-2"], nodes=2)
    lines = process_lines(Layout(nodes=2, names=names))
    assert list(lines) == ["nats", *(f"{node}-{role}" for node in names for role in ROLES), "progress"]
    assert environment_of(lines["site-2-trainer"])["SWARM_NODE__ID"] == "site-2"
    assert chosen_names([], nodes=2) == ()


@pytest.mark.parametrize(
    ("names", "nodes", "problem"),
    [
        (["gamma"], 2, "^1 name is given with --name, and --nodes is 2: give each node one$"),
        (["gamma", "beta"], 1, "^2 names are given with --name, and --nodes is 1: give each node one$"),
        (["gamma", "gamma"], 2, "^--name gamma is given more than once: give each node a name of its own$"),
        (["A b"], 1, "letters"),
    ],
)
def test_names_that_nodes_cannot_have_are_refused(names: list[str], nodes: int, problem: str) -> None:
    with pytest.raises(CommandError, match=problem):
        chosen_names(names, nodes)


@pytest.mark.slow
def test_names_alone_say_how_many_nodes() -> None:
    names = [word for node in ("x", "y", "z") for word in ("--name", node)]
    asked = [sys.executable, "-m", "swarm_cli", "up", "--print-procfile", *names]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SWARM_")}
    printed = subprocess.run(asked, cwd=ROOT, env=environment, capture_output=True, text=True, check=True, timeout=180).stdout
    assert [line.split(":")[0] for line in printed.splitlines() if "-trainer: " in line] == ["x-trainer", "y-trainer", "z-trainer"]


@pytest.mark.parametrize("run", ["../x", "a b", "-x", "é", "x" * 65, "x\n"])
def test_a_name_that_no_run_can_have_is_refused_as_the_option_that_was_given(run: str) -> None:
    with pytest.raises(CommandError, match="^--run .*: use 1 to 64 letters"):
        checked_run(run)
    assert (checked_run("2026.a_b-c"), checked_run("")) == ("2026.a_b-c", "")


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


def configured(**http: int) -> NodeConfig:
    return load_config(overrides={"http": http, "tasks": [{"dataset": "gcd"}]})


def test_the_first_nodes_ports_are_the_configurations_and_the_others_follow() -> None:
    assert configured_base_port(configured(), nodes=3) == 9400
    assert Layout(base_port=configured_base_port(configured(base_port=12_000), nodes=2)).http_base_port(1) == 12_010


def test_base_port_0_leaves_all_ports_to_the_system() -> None:
    layout = Layout(nodes=2, nats_port=4333, base_port=configured_base_port(configured(base_port=0), nodes=2))
    assert set(layout.ports) == {4333}
    assert environment_of(process_lines(layout)["beta-trainer"])["SWARM_HTTP__BASE_PORT"] == "0"


def test_ports_that_cannot_be_had_on_one_machine_are_refused_with_the_settings_name() -> None:
    with pytest.raises(CommandError, match="http.port is 9400 for every process.*set http.base_port") as one_port:
        configured_base_port(configured(port=9400), nodes=2)
    with pytest.raises(CommandError, match="http.base_port is 65400, and 10 ports each for 20 nodes"):
        configured_base_port(configured(base_port=65_400), nodes=20)
    assert one_port.value.exit_code == EXIT_CONFIG


@pytest.mark.parametrize("folder", ["var", "/data/my runs", 'a"b`c$HOME}d\\e'])
def test_a_line_falls_back_on_the_configurations_folder_and_file_whatever_their_names(folder: str) -> None:
    lines = process_lines(Layout(var_dir=Path(folder), config=Path(folder) / "node.toml"))
    said = {"nats": 'printf "%s\\n" "$run"', "alpha-trainer": 'sh -c \'printf "%s\\n" "$SWARM_CONFIG"\''}
    expected = {"nats": f"{folder}/runs/honcho", "alpha-trainer": f"{folder}/node.toml"}
    for name, command in said.items():
        setting = lines[name].split(" && ")[0] + " && " if name == "nats" else lines[name].split(" exec ")[0] + " "
        told = subprocess.run(["sh", "-c", setting + command], env={"PATH": os.environ["PATH"]}, capture_output=True, text=True)
        assert told.stdout.strip() == expected[name], told.stderr


@pytest.mark.slow
def test_swarm_up_takes_ports_folder_and_file_from_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "node.toml").write_text('node.var_dir = "elsewhere"\nhttp.base_port = 12000\n[[tasks]]\ndataset = "gcd"\n')
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SWARM_")}
    printed = subprocess.run(
        [sys.executable, "-m", "swarm_cli", "up", "--print-procfile", "--config", "node.toml"],
        cwd=tmp_path,
        env={**environment, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    lines = dict(line.split(": ", 1) for line in printed.splitlines() if line and not line.startswith("#"))
    assert lines["nats"].startswith('run="${SWARM_NODE__VAR_DIR:-elsewhere}/runs/')
    assert f"--config {NATS_CONFIG} " in lines["nats"], "outside of the source tree the server's file is named in full"
    assert environment_of(lines["beta-verifier"])["SWARM_HTTP__BASE_PORT"] == "12010"
    assert environment_of(lines["beta-verifier"])["SWARM_CONFIG"] == "${SWARM_CONFIG:-node.toml}"


@pytest.mark.parametrize("text", ["$(touch made)", "`touch made`", ";touch made;", "'\"}${HOME}\\", "a b&c"])
def test_a_servers_address_is_an_address_whatever_is_in_it(tmp_path: Path, text: str) -> None:
    """It comes from the command line, or from the note in a run's folder, which anybody may have
    made.
    """
    environment = {"PATH": os.environ["PATH"], "HOME": "/"}
    for name, line in process_lines(Layout(nodes=1, nats_url=f"nats://h:1{text}")).items():
        told, _, _ = line.partition(" exec ")
        done = subprocess.run(f"{told} exec env", shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True)
        found = dict(each.split("=", 1) for each in done.stdout.splitlines() if "=" in each)
        assert (found.get("SWARM_NATS__NODE_URL"), found.get("SWARM_NATS__SWARM_URL")) == (f"nats://h:1{text}",) * 2, name
    assert not list(tmp_path.iterdir())


def test_the_header_of_one_node_says_one_node() -> None:
    assert render_procfile(Layout(nodes=1)).startswith("# A NATS server, 1 node of four services each")


def test_a_node_without_a_trainer_starts_its_roles_alone_and_is_continued_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    for given, roles in (("verifier, generator", "generator,verifier"), ("all", "all"), ("verifier", "verifier"), ("", "")):
        assert chosen_roles(given) == roles
    assert chosen_roles(",".join(ROLES)) == "all"
    for wrong in ("trainer", "generator", "verifier,sampler", "verifer"):
        with pytest.raises(CommandError, match="generator,verifier"):
            chosen_roles(wrong)
    config = load_config(overrides={"node": {"roles": "generator,verifier"}, "tasks": [{"dataset": "gcd"}]})
    layout = Layout(nodes=1, roles=config.node.role_names)
    assert list(process_lines(layout)) == ["nats", "alpha-generator", "alpha-verifier", "progress"]
    assert len(layout.ports) == 3 and 'roles = "all"' not in render_procfile(layout)
    assert "--roles generator,verifier" in start_options(config, layout).command("first")
    assert "--roles" not in start_options(load_config(overrides={"tasks": [{"dataset": "gcd"}]}), Layout()).command("first")
