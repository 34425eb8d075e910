"""Asks a judge, an OpenAI-compatible server that the operator named, what sandboxed rewards want to
know about answers. The sandbox's parent asks: no address, key or connection reaches a worker.

A process asks one text once: its reply is kept for as long as there is room, and what a pool asks
again while its first request is on its way waits for it. A request that fails gives no reply, and
is asked again the next time.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from shared.cancelling import cancel_and_wait
from shared.openai_server import OpenAiRequests, RefusedRequest, ServerError, UnusableAnswer, server_key
from shared.reward_files import Replies, Requests

if TYPE_CHECKING:
    from shared.config.task_sections import JudgeSection

CONNECTIONS = 16
"""Requests under way at a time."""
CACHE_CHARS = 32 * 2**20
"""Characters of requests and replies that are kept."""
DAY_S = 86_400.0
_MOST_BYTES_PER_TOKEN, _MOST_BYTES_BESIDE = 1024, 2**16
_CHARS_PER_TOKEN = 4
"""For servers that do not say how many tokens they used."""
_UNKNOWN_FIELD = (400, 422)
_SETTLES_S = 0.05


class Budget:
    """The limits on requests: their pace, and the tokens of 24 hours. Pure."""

    def __init__(self, calls_per_minute: int, tokens_per_day: int) -> None:
        """0: no limit."""
        self._call_s = 60.0 / calls_per_minute if calls_per_minute else 0.0
        self._most_tokens = tokens_per_day
        self._free_s = 0.0
        self._used: deque[tuple[float, int]] = deque()
        self._used_tokens = 0
        self.reserved = 0
        """Tokens of requests under way, at most."""

    def next_s(self, from_s: float, before_s: float = math.inf) -> float:
        """Take the next place in the pace. Returns when its request may be sent, at or after
        `from_s`; infinite, and nothing is taken, if that is not before `before_s`.
        """
        place_s = max(self._free_s, from_s)
        if place_s >= before_s:
            return math.inf
        self._free_s = place_s + self._call_s
        return place_s

    def reserve(self, most_tokens: int, now_s: float) -> bool:
        """Set tokens aside for a request and its reply; False if fewer are left of the last 24
        hours. `settle` follows.
        """
        while self._used and self._used[0][0] <= now_s - DAY_S:
            self._used_tokens -= self._used.popleft()[1]
        if self._most_tokens and self._used_tokens + self.reserved + most_tokens > self._most_tokens:
            return False
        self.reserved += most_tokens
        return True

    def settle(self, most_tokens: int, tokens: int, now_s: float) -> None:
        """Note what a request used, in place of what was set aside for it."""
        self.reserved -= most_tokens
        if self._most_tokens:
            self._used.append((now_s, tokens))
            self._used_tokens += tokens


class KeptReplies:
    """Replies by what was asked, the most recently used of them: at most `CACHE_CHARS`. Pure."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, str] = OrderedDict()
        self._chars = 0

    def get(self, text: str) -> str | None:
        """The reply; None if there is none."""
        if text in self._kept:
            self._kept.move_to_end(text)
        return self._kept.get(text)

    def keep(self, text: str, reply: str) -> None:
        """Keep one that is not kept yet, for as long as there is room."""
        if text in self._kept:
            return
        self._kept[text] = reply
        self._chars += len(text) + len(reply)
        while self._chars > CACHE_CHARS:
            old, its_reply = self._kept.popitem(last=False)
            self._chars -= len(old) + len(its_reply)


_OF_PROCESS: dict[JudgeSection, tuple[Budget, KeptReplies]] = {}
"""A process asks through several pools, some of them short-lived: limits and replies are common."""


