"""Acts as many nodes of a swarm at once: signed groups that others accept, and requests as those of
verifiers and of their directory entries, from few processes.

    python -m benchmarks.crowd '{"url": "...", "identities": 9, "each_per_s": 0.2, "seconds": 60}'
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from pydoc_data.topics import topics  # type: ignore[import-untyped]
from typing import Any

from prometheus_client import CollectorRegistry

from services.verifier.figures import Figures
from services.verifier.sharing import AUDIENCE_PERIOD_S, AUDIENCE_READ, RECORD_PERIOD_S, Content, audience_start, message_id, sign
from services.verifier.swarm_reader import SwarmReader
from shared.cancelling import cancel_and_wait
from shared.config import NodeConfig, load_config
from shared.contracts import subjects
from shared.contracts.codec import content_id, encode, pack_ids, pack_logprobs
from shared.contracts.control import EvalReport, NodeRecord
from shared.contracts.messages import Completion, RolloutGroup, Sampling
from shared.contracts.wire import DEFAULT_SWARM_ID, SWARM_SCHEMA_VERSION, ModelIdentity
from shared.identity.keys import SigningKey, new_seed
from shared.identity.statements import sign_statement
from shared.runtime.status import StatusBoard
from shared.tasks import TaskSource, derive_task
from shared.transport.base import KvEntry, Transport, TransportError, bucket_stream
from shared.transport.connect import connect
from swarm_cli.installation import DEMO_CONFIG

NAME = "crowd"
ANSWERS = 8
RIGHT = 0.4
"""Part of the answers that are right."""
LOCAL, FOREIGN = 2, 6
"""Groups that a node shares and uses in a default sharing step."""
FLOODING = 10
"""One in this many identities floods, where any does."""
FLOOD_TIMES = 100
"""A flooding identity sends this many times as much as another."""
CHARS_PER_TOKEN = 4.4
"""Of English prose with the tokenizers of current models."""
AT_ONCE = 128
MODEL = ModelIdentity(name=NAME, tokenizer_hash="c" * 64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Crowd:
    """Who acts, and for how long.

    Attributes:
        identities: Number of keys, each with a name of its own.
        each_per_s: Groups a second that each shares.
        tokens: Of an answer: prose, and the answer at its end. 0: the answer alone.
        demo: Whether the tasks are the demo's, otherwise reasoning-gym's default sums and divisors.
        floods: Whether one identity in `FLOODING` shares `FLOOD_TIMES` as much.
        nodes: Whether they also read and write as nodes do; otherwise they only share groups.
        part, parts: Which of several processes this is.
        report: File for a `CrowdReport`; "": none.
    """

    url: str
    identities: int
    each_per_s: float
    seconds: float
    swarm: str = DEFAULT_SWARM_ID
    tokens: int = 0
    demo: bool = False
    floods: bool = False
    nodes: bool = False
    part: int = 0
    parts: int = 1
    report: str = ""


@dataclass(slots=True)
class CrowdReport:
    """Everything that one process has done.

    Attributes:
        acknowledged: Groups by name.
        seen: Entries of the directory.
        late_s: How far it was behind at most.
        publish_s: Seconds until each thousandth of the acknowledgements.
    """

    acknowledged: dict[str, int]
    stored_bytes: int = 0
    failed: int = 0
    read: int = 0
    read_bytes: int = 0
    renewed: int = 0
    looked: int = 0
    seen: int = 0
    late_s: float = 0.0
    publish_s: list[float] | None = None
    cpu_s: float = 0.0


def crowd_name(number: int, *, floods: bool = False) -> str:
    """The name of an identity, which tells whether it floods."""
    return f"flood-{number}" if floods and number % FLOODING == 0 else f"{NAME}-{number}"


@asynccontextmanager
async def crowd_process(crowd: Crowd) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run the crowd in a process of its own, until it ends or the block does."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "benchmarks.crowd", json.dumps(asdict(crowd))),
        stdout=asyncio.subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()


class GroupMaker:
    """Makes groups whose tasks others derive again. Each answer is a piece of English prose of its
    own, so that it compresses as prose does and no group copies another.
    """

    def __init__(self, config: NodeConfig, tokens: int, source: str) -> None:
        """`source`: names the sequence of tasks, so that no two makers share one."""
        self._source = TaskSource(config.tasks, node=source, seed=0, secret=os.urandom(16))
        self._tokens = tokens
        self._prose = "\n\n".join(topics[topic] for topic in sorted(topics)) if tokens else ""
        self._draw = random.Random(source)
        self._drawn = 0

    def group(self, node: str, draw: int, *, with_tokens: bool = False) -> RolloutGroup:
        """A new group. `with_tokens`: with ids and logprobs, as a generator hands it on."""
        task = derive_task(self._source.ref(self._drawn))
        self._drawn += 1
        right = str(task.answer)
        return RolloutGroup(
            node=node,
            created_at=time.time(),
            draw=draw,
            task=task,
            completions=[
                self._completion(right if self._draw.random() < RIGHT else _slip(right), with_tokens) for _ in range(ANSWERS)
            ],
            model=MODEL,
            policy_version=1,
            sampling=Sampling(max_new_tokens=max(16, self._tokens)),
        )

    def _completion(self, answer: str, with_tokens: bool) -> Completion:
        chars = int(CHARS_PER_TOKEN * self._tokens)
        begin = self._draw.randrange(max(1, len(self._prose) - chars))
        prose = self._prose[begin : begin + chars]
        count = self._tokens or len(answer) // 4 + 2
        return Completion(
            text=f"{prose}\n<answer>{answer}</answer>" if prose else answer,
            finish_reason="stop",
            token_count=count,
            token_ids=pack_ids([7] * count) if with_tokens else None,
            behaviour_logprobs=pack_logprobs([-0.5] * count) if with_tokens else None,
            canonical=True,
        )


def _slip(answer: str) -> str:
    """The mistake that the demo's policy prefers: the last digit one too high."""
    return re.sub(r"\d(?=\D*$)", lambda digit: str((int(digit[0]) + 1) % 10), answer)


