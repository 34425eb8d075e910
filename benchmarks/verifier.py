"""Compares the verifier, and its scoring path alone, with reasoning-gym's own derivation and scorer
in a plain loop.
"""

from __future__ import annotations

import asyncio
import os
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.measuring import Result, in_turns, quotients
from benchmarks.workload import CHEAP_TASKS, answered_group, answered_tasks, node_config, node_plane, running_server, spec_json
from shared.config import NodeConfig
from shared.config.verifier_section import VerifierSection
from shared.contracts.codec import decode, encode
from shared.contracts.messages import RolloutGroup, Task
from shared.contracts.subjects import node_rollouts, node_rollouts_stream, node_scored, node_scored_stream
from shared.tasks.sandbox import ScorerPool
from shared.transport.base import Transport

COMPLETIONS, GROUPS, PAIRS = 8, 400, 7
SCORED_GROUPS = 4_000
"""Groups in a turn of the scoring path: long enough (50 ms of the plain loop) that its batches
overlap as they do under load.
"""
TURN_TIMEOUT_S = 60.0
IN_FLIGHT = 64
Answered = list[tuple[Task, list[str]]]


def _config(folder: Path, url: str, *, workers: int = 1) -> NodeConfig:
    return node_config(folder, url, tasks=CHEAP_TASKS, verifier={"share": "none", "workers": workers})


def _turns(config: NodeConfig, groups: int = GROUPS) -> dict[int, Answered]:
    """Different tasks every turn, so that neither side can use results of an earlier turn."""
    return {turn: answered_tasks(config, turn * groups, groups, COMPLETIONS) for turn in range(PAIRS + 1)}


class PlainLoop:
    """reasoning-gym alone: one dataset for each seed, which the draws share. Every task is derived
    once, then its scorer is called.
    """

    def score(self, answered: Answered) -> float:
        """Seconds."""
        import json

        from reasoning_gym.factory import create_dataset

        datasets: dict[tuple[str, int], object] = {}
        started = time.perf_counter()
        for task, texts in answered:
            ref = task.ref
            key = (ref.dataset, ref.seed)
            if key not in datasets:
                datasets[key] = create_dataset(ref.dataset, seed=ref.seed, **json.loads(ref.config))
            dataset = datasets[key]
            entry = dataset[ref.index]
            for text in texts:
                dataset.score_answer(answer=text, entry=entry)
        return time.perf_counter() - started


async def measure_verifier_scoring() -> Result:
    """`ScorerPool.score` with a verifier's default number of workers, in answers per second."""
    return await _measure_scoring("verifier-scoring", VerifierSection().workers)


async def measure_verifier_scoring_one() -> Result:
    """The same with one worker."""
    return await _measure_scoring("verifier-scoring-one", 1)


async def _measure_scoring(row: str, workers: int) -> Result:
    """The scoring path alone, without NATS: `ScorerPool`, compared with reasoning-gym in this
    process. The server's address in the configuration is never used.
    """
    with tempfile.TemporaryDirectory() as folder:
        config = _config(Path(folder), "nats://127.0.0.1:4222", workers=workers)
        turns = _turns(config, SCORED_GROUPS)
        loop = PlainLoop()
        async with ScorerPool.from_config(config.verifier) as pool:

            async def product(turn: int) -> float:
                started = time.perf_counter()
                await pool.score(turns[turn])
                return SCORED_GROUPS * COMPLETIONS / (time.perf_counter() - started)

            async def plain(turn: int) -> float:
                return SCORED_GROUPS * COMPLETIONS / loop.score(turns[turn])

            ours, theirs = await in_turns(product, plain, pairs=PAIRS)
    processes = "one scorer process" if workers == 1 else f"{workers} scorer processes, the default"
    return Result(
        row=row,
        measured=f"scored answers/s of the scoring path, {processes}: sandboxed, derivation and comparison of the task included",
        against="reasoning-gym deriving the same tasks and calling its scorer in a plain loop, one process",
        workload=_workload(config, SCORED_GROUPS),
        unit="answers/s",
        ratios=quotients(ours, theirs),
        bar=0.5,
        direction="at least",
        product=statistics.median(ours),
        plain=statistics.median(theirs),
        remarks=[
            "the product also extracts each answer, guards the scorer, compares the task with the one sent, "
            "and notes every step in shared memory, so that a hang is blamed on one answer",
            "tasks and answers go to the sandbox and rewards come back through pipes, in batches of about 20 ms, two under way",
        ],
    )


