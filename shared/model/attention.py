"""What a model's configuration says about its attention: local windows, and which implementation
computes it correctly.
"""

from __future__ import annotations

from typing import Any

_WINDOWS = (
    "sliding_window",
    "window_size",
    "attention_window_size",
    "attention_window",
    "attention_chunk_size",
    "local_attention",
    # Of Doge: more keys than these, and every token keeps the highest, chosen among the later ones
    # too.
    "keep_window_size",
)


def attention_windows(config: Any) -> list[int]:
    """Widths, in tokens, of every kind of local attention that `config` names, ascending; a layer
    may still not use it.
    """
    text = config.get_text_config()
    named = [getattr(text, name, None) for name in _WINDOWS]
    # MPT keeps what concerns attention in a configuration of its own.
    named.append(getattr(getattr(text, "attn_config", None), "sliding_window", None))
    return sorted({width for width in named if isinstance(width, int) and not isinstance(width, bool) and width > 0})


def meant_attention(config: Any) -> str | None:
    """The only attention implementation that computes what `config` says, or None where
    transformers may choose.

    A soft cap on attention scores is left out by `sdpa` without a word; only `eager` applies it.
    """
    return "eager" if getattr(config.get_text_config(), "attn_logit_softcapping", None) else None