class _OneKey:
    """The bucket of a node plane in memory, with as much of `KeyValue` as a reader uses."""

    def __init__(self) -> None:
        self._entry: KvEntry | None = None
        self.kv = self

    async def get(self, bucket: str, key: str) -> KvEntry | None:
        return self._entry

    async def update(self, bucket: str, key: str, value: bytes, *, last_revision: int) -> int:
        self._entry = KvEntry(key, value, last_revision + 1)
        return last_revision + 1


class _Identity:
    """One of the crowd."""

    def __init__(self, number: int, crowd: Crowd, config: NodeConfig, figures: Figures) -> None:
        self.name = crowd_name(number, floods=crowd.floods)
        self.floods = self.name != crowd_name(number)
        self.key = SigningKey(new_seed())
        self.reader = SwarmReader(config, _OneKey(), figures)  # type: ignore[arg-type]
        self.draws = number % LOCAL
        self.lacks = 0
        self.reading = False

    def record(self) -> NodeRecord:
        """Its entry in the directory."""
        return NodeRecord(
            node=self.name,
            public_key=self.key.public_key,
            model=MODEL,
            tasks=["chain_sum", "gcd"],
            policy_version=self.draws,
            software="swarm crowd",
            updated_at=time.time(),
            swarm_schema=SWARM_SCHEMA_VERSION,
            encodings=["zstd"],
            wants_logprobs=False,
        )

    def score(self) -> EvalReport:
        """Its first held-out score."""
        return EvalReport(
            node=self.name,
            policy_version=0,
            created_at=time.time(),
            n=100,
            pass_rate=0.25,
            mean_reward=0.25,
            per_task={},
            seconds=1.0,
        )


