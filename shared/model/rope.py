"""Finds the length up to which a text's logprobs do not depend on how long the text is or may
become.
"""

from __future__ import annotations

from typing import Any


def steady_rope_length(config: Any) -> int | None:
    """The largest number of tokens for which the rotation of positions stays the same; None if it
    always stays the same.

    `longrope` rotates all tokens of a text differently once that text, or another one in the batch,
    exceeds the original length; vLLM chooses by the longest text that it may see. `dynamic` scales
    with the longest text seen so far. Beyond the returned length, the logprob that a token had when
    it was sampled, in a text that was still short, differs from the one computed for the whole
    text.
    """
    text = config.get_text_config()
    parameters = getattr(text, "rope_parameters", None) or {}
    per_layer = [value for value in parameters.values() if isinstance(value, dict)] or [parameters]
    lengths = [
        each.get("original_max_position_embeddings") or getattr(text, "max_position_embeddings", None)
        for each in per_layer
        if each.get("rope_type") in ("longrope", "dynamic")
    ]
    return min((int(length) for length in lengths if length), default=None)


def rope_problem(config: Any, length: int) -> str:
    """Why texts of `length` tokens have no single set of logprobs; empty if they do."""
    steady = steady_rope_length(config)
    if steady is None or length <= steady:
        return ""
    return (
        f"beyond {steady} tokens this model rotates positions by the length of the text (longrope or dynamic scaling), so that "
        f"sampled and trained logprobs would differ: set model.max_length to {steady} or less"
    )
