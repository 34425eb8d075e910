"""Asks a judge, an OpenAI-compatible server that the operator named, what sandboxed rewards want to
know about answers. The sandbox's parent asks: no address, key or connection reaches a worker.

One text is asked once: its reply is kept for as long as there is room, and what is asked again
while the first request is on its way waits for it. A request that fails gives no reply, and is
asked again the next time.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from shared.cancelling import cancel_and_wait
from shared.openai_server import OpenAiRequests, RefusedRequest, ServerError, server_key
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


class Budget:
    """The limits on requests: their pace, and the tokens of 24 hours. Pure."""

    def __init__(self, calls_per_minute: int, tokens_per_day: int) -> None:
        """0: no limit."""
        self._call_s = 60.0 / calls_per_minute if calls_per_minute else 0.0
        self._most_tokens = tokens_per_day
        self._free_s = 0.0
        self._used: deque[tuple[float, int]] = deque()
        self._used_tokens = 0

    def next_s(self, now_s: float) -> float:
        """Take the next place in the pace. Returns when its request may be sent."""
        place_s = max(self._free_s, now_s)
        self._free_s = place_s + self._call_s
        return place_s

    def is_spent(self, now_s: float) -> bool:
        """Check whether the tokens of the last 24 hours are used up."""
        while self._used and self._used[0][0] <= now_s - DAY_S:
            self._used_tokens -= self._used.popleft()[1]
        return 0 < self._most_tokens <= self._used_tokens

    def use(self, tokens: int, now_s: float) -> None:
        """Note the tokens of a request and its reply."""
        if self._most_tokens:
            self._used.append((now_s, tokens))
            self._used_tokens += tokens


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
        self._budget = Budget(settings.calls_per_minute, settings.tokens_per_day)
        self._turns = asyncio.Semaphore(CONNECTIONS)
        self._kept: OrderedDict[str, str] = OrderedDict()
        self._kept_chars = 0
        self._asking: dict[str, asyncio.Task[str | None]] = {}
        self._plain = False
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
        if text in self._kept:
            self._kept.move_to_end(text)
            return self._kept[text]
        if text not in self._asking:
            asking = self._asking[text] = asyncio.create_task(self._asked(text))
            asking.add_done_callback(lambda _: self._asking.pop(text, None))
        # Others wait for it too, so that one who is cancelled must not end it.
        return await asyncio.shield(self._asking[text])

    async def _asked(self, text: str) -> str | None:
        async with self._turns:
            await asyncio.sleep(self._budget.next_s(now_s := time.monotonic()) - now_s)
            if self._budget.is_spent(time.monotonic()):
                return self._fail(f"judge.tokens_per_day = {self._settings.tokens_per_day:,} are used up: wait or raise it")
            try:
                answer = await self._completion(text)
            except ServerError as error:
                return self._fail(str(error))
            try:
                reply = msgspec.convert(answer, _Answer).choices[0].message.content
                reply.encode()  # a lone surrogate is no text
            except (ValueError, IndexError) as error:
                reply, problem = "", f"{self._settings.url}: no reply in the answer ({error}): is this a chat interface?"
            else:
                problem = "" if reply else f"{self._settings.url}: an empty reply: raise judge.reply_tokens if the judge thinks"
            self._note_tokens(answer, text, reply)
            if problem:
                return self._fail(problem)
            self.answered += 1
            self._keep(text, reply)
            return reply

    async def _completion(self, text: str) -> dict[str, Any]:
        """Ask as most servers want it; once one refuses these fields, with none that it may
        refuse.
        """
        message = {"model": self._settings.model, "messages": [{"role": "user", "content": text}]}
        if not self._plain:
            try:
                return await self._post(message | {"max_tokens": self._settings.reply_tokens, "temperature": 0.0, "seed": 0})
            except RefusedRequest as error:
                if error.status not in _UNKNOWN_FIELD:
                    raise
        answer = await self._post(message | {"max_completion_tokens": self._settings.reply_tokens})
        self._plain = True
        return answer

    async def _post(self, body: dict[str, Any]) -> dict[str, Any]:
        most = _MOST_BYTES_BESIDE + _MOST_BYTES_PER_TOKEN * self._settings.reply_tokens
        return await self._server.ask("POST", "/chat/completions", body, most_bytes=most)

    def _note_tokens(self, answer: dict[str, Any], text: str, reply: str) -> None:
        usage = answer.get("usage")
        said = usage.get("total_tokens") if isinstance(usage, dict) else None
        tokens = said if isinstance(said, int) and 0 < said < 2**40 else (len(text) + len(reply)) // _CHARS_PER_TOKEN + 1
        self.tokens += tokens
        self._budget.use(tokens, time.monotonic())

    def _keep(self, text: str, reply: str) -> None:
        self._kept[text] = reply
        self._kept_chars += len(text) + len(reply)
        while self._kept_chars > CACHE_CHARS:
            old, its_reply = self._kept.popitem(last=False)
            self._kept_chars -= len(old) + len(its_reply)

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