class _Directory:
    """Renews entries of the directory and looks at it as nodes do, and throws the answers away
    unread: ten thousand nodes are sent more than one Python process could decode.
    """

    def __init__(self, entries: int) -> None:
        """entries: Number of nodes that have one."""
        self._entries = entries
        self._random = random.Random()
        self._last_seq = 1
        self._reading: asyncio.Task[None] | None = None
        self._get = f"$JS.API.DIRECT.GET.{bucket_stream(subjects.SWARM_NODES_BUCKET)}"
        self._inbox = f"_INBOX.{os.urandom(8).hex()}"
        self.seen = 0

    async def open(self, url: str) -> None:
        """Connect to an open server."""
        host, _, port = url.removeprefix("nats://").partition(":")
        self._reader, self._writer = await asyncio.open_connection(host, int(port))
        hello = 'CONNECT {"verbose":false,"headers":true,"no_responders":true}'
        self._writer.write(f"{hello}\r\nSUB {self._inbox} 1\r\n".encode())
        self._reading = asyncio.create_task(self._read())

    def renew(self, name: str, entry: bytes) -> None:
        """Ask who holds the name, and store its entry."""
        subject = f"$KV.{subjects.SWARM_NODES_BUCKET}.{name}"
        self._ask(f"{self._get}.{subject}", b"")
        self._ask(subject, entry)

    def look(self) -> None:
        """Ask for some of the entries."""
        start = audience_start(self._last_seq, self._entries, self._random)
        self._ask(self._get, json.dumps({"seq": start, "batch": AUDIENCE_READ}).encode())

    async def close(self) -> None:
        await cancel_and_wait(self._reading)
        self._writer.close()

    def _ask(self, subject: str, payload: bytes) -> None:
        self._writer.write(f"PUB {subject} {self._inbox} {len(payload)}\r\n".encode() + payload + b"\r\n")

    async def _read(self) -> None:
        while data := await self._reader.read(2**18):
            self.seen += data.count(b"HMSG ")
            if stored := _STORED.findall(data):
                self._last_seq = max(self._last_seq, int(stored[-1]))
            if b"PING\r\n" in data:
                self._writer.write(b"PONG\r\n")


_STORED = re.compile(rb'"seq":\s?(\d+)[,}]')


