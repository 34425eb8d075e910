"""What is wrong with a spec is found before anything is screened or run."""

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
        ({"model": {"pth": "x"}}, "arm 8-0: model.pth: unknown key"),
        ({"model": {"path": "experiments/models/papr"}}, "arm 8-0: model.path experiments/models/papr: no such folder"),
        ({"trainer": {"learning_rat": 1}}, "arm 8-0: trainer.learning_rat: unknown key"),
        (
            {"tasks": [{"dataset": "gcd"}, {"dataset": "gdc"}]},
            "arm 8-0: tasks: gdc: neither reasoning-gym nor",
        ),
        ({"tasks": [{"dataset": "gcd", "config": {"size_": 3}}]}, "arm 8-0: tasks: gcd: config key 'size_' is unknown"),
        ({"nodes": [{"tasks": [{"dataset": "gdc"}]}]}, "arm 8-0: tasks: gdc: "),
        ({"nodes": [{}, {"model": {"path": "nowhere"}}]}, "arm 8-0: model.path nowhere: no such folder"),
        ({"arms": {**ARMS, "4-4": {"model": {"path": "nowhere"}}}}, "arm 4-4: model.path nowhere: no such folder"),
        ({"arms": {**ARMS, "4-4": {"trainer": {"optimizer": 1}}}}, "arm 4-4: trainer.optimizer: unknown key"),
    ],
)
def test_a_mistake_is_told_with_its_arm_and_field(folder: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError) as told:
        check_spec(tiny_spec(folder, **{"arms": ARMS, **changes}), problem_of)
    assert str(told.value).startswith(said)


def test_an_unknown_dataset_is_found_before_any_is_screened(folder: Path) -> None:
    with pytest.raises(SpecError, match=r"gdc: neither reasoning-gym nor an installed package"):
        check_datasets(tiny_spec(folder, tasks=[{"dataset": "gdc"}]))


def test_all_keys_of_an_arm_that_are_unknown_or_missing_are_told() -> None:
    with pytest.raises(SpecError) as told:
        parse_spec({"name": "x", "seeds": [1], "round": 6, "tasks": [{"dataset": "gcd"}], "arms": {"a": {}, "b": {}}})
    found = [line.split(";")[0] for line in str(told.value).splitlines()]
    assert sorted(found) == ["arm a: nodes: is missing", "arm a: round: unknown key", "arm a: rounds: is missing"]


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
