"""Reads from a model's configuration its local attention windows, and which attention
implementation computes it correctly.
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
    # Doge's: with more keys than this every token keeps the highest-scoring ones, and the choice
    # also considers later keys.
    "keep_window_size",
)

LONGEST_PROBE = 1024
"""Widest attention window, in tokens, past which a model is tried when it is loaded: a wider one
would take too long.
"""


def attention_windows(config: Any) -> list[int]:
    """Widths, in tokens, of every kind of local attention that `config` names, ascending. A named
    kind need not be used by any layer.
    """
    text = config.get_text_config()
    named = [getattr(text, name, None) for name in _WINDOWS]
    # MPT keeps its attention settings in a nested configuration.
    named.append(getattr(getattr(text, "attn_config", None), "sliding_window", None))
    return sorted({width for width in named if isinstance(width, int) and not isinstance(width, bool) and width > 0})


def meant_attention(config: Any) -> str | None:
    """The only attention implementation that computes what `config` describes; None if transformers
    may choose.

    `sdpa` silently leaves out a soft cap on attention scores; only `eager` applies it.
    """
    return "eager" if getattr(config.get_text_config(), "attn_logit_softcapping", None) else None
