"""The stacked learner ends where the trainer's own would, node by node: log-probabilities,
gradients, bounds and weights.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lab.stacked_learner import Part, StackedLearner
from lab.stacked_logprobs import group_logprobs, stack_groups
from lab.stacked_model import StackedDecoder
from lab.stacked_params import Architecture, leaves, load_stack
from services.trainer.gradient.forward import completion_logprobs
from services.trainer.gradient.rows import TokenGroup, build_rows, plan_rows
from services.trainer.gradient.update import UpdateConfig, accumulate_gradients, batch_logprobs
from services.trainer.learner import Learner
from services.trainer.selection.intake import Intake
from tests.lab.tiny_swarm import spread_out, tiny_config, tiny_llama, tiny_qwen3, transformers_model, unflatten
from tests.unit.trainer_models import ragged_groups

NODES = 3
FOLDERS = ("qwen3-tied", "qwen3-untied", "llama-tied")
SIZES = ("small", "large")


@pytest.fixture(scope="module", params=FOLDERS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    kind, embeddings = request.param.split("-")
    make = {"qwen3": tiny_qwen3, "llama": tiny_llama}[kind]
    return make(tmp_path_factory.mktemp(kind) / "model", tied=embeddings == "tied")


@pytest.fixture(params=SIZES)
def size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether policies are computed in one pass, or are taken for so large that each has its
    own.
    """
    if request.param == "large":
        monkeypatch.setattr("lab.stacked_learner.IN_ONE_PASS", 1)
        monkeypatch.setattr("lab.stacked_learner.NORM_PART", 1000)


def groups_of_nodes() -> list[list[TokenGroup]]:
    return [ragged_groups(count, seed=count) for count in (4, 1, 6)]


def intake_of(groups: Sequence[TokenGroup]) -> Intake:
    return Intake(
        groups=list(groups),
        authors=[("other", f"{number:064x}") for number in range(len(groups))],
        local=len(groups),
        external=0,
        with_behaviour=0,
        reencoded=0,
        zero_advantage=0,
        skipped=Counter(),
        rewards_local=[],
        rewards_external=[],
    )


def test_the_stack_gives_back_the_tensors_it_was_made_of(folder: Path) -> None:
    architecture, flat = load_stack([folder] * 2, torch.device("cpu"))
    again = architecture.flatten(unflatten(architecture, flat[1]))
    assert torch.equal(again, flat[0])


def test_logprobs_and_entropy_of_every_node_are_those_of_its_own_model(folder: Path) -> None:
    architecture, flat = load_stack([folder] * NODES, torch.device("cpu"))
    flat = spread_out(architecture, flat)
    groups = groups_of_nodes()
    stacked = stack_groups(groups, [list(range(len(each))) for each in groups], torch.device("cpu"))
    with torch.no_grad():
        scored = group_logprobs(
            StackedDecoder(architecture, torch.device("cpu")), leaves(architecture, flat), stacked, [1.0, 0.7, 2.0]
        )
    for node, temperature in enumerate((1.0, 0.7, 2.0)):
        model = transformers_model(folder, architecture, flat[node])
        rows = build_rows(groups[node], plan_rows(groups[node], shared_prompt=False, budget_tokens=10_000, hidden_size=32))
        expected = completion_logprobs(model, rows, temperature=temperature)
        longest = rows.mask.shape[1]
        assert stacked.rows[node].sequences == rows.sequences
        assert torch.allclose(scored[node].logprobs[:, :longest], expected.logprobs, atol=1e-5)
        assert torch.allclose(scored[node].entropy[:, :longest], expected.entropy, atol=1e-5)


