"""`swarm config check` of what installed packages add: broken entries are lines of its usual list,
and names that are used twice are told.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.trainer.service import TrainerService
from shared.config import ConfigError, load_config
from shared.registry import ignored_entries
from shared.runtime import EXIT_CONFIG, FatalError
from swarm_cli.config_checks import entry_problems, objective_problem
from swarm_cli.config_commands import check
from swarm_cli.errors import CommandError
from tests.installed_packages import forget, install

ROOT = Path(__file__).parents[2]
TASKS = [{"dataset": "gcd"}]
SETTINGS = {
    "swarm.objectives": '[trainer]\nobjective = "mine"',
    "swarm.strategies": '[sampler]\nstrategy = "mine"',
    "swarm.engines": '[generator]\nengine = "mine"',
    "swarm.policy_stores": '[policy_store]\nuri = "mine:///tmp/x"',
}


STRATEGY = """
from services.sampler.strategies import Strategy
mine = Strategy("mine", keeps=None, draw=None)
"""


@pytest.fixture(autouse=True)
def _forget_packages() -> Iterator[None]:
    yield
    forget()


def checked(folder: Path, text: str) -> list[str]:
    """The lines with which `swarm config check` refuses a configuration."""
    file = folder / "node.toml"
    file.write_text(text)
    with pytest.raises(CommandError) as refused:
        check(file)
    return str(refused.value).splitlines()


@pytest.mark.slow
def test_broken_entries_are_lines_of_the_list_with_their_names_and_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for group in SETTINGS:
        install(tmp_path, monkeypatch, group, "mine", "raise SystemExit(3)", package=f"package-of-{group.removeprefix('swarm.')}")
    text = "\n".join(SETTINGS.values())
    heading, *problems = checked(tmp_path, f'{text}\n[[tasks]]\ndataset = "gcd"\n')
    assert heading == "the configuration cannot be used:"
    for kind in ("objective", "strategy", "engine", "policy store"):
        named = [each for each in problems if each.startswith(f"{kind} mine of the package package-of-")]
        assert len(named) == 1 and "cannot be loaded: SystemExit: 3" in named[0], problems


@pytest.mark.parametrize(
    ("group", "code", "words"),
    [
        ("swarm.engines", "mine = 3", "engine mine of the package my-package is a int"),
        ("swarm.engines", "", "engine mine of the package my-package cannot be loaded: AttributeError"),
        ("swarm.strategies", "mine = 3", "strategy mine of the package my-package is a int"),
        ("swarm.strategies", STRATEGY, "my-package: its keeps is a NoneType and its draw is a NoneType: give functions"),
        ("swarm.policy_stores", "mine = 3", "policy store mine of the package my-package is a int"),
    ],
)
def test_entries_of_a_wrong_type_are_found_and_none_is_called(
    group: str, code: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, monkeypatch, group, "mine", code)
    file = tmp_path / "node.toml"
    file.write_text(f'{SETTINGS[group]}\n[[tasks]]\ndataset = "gcd"\n')
    (problem,) = entry_problems(load_config(file))
    assert words in problem


def test_an_engine_is_imported_and_not_made_and_a_built_in_one_is_not_even_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, monkeypatch, "swarm.engines", "mine", "def mine(settings): raise AssertionError")
    assert entry_problems(load_config(None, {"tasks": TASKS, "generator": {"engine": "mine"}})) == []
    monkeypatch.setitem(sys.modules, "services.generator.engines.vllm_engine", None)
    assert entry_problems(load_config(None, {"tasks": TASKS, "generator": {"engine": "vllm"}})) == []


@pytest.mark.parametrize("code", ["mine = 3.5", "", "import no_such_module", "raise SystemExit(3)"])
def test_an_objective_that_cannot_be_used_is_named_with_its_package(
    code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, monkeypatch, "swarm.objectives", "mine", code)
    trainer = {"objective": "mine", "objective_options": {"threshold": 0.05}}
    config = load_config(None, {"tasks": TASKS, "trainer": trainer})
    assert "objective mine of the package my-package" in objective_problem(config)


@pytest.mark.parametrize(
    ("group", "sections", "role", "words"),
    [
        ("swarm.objectives", {"trainer": {"objective": "grpo"}}, "trainer", "trainer.objective = grpo is the built-in objective"),
        ("swarm.engines", {"generator": {"engine": "vllm"}}, "generator", "generator.engine = vllm is the built-in engine"),
        ("swarm.task_sources", {"tasks": [{"dataset": "chain_sum"}]}, "generator", "= chain_sum is the built-in task source"),
        ("swarm.policy_stores", {"policy_store": {"uri": "nats://"}}, "trainer", "policy_store.uri = nats is the built-in"),
    ],
)
def test_a_package_whose_entry_has_the_name_of_a_built_in_one_is_warned_of(
    group: str, sections: dict[str, object], role: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = words.split(" = ")[1].split()[0] if " = " in words else "chain_sum"
    config = load_config(None, {"tasks": TASKS, **sections})
    assert ignored_entries(config.entries()) == []
    install(tmp_path, monkeypatch, group, name, "raise SystemExit(3)")
    (sentence,) = ignored_entries(config.entries())
    assert words in sentence and "the one of the package my-package is ignored" in sentence
    assert ignored_entries(config.entries(), role) == [sentence] and ignored_entries(config.entries(), "verifier") == []
    assert ignored_entries(load_config(None, {"tasks": TASKS}).entries()) == []


OBJECTIVE = """
from services.trainer.objectives.base import Objective
from services.trainer.objectives.base import plain_loss
mine = Objective(name="mine", loss=plain_loss, {declared})
"""


@pytest.mark.parametrize(
    ("declared", "words"),
    [
        ('aggregation="mean"', r"unknown aggregation 'mean' \(there are sequence_mean, token_mean, fixed_length, sequence_sum\)"),
        (
            'aggregation="token_mean", advantages="group_normalized"',
            r"unknown advantages 'group_normalized' \(there are group_normalised, leave_one_out, soft_value, or a function",
        ),
        ('aggregation="token_mean", clips="low"', r"unknown clips 'low' \(there are True and False\)"),
        ('aggregation="token_mean", uses_behaviour="no"', r"unknown uses_behaviour 'no' \(there are True and False\)"),
        ('aggregation="token_mean", keeps="all"', r"unknown keeps 'all' \(there are functions and None\)"),
        ('aggregation="token_mean", options="abc"', r"unknown options 'abc' \(there are mappings of names to numbers\)"),
    ],
)
def test_an_objective_that_declares_what_does_not_exist_is_refused_with_the_names_that_do(
    declared: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, monkeypatch, "swarm.objectives", "mine", OBJECTIVE.format(declared=declared))
    config = load_config(
        None, {"tasks": TASKS, "trainer": {"objective": "mine", "objective_options": {"aggregation": "token_mean"}}}
    )
    wanted = f"objective mine of the package my-package has the {words}.*: correct that, or change trainer.objective"
    assert re.search(wanted, objective_problem(config))
    with pytest.raises(FatalError, match=wanted):
        TrainerService(config)


AMBIGUOUS = "mine is an entry point of several packages, first and second: uninstall all but one"


@pytest.mark.parametrize("group", [*SETTINGS, "swarm.trackers"])
def test_a_name_that_two_packages_use_is_refused_with_both(group: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("second", "first"):
        install(tmp_path, monkeypatch, group, "mine", "", package=package)
    file = tmp_path / "node.toml"
    settings = SETTINGS.get(group, '[tracking]\ntrackers = ["mine"]')
    file.write_text(f'{settings}\n[[tasks]]\ndataset = "gcd"\n')
    with pytest.raises(ConfigError, match=AMBIGUOUS):
        load_config(file)


@pytest.mark.slow
def test_a_verifier_or_a_task_source_of_two_packages_is_refused_with_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("first", "second"):
        install(tmp_path, monkeypatch, "swarm.verifiers", "mine", "", package=package)
    for package in ("third", "fourth"):
        install(tmp_path, monkeypatch, "swarm.task_sources", "mine", "", package=package)
    tasks = '[[tasks]]\ndataset = "gcd"\nverifier = "mine"\n[[tasks]]\ndataset = "mine"\n'
    told = "\n".join(checked(tmp_path, tasks))
    assert f"verifier {AMBIGUOUS}" in told
    assert "task source mine is an entry point of several packages, fourth and third" in told


@pytest.mark.slow
def test_a_service_warns_when_it_starts_of_a_package_that_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing listens on the server's port, so that the service ends at once."""
    install(tmp_path, monkeypatch, "swarm.strategies", "uniform", "")
    nats = '[nats]\nnode_url = "nats://127.0.0.1:9"\nconnect_timeout_s = 0.1\n[http]\nbase_port = 0\n'
    file = tmp_path / "node.toml"
    file.write_text(f'node = {{ var_dir = "{tmp_path}" }}\n{nats}[[tasks]]\ndataset = "gcd"\n[sampler]\nstrategy = "uniform"\n')
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)])}
    command = [sys.executable, "-m", "services.sampler", "--config", str(file)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert ended.returncode == EXIT_CONFIG, ended.stderr
    assert "entry_point_ignored" in ended.stdout and "sampler.strategy = uniform is the built-in strategy" in ended.stdout
