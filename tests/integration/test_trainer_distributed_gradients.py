"""Several processes compute the gradients and updates of one process, below the learner.

What should come out, written down before it was measured: the processes' gradients are those of one
process but for the order of additions, so in float64 gradients agree to 1e-12 and weights after
clipped AdamW updates to 1e-10.
"""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from services.trainer.gradient.answer_uses import AnswerPlace, AnswerUse
from services.trainer.gradient.update import (
    UpdateConfig,
    UpdateStats,
    accumulate_gradients,
    accumulate_part,
    batch_logprobs,
    step_normaliser,
)
from services.trainer.objectives.config import ConfiguredObjective
from services.trainer.parallel import ALONE, Parallel
from services.trainer.policy_model import probed
from services.trainer.torchrun import Place
from shared.config import NodeConfig
from shared.model.full_precision import computing_in_float32
from shared.model.loading import load_causal_lm
from tests.integration.trainer_fixtures import model
from tests.integration.trainer_life import config_for
from tests.integration.trainer_ranks import in_ranks, joined
from tests.long_forms import FULL
from tests.objectives import configured
from tests.unit.trainer_models import VOCABULARY, ragged_groups, small_model

__all__ = ["model"]

OBJECTIVES = {
    "dapo": configured("dapo"),
    "dapo with a reference": configured("dapo", kl_coefficient=0.1),
    "dr_grpo": configured("dr_grpo", max_completion_tokens=12),
    "gspo": configured("gspo", clip_low=0.05, clip_high=0.05),
    "cispo": configured("cispo", objective_options={"min": 0.9, "max": 1.1}),
}


# Float64: there is no error in the sums, the normaliser or the shares.


@dataclasses.dataclass
class Updated:
    """After two updates on the same groups: gradient and norm of each, statistics of the second,
    weights, and what a third one uses of each completion.
    """

    gradients: list[Tensor]
    norms: list[float]
    stats: UpdateStats
    weights: Tensor
    uses: dict[AnswerPlace, AnswerUse]


def two_updates(
    objective: ConfiguredObjective, group_count: int, parallel: Parallel, *, in_chunks: bool = False, tied: bool = False
) -> Updated:
    """From random float64 weights; the second update is off the proximal policy, so that ratios are
    clipped.
    """
    model = small_model(dtype=torch.float64, tie_word_embeddings=tied)
    reference_model = small_model(dtype=torch.float64, hidden_size=16)
    for module in (model, reference_model):
        parallel.shard(module)
    groups = ragged_groups(group_count)
    if group_count > 2:
        groups[1] = replace(groups[1], weight=0.5)
        groups[2] = replace(groups[2], advantages=[0.0] * len(groups[2].completions))
    # Plain rows: which answers share a prompt depends on the number of processes, and the model's
    # norms compute in float32.
    config = UpdateConfig(objective=objective, budget_tokens=60)
    if in_chunks:
        separate = replace(probed(model), chunk_bytes=5 * VOCABULARY * 8)
        assert separate.always == (parallel is not ALONE)
        config = replace(config, separate_head=separate)
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    proximal = batch_logprobs(model, groups, config, parallel)
    reference = batch_logprobs(reference_model, groups, config, parallel) if objective.needs_reference else None
    gradients, norms = [], []
    for _ in range(2):
        optimizer.zero_grad()
        stats = accumulate_gradients(model, groups, config, proximal=proximal, reference=reference, parallel=parallel)
        gradients.append(torch.cat([parallel.whole(p.grad).flatten() for p in parameters if p.grad is not None]))
        norms.append(parallel.number(torch.nn.utils.clip_grad_norm_(parameters, 0.1)))
        optimizer.step()
    weights = torch.cat([parallel.whole(p.detach()).flatten() for p in parameters])
    normaliser = step_normaliser(groups, config, proximal)
    everything = range(len(groups))
    part = accumulate_part(model, groups, everything, config, normaliser, proximal=proximal, reference=reference, parallel=parallel)
    return Updated(gradients, norms, stats, weights, part.uses(groups, config, parallel))


CASES = [("dapo with a reference", 6), ("gspo", 6), ("cispo", 6), ("dapo", 1)]
if FULL:
    CASES += [("dapo", 6), ("dr_grpo", 6)]


def two_updates_of_all(place: Place, config: NodeConfig, cases: list[tuple[str, int]]) -> dict[tuple[str, int], Updated]:
    parallel = joined(place, config)
    return {case: two_updates(OBJECTIVES[case[0]], case[1], parallel) for case in cases}


