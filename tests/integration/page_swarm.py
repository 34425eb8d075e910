"""A swarm as the page finds it on a real NATS server, written by the test: nodes, signed scores,
batches with groups; and the server process that shows it.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import nats

from services.trainer.records import batch_line
from shared.contracts import subjects
from shared.contracts.codec import content_id, encode, pack_ids, pack_logprobs
from shared.contracts.control import EvalReport, NodeRecord, ServiceStatus, TaskScore, TrainerPosition
from shared.contracts.messages import Batch, BatchItem, Completion, RolloutGroup, Sampling, ScoredGroup, TaskRef
from shared.contracts.sampler_state import SamplerState
from shared.contracts.streams import ensure_node_streams, ensure_swarm_streams
from shared.contracts.wire import ModelIdentity
from shared.identity.keys import SigningKey, new_seed
from shared.identity.statements import sign_statement
from shared.lease.name import take_name
from shared.roles import ROLES
from shared.run_records import BATCHES_FILE
from shared.tasks.evaluation import PASS_REWARD
from shared.tasks.prompt import text_task
from shared.transport.base import Transport
from shared.transport.connect import connect
from tests.integration.local_swarm import free_port_range

ROOT = Path(__file__).parents[2]
DEADLINE_S = 180.0
SWARM = "first"
SET = "ab" * 32
TOKENIZER = ROOT / "models" / "base" / "tokenizer.json"


@dataclass
class PageSwarm:
    """Writes what nodes would write."""

    transport: Transport
    url: str
    records: Path | None = None
    """The run's folder, for the trainers' records; their trainers are then on this machine."""
    keys: dict[str, SigningKey] = field(default_factory=dict)
    number: dict[str, int] = field(default_factory=dict)

    @classmethod
    async def open(cls, url: str, records: Path | None = None) -> PageSwarm:
        transport = await connect(url, name="test", timeout_s=10)
        await ensure_swarm_streams(transport)
        return cls(transport, url, records)

    def key(self, node: str) -> SigningKey:
        return self.keys.setdefault(node, SigningKey(new_seed()))

    async def node(
        self,
        name: str,
        *,
        here: bool = True,
        state: str = "working",
        step: int = 7,
        age_s: float = 0.0,
        finished: bool = False,
        run: str = "",
        tasks: Sequence[str] = ("gcd", "basic_arithmetic"),
    ) -> None:
        """Its directory entry, and where it is on this server its streams and processes. age_s:
        since its last word. run: the run that its name belongs to.
        """
        now = time.time()
        record = NodeRecord(
            node=name,
            public_key=self.key(name).public_key,
            model=ModelIdentity(name="models/base", tokenizer_hash="a" * 64),
            tasks=list(tasks),
            policy_version=step,
            software="swarm test",
            updated_at=now - age_s,
        )
        await self.transport.kv.put(subjects.SWARM_NODES_BUCKET, name, encode(sign_statement(record, self.key(name), SWARM)))
        if not here:
            return
        await ensure_node_streams(self.transport, name)
        bucket = subjects.node_bucket(name)
        for role in ROLES:
            figures = {"step": float(step)} if role == "trainer" else {}
            status = ServiceStatus(
                node=name,
                role=role,
                replica="0",
                pid=1,
                host="h" if self.records is None else socket.gethostname(),
                state=state,
                started_at=now - 100,
                updated_at=now - age_s,
                figures=figures,
            )
            await self.transport.kv.put(bucket, subjects.status_key(role, "0"), encode(status))
        if run:
            await take_name(self.transport, name, run, self.url)
        position = TrainerPosition(policy_version=step, consumed_local=step, finished=finished)
        await self.transport.kv.put(bucket, subjects.TRAINER_KEY, encode(position))

    def report(self, node: str, version: int, pass_rate: float, held_out: str | None = SET, datasets: int = 2) -> EvalReport:
        names = ["gcd", "basic_arithmetic", *(f"set_{number}" for number in range(datasets - 2))][:datasets]
        per_task = {
            name: TaskScore(n=100, pass_rate=max(0.0, min(1.0, pass_rate + shift)), mean_reward=pass_rate)
            for name, shift in zip(names, (-0.1, 0.08, *[0.0] * datasets), strict=False)
        }
        return EvalReport(
            node=node,
            policy_version=version,
            created_at=time.time() - 1000 + version,
            n=200,
            pass_rate=pass_rate,
            mean_reward=pass_rate,
            per_task=per_task,
            seconds=2.0,
            held_out=held_out,
        )

    async def score(self, report: EvalReport, key: SigningKey | None = None, payload: bytes | None = None) -> None:
        payload = payload or encode(sign_statement(report, key or self.key(report.node), SWARM))
        stream = subjects.SWARM_EVALS
        await self.transport.publish(subjects.evals(report.node), payload, stream=stream, message_id=content_id(payload))

    async def batch(self, taker: str, *groups: ScoredGroup) -> None:
        number = self.number[taker] = self.number.get(taker, 0) + 1
        batch = batch_of(number, groups)
        payload = encode(batch)
        stream = subjects.node_batches_stream(taker)
        await self.transport.publish(subjects.node_batches(taker), payload, stream=stream, message_id=f"{taker}-{number}")
        if self.records is not None:
            trained_on(self.records / taker, number, groups)
            with (self.records / taker / BATCHES_FILE).open("a") as file:
                file.write(batch_line(batch) + "\n")


def batch_of(number: int, groups: Sequence[ScoredGroup]) -> Batch:
    """The batch of a step."""
    return Batch(
        number=number,
        created_at=time.time(),
        items=[BatchItem(scored=each, staleness=1 if each.origin == "local" else None, age_s=3.0) for each in groups],
        strategy="uniform",
        seed=1,
        wanted_local=4,
        wanted_external=4,
        pool_local=8,
        pool_external=8,
        shortage="none",
        state=SamplerState(consumed_local=number),
    )


def trained_on(folder: Path, step: int, groups: Sequence[ScoredGroup]) -> None:
    """Write the trainer's record of a step on these groups, of which those whose rewards are all
    equal had no effect.
    """
    found: dict[str, dict[str, int]] = {}
    for each in groups:
        if len(set(each.rewards)) > 1:
            of_sender, dataset = found.setdefault(each.group.node, {}), each.group.task.ref.dataset
            of_sender[dataset] = of_sender.get(dataset, 0) + 1
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "metrics.jsonl").open("a") as file:
        rewards = {f"reward_{origin}": _mean(groups, origin) for origin in ("local", "external")}
        file.write(json.dumps({"step": step, "time": time.time(), "updated": bool(found), "trained_of": found, **rewards}) + "\n")


def _mean(groups: Sequence[ScoredGroup], origin: str) -> float | None:
    rewards = [reward for each in groups if each.origin == origin for reward in each.rewards]
    return sum(rewards) / len(rewards) if rewards else None


def group(
    taker: str,
    sender: str,
    question: str,
    answers: list[tuple[str, float]],
    *,
    dataset: str = "gcd",
    tokens: bool = True,
    n: int = 0,
) -> ScoredGroup:
    """A scored group of `sender`'s in a batch of `taker`'s, with token ids of the toy policy's
    tokenizer.
    """
    made = RolloutGroup(
        node=sender,
        created_at=time.time(),
        draw=n,
        task=text_task(TaskRef(dataset=dataset, seed=4, index=n), question, "6"),
        completions=[_completion(text, tokens) for text, _ in answers],
        model=ModelIdentity(name="models/base", tokenizer_hash="a" * 64),
        policy_version=6,
        sampling=Sampling(),
    )
    return ScoredGroup(
        group_id=content_id(encode(made)),
        origin="local" if taker == sender else "external",
        group=made,
        rewards=[reward for _, reward in answers],
        passed=[reward >= PASS_REWARD for _, reward in answers],
        scored_by=f"{taker}-verifier-0",
        score_seconds=0.01,
        scored_at=time.time(),
    )


def _completion(text: str, tokens: bool) -> Completion:
    from tokenizers import Tokenizer

    ids = Tokenizer.from_file(str(TOKENIZER)).encode(text).ids if tokens else []
    logprobs = [-0.02, -0.4, -1.5, -3.5, -6.0] * (len(ids) // 5 + 1)
    return Completion(
        text=text,
        finish_reason="stop",
        token_count=len(ids),
        token_ids=pack_ids(ids) if tokens else None,
        behaviour_logprobs=pack_logprobs(logprobs[: len(ids)]) if tokens else None,
    )


async def usual(swarm: PageSwarm, *, steps: int = 6) -> None:
    """Two nodes here and one elsewhere, half way through a run."""
    for name in ("alpha", "beta"):
        await swarm.node(name)
    await swarm.node("gamma", here=False)
    for name, gain in (("alpha", 0.06), ("beta", 0.055), ("gamma", 0.02)):
        for version in range(0, 175, 25):
            await swarm.score(swarm.report(name, version, 0.09 + gain * version / 25))
    for step in range(steps):
        for taker, other in (("alpha", "beta"), ("beta", "alpha")):
            right = [("6", 1.0)] * (1 + step % 4) + [("12", 0.0), ("8", 0.0), ("6 is it, surely", 0.2)]
            own = group(taker, taker, f"Find the greatest common divisor of {12 + step} and 18.", right, n=2 * step)
            asked, shares = f"Calculate {step} + {step + 3}.", step % 2 == 0
            theirs = group(taker, other, asked, right[1:], dataset="basic_arithmetic", n=2 * step + 1, tokens=shares)
            far = [group(taker, "gamma", "What is 2 * 3?", [("6", 1.0), ("5", 0.0)], n=step)] if step % 3 == 0 else []
            await swarm.batch(taker, own, theirs, *far)


async def a_hundred(swarm: PageSwarm) -> None:
    """`usual`, and 97 more nodes elsewhere with long names, twenty scores and a group each."""
    await usual(swarm)
    for number in range(97):
        name = f"node-{number:03d}-" + "n" * 20
        await swarm.node(name, here=False)
        for version in range(0, 500, 25):
            await swarm.score(swarm.report(name, version, 0.1 + number / 200 + version / 2000, datasets=8))
        answers = [*[("a" * 500, 1.0)] * 15, ("a" * 500, 0.0)]
        await swarm.batch("alpha", group("alpha", name, "q" * 2000, answers, tokens=False))


async def publish_raw(url: str, subject: str, payload: bytes) -> None:
    """As a stranger does who has no code of ours."""
    peer = await nats.connect(url)
    await peer.jetstream().publish(subject, payload)
    await peer.close()


class Dashboard:
    """`swarm dashboard` as a process. `url` empty: it finds by itself what to look at."""

    def __init__(self, url: str, *more: str, var_dir: Path | None = None) -> None:
        self.port = free_port_range()
        self.url = f"http://127.0.0.1:{self.port}/"
        environment = {name: value for name, value in os.environ.items() if not name.startswith("SWARM_")}
        if var_dir is not None:
            environment["SWARM_NODE__VAR_DIR"] = str(var_dir)
        arguments = ["--port", str(self.port), *(["--node-url", url] if url else []), *more]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "swarm_cli", "dashboard", *arguments],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def until_state(self, *states: str) -> dict[str, Any]:
        """Wait for the page's data to be in one of the states."""
        return self.until(lambda found: found["state"] in states, " or ".join(states))

    def until(self, wanted: Callable[[dict[str, Any]], bool], what: str) -> dict[str, Any]:
        """Wait for the page's data to be what is wanted."""
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.process.communicate()
            try:
                with urllib.request.urlopen(self.url + "swarm.json", timeout=10) as answer:
                    found: dict[str, Any] = json.load(answer)
                if wanted(found):
                    return found
            except (urllib.error.URLError, OSError):
                pass
            time.sleep(0.1)
        raise AssertionError(f"not {what} within {DEADLINE_S:.0f} s")

    def close(self) -> str:
        self.process.terminate()
        said, _ = self.process.communicate(timeout=180)
        assert self.process.returncode == 0, said
        return said
