"""Plans a run: turns an arm and a seed into nodes, each with a role and a complete, checked
`NodeConfig`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pydantic import ValidationError

from lab.spec import Attack, Role, Spec, SpecError, merged
from shared.config import NodeConfig
from shared.tasks import TaskConfigError
from shared.tasks.file_source import with_row_name

_BARE = {
    "sampler": {"adapt": "off", "strategy": "uniform"},
    "verifier": {"foreign_partial_credit": True},
    "trainer": {
        "objective_options": {"count_uninformative": False},
        "clip_low": 0.2,
        "clip_high": 0.28,
        "constants": {
            "policy_check_fraction": 0.0,
            "foreign_norm_factor": 0.0,
            "foreign_share_factor": 0.0,
            "foreign_cost_factor": 0.0,
            "foreign_weight_positive": "capped",
            "foreign_weight_negative": "capped",
            "drop_foreign_negatives": False,
        },
    },
}
"""The values behind `settings = "bare"`. Whatever a node's defaults are now, an arm's I and J are
fixed and foreign text is used unchanged, unless the arm sets a controller or a defence.
"""


def simulated_name(place: int) -> str:
    """Name of the node at a place, counted from 0 over all of an arm's nodes."""
    return f"n{place:02d}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedNode:
    """One node of a run."""

    name: str
    role: Role
    config: NodeConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRun:
    """Everything that a run depends on, except the software."""

    experiment: str
    arm: str
    seed: int
    rounds: int
    round_s: float
    nodes: tuple[PlannedNode, ...]
    attack: Attack
    delay_rounds: tuple[int, int] = (0, 0)


def plan_run(spec: Spec, arm_name: str, seed: int, name_of: Callable[[int], str] = simulated_name) -> PlannedRun:
    """The run of one arm and seed. `name_of` gives the node at a place its name, on which its task
    draws depend.

    Raises: SpecError: a node's configuration cannot be used, or the arm's rules contradict each
    other.
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
            try:
                # The spec may have been read in a different process.
                values["tasks"] = [with_row_name(task).model_dump() for task in group.tasks or arm.tasks]
                config = NodeConfig(**values)
            except TaskConfigError as error:
                raise SpecError(str(error)) from None
            except ValidationError as error:
                raise SpecError.of(error, arm_name, "`swarm config show --all` lists all keys") from None
            nodes.append(PlannedNode(name=name, role=group.role, config=config))
    if misfit := _misfit(nodes):
        raise SpecError(f"arm {arm_name}: {misfit}")
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


def _misfit(nodes: list[PlannedNode]) -> str | None:
    """What is wrong with settings that are valid on their own but cannot be combined."""
    honest = [node for node in nodes if node.role == "honest"]
    if not honest:
        return "nodes: no node is honest, so nothing would be measured"
    if any(node.config.sampler.shortage == "wait" for node in honest):
        return "sampler.shortage: all nodes' rounds are in step, so a batch cannot wait for groups: use short or fill_local"
    models = {node.config.model.path for node in honest}
    if other := next((node.config.model.path for node in nodes if node.config.model.path not in models), None):
        return f"nodes: a hostile node answers with an honest node's policy, and none has the model {other}"
    return None
