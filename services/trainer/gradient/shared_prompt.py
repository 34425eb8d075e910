"""Tests on the model itself whether it computes completions that share a row exactly as if each
were alone.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from services.trainer.gradient.forward import attention_implementation, completion_logprobs, text_config
from services.trainer.gradient.micro_batches import plan_rows
from services.trainer.gradient.modes import evaluating
from services.trainer.gradient.rows import TokenGroup, build_rows
from shared.model.attention import LONGEST_PROBE, attention_windows
from shared.model.full_precision import HALF_TOLERANCE, computing_in_float32, is_half

# Tolerance relative to 1 + |logprob|; in half precision it is `HALF_TOLERANCE` for the mean.
_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-6}
# Experts that also get other texts' tokens sum in another order.
_LEAK_TOLERANCE = 1e-5


def supports_shared_prompt(model: nn.Module) -> bool:
    """Whether shared-prompt rows may be used; see `plain_rows_reason`."""
    return not plain_rows_reason(model)


def plain_rows_reason(model: nn.Module) -> str:
    """Why every completion needs a row of its own; empty if a prompt's completions may share one.

    Sharing needs sdpa or eager attention over the full context in every layer. If the configuration
    does not rule it out, it is tested on a few tokens, more than any window that the configuration
    names: shared rows must give the logprobs of plain rows, and a completion's logprobs must not
    change with its neighbour's tokens. Each module's mode is restored afterwards.
    """
    if attention_implementation(model) not in ("sdpa", "eager"):
        return f"attention {attention_implementation(model)!r} takes no mask of one's own"
    config = text_config(model)
    window = _window(config)
    if window is None:
        return "not every layer attends to the whole text"
    if window > LONGEST_PROBE:
        return f"its configuration names a window of {window} tokens, too long to try whether its layers keep to it"
    try:
        with torch.no_grad(), evaluating(model):
            with computing_in_float32(model):
                agrees = _probe(model, window, rounded=False)
            if agrees and is_half(next(model.parameters()).dtype):
                agrees = _probe(model, window, rounded=True)
    except Exception as error:
        # Models that cannot take the mask raise different errors; any of them means that sharing is
        # not possible.
        return f"it cannot take a mask of one's own ({type(error).__name__})"
    return "" if agrees else "it computes completions that share a row otherwise than each alone"


def _window(config: object) -> int | None:
    """The widest window that the probe must exceed, 0 without any; None if the configuration rules
    sharing out.
    """
    layer_types = getattr(config, "layer_types", None)
    if layer_types is not None:
        return 0 if all(kind == "full_attention" for kind in layer_types) else None
    if getattr(config, "use_sliding_window", True) is False:
        return 0
    if getattr(config, "sliding_window", None) is not None:
        return None
    return max(attention_windows(config), default=0)


def _probe(model: nn.Module, window: int, *, rounded: bool) -> bool:
    """Whether shared rows are right. rounded: in the model's own half precision, as far as its
    accuracy allows.
    """
    vocabulary = int(getattr(text_config(model), "vocab_size", 0))
    generator = torch.Generator().manual_seed(0)

    def tokens(count: int) -> list[int]:
        return torch.randint(vocabulary, (count,), generator=generator).tolist()

    prompt, first, second, third = tokens(5), tokens(4), tokens(window + 6), tokens(3)
    other = [(token + 1) % vocabulary for token in first]
    plain = _logprobs(model, prompt, [first, second, third], shared=False)
    shared = _logprobs(model, prompt, [first, second, third], shared=True)
    moved = _logprobs(model, prompt, [other, second, third], shared=True)
    relative = (shared - plain).abs() / (1.0 + plain.abs())
    same_as_plain = float(relative.mean()) <= HALF_TOLERANCE if rounded else float(relative.max()) <= _TOLERANCE[plain.dtype]
    blind_to_neighbours = rounded or bool(((shared[1:] - moved[1:]).abs() <= _LEAK_TOLERANCE).all())
    return same_as_plain and blind_to_neighbours


def _logprobs(model: nn.Module, prompt: list[int], completions: list[list[int]], *, shared: bool) -> Tensor:
    group = TokenGroup(
        prompt_ids=prompt,
        completions=completions,
        behaviour_logprobs=[None] * len(completions),
        advantages=[0.0] * len(completions),
    )
    # With a hidden size this large the plan treats attention as free and puts all completions into
    # one row.
    rows = plan_rows([group], shared_prompt=shared, budget_tokens=1 << 30, hidden_size=1 << 20)
    device = next(model.parameters()).device
    return completion_logprobs(model, build_rows([group], rows).to(device)).logprobs
