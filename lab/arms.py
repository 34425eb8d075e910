"""From an arm and a seed to the nodes of one run: each with a complete, checked `NodeConfig`, a role and a local rule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from lab.spec import Arm, Attack, LocalRule, Role, Spec, SpecError, merged
from shared.config import NodeConfig
from shared.config.load import explain

_BARE = {
    "sampler": {"adapt": "off", "strategy": "uniform"},
    "verifier": {"foreign_partial_credit": True},
    "trainer": {
        "policy_check_fraction": 0.0,
        "count_uninformative": False,
        "foreign_norm_factor": 0.0,
        "foreign_share_factor": 0.0,
        "foreign_cost_factor": 0.0,
        "foreign_weight_positive": "capped",
        "foreign_weight_negative": "capped",
        "drop_foreign_negatives": False,
    },
}
"""What `settings = "bare"` means: an arm's I and J stay as it says, and text of others is taken as it is, unless an arm asks for
a controller or a defence; whatever a node's defaults have become since."""


def simulated_name(place: int) -> str:
    """Name of the node at a place, counted from 0 over all of an arm's nodes, in the driver `simulate`."""
    return f"n{place:02d}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedNode:
    """One node of a run."""

    name: str
    role: Role
    config: NodeConfig
    local: LocalRule


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRun:
    """Everything one run depends on, besides the software."""

    experiment: str
    arm: str
    seed: int
    rounds: int
    round_s: float
    nodes: tuple[PlannedNode, ...]
    attack: Attack
    delay_rounds: tuple[int, int] = (0, 0)


def plan_run(spec: Spec, arm_name: str, seed: int, name_of: Callable[[int], str] = simulated_name) -> PlannedRun:
    """The run of one arm and seed. `name_of` gives the node at a place its name, on which its task draws depend.

    Raises:
        SpecError: a node's configuration cannot be used, or the arm's rules do not fit each other.
    """
    arm = spec.arms[arm_name]
    nodes: list[PlannedNode] = []
    for group in arm.nodes:
        for _ in range(group.count):
            name = name_of(len(nodes))
            values = merged(_BARE if spec.settings == "bare" else {}, merged(arm.overrides, group.overrides))
            values["node"] = {"id": name, "seed": seed, "run": f"{spec.name}-{arm_name}-{seed}"}
            if spec.held_out == "per seed":
                values = merged(values, {"eval": {"draw": seed}})
            values["tasks"] = [task.model_dump() for task in (group.tasks or arm.tasks)]
            nodes.append(PlannedNode(name=name, role=group.role, config=_checked(values, arm_name, name), local=arm.local))
    _check(arm, arm_name, nodes)
    return PlannedRun(
        experiment=spec.name,
        arm=arm_name,
        seed=seed,
        rounds=arm.rounds,
        round_s=spec.round_s,
        nodes=tuple(nodes),
        attack=arm.attack,
        delay_rounds=arm.delay_rounds,
    )


def _checked(values: dict[str, Any], arm: str, node: str) -> NodeConfig:
    try:
        # A prefix that no variable has: a result must not depend on the environment it was made in.
        return NodeConfig(_env_prefix="NO_ENVIRONMENT_", **values)
    except ValidationError as error:
        raise SpecError(explain(error, f"arm {arm}, node {node}")) from None


def _check(arm: Arm, name: str, nodes: list[PlannedNode]) -> None:
    honest = [node for node in nodes if node.role == "honest"]
    if not honest:
        raise SpecError(f"  arms.{name}.nodes: no node is honest, so nothing would be measured")
    rule = arm.local
    for node in honest:
        sampler = node.config.sampler
        if rule.filter != "none" and (sampler.max_staleness or rule.unfiltered > sampler.local):
            raise SpecError(
                f"  arms.{name}.local: a filter needs sampler.max_staleness 0 (it is {sampler.max_staleness}) and "
                f"`unfiltered` of at most sampler.local {sampler.local}"
            )
        if sampler.shortage == "wait":
            raise SpecError(
                f"  arms.{name}.sampler.shortage: rounds go in step, so nothing can be waited for: use short or fill_local"
            )