def test_three_processes_compute_what_one_does_to_float64_accuracy(model: Path, tmp_path: Path) -> None:
    found = in_ranks(two_updates_of_all, config_for(model), CASES, ranks=3, folder=tmp_path)
    for name, count in CASES:
        expected = two_updates(OBJECTIVES[name], count, ALONE)
        together, second, third = (rank_values[name, count] for rank_values in found)
        for ours, one in zip(together.gradients, expected.gradients, strict=True):
            assert one.norm() > 0.05 and (ours - one).norm() <= 1e-12 * one.norm(), name
        assert together.norms == pytest.approx(expected.norms, rel=1e-12)
        assert (together.weights - expected.weights).norm() <= 1e-10 * expected.weights.norm(), name
        for field in dataclasses.fields(UpdateStats):
            if field.name not in {"micro_batches", "padded_tokens"}:
                wanted = pytest.approx(getattr(expected.stats, field.name), rel=1e-9, abs=1e-12)
                assert getattr(together.stats, field.name) == wanted, (name, field.name)
        assert together.uses == second.uses == third.uses and together.uses.keys() == expected.uses.keys(), name
        for answer, use in expected.uses.items():
            sums, wanted_sums = (dataclasses.astuple(each)[:-1] for each in (together.uses[answer], use))
            assert sums == pytest.approx(wanted_sums, rel=1e-9), name
            # -1: no number is known; ratios and weights are 0 or more.
            tokens, wanted_tokens = (
                [-1.0 if value is None else value for value in chain(*(each.each or ()))] for each in (together.uses[answer], use)
            )
            assert wanted_tokens and tokens == pytest.approx(wanted_tokens, rel=1e-6), name
        assert together.norms == second.norms == third.norms
        assert together.stats == second.stats == third.stats
    assert found[0]["cispo", 6].stats.clip_fraction > 0.01


CHUNKED = [("dapo", False), ("dapo with a reference", True)]


def two_updates_in_chunks(place: Place, config: NodeConfig) -> dict[tuple[str, bool], Updated]:
    parallel = joined(place, config)
    return {(name, tied): two_updates(OBJECTIVES[name], 6, parallel, in_chunks=True, tied=tied) for name, tied in CHUNKED}


def test_logits_in_chunks_of_a_sharded_output_layer_give_what_one_process_computes_at_once(model: Path, tmp_path: Path) -> None:
    found = in_ranks(two_updates_in_chunks, config_for(model), ranks=3, folder=tmp_path)
    for name, tied in CHUNKED:
        expected = two_updates(OBJECTIVES[name], 6, ALONE, tied=tied)
        for ours, one in zip(found[0][name, tied].gradients, expected.gradients, strict=True):
            assert one.norm() > 0.05 and (ours - one).norm() <= 1e-12 * one.norm(), (name, tied)
        assert (found[0][name, tied].weights - expected.weights).norm() <= 1e-10 * expected.weights.norm(), (name, tied)


def test_a_sharded_model_in_half_precision_computes_in_float32_for_a_while(model: Path, tmp_path: Path) -> None:
    exact, rounded, again = in_ranks(sharded_logits, config_for(model), ranks=2, folder=tmp_path)[0]
    whole: Any = load_causal_lm(config_for(model).model, dtype=torch.bfloat16, device=torch.device("cpu")).eval()
    with torch.no_grad(), computing_in_float32(whole):
        torch.testing.assert_close(exact, whole(torch.arange(30)[None]).logits, atol=1e-5, rtol=0)
    assert (exact - rounded).abs().max() > 1e-3 and torch.equal(rounded, again)


def sharded_logits(place: Place, config: NodeConfig) -> tuple[Tensor, Tensor, Tensor]:
    loaded: Any = load_causal_lm(config.model, dtype=torch.bfloat16, device=torch.device("cpu")).eval()
    joined(place, config).shard(loaded)
    ids = torch.arange(30)[None]
    with torch.no_grad():
        rounded = loaded(ids).logits
        with computing_in_float32(loaded):
            exact = loaded(ids).logits
        return exact, rounded, loaded(ids).logits


def test_the_tied_embeddings_of_the_tiny_policy_stay_tied_when_sharded(model: Path, tmp_path: Path) -> None:
    found = in_ranks(sharded_names, config_for(model), ranks=2, folder=tmp_path)
    assert found[0] == found[1] == ("model.embed_tokens.weight", True)


def sharded_names(place: Place, config: NodeConfig) -> tuple[str, bool]:
    loaded: Any = load_causal_lm(config.model, dtype=torch.float32, device=torch.device("cpu"))
    joined(place, config).shard(loaded)
    return next(iter(dict(loaded.named_parameters()))), loaded.lm_head.weight is loaded.model.embed_tokens.weight
