"""Attention over one row of texts without padding: every token sees the text before it, and a
prompt that several answers share is in the row once.

A row is a list of prompts, each with its answers: `prompt, answer, answer, prompt, answer, ...`.
transformers calls `packed_attention` in every layer (`AttentionInterface`). The row's layout
(`rows.TokenRows`) stands where a mask would, because models hand a mask of four dimensions to every
layer as it is. Without a layout the function is what transformers would use, so the model can
sample too.

The answers of one prompt are attended to together, as rows padded to the longest: those that are
longer than their prompt behind a copy of it, causally; shorter ones with its keys alone.
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
_LARGEST_MASK = 2**22
"""Pairs of tokens. Answers with more are computed behind a copy of their prompt, without a mask."""


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
    if query.shape[:3:2] != (1, tokens) or key.shape[2] != tokens or options.get("position_bias") is not None:
        raise ValueError("this attention does not take a row of several texts")
    row.windows.add(options.get("sliding_window"))

    def attend(*texts: Tensor) -> Tensor:
        """(texts, tokens, heads, size) of each; queries are the last tokens of their texts."""
        q, k, v = (each.transpose(1, 2) for each in texts)
        return _attend(module, q, k, v, row.mask(q, k, options.get("sliding_window")), **options)[0]

    # Splits and joins only: an index's backward pass adds token by token, a slice's makes a whole
    # row for each.
    texts = zip(*(torch.split(each[0].transpose(0, 1), row.sizes) for each in (query, key, value)), strict=True)
    found: list[Tensor] = []
    for prompt, lengths in row.groups:
        first = next(texts)
        if len(lengths) == 1:
            found.append(attend(*(each.unsqueeze(0) for each in first))[0])
            continue
        answers = [_padded(each) for each in zip(*islice(texts, len(lengths)), strict=True)]
        whole = [torch.cat([one.expand(len(lengths), *one.shape), each], dim=1) for one, each in zip(first, answers, strict=True)]
        longest = max(lengths)
        if longest > prompt or longest * (prompt + longest) > _LARGEST_MASK:
            parts = torch.split(attend(*whole).flatten(0, 1), [size for n in lengths for size in (prompt, n, longest - n)])
            found += [parts[0], *parts[1::3]]
        else:
            found.append(attend(*(each.unsqueeze(0) for each in first))[0])
            parts = torch.split(attend(answers[0], *whole[1:]).flatten(0, 1), [size for n in lengths for size in (n, longest - n)])
            found += parts[::2]
    return torch.cat(found).unsqueeze(0), None


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
        mask = _causal(query.shape[2], key.shape[2], None, query.dtype, query.device)
    elif mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, torch.finfo(query.dtype).min)
    eager = sys.modules[type(module).__module__].eager_attention_forward
    found: tuple[Tensor, Tensor | None] = eager(module, query, key, value, mask, **options)
    return found


def _causal(queries: int, keys: int, window: int | None, dtype: torch.dtype, device: torch.device) -> Tensor:
    """(queries, keys), to be added to scores: the last query sees the last key."""
    mask = torch.full((queries, keys), -math.inf, dtype=dtype, device=device).triu_(keys - queries + 1)
    return mask if window is None else mask + torch.full_like(mask, -math.inf).tril_(keys - queries - window)


class _Row:
    """A packed row.

    groups: tokens of each prompt and of its answers. sizes: tokens of each text that is split off:
    a prompt, an answer, or a prompt with its only answer. windows: those that layers asked for.
    """

    def __init__(self, layout: Sequence[int]) -> None:
        numbers = iter(layout)
        self.groups = [(prompt, [next(numbers) for _ in range(next(numbers))]) for prompt in numbers]
        self.sizes = [
            size for prompt, lengths in self.groups for size in ([prompt + lengths[0]] if len(lengths) == 1 else [prompt, *lengths])
        ]
        self.windows: set[int | None] = set()
        self._masks: dict[tuple[int, int, int | None, torch.dtype], Tensor] = {}

    def mask(self, query: Tensor, key: Tensor, window: int | None) -> Tensor | None:
        """The mask that attention needs, the same tensor in all layers, in the dtype that it
        computes in; None: causal attention does.
        """
        queries, keys = query.shape[2], key.shape[2]
        if queries == keys and not (window and keys > window):
            return None
        device = query.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else query.dtype
        of = queries, keys, window, dtype
        if of not in self._masks:
            self._masks[of] = _causal(queries, keys, window, dtype, query.device)
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