def test_gradients_are_those_that_the_trainer_computes(folder: Path) -> None:
    architecture, flat = load_stack([folder] * NODES, torch.device("cpu"))
    flat = spread_out(architecture, flat)
    config = tiny_config(folder)
    learner = StackedLearner([config] * NODES, architecture, flat)
    groups = groups_of_nodes()
    wanted = [[number for number, group in enumerate(each) if group.moves_policy] for each in groups]
    parts_of = [Part(node, numbers) for node, numbers in enumerate(wanted)]
    gradients, parts = learner._accumulate(groups, parts_of, [None] * NODES, [None] * NODES)
    for node in range(NODES):
        model = transformers_model(folder, architecture, flat[node])
        expected_stats = accumulate_gradients(model, groups[node], learner._update_configs[node])
        expected = {name: parameter.grad for name, parameter in model.named_parameters()}
        found = unflatten(architecture, gradients[node])
        largest = max(float(gradient.abs().max()) for gradient in expected.values())
        for name, gradient in expected.items():
            assert torch.allclose(found[name], gradient, atol=1e-5 * max(1.0, largest)), name
        stats = parts[node].stats(groups[node], learner._update_configs[node])
        assert stats.loss == pytest.approx(expected_stats.loss, abs=1e-6)
        assert stats.tokens == expected_stats.tokens


@pytest.mark.usefixtures("size")
def test_a_node_holds_foreign_groups_to_the_bound_that_its_own_learner_would(folder: Path) -> None:
    """One foreign group of a hundredfold gradient: every node finds the scales and ends with the
    weights of a real learner.
    """
    config = tiny_config(folder, trainer={"constants": {"adam_eps": 1e-2, "policy_check_fraction": 0.0}})
    architecture, flat = load_stack([folder] * NODES, torch.device("cpu"))
    stacked = StackedLearner([config] * NODES, architecture, flat)
    learners = [Learner(config) for _ in range(NODES)]
    groups = [ragged_groups(count, seed=count) for count in (5, 3, 4)]
    for node_groups, number in zip(groups, (1, 1, 3), strict=True):
        large = [100.0 * advantage for advantage in node_groups[number].advantages]
        node_groups[number] = replace(node_groups[number], advantages=large)
    # The last node has no local group, so that only the others say what is usual.
    groups[2] = [replace(group, is_local=False) for group in groups[2]]
    outcomes = stacked.step([intake_of(each) for each in groups], [1] * NODES, [0] * NODES)
    for node, learner in enumerate(learners):
        learner._set_learning_rate(1)
        (update,) = learner._updates(intake_of(groups[node]))
        outcome = outcomes[node]
        assert outcome is not None
        assert outcome.bounded == len(update.gradient.scales) >= 1
        assert outcome.grad_norms == pytest.approx([update.grad_norm], rel=1e-4)
        expected = dict(learner.model.named_parameters())
        for name, tensor in unflatten(architecture, stacked.flat[node]).items():
            assert torch.allclose(tensor, expected[name], atol=1e-5), name


TRAINERS: dict[str, dict[str, object]] = {
    "plain": {},
    "several updates": {"updates_per_batch": 3, "grad_clip": 0.05, "constants": {"weight_decay": 0.1}},
    "with reference": {"objective": "gspo", "kl_coefficient": 0.2, "constants": {"importance_cap": 1.1}},
    "schedule": {
        "objective": "cispo",
        "schedule": "cosine",
        "max_steps": 5,
        "warmup_steps": 1,
        "constants": {"external_weight": 0.5},
    },
    "foreign weights": {
        "objective": "m2po",
        "constants": {"foreign_weight_level": "sequence", "foreign_negative_divergence": 0.5},
        "objective_options": {"threshold": 0.3},
    },
    "group expectation": {"objective": "gepo", "count_uninformative": True},
}


def _trainers_over_policies() -> list[Any]:
    """Each trainer with each kind of policy and each size. The short form has each trainer once,
    and each kind of policy once small and once large; the others are long.
    """
    return [
        pytest.param(
            kind, size, trainer, id=f"{kind}-{size}-{name}", marks=() if number == len(SIZES) * place + side else pytest.mark.long
        )
        for place, kind in enumerate(FOLDERS)
        for side, size in enumerate(SIZES)
        for number, (name, trainer) in enumerate(TRAINERS.items())
    ]


