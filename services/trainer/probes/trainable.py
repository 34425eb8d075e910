"""Tests when a model is loaded that training computes the same logprobs as for each text alone."""

from __future__ import annotations

import inspect
from contextlib import nullcontext
from dataclasses import replace

import torch
from torch import Tensor, nn

from services.trainer.gradient.forward import completion_logprobs, text_config
from services.trainer.gradient.micro_batches import plan_rows
from services.trainer.gradient.modes import evaluating
from services.trainer.gradient.rows import TokenGroup, build_rows
from shared.model.attention import LONGEST_PROBE, attention_windows
from shared.model.full_precision import HALF_TOLERANCE, computing_in_float32, is_half

# Tolerance relative to 1 + |logprob|; in half precision it is `HALF_TOLERANCE` for the mean.
_TOLERANCE = 1e-4
_DOUBLE_TOLERANCE = 1e-6
_BEYOND = 16


class UntrainableModel(ValueError):
    """Training would use other logprobs than sampling. The message has the findings and the
    remedy.
    """


def check_trainable(model: nn.Module) -> None:
    """Test the model on a few tokens in the modes used for training.

    Raises:
        UntrainableModel: a later token or padding changes the logprobs, two passes disagree, or the
            model cannot take rows.
    """
    _check(model, rounded=False)
    if is_half(next(model.parameters()).dtype):
        _check(model, rounded=True)


def _check(model: nn.Module, *, rounded: bool) -> None:
    """Like `check_trainable`; rounded: in the model's own half precision instead of float32."""
    with nullcontext() if rounded else computing_in_float32(model):
        _compare(model, rounded)


def _compare(model: nn.Module, rounded: bool) -> None:
    groups = _groups(int(getattr(text_config(model), "vocab_size", 0)))
    try:
        with torch.no_grad():
            with evaluating(model):
                expected = _alone(model, groups)
                otherwise_ended = _alone(model, [_with_other_ends(group) for group in groups])
                padded = _in_rows(model, groups)
                shorter, longer = _beyond_windows(model)
            passes = [_in_rows(model, groups) for _ in range(2)]
    except Exception as error:
        # Models raise different errors if they cannot.
        raise UntrainableModel(f"{_name(model)} does not compute rows of tokens ({type(error).__name__}: {error})") from error
    if not torch.cat([expected, otherwise_ended, padded, shorter, longer, *passes]).isfinite().all():
        raise UntrainableModel(f"{_name(model)}: its logprobs are not numbers: check its configuration's numbers and weights")
    before_ends = _all_but_last(groups)
    # Test both, because padding may be masked where text is not.
    moved = _difference(otherwise_ended[before_ends], expected[before_ends], rounded) or _difference(longer, shorter, rounded)
    if problem := moved or _difference(padded, expected, rounded):
        raise UntrainableModel(
            f"{_name(model)} gives a text's tokens other logprobs when text or padding follows them ({problem}): it is not a "
            "causal language model, and cannot be trained here"
        )
    for found in passes:
        if problem := _difference(found, expected, rounded):
            raise UntrainableModel(
                f"{_name(model)} does not compute the same logprobs in training ({problem}): it keeps dropout or noise on; "
                "set its rates in the model's config.json to 0, or trainer.gradient_checkpointing to false"
            )


def _difference(found: Tensor, expected: Tensor, rounded: bool) -> str:
    """Why two sets of logprobs differ; empty if they do not."""
    apart = (found - expected).abs()
    relative = apart / (1.0 + expected.abs())
    tolerance = _DOUBLE_TOLERANCE if found.dtype == torch.float64 else _TOLERANCE
    same = float(relative.mean()) <= HALF_TOLERANCE if rounded else float(relative.max()) <= tolerance
    return "" if same else f"they differ by {float(apart.max()):.2g} nats" + (" in half precision" if rounded else "")


def _groups(vocabulary: int) -> list[TokenGroup]:
    generator = torch.Generator().manual_seed(0)

    def group(prompt: int, *lengths: int) -> TokenGroup:
        ids = [torch.randint(vocabulary, (length,), generator=generator).tolist() for length in (prompt, *lengths)]
        count = len(lengths)
        return TokenGroup(prompt_ids=ids[0], completions=ids[1:], behaviour_logprobs=[None] * count, advantages=[0.0] * count)

    return [group(5, 4, 9), group(11, 3)]


def _with_other_ends(group: TokenGroup) -> TokenGroup:
    return replace(group, completions=[[*tokens[:-1], 1 - min(tokens[-1], 1)] for tokens in group.completions])


def _all_but_last(groups: list[TokenGroup]) -> Tensor:
    """Mask over all completion tokens except the last of each completion."""
    return torch.tensor([place + 1 < length for group in groups for length in group.completion_lengths for place in range(length)])


def _in_rows(model: nn.Module, groups: list[TokenGroup]) -> Tensor:
    """Every completion token's logprob as training computes it: rows in a batch, padded on the
    right.
    """
    planned = plan_rows(groups, shared_prompt=False, budget_tokens=1 << 20, hidden_size=1)
    rows = build_rows(groups, planned).to(next(model.parameters()).device)
    scored = completion_logprobs(model, rows).logprobs
    by_sequence = {sequence: scored[row][rows.mask[row]] for row, sequence in enumerate(rows.sequences)}
    return torch.cat([by_sequence[sequence] for sequence in sorted(by_sequence)])


def _alone(model: nn.Module, groups: list[TokenGroup]) -> Tensor:
    texts = [(group.prompt_ids, completion) for group in groups for completion in group.completions]
    return torch.cat([_text_alone(model, [*prompt, *completion], len(completion)) for prompt, completion in texts])


def _beyond_windows(model: nn.Module) -> tuple[Tensor, Tensor]:
    """Logprobs of the same tokens, past the widest window that can be tested: at the end of a text,
    and with more tokens after them.
    """
    config = text_config(model)
    context = int(getattr(config, "max_position_embeddings", None) or 2 * LONGEST_PROBE)
    beyond = min(_BEYOND, context // 3)
    widest = max(
        (width for width in attention_windows(model.config) if width <= min(LONGEST_PROBE, context - 3 * beyond)), default=0
    )
    vocabulary = int(getattr(config, "vocab_size", 0))
    text = torch.randint(vocabulary, (widest + 3 * beyond,), generator=torch.Generator().manual_seed(1)).tolist()
    return _text_alone(model, text[:-beyond], beyond), _text_alone(model, text, 2 * beyond)[:beyond]


def _text_alone(model: nn.Module, text: list[int], count: int) -> Tensor:
    """Logprobs of a text's last `count` tokens, `(count,)`; computes only the logits that these
    need if the model supports it.
    """
    ids = torch.tensor([text], device=next(model.parameters()).device)
    base = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    fewer = {"logits_to_keep": count + 1} if "logits_to_keep" in inspect.signature(base.forward).parameters else {}
    logits: Tensor = model(input_ids=ids, use_cache=False, **fewer).logits[0, -count - 1 : -1]
    at_least_float32 = logits if logits.dtype == torch.float64 else logits.float()
    return at_least_float32.log_softmax(-1).gather(1, ids[0, -count:, None]).squeeze(1)


def _name(model: nn.Module) -> str:
    return f"the model ({getattr(text_config(model), 'model_type', type(model).__name__)})"
