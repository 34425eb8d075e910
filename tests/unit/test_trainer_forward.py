"""Log-probabilities and entropies of a batch equal those of each sequence alone, for every family
of models.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from services.trainer.gradient.forward import completion_logprobs
from services.trainer.gradient.rows import TokenGroup, plan_micro_batches, plan_rows
from services.trainer.gradient.update import UpdateConfig, batch_logprobs
from tests.unit.trainer_models import ragged_groups, rows_of, small_model


def alone(model, prompt: list[int], completion: list[int], temperature: float) -> tuple[Tensor, Tensor]:
    """Logprobs and entropies of one completion in a batch of its own, over all logits, without any
    of our code.
    """
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *completion]])).logits[0, len(prompt) - 1 : -1] / temperature
    distribution = torch.distributions.Categorical(logits=logits)
    return distribution.log_prob(torch.tensor(completion)), distribution.entropy()


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_logprobs_in_rows_equal_those_of_each_sequence_alone(family: str, packed: bool) -> None:
    model = small_model(family)
    groups = ragged_groups(5)
    rows = rows_of(groups, packed=packed)
    scored = completion_logprobs(model, rows, temperature=0.7)
    assert len(rows.sequences) == sum(len(group.completions) for group in groups)
    for row, (group, completion) in enumerate(rows.sequences):
        tokens = groups[group].completions[completion]
        logprobs, entropy = alone(model, list(groups[group].prompt_ids), list(tokens), 0.7)
        torch.testing.assert_close(scored.logprobs[row, : len(tokens)], logprobs, atol=1e-5, rtol=0)
        torch.testing.assert_close(scored.entropy[row, : len(tokens)], entropy, atol=1e-5, rtol=0)
        assert not scored.logprobs[row, len(tokens) :].any()
        assert not scored.entropy[row, len(tokens) :].any()


@pytest.mark.parametrize("packed", [False, True])
def test_longer_texts_beside_them_change_nothing(packed: bool) -> None:
    model = small_model()
    groups = ragged_groups(2)
    long = TokenGroup(prompt_ids=list(range(30)), completions=[list(range(30))], behaviour_logprobs=[None], advantages=[1.0])
    config = UpdateConfig(packed=packed, budget_tokens=1 << 20)
    narrow = batch_logprobs(model, groups, config)
    wide = batch_logprobs(model, [*groups, long], config)
    for before, after in zip(narrow, wide, strict=False):
        for first, second in zip(before, after, strict=True):
            torch.testing.assert_close(first, second, atol=2e-6, rtol=0)


def test_the_output_layer_sees_only_positions_that_predict_a_completion_token() -> None:
    model = small_model()
    groups = ragged_groups(3)
    seen: list[int] = []
    hook = model.lm_head.register_forward_hook(lambda _module, _inputs, output: seen.append(output.shape[:-1].numel()))
    rows = rows_of(groups, packed=True)
    completion_logprobs(model, rows)
    hook.remove()
    assert seen == [sum(length for group in groups for length in group.completion_lengths)]
    logits = model(rows.input_ids).logits
    assert logits.shape == (*rows.input_ids.shape, 37), "the output layer must be left as it was"


def test_what_a_model_does_to_its_logits_is_kept() -> None:
    model = small_model()
    forward = model.forward

    def scaled(*positional: object, **named: object) -> object:
        output = forward(*positional, **named)
        output.logits = output.logits / 3.0
        return output

    groups = ragged_groups(2)
    rows = rows_of(groups)
    expected = completion_logprobs(model, rows, temperature=3.0).logprobs
    model.forward = scaled
    torch.testing.assert_close(completion_logprobs(model, rows).logprobs, expected)


def test_the_entropy_of_a_ruled_out_token_is_zero_and_not_nan() -> None:
    model = small_model()
    forward = model.forward

    def masked(*positional: object, **named: object) -> object:
        output = forward(*positional, **named)
        output.logits = output.logits.clone()
        output.logits[..., :30] = -torch.inf
        return output

    model.forward = masked
    group = TokenGroup(prompt_ids=[1, 2], completions=[[31, 32]], behaviour_logprobs=[None], advantages=[1.0])
    rows = rows_of([group])
    scored = completion_logprobs(model, rows)
    assert torch.isfinite(scored.entropy).all() and (scored.entropy > 0).all()
    assert torch.isfinite(scored.logprobs).all()


def test_a_lora_model_scores_through_its_adapters() -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(
        small_model(),
        peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM"),
    )
    groups = ragged_groups(2)
    rows = rows_of(groups, packed=True)
    adapted = completion_logprobs(model, rows).logprobs
    with model.disable_adapter():
        base = completion_logprobs(model, rows).logprobs
    assert (adapted - base).abs().max() > 1e-2
    group, completion = rows.sequences[0]
    tokens = list(groups[group].completions[completion])
    expected, _ = alone(model, list(groups[group].prompt_ids), tokens, 1.0)
    torch.testing.assert_close(adapted[0, : len(tokens)], expected, atol=1e-5, rtol=0)


def test_a_temperature_of_zero_is_refused() -> None:
    groups = ragged_groups(1)
    rows = rows_of(groups)
    with pytest.raises(ValueError, match="temperature is 0"):
        completion_logprobs(small_model(), rows, temperature=0.0)


def test_half_precision_logits_are_normalised_in_float32() -> None:
    groups = ragged_groups(2)
    rows = rows_of(groups)
    scored = completion_logprobs(small_model(dtype=torch.bfloat16), rows)
    assert scored.logprobs.dtype == torch.float32
    exact = completion_logprobs(small_model(), rows)
    assert 1e-4 < (scored.logprobs - exact.logprobs).abs().max() < 0.5


def test_micro_batches_are_planned_in_the_same_way_every_time() -> None:
    rows = plan_rows(ragged_groups(6), packed=True, budget_tokens=64)
    assert plan_micro_batches(rows, 64, packed=True) == plan_micro_batches(list(reversed(rows)), 64, packed=True)
