"""Checks whether a foreign completion's lengths, token ids and logprobs can belong to its text.
Pure.
"""

from __future__ import annotations

import numpy as np

from services.verifier.refusals import Refusal
from shared.contracts.codec import MAX_LOGPROB
from shared.contracts.messages import Completion


def token_ids_problem(packed: bytes) -> tuple[Refusal, str] | None:
    """Why packed token ids are refused, or None. They are checked as an array, because a list of a
    million numbers takes as long as a hundred groups.
    """
    if len(packed) % 4:
        return Refusal.MALFORMED, f"token ids of {len(packed)} bytes, not a multiple of 4"
    if (np.frombuffer(packed, "<i4") < 0).any():
        return Refusal.MALFORMED, "negative token id"
    return None


def completion_problem(completion: Completion, max_chars: int, max_tokens: int) -> tuple[Refusal, str] | None:
    """Why the completion is refused, or None. Whether the ids match the text is checked by the
    trainer, which has the tokenizer.

    A sampled token's logprob is finite and not above 0; generators refuse samples with others.
    """
    if len(completion.text) > max_chars:
        return Refusal.LENGTHS, f"a text of {len(completion.text)} characters (verifier.max_answer_chars)"
    if completion.token_count > max_tokens:
        return Refusal.LENGTHS, f"an answer of {completion.token_count} tokens, at most {max_tokens} (verifier.max_foreign_length)"
    if completion.token_count == 0 and completion.text:
        return Refusal.LENGTHS, "a text of no tokens"
    for packed in (completion.token_ids, completion.behaviour_logprobs):
        if packed is not None and len(packed) != 4 * completion.token_count:
            return Refusal.MALFORMED, "token_ids, behaviour_logprobs and token_count disagree"
    if completion.behaviour_logprobs is not None and completion.token_ids is None:
        return Refusal.MALFORMED, "behaviour logprobs of tokens that are not there"
    problem = token_ids_problem(completion.token_ids or b"")
    if problem is not None:
        return problem
    logprobs = np.frombuffer(completion.behaviour_logprobs or b"", "<f4")
    if not np.isfinite(logprobs).all():
        return Refusal.MALFORMED, "a log-probability is not finite"
    if logprobs.size and float(logprobs.max()) > MAX_LOGPROB:
        return Refusal.MALFORMED, "a log-probability is positive"
    return None
