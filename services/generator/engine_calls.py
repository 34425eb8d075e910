"""The service's calls of its engine.

What the engine returns is held to what `Engine` and `Sample` promise, because a group that the
verifier cannot read would only be found there, as a dead letter that names no engine. The server of
an engine that computes elsewhere is waited for, as long as it is away.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from itertools import chain
from typing import Any, TypeVar, get_args

from services.generator.engines.base import Engine, EngineAway, EngineError, FinishReason, Sample, SamplingParams
from shared.cancelling import cancel_and_wait
from shared.contracts.codec import pack_ids, pack_logprobs, unpack_ids, unpack_logprobs
from shared.contracts.status_figures import EVALUATING_BASE, EVALUATING_LAST, GENERATING, STARTING
from shared.registry import ENGINES
from shared.runtime import ServiceContext
from shared.runtime.exits import FatalError


async def sampled(
    engine: Engine, prompts: Sequence[Sequence[int]], n: int, params: SamplingParams, *, seed: int
) -> list[list[Sample]]:
    """Generate with the engine.

    Raises:
        FatalError: it is not `n` usable samples for each prompt, or none for one that a server
            refused.
        EngineError: the same of a built-in engine, which only passes on what a server says.
    """
    found: Any = await engine.generate(prompts, n, params, seed=seed)
    if not (fault := _fault(found, len(prompts), n, may_refuse=not engine.loads_policies)):
        return list(map(list, found))
    if engine.name in ENGINES.built_in:
        raise EngineError(f"engine {engine.name} returned {fault}")
    raise FatalError(f"{ENGINES.described(engine.name)} returned {fault}: correct its generate, or change {ENGINES.setting}")


def calls_of(engine: Engine) -> int:
    """The number of concurrent calls that keep the engine busy. Raises FatalError if it is none,
    with which nothing would ever be generated.
    """
    calls: Any = engine.good_calls
    if not isinstance(calls, int) or calls < 1:
        raise FatalError(
            f"{ENGINES.described(engine.name)} has good_calls {calls!r}, and must have a whole number above 0: correct it"
        )
    return calls


def _fault(found: Any, prompts: int, n: int, *, may_refuse: bool) -> str:
    """Describe the first fault in an engine's samples, or return "". Engines are plug-ins, so
    everything is checked. `may_refuse`: a prompt may have none.
    """
    if not isinstance(found, (list, tuple)) or not all(isinstance(each, (list, tuple)) for each in found):
        return f"a {type(found).__name__} that is no list of lists of samples"
    if len(found) != prompts:
        return f"samples of {len(found)} prompts where {prompts} were given"
    if wrong := [len(each) for each in found if len(each) != n and (each or not may_refuse)]:
        return f"{wrong[0]} samples of a prompt where {n} were asked for"
    return next(filter(None, map(_fault_of, chain.from_iterable(found))), "")


def _fault_of(sample: Any) -> str:
    """The same of one sample."""
    if not isinstance(sample, Sample):
        return f"a {type(sample).__name__} instead of a Sample"
    if sample.finish_reason not in get_args(FinishReason):
        return f"a sample with the unknown finish_reason {sample.finish_reason!r} (there are {', '.join(get_args(FinishReason))})"
    version: Any = sample.policy_version
    if not isinstance(version, int) or version < 0:
        return f"a sample with policy_version {version!r}, which must be a whole number of 0 or more"
    try:
        part = "text"
        sample.text.encode()
        part = "token_ids"
        ids = unpack_ids(pack_ids(sample.token_ids))
        part = "logprobs"
        logprobs = ids if sample.logprobs is None else unpack_logprobs(pack_logprobs(sample.logprobs))
    except (AttributeError, TypeError, ValueError, OverflowError) as error:
        return f"a sample whose {part} cannot be used ({error})"
    return "" if len(logprobs) == len(ids) else f"a sample with {len(logprobs)} logprobs for {len(ids)} token_ids"


WAITING = "waiting for the engine's server"
"""The state of a generator whose engine's server is away."""
_PAUSE_S = 1.0
_TOLD_EVERY_S = 60.0
_PROGRESS_S = 0.5

T = TypeVar("T")


@asynccontextmanager
async def evaluation_progress(
    context: ServiceContext,
    engine: Engine,
    answers: int,
    *,
    last: bool,
    given: Sequence[Sequence[Sample]] = (),
    turns: bool = False,
) -> AsyncIterator[None]:
    """Show in the status how far the evaluation of the base policy or of the last one is, if the
    engine counts: with a real model it takes minutes. Does nothing in between, while the state says
    what the generator does besides.

    answers: how many are asked for. last: the trainer has taken its steps; the caller restores the
    state. given: those of earlier calls. turns: an answer may have several, and the engine counts
    each.
    """
    earlier = [each for of_task in given for each in of_task]
    ended = sum(len(each.turn_tokens) or 1 for each in earlier) - engine.completions_ended
    tokens = sum(len(each.token_ids) for each in earlier) - engine.tokens_sampled

    async def tell() -> None:
        told = engine.tokens_sampled
        if last:
            context.status.state(EVALUATING_LAST)
        while True:
            await asyncio.sleep(_PROGRESS_S)
            if engine.tokens_sampled != told:
                told = engine.tokens_sampled
                done = f"{ended + engine.completions_ended:,} {'turns' if turns else f'of {answers:,} answers'}"
                context.status.state(f"{EVALUATING_LAST if last else EVALUATING_BASE}: {done}, {tokens + told:,} tokens")

    if context.ready and not last:
        yield
        return
    telling = asyncio.create_task(tell())
    try:
        yield
    finally:
        await cancel_and_wait(telling)


class ServerWait:
    """Repeats what an absent server has not answered, because a restart would not bring it back."""

    def __init__(self, context: ServiceContext) -> None:
        self._context = context

    async def answer(self, ask: Callable[[], Awaitable[T]]) -> T:
        """The result of `ask`, which is called again for as long as it raises `EngineAway`."""
        told_at: float | None = None
        while True:
            try:
                result = await ask()
            except EngineAway as error:
                self._context.status.state(WAITING)
                if told_at is None or time.monotonic() - told_at >= _TOLD_EVERY_S:
                    told_at = time.monotonic()
                    self._context.log.warning("engine_away", reason=str(error), consequence="waiting until it answers")
                await asyncio.sleep(_PAUSE_S)
            else:
                if told_at is not None:
                    self._context.status.state(GENERATING if self._context.ready else STARTING)
                    self._context.log.info("engine_back")
                return result
