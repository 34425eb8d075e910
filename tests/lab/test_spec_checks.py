"""What is wrong with a spec is found before anything is screened or run, and said once, at its
place in the file.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from lab.check import check_datasets, check_spec
from lab.runs import runs_to_make
from lab.spec import Arm, Spec, SpecError, load_spec, parse_spec
from shared.config.model_section import ModelSection
from swarm_cli.local.base_model import model_problem
from tests.lab.tiny_swarm import tiny_qwen3, tiny_spec


def problem_of(model: ModelSection) -> str | None:
    return model_problem(model.path, model.revision)


ARMS = {"8-0": {"sampler": {"local": 8, "external": 0}}, "4-4": {"sampler": {"local": 4, "external": 4}}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_qwen3(tmp_path_factory.mktemp("qwen3") / "model")


def lines_of(spec: Spec) -> list[str]:
    with pytest.raises(SpecError, match="^spec tiny cannot be used:") as told:
        check_spec(spec, problem_of)
    return str(told.value).splitlines()[1:]


def test_a_spec_without_a_mistake_is_let_through(folder: Path) -> None:
    check_spec(tiny_spec(folder, arms=ARMS), problem_of)


def test_the_readme_s_least_spec_runs_and_its_table_has_every_key(tmp_path: Path) -> None:
    readme = Path("experiments/README.md").read_text()
    spec_file = tmp_path / "mine.toml"
    spec_file.write_text(readme.split("```toml\n")[1].split("```")[0])
    check_spec(load_spec(spec_file), problem_of)
    told = set(re.findall(r"^\| `(\w+)` \|", readme, re.MULTILINE))
    assert told == (Spec.model_fields.keys() | Arm.model_fields.keys()) - {"overrides", "source"}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model": {"pth": "x"}}, "  model.pth: unknown key"),
        ({"model": {"path": "experiments/models/papr"}}, "  model.path: model.path experiments/models/papr: no such folder"),
        ({"trainer": {"learning_rat": 1}}, "  trainer.learning_rat: unknown key"),
        (
            {"tasks": [{"dataset": "gcd"}, {"dataset": "gdc"}]},
            "  [[tasks]] 2: gdc: neither reasoning-gym nor an installed package has this dataset; did you mean gcd",
        ),
        ({"tasks": [{"dataset": "gcd", "config": {"size_": 3}}]}, "  [[tasks]] 1: gcd: config key 'size_' is unknown"),
        ({"nodes": [{"tasks": [{"dataset": "gdc"}]}]}, "  [[nodes]] 1: [[tasks]] 1: gdc: "),
        ({"nodes": [{}, {"sampler": {"locl": 2}}]}, "  [[nodes]] 2: sampler.locl: unknown key"),
        ({"nodes": [{}, {"model": {"path": "nowhere"}}]}, "  [[nodes]] 2: model.path: model.path nowhere: no such folder"),
    ],
)
def test_what_the_spec_s_top_says_wrong_is_said_once(folder: Path, changes: dict[str, Any], said: str) -> None:
    (line,) = lines_of(tiny_spec(folder, arms=ARMS, **changes))
    assert line.startswith(said)


def test_what_one_arm_says_wrong_is_said_of_it(folder: Path) -> None:
    arms = {**ARMS, "4-4": {"model": {"path": "nowhere"}, "tasks": [{"dataset": "gdc"}]}, "2-6": {"trainer": {"optimizer": 1}}}
    found = [line.split(": ")[0] for line in lines_of(tiny_spec(folder, arms=arms))]
    assert found == ["  [[arms.4-4.tasks]] 1", "  arms.4-4.model.path", "  arms.2-6.trainer.optimizer"]


def test_an_unknown_dataset_is_found_before_any_is_screened(folder: Path) -> None:
    with pytest.raises(SpecError, match=r"\[\[tasks\]\] 1: gdc: neither reasoning-gym nor an installed package"):
        check_datasets(tiny_spec(folder, tasks=[{"dataset": "gdc"}]))


def test_keys_that_are_unknown_or_missing_at_the_top_are_said_once() -> None:
    with pytest.raises(SpecError) as told:
        parse_spec({"name": "x", "seeds": [1], "round": 6, "tasks": [{"dataset": "gcd"}], "arms": {"a": {}, "b": {}, "c": {}}})
    found = [line.split(";")[0] for line in str(told.value).splitlines()]
    assert sorted(found) == ["  nodes: is missing", "  round: unknown key", "  rounds: is missing"]


def test_a_key_that_one_arm_lacks_is_said_of_it() -> None:
    with pytest.raises(SpecError, match=r"^  arms\.b\.nodes: is missing$"):
        parse_spec({"name": "x", "seeds": [1], "rounds": 6, "tasks": [{"dataset": "gcd"}], "arms": {"a": {"nodes": 1}, "b": {}}})


@pytest.mark.parametrize(
    ("arms", "seeds", "said"),
    [
        ([], None, "--arms names none"),
        (None, [], "--seeds names none"),
        (None, [1, 2, 1], "--seeds: 1 is listed twice"),
        (None, [-3], "--seeds: -3 is below 0"),
    ],
)
def test_arms_and_seeds_that_are_asked_for_must_make_sense(
    folder: Path, tmp_path: Path, arms: list[str] | None, seeds: list[int] | None, said: str
) -> None:
    with pytest.raises(SpecError, match=said):
        runs_to_make(tiny_spec(folder, arms=ARMS), tmp_path, arms, seeds)
