"""Specs of experiments: published ones are complete, arms change what they name, mistakes are
named.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from lab.arms import plan_run
from lab.spec import SpecError, load_spec, merged, parse_spec
from shared.config import NodeConfig

BROUGHT_IN = tomllib.loads(Path("config/smollm2.toml").read_text())["model"]["path"]
"""By `make run MODEL=smollm2`; all other models are in the repository."""
SPECS = sorted(Path("experiments").glob("*.toml"))


def source(**changes: Any) -> dict[str, Any]:
    base = {
        "name": "x",
        "seeds": [1, 2],
        "rounds": 3,
        "nodes": 2,
        "tasks": [{"dataset": "gcd"}],
        "trainer": {"learning_rate": 1e-3, "constants": {"betas": [0.9, 0.95]}},
        "arms": {"8-0": {"sampler": {"local": 8, "external": 0}}, "4-4": {}},
    }
    return merged(base, changes)


@pytest.mark.slow
@pytest.mark.parametrize("file", SPECS, ids=[file.stem for file in SPECS])
def test_every_published_spec_gives_complete_runs(file: Path) -> None:
    spec = load_spec(file)
    assert spec.name == file.stem
    for arm in spec.arms:
        run = plan_run(spec, arm, spec.seeds[0])
        assert len({node.name for node in run.nodes}) == len(run.nodes)
        models = {node.config.model.path for node in run.nodes} - {BROUGHT_IN}
        assert all((Path(model) / "config.json").is_file() for model in models)


def test_bare_arms_have_no_newer_defence_and_shipped_ones_a_nodes_defaults() -> None:
    bare, shipped = (plan_run(parse_spec(source(settings=name)), "4-4", 1).nodes[0].config for name in ("bare", "shipped"))
    defaults = NodeConfig(node={"id": "n00"}, tasks=[{"dataset": "gcd"}])
    assert shipped.sampler == defaults.sampler
    assert shipped.verifier == defaults.verifier
    assert shipped.trainer.constants.policy_check_fraction == defaults.trainer.constants.policy_check_fraction == 1.0
    assert (bare.sampler.adapt, bare.trainer.constants.policy_check_fraction, bare.verifier.foreign_partial_credit) == (
        "off",
        0.0,
        True,
    )
    digests = {parse_spec(source(settings=name)).digest("4-4") for name in ("bare", "shipped")}
    assert len(digests) == 2
    assert parse_spec(source()).digest("4-4") in digests, "specs of before keep their digest"


def test_an_arm_changes_what_it_names_and_keeps_the_rest() -> None:
    spec = parse_spec(source(arms={"warm": {"trainer": {"warmup_steps": 5}}}))
    eight, warm = (plan_run(spec, arm, 2).nodes[1].config for arm in ("8-0", "warm"))
    assert (eight.sampler.local, eight.trainer.warmup_steps) == (8, 0)
    assert (warm.sampler.local, warm.trainer.warmup_steps, warm.trainer.learning_rate) == (2, 5, 1e-3)
    assert (warm.node.id, warm.node.seed) == ("n01", 2)


def test_nodes_may_differ_in_role_tasks_and_any_section() -> None:
    nodes = [
        {"count": 2},
        {"count": 1, "role": "starve"},
        {"tasks": [{"dataset": "lcm"}], "trainer": {"objective": "cispo"}, "model": {"path": "elsewhere"}},
    ]
    run = plan_run(parse_spec(source(nodes=nodes)), "4-4", 1)
    assert [node.role for node in run.nodes] == ["honest", "honest", "starve", "honest"]
    assert [node.config.tasks[0].dataset for node in run.nodes] == ["gcd", "gcd", "gcd", "lcm"]
    assert run.nodes[3].config.trainer.objective == "cispo"
    assert run.nodes[3].config.trainer.learning_rate == 1e-3
    assert run.nodes[3].config.model.path == "elsewhere"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rounds": 0}, r"^arm 8-0: rounds: .*greater than or equal to 1"),
        ({"speed": 1}, r"^arm 8-0: speed: unknown key"),
        ({"seeds": []}, r"seeds: .*at least 1"),
        ({"seeds": [1, 2, 1]}, r"^seeds: 1 is listed twice$"),
        ({"seeds": [-1]}, r"^seeds: -1 is below 0$"),
        ({"arms": {"4-4": {"rounds": 0}}}, r"^arm 4-4: rounds: [^\n]*, got 0$"),
        ({"nodes": [{"role": "evil"}]}, r"\[\[nodes\]\] 1: role"),
        ({"baseline": "none"}, r"baseline: no arm is called 'none'; there are 8-0, 4-4"),
    ],
)
def test_a_mistake_is_named_with_its_field(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        parse_spec(source(**changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"trainer": {"learning_rat": 1}}, r"^arm 4-4: trainer\.learning_rat: unknown key"),
        ({"sampler": {"strategy": "best"}}, r"best"),
        ({"sampler": {"shortage": "wait"}}, r"^arm 4-4: sampler\.shortage: all nodes' rounds are in step"),
        ({"nodes": [{"role": "starve"}]}, r"no node is honest"),
        ({"nodes": [{}, {"role": "starve", "model": {"path": "elsewhere"}}]}, r"none has the model elsewhere"),
    ],
)
def test_a_node_that_cannot_be_is_refused_before_anything_runs(changes: dict[str, Any], message: str) -> None:
    with pytest.raises((SpecError, ValueError), match=message):
        plan_run(parse_spec(source(**changes)), "4-4", 1)


def test_the_environment_does_not_reach_an_experiment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWARM_TRAINER__WARMUP_STEPS", "77")
    assert plan_run(parse_spec(source()), "4-4", 1).nodes[0].config.trainer.warmup_steps == 0


def test_a_file_that_is_no_toml_is_named(tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text("name = ")
    with pytest.raises(SpecError, match=r"bad\.toml cannot be read"):
        load_spec(tmp_path / "bad.toml")