@pytest.mark.usefixtures("size")
@pytest.mark.parametrize(("folder", "size", "trainer"), _trainers_over_policies(), indirect=["folder", "size"])
def test_three_nodes_end_with_the_weights_of_three_learners(folder: Path, trainer: dict[str, object]) -> None:
    # A large epsilon: with the usual one AdamW turns the sign of a gradient near zero, thus its
    # rounding, into a whole step. Foreign text is checked by a test of its own; here are only the
    # updates.
    config = tiny_config(folder, trainer={**trainer, "constants": {"adam_eps": 1e-2, "policy_check_fraction": 0.0}})
    architecture, flat = load_stack([folder] * NODES, torch.device("cpu"))
    stacked = StackedLearner([config] * NODES, architecture, flat)
    learners = [Learner(config) for _ in range(NODES)]
    for step in range(1, 4):
        groups = [ragged_groups(count, seed=10 * step + count) for count in (4, 2, 5)]
        outcomes = stacked.step([intake_of(each) for each in groups], [step] * NODES, [0] * NODES)
        for node, learner in enumerate(learners):
            learner._set_learning_rate(step)
            updates = learner._updates(intake_of(groups[node]))
            outcome = outcomes[node]
            assert outcome is not None
            assert outcome.moved
            assert outcome.grad_norms == pytest.approx([update.grad_norm for update in updates], rel=1e-4)
            assert outcome.stats[-1].clip_fraction == pytest.approx(updates[-1].gradient.stats.clip_fraction)
            expected, found = learner.policy(), unflatten(architecture, stacked.flat[node])
            for name, tensor in found.items():
                assert torch.allclose(tensor, expected[name], atol=1e-5), name


def test_a_node_without_advantage_keeps_weights_and_moments(folder: Path) -> None:
    config = tiny_config(folder)
    architecture, flat = load_stack([folder] * 2, torch.device("cpu"))
    learner = StackedLearner([config] * 2, architecture, flat)
    moving = ragged_groups(2)
    still = [TokenGroup(prompt_ids=[1], completions=[[2], [3]], behaviour_logprobs=[None, None], advantages=[0.0, 0.0])]
    outcomes = learner.step([intake_of(moving), intake_of(still)], [1, 1], [0, 0])
    assert outcomes[0] is not None
    assert outcomes[0].moved
    assert outcomes[1] is not None
    assert not outcomes[1].moved
    assert torch.equal(learner.flat[1], flat[1])
    assert not torch.equal(learner.flat[0], flat[0])
    assert learner._optimizer._steps == [1, 0]


@pytest.mark.usefixtures("size")
def test_what_this_nodes_policy_finds_absurd_is_left_out_as_in_the_trainer(folder: Path) -> None:
    architecture, flat = load_stack([folder] * 2, torch.device("cpu"))
    flat = spread_out(architecture, flat)
    foreign = [
        TokenGroup(
            **{name: getattr(group, name) for name in ("prompt_ids", "completions", "behaviour_logprobs", "advantages")},
            is_local=False,
        )
        for group in ragged_groups(5, with_behaviour=False)
    ]
    means = [
        [float(token_logprobs.mean()) for token_logprobs in group_means]
        for group_means in batch_logprobs(transformers_model(folder, architecture, flat[1]), foreign, UpdateConfig())
    ]
    floor = sorted(mean for group_means in means for mean in group_means)[4] + 1e-3
    config = tiny_config(folder, trainer={"constants": {"policy_check_fraction": 1.0, "min_foreign_logprob": floor}})
    learner = StackedLearner([config] * 2, architecture, flat)
    outcomes = learner.step([None, intake_of(foreign)], [0, 1], [0, 3])
    assert outcomes[0] is None
    assert outcomes[1] is not None
    assert outcomes[1].absurd == sum(mean < floor for group_means in means for mean in group_means) == 5


def test_a_model_of_another_kind_is_refused_with_its_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gemma2", "hidden_act": "gelu"}')
    with pytest.raises(ValueError, match="model_type 'gemma2', hidden_act 'gelu': .*Qwen3 and Llama"):
        Architecture.from_folder(tmp_path)
