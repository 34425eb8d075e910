"""Reads what a server with OpenAI's completions interface answers, which may be anything."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from services.generator.engines.base import EngineError, Sample
from services.generator.engines.model_folder import ModelFolder
from shared.contracts.codec import MAX_LOGPROB

_MOST_BYTES_PER_TOKEN = 1024
"""Of a completion, with its text, token ids and logprobs in JSON: some ten times the usual."""
_MOST_BYTES_BESIDE = 2**16
_MORE_TOKENS = 16


class UnusableAnswer(EngineError):
    """The answer to one request cannot be used; another may be."""


class Choice(msgspec.Struct):
    """One completion; what else servers send with it is ignored."""

    index: int
    text: str
    finish_reason: str | None = None
    token_ids: Any = None
    logprobs: Any = None


class _Logprobs(msgspec.Struct):
    token_logprobs: list[float]


class _Tokens(msgspec.Struct):
    token_ids: list[Annotated[int, Meta(ge=0, lt=2**31)]]
    logprobs: _Logprobs


class _Answer(msgspec.Struct):
    choices: list[Choice]


def read_choices(answer: dict[str, Any], where: str) -> list[Choice]:
    """The completions in their order; `where` is the server's address. Raises `UnusableAnswer`."""
    try:
        choices = msgspec.convert(answer, _Answer).choices
        for choice in choices:
            choice.text.encode()  # half of a surrogate pair, which JSON can hold and nothing else
    except ValueError as error:
        raise UnusableAnswer(
            f"{where}/completions: the answer cannot be read ({error}): is this a server with OpenAI's completions interface?"
        ) from None
    return sorted(choices, key=lambda choice: choice.index)


def most_bytes(body: dict[str, Any]) -> int:
    """Bound the size of the answer to a request. Some servers repeat the prompt in each choice."""
    size: int = body["n"] * (_MOST_BYTES_PER_TOKEN * body["max_tokens"] + 32 * len(body["prompt"]))
    return _MOST_BYTES_BESIDE + size


def has_tokens(choice: Choice) -> bool:
    """Check whether the completion comes with token ids and the logprob of each."""
    return _tokens(choice) is not None


def sample(choice: Choice, folder: ModelFolder, *, most: int, tokens: bool, where: str) -> Sample:
    """One completion of at most `most` tokens; `tokens`: whether the server gave token ids when it
    was started.

    Raises:
        UnusableAnswer: it is longer, or ended in another way than a model ends.
        EngineError: it lacks token ids.
    """
    finish: Literal["stop", "length"] | Any = choice.finish_reason
    if finish not in ("stop", "length"):
        raise UnusableAnswer(f"{where} ended a completion with {finish!r}: see the server's log")
    if not tokens:
        fits = len(choice.text) <= _MOST_BYTES_PER_TOKEN * most  # encoding a longer text takes long
        ids: Sequence[int] = folder.tokenizer.encode(choice.text, add_special_tokens=False) if fits else ()
        # Text that was cut within a character, or by another tokenizer, has some tokens more.
        if not fits or len(ids) > 2 * most + _MORE_TOKENS:
            raise UnusableAnswer(f"{where} gave a text of {len(choice.text)} characters where {most} tokens were asked for")
        return Sample((*ids, *(folder.end_token_ids[:1] if finish == "stop" else ())), choice.text, finish, None)
    found = _tokens(choice)
    if found is None:
        raise EngineError(f"{where} returned no token ids with their logprobs, unlike when it was started")
    if len(found.token_ids) > most:
        raise UnusableAnswer(f"{where} gave {len(found.token_ids)} tokens where {most} were asked for")
    return Sample(tuple(found.token_ids), folder.text(found.token_ids), finish, tuple(found.logprobs.token_logprobs))


def _tokens(choice: Choice) -> _Tokens | None:
    try:
        found = msgspec.convert({"token_ids": choice.token_ids, "logprobs": choice.logprobs}, _Tokens)
    except msgspec.ValidationError:
        return None
    logprobs = found.logprobs.token_logprobs
    sound = all(math.isfinite(logprob) and logprob <= MAX_LOGPROB for logprob in logprobs)
    return found if sound and len(found.token_ids) == len(logprobs) else None
