"""Compares what the border spends on a foreign group of four turns, which are played again, and on
one of a single turn of as many tokens.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from pathlib import Path

import psutil
from transformers import AutoTokenizer

from benchmarks.measuring import Result, in_turns, quotients
from shared.contracts.messages import RolloutGroup
from shared.identity.keys import SigningKey, new_seed
from shared.tasks.sandbox import JobResult, ScorerPool
from tests.integration.test_turns import BASE, Gate, call, group_of, said, source

GROUPS, COMPLETIONS, PAIRS = 100, 8, 7


async def measure_verifier_turns() -> Result:
    """CPU time of all that a foreign group passes: checks of the message, sandbox, verdict."""
    tokenizer, chance, draws = AutoTokenizer.from_pretrained(BASE, revision=None), random.Random(1), iter(range(10**6))
    with tempfile.TemporaryDirectory() as folder:
        several = source(Path(folder), tools=["calculator"], verifier="final_number", max_turns=4)
        single = source(Path(folder), verifier="final_number")
        limits = {"workers": 1, "answer_timeout_s": 10.0, "memory_mb": 2048, "foreign_workers": 1}

        def made(turns: int) -> RolloutGroup:
            answers = []
            for _ in range(COMPLETIONS):
                calls = [call(f"{chance.randrange(10**6)}*{chance.randrange(10**6)}") for _ in range(3)]
                parts = [*calls, f"It is {chance.randrange(10**9)}, as far as I see."]
                answers.append(said(tokenizer, parts if turns > 1 else ["".join(parts)]))
            return group_of(several if turns > 1 else single, next(draws), answers)

        async with (
            ScorerPool(tasks=[several], **limits) as of_several,  # type: ignore[arg-type]
            ScorerPool(tasks=[single], **limits) as of_single,  # type: ignore[arg-type]
        ):
            gates = {4: Gate(Path(folder), several, of_several), 1: Gate(Path(folder), single, of_single)}
            key = SigningKey(new_seed())

            async def cost(turns: int) -> float:
                """CPU milliseconds for each group."""
                groups = [made(turns) for _ in range(GROUPS)]
                before = _cpu_s()
                for group in groups:
                    found = await gates[turns].verdict(group, key)
                    if not isinstance(found, JobResult) or any(len(replies) != turns - 1 for replies in found.said):
                        raise RuntimeError(f"a group of {turns} turns was not taken as it was said: {found}")
                return 1e3 * (_cpu_s() - before) / GROUPS

            ours, theirs = await in_turns(lambda _: cost(4), lambda _: cost(1), pairs=PAIRS)
    return Result(
        row="verifier-turns",
        measured="CPU ms for a foreign group of answers of four turns with three calls of the calculator: checks of the message, "
        "playing again in the sandbox, scoring, verdict",
        against="a foreign group of answers of one turn with as many tokens, scored by the same verifier",
        workload=f"{GROUPS} groups of {COMPLETIONS} answers a turn, gcd, final_number; {PAIRS} pairs",
        unit="ms",
        ratios=quotients(ours, theirs),
        bar=1.5,
        direction="at most",
        product=statistics.median(ours),
        plain=statistics.median(theirs),
        remarks=["signing, which is the sender's work, is in both sides; no server is"],
    )


def _cpu_s() -> float:
    """CPU seconds of this process and its sandbox's, of those that ended too."""
    times = [process.cpu_times() for process in psutil.Process().children(recursive=True)]
    return time.process_time() + sum(each.user + each.system + each.children_user + each.children_system for each in times)
