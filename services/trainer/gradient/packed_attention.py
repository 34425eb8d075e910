"""Attention over one row of texts without padding: every token sees the text before it, and a
prompt that several answers share is in the row once.

A row is a list of prompts, each with its answers: `prompt, answer, answer, prompt, answer, ...`.
transformers calls `packed_attention` in every layer (`AttentionInterface`). The row's layout
(`rows.TokenRows`) stands where a mask would, because models hand a mask of four dimensions to every
layer as it is. Without a layout the function is what transformers would use, so the model can
sample too.

Answers that are longer than their prompt are attended to behind a copy of it, causally, those of
similar length together as padded rows. Shorter ones share a copy of its keys and need a mask. So
nothing is as large as all pairs of tokens, and copies are about as long as what they are made for.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

PACKED = "swarm_packed"
"""The name under which models find `packed_attention`."""
_PROMPT = -1
"""Where the number of an answer would stand."""
_FEW = 512
"""Tokens of short answers that are attended to together even if their prompt is shorter."""
_LARGEST_MASK = 2**22
"""Pairs of tokens. Answers with more are computed behind a copy of their prompt, without a mask."""
_MASK_ALIGNMENT = 16
"""Memory-efficient attention on a GPU copies a mask, in every layer, whose rows do not start at
multiples of so many numbers.
"""


def packed_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """Attention outputs, (1, tokens, heads, size), and None, as `AttentionInterface` asks for.

    Raises ValueError if the row is not as long as its layout, or if the model adds to attention's
    scores.
    """
    if attention_mask is None or attention_mask.dtype != torch.int64:
        return _attend(module, query, key, value, attention_mask, **options)
    row = _row(attention_mask)
    tokens = sum(row.sizes)
    window = options.get("sliding_window")
    if query.shape[:3:2] != (1, tokens) or key.shape[2] != tokens or options.get("position_bias") is not None:
        raise ValueError("this attention does not take a row of several texts")
    row.windows.add(window)

    def attend(texts: Sequence[Tensor], prompt: int, lengths: Sequence[int] = ()) -> Tensor:
        """Queries, keys and values, (texts, tokens, heads, size) each. Queries of answers see
        their prompt and their own answer.
        """
        q, k, v = (each.transpose(1, 2) for each in texts)
        return _attend(module, q, k, v, row.mask(q, prompt, lengths, window), **options)[0]

    # Splits and joins only: an index's backward pass adds token by token, a slice's makes a whole
    # row for each.
    texts = zip(*(torch.split(each[0].transpose(0, 1), row.sizes) for each in (query, key, value)), strict=True)
    found: list[Tensor] = []
    for prompt, lengths, calls in row.groups:
        first, *answers = islice(texts, 1 + len(lengths))
        outputs: dict[int, Tensor] = {}
        for numbers in calls:
            chosen = list(zip(*(answers[number] for number in numbers), strict=True))
            sizes = [lengths[number] for number in numbers]
            longest = max(sizes)
            if _is_long(prompt, longest):
                behind = [one.expand(len(sizes), *one.shape) for one in first]
                whole = [torch.cat([one, _padded(each)], dim=1) for one, each in zip(behind, chosen, strict=True)]
                cut = [size for n in sizes for size in (prompt, n, longest - n)]
                parts = torch.split(attend(whole, prompt + longest).flatten(0, 1), cut)
                outputs |= {_PROMPT: parts[0], **dict(zip(numbers, parts[1::3], strict=True))}
            else:
                queries, keys, values = (torch.cat(each) for each in chosen)
                seen = queries, torch.cat([first[1], keys]), torch.cat([first[2], values])
                parts = torch.split(attend([each.unsqueeze(0) for each in seen], prompt, sizes)[0], sizes)
                outputs |= zip(numbers, parts, strict=True)
        if _PROMPT not in outputs:
            outputs[_PROMPT] = attend([each.unsqueeze(0) for each in first], prompt)[0]
        found += [outputs[number] for number in (_PROMPT, *range(len(lengths)))]
    return torch.cat(found).unsqueeze(0), None


def _is_long(prompt: int, answer: int) -> bool:
    """Say whether an answer is attended to behind a copy of its whole prompt."""
    return answer > prompt or answer * (prompt + answer) > _LARGEST_MASK


def _calls(prompt: int, lengths: Sequence[int]) -> list[list[int]]:
    """The answers, by number, that are attended to together: long ones of similar length; short
    ones that are as long as their prompt altogether.
    """

    def fits(length: int, others: Sequence[int]) -> bool:
        if _is_long(prompt, others[0]):
            return _is_long(prompt, length) and 4 * length >= 3 * others[0]
        together = sum(others) + length
        return together <= max(prompt, _FEW) and together * (prompt + together) <= _LARGEST_MASK

    calls: list[list[int]] = []
    for number in sorted(range(len(lengths)), key=lambda each: -lengths[each]):
        if calls and fits(lengths[number], [lengths[each] for each in calls[-1]]):
            calls[-1].append(number)
        else:
            calls.append([number])
    return calls


def _padded(texts: Sequence[Tensor]) -> Tensor:
    """(texts, tokens, ...) from (tokens, ...) of each, with zeros behind shorter ones."""
    longest = max(map(len, texts))
    zeros = texts[0].new_zeros(()).expand(longest, *texts[0].shape[1:])
    parts = [part for text in texts for part in (text, zeros[len(text) :])]
    return torch.cat(parts).view(len(texts), longest, *texts[0].shape[1:])


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """Attention as transformers computes it; caps and sinks, which sdpa lacks, by the model's own
    code.
    """
    if options.get("softcap") is None and options.get("s_aux") is None:
        return sdpa_attention_forward(module, query, key, value, mask, **options)
    if mask is None:
        mask = _mask(query, key.shape[2], (), None, query.dtype)
    elif mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, torch.finfo(query.dtype).min)
    eager = sys.modules[type(module).__module__].eager_attention_forward
    found: tuple[Tensor, Tensor | None] = eager(module, query, key, value, mask, **options)
    return found


def _mask(query: Tensor, prompt: int, lengths: Sequence[int], window: int | None, dtype: torch.dtype) -> Tensor:
    """(queries, prompt + answers), to be added to scores; the queries are the last tokens.

    A token sees what comes before it in the prompt and in its own answer, as far as the window.
    """
    answers = [torch.arange(prompt, prompt + length) for length in lengths]
    positions = torch.cat([torch.arange(prompt), *answers]).to(query.device)
    segments = torch.arange(1 + len(lengths)).repeat_interleave(torch.tensor([prompt, *lengths])).to(query.device)
    start = len(positions) - query.shape[2]
    distance = positions[start:, None] - positions
    allowed = ((segments == 0) | (segments == segments[start:, None])) & (distance >= 0)
    if window is not None:
        allowed &= distance < window
    width = -(-len(positions) // _MASK_ALIGNMENT) * _MASK_ALIGNMENT
    mask = torch.zeros(len(allowed), width, dtype=dtype, device=query.device)
    return mask[:, : len(positions)].masked_fill_(~allowed, -math.inf)


class _Row:
    """A packed row.

    groups: tokens of a prompt, of its answers, and which answers are attended to together; a prompt
    with its only answer counts as one text. sizes: tokens of each text. windows: those that layers
    asked for.
    """

    def __init__(self, layout: Sequence[int]) -> None:
        numbers = iter(layout)
        self.groups: list[tuple[int, list[int], list[list[int]]]] = []
        for prompt in numbers:
            lengths = [next(numbers) for _ in range(next(numbers))]
            alone = len(lengths) == 1
            self.groups.append((prompt + lengths[0], [], []) if alone else (prompt, lengths, _calls(prompt, lengths)))
        self.sizes = [size for prompt, lengths, _ in self.groups for size in (prompt, *lengths)]
        self.windows: set[int | None] = set()
        self._masks: dict[tuple[int, tuple[int, ...], int | None, torch.dtype], Tensor] = {}

    def mask(self, query: Tensor, prompt: int, lengths: Sequence[int], window: int | None) -> Tensor | None:
        """The mask that attention needs, the same tensor in all layers, in the dtype that it
        computes in; None: causal attention does.
        """
        if not lengths and not (window and prompt > window):
            return None
        device = query.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else query.dtype
        of = prompt, tuple(lengths), window, dtype
        if of not in self._masks:
            self._masks[of] = _mask(query, prompt, lengths, window, dtype)
        return self._masks[of]


def _row(layout: Tensor) -> _Row:
    """The row of a layout, made once in a pass: it stays with the tensor, which recomputed layers
    get again.
    """
    row: _Row | None = getattr(layout, "row", None)
    if row is None:
        row = layout.row = _Row(layout.flatten().tolist())  # type: ignore[attr-defined]
    return row


def windows_asked(layout: Tensor) -> set[int]:
    """The windows that layers gave to `packed_attention` in a pass over this layout."""
    return {window for window in _row(layout).windows if window is not None}


AttentionInterface.register(PACKED, packed_attention)
AttentionMaskInterface.register(PACKED, sdpa_mask)
