"""Whether the trainer computes a model's logprobs as each text alone would give them: asked of the model when it is loaded."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from services.trainer.forward import completion_logprobs, text_config
from services.trainer.micro_batches import plan_rows
from services.trainer.modes import evaluating
from services.trainer.rows import TokenGroup, build_rows

# Relative to 1 + |logprob|. In half precision rounding may send a token to another expert: there the mean is held to its bound.
_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-6}
_HALF_TOLERANCE = 0.05


class UntrainableModel(ValueError):
    """The model would be trained on other logprobs than it samples with; the message says what was found and what helps."""


def check_trainable(model: nn.Module) -> None:
    """Try a few tokens in the modes that the model is trained in.

    Raises:
        UntrainableModel: a later token or padding moves the logprobs, or two passes do not agree, or the model cannot take rows.
    """
    groups = _groups(int(getattr(text_config(model), "vocab_size", 0)))
    try:
        with torch.no_grad():
            with evaluating(model):
                expected = _alone(model, groups)
                otherwise_ended = _alone(model, [_with_other_ends(group) for group in groups])
                padded = _in_rows(model, groups)
            passes = [_in_rows(model, groups) for _ in range(2)]
    except Exception as error:
        # Each model says in its own way that it cannot.
        raise UntrainableModel(f"{_name(model)} does not compute rows of tokens ({type(error).__name__}: {error})") from error
    before_ends = _all_but_last(groups)
    # Padding may be masked where text is not, so that both are tried.
    moved = difference(otherwise_ended[before_ends], expected[before_ends], model)
    if problem := moved or difference(padded, expected, model):
        raise UntrainableModel(
            f"{_name(model)} gives a text's tokens other logprobs when text or padding follows them ({problem}): it is no causal "
            "language model, and cannot be trained here"
        )
    for found in passes:
        if problem := difference(found, expected, model):
            raise UntrainableModel(
                f"{_name(model)} does not compute the same logprobs when it trains ({problem}): it keeps dropout or noise on, "
                "set its rates in the model's config.json to 0, or trainer.gradient_checkpointing to false"
            )


def difference(found: Tensor, expected: Tensor, model: nn.Module) -> str:
    """Why two sets of logprobs are not the same as far as the model's precision tells, or nothing."""
    dtype = next(model.parameters()).dtype
    apart = (found - expected).abs()
    relative = apart / (1.0 + expected.abs())
    tolerance = _TOLERANCE.get(dtype)
    same = float(relative.mean()) <= _HALF_TOLERANCE if tolerance is None else float(relative.max()) <= tolerance
    return "" if same else f"they differ by {float(apart.max()):.2g} nats"


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
    """Mask over all completion tokens that leaves out the last of each completion."""
    return torch.tensor([place + 1 < length for group in groups for length in group.completion_lengths for place in range(length)])


def _in_rows(model: nn.Module, groups: list[TokenGroup]) -> Tensor:
    """Every completion token's logprob, as training computes it: rows side by side, padded on the right."""
    planned = plan_rows(groups, shared_prompt=False, budget_tokens=1 << 20, hidden_size=1)
    rows = build_rows(groups, planned).to(next(model.parameters()).device)
    scored = completion_logprobs(model, rows).logprobs
    of_sequence = {sequence: scored[row][rows.mask[row]] for row, sequence in enumerate(rows.sequences)}
    return torch.cat([of_sequence[sequence] for sequence in sorted(of_sequence)])


def _alone(model: nn.Module, groups: list[TokenGroup]) -> Tensor:
    device = next(model.parameters()).device
    logprobs = []
    for group in groups:
        for completion in group.completions:
            ids = torch.tensor([[*group.prompt_ids, *completion]], device=device)
            logits = model(input_ids=ids, use_cache=False).logits[0, len(group.prompt_ids) - 1 : -1]
            at_least_float32 = logits if logits.dtype == torch.float64 else logits.float()
            targets = ids[0, len(group.prompt_ids) :, None]
            logprobs.append(at_least_float32.log_softmax(-1).gather(1, targets).squeeze(1))
    return torch.cat(logprobs)


def _name(model: nn.Module) -> str:
    return f"the model ({getattr(text_config(model), 'model_type', type(model).__name__)})"
