"""Texts one after another in one row, a group's prompt once, give the loss and gradient of texts in
rows of their own, and models that cannot do that are found out.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import PreTrainedModel

from services.trainer.gradient.forward import attention_implementation, completion_logprobs, plain_rows_reason
from services.trainer.gradient.packed_attention import PACKED
from services.trainer.gradient.rows import RowSlice, TokenGroup, build_rows
from services.trainer.gradient.update import UpdateConfig, accumulate_gradients, batch_logprobs
from tests.architectures.tiny import tiny_model
from tests.objectives import configured
from tests.unit.trainer_models import gradients, ragged_groups, rows_of, small_model

MODELS = [("qwen2", "sdpa"), ("qwen2", "eager"), ("llama", "sdpa"), ("llama", "eager")]


def step(model, groups, config, **arguments):
    model.zero_grad()
    stats = accumulate_gradients(model, groups, config, **arguments)
    return stats, gradients(model)


@pytest.mark.parametrize(("family", "attention"), MODELS)
def test_packed_and_plain_rows_give_the_same_loss_and_gradient(family: str, attention: str) -> None:
    model = small_model(family, attention=attention)
    groups = ragged_groups(5)
    plain_stats, plain = step(model, groups, UpdateConfig(packed=False))
    packed_stats, packed = step(model, groups, UpdateConfig(packed=True))
    assert packed_stats.padded_tokens < plain_stats.padded_tokens
    assert abs(packed_stats.loss - plain_stats.loss) < 1e-6
    assert plain.norm() > 1e-2
    assert (packed - plain).abs().max() < 1e-5


def test_in_double_precision_packed_and_plain_rows_agree_as_far_as_the_models_own_float32_norms_allow() -> None:
    model = small_model(dtype=torch.float64)
    groups = ragged_groups(5)
    plain_stats, plain = step(model, groups, UpdateConfig(packed=False))
    packed_stats, packed = step(model, groups, UpdateConfig(packed=True))
    assert abs(packed_stats.loss - plain_stats.loss) < 1e-12
    assert (packed - plain).abs().max() < 2e-7


def test_packed_and_plain_rows_agree_when_ratios_clip_and_a_reference_holds_the_policy() -> None:
    model, reference_model = small_model(), small_model(hidden_size=16)
    groups = ragged_groups(4)
    config = UpdateConfig(objective=configured("grpo", kl_coefficient=0.05))
    proximal = batch_logprobs(model, groups, config)
    reference = batch_logprobs(reference_model, groups, config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.03)
    results = [
        step(model, groups, replace(config, packed=packed), proximal=proximal, reference=reference) for packed in (False, True)
    ]
    assert results[0][0].clip_fraction > 0.05
    assert results[0][0].kl_reference > 0.05
    assert abs(results[0][0].loss - results[1][0].loss) < 1e-6
    assert (results[0][1] - results[1][1]).abs().max() < 1e-5


def test_a_packed_row_has_no_padding() -> None:
    groups = ragged_groups(5)
    stats, _ = step(small_model(), groups, UpdateConfig(packed=True))
    assert stats.padded_tokens == sum(len(group.prompt_ids) + sum(group.completion_lengths) for group in groups)
    assert stats.micro_batches == 1


def kept_bytes(model: PreTrainedModel, prompt: int, answers: list[int], *, packed: bool = True, autocast: bool = False) -> float:
    """What a pass keeps for the backward pass, weights included; bytes a token."""
    group = TokenGroup(
        prompt_ids=[1] * prompt,
        completions=[[2] * answer for answer in answers],
        behaviour_logprobs=[None] * len(answers),
        advantages=[1.0] * len(answers),
    )
    rows, found = rows_of([group], packed=packed), {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with hooks, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        completion_logprobs(model, rows)
    return sum(storage.nbytes() for storage in found.values()) / rows.input_ids.numel()


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize(("prompt", "answers"), [(20, 4 * [100]), (600, 4 * [20]), (20, [300, 10])])
def test_what_a_pass_keeps_grows_with_the_tokens_and_not_with_their_pairs(prompt: int, answers: list[int], autocast: bool) -> None:
    model = small_model(layers=6)
    four_times = kept_bytes(model, 4 * prompt, [4 * answer for answer in answers], autocast=autocast)
    assert four_times < 1.1 * kept_bytes(model, prompt, answers, autocast=autocast)


@pytest.mark.parametrize(("prompt", "answers"), [(60, [400] + 7 * [10]), (60, 16 * [30]), (300, 8 * [200])])
def test_a_packed_token_keeps_little_more_than_one_of_plain_rows(prompt: int, answers: list[int]) -> None:
    model = small_model(layers=6)
    plain = kept_bytes(model, prompt, answers, packed=False)
    assert kept_bytes(model, prompt, answers) < 1.5 * plain


def test_positions_of_every_completion_go_on_where_the_prompt_ends() -> None:
    group = TokenGroup(prompt_ids=[5, 6, 7], completions=[[1, 2], [3]], behaviour_logprobs=[None, None], advantages=[1.0, -1.0])
    rows = build_rows([group], [RowSlice(width=6, group=0, start=0, stop=2)], packed=True)
    assert rows.input_ids.tolist() == [[5, 6, 7, 1, 2, 3]]
    assert rows.position_ids.tolist() == [[0, 1, 2, 3, 4, 3]]
    assert rows.predicted_from.tolist() == [[2, 3], [2, 0]]
    assert rows.mask.tolist() == [[True, True], [True, False]]
    assert rows.targets.tolist() == [[1, 2], [3, 0]]


@pytest.mark.parametrize(("family", "attention"), MODELS)
def test_full_attention_models_are_found_able_to_pack_rows(family: str, attention: str) -> None:
    model = small_model(family, attention=attention).train()
    assert not plain_rows_reason(model)
    assert model.training and attention_implementation(model) == PACKED


def test_a_bfloat16_model_is_found_able_to_pack_rows() -> None:
    assert not plain_rows_reason(small_model(dtype=torch.bfloat16))


@pytest.mark.parametrize("window", [8, 64, 2000])
def test_windows_of_any_width_are_kept_in_packed_rows(window: int) -> None:
    model = small_model(use_sliding_window=True, sliding_window=window, max_window_layers=0)
    assert "sliding_attention" in model.config.layer_types
    groups = [*ragged_groups(3, prompt=(30, 40), length=(10, 60)), *ragged_groups(3, prompt=(3, 9), length=(10, 60))]
    _, plain = step(model, groups, UpdateConfig())
    assert not plain_rows_reason(model)
    _, packed = step(model, groups, UpdateConfig(packed=True))
    assert (packed - plain).abs().max() < 1e-5 * plain.abs().max()


@pytest.mark.parametrize("kind", ["qwen3", "mistral", "gemma2", "gpt_oss"])
def test_a_model_whose_rows_are_packed_still_samples(kind: str) -> None:
    """With prompts that are padded on the left, and with a cache."""
    model = tiny_model(kind)
    ids = torch.randint(90, (2, 24), generator=torch.Generator().manual_seed(1))
    padding = torch.ones_like(ids)
    padding[0, :5] = 0
    asked = {"max_new_tokens": 12, "do_sample": False, "output_logits": True, "return_dict_in_generate": True, "eos_token_id": None}
    before = model.generate(input_ids=ids, attention_mask=padding, **asked)
    assert not plain_rows_reason(model)
    after = model.generate(input_ids=ids, attention_mask=padding, **asked)
    assert torch.equal(before.sequences, after.sequences)
    torch.testing.assert_close(torch.stack(after.logits), torch.stack(before.logits), atol=1e-5, rtol=0)


def test_a_window_too_long_to_try_is_trained_on_plain_rows() -> None:
    model = tiny_model("llama4_text", attention_chunk_size=2000, max_position_embeddings=4000)
    assert "window of 2000 tokens, too long to try" in plain_rows_reason(model)
    assert attention_implementation(model) == "sdpa"


def test_attention_that_cannot_be_replaced_is_trained_on_plain_rows() -> None:
    model = tiny_model("gptj")
    before = attention_implementation(model)
    assert plain_rows_reason(model) and attention_implementation(model) == before
    with pytest.raises(ValueError, match="packed=False"):
        completion_logprobs(model, rows_of(ragged_groups(1), packed=True))
    flash = small_model()
    flash.config._attn_implementation = "flash_attention_2"
    assert "flash_attention_2" in plain_rows_reason(flash)


@pytest.mark.parametrize("lost", ["attention_mask", "position_ids"])
def test_the_probe_notices_a_model_that_loses_the_layout_or_the_positions(lost: str) -> None:
    model = small_model()
    forward = model.model.forward

    def deaf_forward(**arguments: object) -> object:
        return forward(**{**arguments, lost: None})

    model.model.forward = deaf_forward
    assert plain_rows_reason(model) == "it computes texts that share a row otherwise than each alone"


def test_a_model_that_cannot_run_the_probe_is_trained_on_plain_rows() -> None:
    model = small_model()

    def refuse(**_arguments: object) -> object:
        raise RuntimeError("custom masks are not supported")

    model.model.forward = refuse
    assert "RuntimeError" in plain_rows_reason(model)