class Judge:
    """A judge, asked by one process. `answered`, `failed`: requests; `tokens`: of both sides."""

    def __init__(self, settings: JudgeSection) -> None:
        """Raises `FatalError`: the key cannot be read."""
        self._settings = settings
        self._server = OpenAiRequests(
            settings.url,
            server_key(settings.key_variable, "judge.key_variable"),
            settings.timeout_s,
            CONNECTIONS,
            setting="judge.url",
            relief="raise judge.timeout_s",
        )
        budget = Budget(settings.calls_per_minute, settings.tokens_per_day)
        self._budget, self._kept = _OF_PROCESS.setdefault(settings, (budget, KeptReplies()))
        self._turns = asyncio.Semaphore(CONNECTIONS)
        self._asking: dict[str, asyncio.Task[str | None]] = {}
        self._usual: dict[str, Any] = {"max_tokens": settings.reply_tokens, "temperature": 0.0, "seed": 0}
        self._bare: dict[str, Any] = {"max_completion_tokens": settings.reply_tokens}
        self._fields = [self._usual, self._bare]
        """What to send beside a text: all of them in turn until one is taken."""
        self._accepted = False
        self.answered = self.failed = self.tokens = 0
        self.problem = ""
        """Why the newest request that failed did."""

    async def replies(self, requests: Sequence[Sequence[Requests]]) -> list[list[Replies]]:
        """Ask all of a group's requests at once; None for each that has no reply in time."""
        texts = list(dict.fromkeys(text for of_part in requests for each in of_part if not isinstance(each, int) for text in each))
        found = dict(zip(texts, await asyncio.gather(*map(self._reply, texts)), strict=True))
        return [[each if isinstance(each, int) else [found[text] for text in each] for each in of_part] for of_part in requests]

    async def close(self) -> None:
        """End requests under way."""
        await cancel_and_wait(*self._asking.values())
        await self._server.close()

    async def _reply(self, text: str) -> str | None:
        if (kept := self._kept.get(text)) is not None:
            return kept
        if text not in self._asking:
            asking = self._asking[text] = asyncio.create_task(self._asked(text))
            asking.add_done_callback(lambda _: self._asking.pop(text, None))
        # Others wait for it too, so that one who is cancelled must not end it; and `close` ends it,
        # which cancels nobody who waits.
        asking = self._asking[text]
        await asyncio.wait([asking])
        return None if asking.cancelled() else asking.result()

    async def _asked(self, text: str) -> str | None:
        most_tokens = len(text) // _CHARS_PER_TOKEN + 1 + self._settings.reply_tokens
        async with self._turns:
            while not self._budget.reserve(most_tokens, time.monotonic()):
                if not self._budget.reserved:
                    return self._fail(
                        f"judge.tokens_per_day = {self._settings.tokens_per_day:,} leaves too few for a request of up to "
                        f"{most_tokens:,} tokens: wait, raise it, or lower judge.reply_tokens"
                    )
                await asyncio.sleep(_SETTLES_S)  # others may use fewer than they may
            used = 0
            try:
                answer = await self._completion(text)
                try:
                    reply = msgspec.convert(answer, _Answer).choices[0].message.content
                    reply.encode()  # a lone surrogate is no text
                except (ValueError, IndexError) as error:
                    reply, problem = "", f"{self._settings.url}: no reply in the answer ({error}): is this a chat interface?"
                else:
                    problem = "" if reply else f"{self._settings.url}: an empty reply: raise judge.reply_tokens if the judge thinks"
                used = self._tokens(answer, text, reply)
            except ServerError as error:
                used = most_tokens if isinstance(error, UnusableAnswer) else 0
                return self._fail(str(error))
            finally:
                self._budget.settle(most_tokens, used, time.monotonic())
            self.tokens += used
            if problem:
                return self._fail(problem)
            self.answered += 1
            self._kept.keep(text, reply)
            return reply

    async def _completion(self, text: str) -> dict[str, Any]:
        """Ask as most servers want it, then with no field that a server may refuse. What one text
        was answered with, later ones are asked with. If the first text is refused both ways, later
        ones are asked once each, in one way and the other by turns.
        """
        tried = self._fields
        for fields in tried:
            try:
                answer = await self._post(
                    {"model": self._settings.model, "messages": [{"role": "user", "content": text}], **fields}
                )
            except RefusedRequest as error:
                if error.status not in _UNKNOWN_FIELD:
                    raise
                refusal = error
            else:
                self._fields, self._accepted = [fields], True
                return answer
        if not self._accepted:
            self._fields = [self._usual if tried[-1] is self._bare else self._bare]
        raise refusal

    async def _post(self, body: dict[str, Any]) -> dict[str, Any]:
        most = _MOST_BYTES_BESIDE + _MOST_BYTES_PER_TOKEN * self._settings.reply_tokens
        pace = self._budget.next_s
        await asyncio.sleep(pace(now_s := time.monotonic()) - now_s)
        return await self._server.ask("POST", "/chat/completions", body, most_bytes=most, retry_s=pace)

    def _tokens(self, answer: dict[str, Any], text: str, reply: str) -> int:
        """Count those of a request and its reply."""
        usage = answer.get("usage")
        said = usage.get("total_tokens") if isinstance(usage, dict) else None
        return said if isinstance(said, int) and 0 < said < 2**40 else (len(text) + len(reply)) // _CHARS_PER_TOKEN + 1

    def _fail(self, problem: str) -> str | None:
        self.failed += 1
        self.problem = problem
        return None


class _Message(msgspec.Struct):
    content: str


class _Choice(msgspec.Struct):
    message: _Message


class _Answer(msgspec.Struct):
    choices: list[_Choice]
