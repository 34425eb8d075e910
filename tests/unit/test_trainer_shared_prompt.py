"""A group's prompt computed once gives the loss and gradient of plain rows, and models that cannot
are found out.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.memory import most_held
from services.trainer.gradient import forward
from services.trainer.gradient.forward import completion_logprobs, plain_rows_reason, supports_shared_prompt
from services.trainer.gradient.rows import RowSlice, TokenGroup, block_causal_mask, build_rows, plan_rows
from services.trainer.gradient.update import UpdateConfig, accumulate_gradients, batch_logprobs
from tests.architectures.tiny import tiny_model
from tests.objectives import configured
from tests.unit.trainer_models import gradients, ragged_groups, small_model

MODELS = [("qwen2", "sdpa"), ("qwen2", "eager"), ("llama", "sdpa"), ("llama", "eager")]


def step(model, groups, config, **arguments):
    model.zero_grad()
    stats = accumulate_gradients(model, groups, config, **arguments)
    return stats, gradients(model)


@pytest.mark.parametrize(("family", "attention"), MODELS)
def test_shared_and_plain_rows_give_the_same_loss_and_gradient(family: str, attention: str) -> None:
    model = small_model(family, attention=attention)
    groups = ragged_groups(5)
    plain_stats, plain = step(model, groups, UpdateConfig(shared_prompt=False))
    shared_stats, shared = step(model, groups, UpdateConfig(shared_prompt=True))
    assert shared_stats.padded_tokens < plain_stats.padded_tokens
    assert abs(shared_stats.loss - plain_stats.loss) < 1e-6
    assert plain.norm() > 1e-2
    assert (shared - plain).abs().max() < 1e-5


def test_in_double_precision_shared_and_plain_rows_agree_as_far_as_the_models_own_float32_norms_allow() -> None:
    model = small_model(dtype=torch.float64)
    groups = ragged_groups(5)
    plain_stats, plain = step(model, groups, UpdateConfig(shared_prompt=False))
    shared_stats, shared = step(model, groups, UpdateConfig(shared_prompt=True))
    assert abs(shared_stats.loss - plain_stats.loss) < 1e-12
    assert (shared - plain).abs().max() < 2e-7


def test_shared_and_plain_rows_agree_when_ratios_clip_and_a_reference_holds_the_policy() -> None:
    model, reference_model = small_model(), small_model(hidden_size=16)
    groups = ragged_groups(4)
    config = UpdateConfig(objective=configured("grpo", kl_coefficient=0.05))
    proximal = batch_logprobs(model, groups, config)
    reference = batch_logprobs(reference_model, groups, config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.03)
    results = [
        step(model, groups, replace(config, shared_prompt=shared), proximal=proximal, reference=reference)
        for shared in (False, True)
    ]
    assert results[0][0].clip_fraction > 0.05
    assert results[0][0].kl_reference > 0.05
    assert abs(results[0][0].loss - results[1][0].loss) < 1e-6
    assert (results[0][1] - results[1][1]).abs().max() < 1e-5


def test_the_mask_shows_a_token_its_prompt_and_its_own_completion_only() -> None:
    segments = torch.tensor([[0, 0, 1, 1, 2, -1]])
    expected = [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 0, 0],
        [1, 1, 0, 0, 1, 0],
        [0, 0, 0, 0, 0, 1],
    ]
    assert block_causal_mask(segments)[0, 0].int().tolist() == expected


def test_the_mask_of_any_rows_is_its_definition_and_takes_a_byte_a_pair() -> None:
    generator = torch.Generator().manual_seed(5)
    counts = torch.randint(0, 40, (6, 5), generator=generator).tolist()
    width = max(map(sum, counts)) + 3
    rows = [[0] * (row[0] + 1) + [n for n in (1, 2, 3, 4) for _ in range(row[n])] for row in counts]
    segments = torch.tensor([row + [-1] * (width - len(row)) for row in rows])
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        mask = block_causal_mask(segments)
    assert most_held(recorded) < 1.2 * mask.numel()
    for row, allowed in zip(segments.tolist(), mask[:, 0].tolist(), strict=True):
        for query, key in itertools.product(range(width), range(width)):
            seen = key <= query and row[query] >= 0 <= row[key] and row[key] in (0, row[query])
            assert allowed[query][key] == (seen or query == key)


@pytest.mark.parametrize("autocast", [False, True])
def test_layers_keep_one_mask_together_and_none_for_themselves(autocast: bool) -> None:
    model, layers = small_model(attention="sdpa", layers=5), 5
    group = TokenGroup(
        prompt_ids=list(range(1, 9)), completions=[[7, 8, 9] * 20] * 4, behaviour_logprobs=[None] * 4, advantages=[1.0] * 4
    )
    rows = build_rows([group], plan_rows([group], shared_prompt=True, budget_tokens=1 << 20, hidden_size=1 << 20))
    assert rows.shared
    masks: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.shape[-2:] == (rows.input_ids.shape[1],) * 2:
            masks[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with hooks, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        completion_logprobs(model, rows)
    assert len(masks) == 1, f"{len(masks)} masks for {layers} layers"


@pytest.mark.parametrize("autocast", [False, True])
def test_a_mask_of_numbers_gives_the_bits_of_one_of_booleans(autocast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    config = UpdateConfig(shared_prompt=True, autocast_bf16=autocast)
    _, numbers = step(small_model(attention="sdpa"), ragged_groups(5), config)
    monkeypatch.setattr(forward, "_attention_mask", lambda _model, allowed: allowed)
    _, booleans = step(small_model(attention="sdpa"), ragged_groups(5), config)
    assert torch.equal(numbers, booleans)


def test_positions_of_every_completion_go_on_where_the_prompt_ends() -> None:
    group = TokenGroup(prompt_ids=[5, 6, 7], completions=[[1, 2], [3]], behaviour_logprobs=[None, None], advantages=[1.0, -1.0])
    rows = build_rows([group], [RowSlice(width=6, group=0, start=0, stop=2)])
    assert rows.input_ids.tolist() == [[5, 6, 7, 1, 2, 3]]
    assert rows.position_ids.tolist() == [[0, 1, 2, 3, 4, 3]]
    assert rows.predicted_from.tolist() == [[2, 3], [2, 0]]
    assert rows.mask.tolist() == [[True, True], [True, False]]
    assert rows.targets.tolist() == [[1, 2], [3, 0]]


@pytest.mark.parametrize(("family", "attention"), MODELS)
def test_full_attention_models_are_found_able_to_share_a_prompt(family: str, attention: str) -> None:
    model = small_model(family, attention=attention).train()
    assert supports_shared_prompt(model)
    assert model.training


def test_a_bfloat16_model_is_found_able_to_share_a_prompt() -> None:
    assert supports_shared_prompt(small_model(dtype=torch.bfloat16))


def test_a_sliding_window_model_is_trained_on_plain_rows() -> None:
    # A window wider than the probe's few tokens: trying it out would notice nothing.
    model = small_model(use_sliding_window=True, sliding_window=64, max_window_layers=0)
    assert "sliding_attention" in model.config.layer_types
    assert not supports_shared_prompt(model)


def test_a_window_under_another_name_is_tried_beyond_it() -> None:
    local = tiny_model("gpt_neo", window_size=64)
    assert plain_rows_reason(local) == "it computes completions that share a row otherwise than each alone"
    assert supports_shared_prompt(tiny_model("gpt_neo", window_size=64, attention_types=[[["global"], 2]]))


def test_a_window_too_long_to_try_is_trained_on_plain_rows() -> None:
    model = tiny_model("gpt_neo", window_size=2000, max_position_embeddings=4000)
    assert "window of 2000 tokens, too long to try" in plain_rows_reason(model)


def test_attention_without_a_mask_of_ones_own_is_trained_on_plain_rows() -> None:
    model = small_model()
    model.config._attn_implementation = "flash_attention_2"
    assert not supports_shared_prompt(model)
    shared = plan_rows(ragged_groups(1), shared_prompt=True, budget_tokens=1000, hidden_size=10_000)
    with pytest.raises(ValueError, match="use sdpa"):
        completion_logprobs(model, build_rows(ragged_groups(1), shared))


@pytest.mark.parametrize("lost", ["attention_mask", "position_ids"])
def test_the_probe_notices_a_model_that_loses_the_mask_or_the_positions(lost: str) -> None:
    model = small_model()
    forward = model.model.forward

    def deaf_forward(**arguments: object) -> object:
        return forward(**{**arguments, lost: None})

    model.model.forward = deaf_forward
    assert not supports_shared_prompt(model)


def test_a_model_that_cannot_run_the_probe_is_trained_on_plain_rows() -> None:
    model = small_model()

    def refuse(**_arguments: object) -> object:
        raise RuntimeError("custom masks are not supported")

    model.model.forward = refuse
    assert not supports_shared_prompt(model)