class _Actors:
    """The identities of one process, on one connection."""

    def __init__(self, crowd: Crowd, config: NodeConfig, plane: Transport) -> None:
        self._crowd = crowd
        self._plane = plane
        self._maker = GroupMaker(config, crowd.tokens, f"{NAME}-{crowd.part}")
        figures = Figures(CollectorRegistry(), StatusBoard(NAME, "verifier", "0"))
        first, last = (crowd.identities * part // crowd.parts for part in (crowd.part, crowd.part + 1))
        self._all = [_Identity(number, crowd, config, figures) for number in range(first, last)]
        self._places = asyncio.Semaphore(AT_ONCE)
        self._publish_s: list[float] = []
        self._late_s = 0.0
        self._directory = _Directory(crowd.identities)
        self.report = CrowdReport({each.name: 0 for each in self._all})

    async def act(self) -> None:
        """Act for as long as the crowd does, then wait for what is under way."""
        crowd, honest = self._crowd, [each for each in self._all if not each.floods]
        flooding = [each for each in self._all if each.floods]
        work = [
            self._paced(honest, crowd.each_per_s, self._share),
            self._paced(flooding, FLOOD_TIMES * crowd.each_per_s, self._share),
        ]
        if crowd.nodes:
            await self._directory.open(crowd.url)
            work += [
                self._paced(self._all, 1.0 / RECORD_PERIOD_S, self._renew, waits=False),
                self._paced(self._all, 1.0 / AUDIENCE_PERIOD_S, self._look, waits=False),
                self._paced(self._all, 1.0 / crowd.seconds, self._evaluate),
            ]
        await asyncio.gather(*work)
        for _ in range(AT_ONCE):
            await self._places.acquire()
        if crowd.nodes:
            await self._directory.close()
        self.report.seen = max(0, self._directory.seen - self.report.renewed)
        slowest = sorted(self._publish_s)
        self.report.publish_s = [round(slowest[len(slowest) * part // 1000], 4) for part in range(1000)] if slowest else []
        self.report.late_s = round(self._late_s, 2)
        self.report.cpu_s = round(time.process_time(), 1)

    async def _paced(
        self, who: Sequence[_Identity], each_per_s: float, do: Callable[[_Identity], Awaitable[None]], *, waits: bool = True
    ) -> None:
        """Have `who` do something in turn, evenly, each so often. waits: Whether it waits for the
        server, so that no more than `AT_ONCE` may be under way.
        """
        if not who:
            return
        began, done = time.monotonic(), 0
        while (now := time.monotonic()) - began < self._crowd.seconds:
            due = began + done / (each_per_s * len(who))
            if now < due:
                await asyncio.sleep(min(due - now, began + self._crowd.seconds - now))
                continue
            self._late_s = max(self._late_s, now - due)
            if waits:
                await self._places.acquire()
                asyncio.create_task(self._in_place(do(who[done % len(who)])))  # noqa: RUF006 (its place keeps count of it)
            else:
                await do(who[done % len(who)])
            done += 1
            if waits or done % AT_ONCE == 0:
                await asyncio.sleep(0)

    async def _in_place(self, work: Awaitable[None]) -> None:
        try:
            await work
        except TransportError as error:
            self.report.failed += 1
            if self.report.failed == 1:
                print(f"crowd: {error}", file=sys.stderr, flush=True)
        finally:
            self._places.release()

    async def _share(self, who: _Identity) -> None:
        """Share a group, and after `LOCAL` of them read what a batch takes."""
        group = self._maker.group(who.name, who.draws)
        who.draws += 1
        signed = sign(group, who.key, Content(), swarm_id=self._crowd.swarm)
        payload, began = encode(signed), time.monotonic()
        await self._plane.publish(
            subjects.rollouts(who.name),
            payload,
            stream=subjects.SWARM_ROLLOUTS,
            message_id=message_id(content_id(signed.body), who.key),
        )
        self._publish_s.append(time.monotonic() - began)
        self.report.acknowledged[who.name] += 1
        self.report.stored_bytes += len(payload)
        if self._crowd.nodes and not who.floods and who.draws % LOCAL == 0:
            who.lacks += FOREIGN
            await self._read(who)

    async def _read(self, who: _Identity) -> None:
        """Read what a batch lacks, as a verifier does; all of it counts as accepted."""
        if who.reading:
            return
        who.reading, more = True, True
        try:
            while more and who.lacks > -FOREIGN:
                messages, more = await who.reader.read(self._plane, max(0, who.lacks), 0)
                for message in messages:
                    who.reader.accepted(message)
                who.lacks -= len(messages)
                self.report.read += len(messages)
                self.report.read_bytes += sum(message.size_bytes for message in messages)
        finally:
            who.reading = False

    async def _renew(self, who: _Identity) -> None:
        self._directory.renew(who.name, encode(sign_statement(who.record(), who.key, self._crowd.swarm)))
        self.report.renewed += 1

    async def _look(self, who: _Identity) -> None:
        self._directory.look()
        self.report.looked += 1

    async def _evaluate(self, who: _Identity) -> None:
        payload = encode(sign_statement(who.score(), who.key, self._crowd.swarm))
        await self._plane.publish(subjects.evals(who.name), payload, stream=subjects.SWARM_EVALS, message_id=content_id(payload))


def crowd_config(*, demo: bool, **sections: dict[str, Any]) -> NodeConfig:
    """The configuration of nodes that take the crowd's groups, with `sections` merged over it."""
    tasks = {} if demo else {"tasks": [{"dataset": "chain_sum"}, {"dataset": "gcd"}]}
    return load_config(DEMO_CONFIG, {**tasks, **sections})


async def act(crowd: Crowd) -> CrowdReport:
    """Act as this part of the crowd, once the swarm's streams are there."""
    while True:
        try:
            plane = await connect(crowd.url, name=f"{NAME}-{crowd.part}")
            await plane.stream_state(subjects.SWARM_ROLLOUTS)
            break
        except TransportError:
            await asyncio.sleep(0.5)
    actors = _Actors(crowd, crowd_config(demo=crowd.demo), plane)
    await actors.act()
    await plane.close()
    return actors.report


def added(reports: Sequence[CrowdReport]) -> CrowdReport:
    """The reports of all parts together."""
    acknowledged = Counter[str]()
    total = CrowdReport({})
    for each in reports:
        acknowledged.update(each.acknowledged)
        for name in ("stored_bytes", "failed", "read", "read_bytes", "renewed", "looked", "seen", "cpu_s"):
            setattr(total, name, getattr(total, name) + getattr(each, name))
    late_s, publish_s = max(each.late_s for each in reports), sorted(s for each in reports for s in each.publish_s or ())
    return replace(total, acknowledged=dict(acknowledged), late_s=late_s, publish_s=publish_s)


if __name__ == "__main__":
    given = Crowd(**json.loads(sys.argv[1]))
    done = asyncio.run(act(given))
    if given.report:
        Path(given.report).write_text(json.dumps(asdict(done)))