async def measure_verifier_service() -> Result:
    """A real `python -m services.verifier` process between two streams of a real server, in groups
    per second.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        async with running_server(folder) as server:
            config = _config(folder, server.url)
            turns = _turns(config)
            loop = PlainLoop()
            async with node_plane(config, "bench") as transport:
                process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-m", "services.verifier", "--config", str(_write_toml(config, folder))),
                    env={**os.environ, "SWARM_NODE__VAR_DIR": str(folder)},
                )
                try:

                    async def product(turn: int) -> float:
                        return await _drain(config, transport, process.pid, turn, turns[turn])

                    async def plain(turn: int) -> float:
                        return GROUPS / loop.score(turns[turn])

                    ours, theirs = await in_turns(product, plain, pairs=PAIRS)
                    publish_s = await _publish_s(config, transport, turns[0])
                finally:
                    process.send_signal(signal.SIGCONT)
                    process.terminate()
                    await process.wait()
    return Result(
        row="verifier-service",
        measured="verified groups/s of one verifier process: from the rollouts stream to the scored stream of a real NATS server",
        against="reasoning-gym deriving the same tasks and calling its scorer in a plain loop",
        workload=_workload(config),
        unit="groups/s",
        ratios=quotients(ours, theirs),
        bar=0.5,
        direction="at least",
        product=statistics.median(ours),
        plain=statistics.median(theirs),
        remarks=[
            "the groups are in the stream while the verifier is stopped (SIGSTOP); clock from SIGCONT until the last one is stored",
            f"a group costs the plain loop {1e6 / statistics.median(theirs):.0f} microseconds and the service "
            f"{1e6 / statistics.median(ours):.0f}; "
            "the service fetches, decodes and validates, hashes, scores in the sandbox, encodes, publishes, waits for the server's "
            "acknowledgement and acknowledges each group; the plain loop has its answers in memory and stores nothing",
            f"parts of it alone, per group: decoding and validating {1e6 * _decode_s(config, turns[0]):.0f} microseconds, one "
            f"acknowledged publish with {IN_FLIGHT} in flight {1e6 * publish_s:.0f}; it needs two such round trips per group",
        ],
    )


async def _drain(config: NodeConfig, transport: Transport, pid: int, turn: int, answered: Answered) -> float:
    """Groups per second."""
    node = config.node.id
    scored = node_scored_stream(node)
    os.kill(pid, signal.SIGSTOP)
    payloads = [encode(answered_group(config, turn * GROUPS + k, *each)) for k, each in enumerate(answered)]
    before = (await transport.stream_state(scored)).last_seq
    stream = node_rollouts_stream(node)
    await asyncio.gather(
        *(
            transport.publish(node_rollouts(node), payload, stream=stream, message_id=f"draw-{turn * GROUPS + k}")
            for k, payload in enumerate(payloads)
        )
    )
    os.kill(pid, signal.SIGCONT)
    started = time.perf_counter()
    deadline = time.monotonic() + TURN_TIMEOUT_S
    while (await transport.stream_state(scored)).last_seq < before + GROUPS:
        if time.monotonic() > deadline:
            raise RuntimeError(f"the verifier did not score {GROUPS} groups within {TURN_TIMEOUT_S:.0f} s")
        await asyncio.sleep(0.01)
    return GROUPS / (time.perf_counter() - started)


def _decode_s(config: NodeConfig, answered: Answered) -> float:
    """Seconds to decode and validate one group's message, as the median over a turn's groups."""
    payloads = [encode(answered_group(config, draw, *each)) for draw, each in enumerate(answered)]
    seconds = []
    for payload in payloads:
        started = time.perf_counter()
        decode(payload, RolloutGroup)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


async def _publish_s(config: NodeConfig, transport: Transport, answered: Answered) -> float:
    """Seconds per message to only publish a turn's groups: the cost of the server and its
    client.
    """
    node = config.node.id
    payloads = [encode(answered_group(config, draw, *each)) for draw, each in enumerate(answered)]
    slots = asyncio.Semaphore(IN_FLIGHT)

    async def publish(number: int, payload: bytes) -> None:
        async with slots:
            await transport.publish(node_scored(node), payload, stream=node_scored_stream(node), message_id=f"alone-{number}")

    started = time.perf_counter()
    await asyncio.gather(*(publish(number, payload) for number, payload in enumerate(payloads)))
    return (time.perf_counter() - started) / len(payloads)


def _write_toml(config: NodeConfig, folder: Path) -> Path:
    """Write the same configuration to a file for the process."""
    file = folder / "verifier.toml"
    tasks = "".join(f'[[tasks]]\ndataset = "{spec.dataset}"\nweight = {spec.weight}\n' for spec in config.tasks)
    file.write_text(
        f'[node]\nid = "{config.node.id}"\nrun = "{config.node.run}"\n[nats]\nnode_url = "{config.nats.node_url}"\n'
        f'swarm_url = "none"\n[sampler]\nexternal = 0\n[eval]\ntasks = 0\n[http]\nbase_port = 0\n[log]\nlevel = "error"\n'
        f'[verifier]\nshare = "none"\nworkers = 1\n{tasks}'
    )
    return file


def _workload(config: NodeConfig, groups: int = GROUPS) -> str:
    return (
        f"{groups} groups of {COMPLETIONS} short answers a turn, half chain_sum, half gcd, reasoning-gym's default configs "
        f"({spec_json(config)}), different tasks every turn; {PAIRS} pairs"
    )
