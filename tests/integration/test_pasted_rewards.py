"""Rewards as people paste them: whatever TRL or verl would take is called as they call it, and what
cannot be is told with its remedy.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from shared.config.task_sections import TaskSpec
from shared.contracts.messages import TaskRef
from shared.tasks.file_source import with_row_name
from shared.tasks.sandbox import ScorerPool, ScoringJob

PASTED = """
import asyncio, functools, json, pathlib
from decimal import Decimal
import numpy as np

def verl_keywords(*, solution_str, ground_truth, method="strict", **kwargs): return float(str(ground_truth) == solution_str)
def verl_all(**kwargs): return float(str(kwargs["ground_truth"]) == kwargs["solution_str"])
def right(completions, answer, scale=1.0, **kwargs): return [scale * (text == str(each)) for text, each in zip(completions, answer)]
def trl_all(*args, **kwargs):
    kwargs["log_metric"]("right", 1.0)
    return right(kwargs.get("completions"), kwargs["answer"])
short = lambda completions, answer, **kwargs: right(completions, answer)
half = functools.partial(right, scale=0.5)
def generator(completions, answer, **kwargs): yield from right(completions, answer)
def mapped(completions, answer, **kwargs): return map(float, right(completions, answer))
def array(completions, answer, **kwargs): return np.array(right(completions, answer))
def bools(completions, answer, **kwargs): return [np.bool_(each) if each else False for each in right(completions, answer)]
def decimals(completions, answer, **kwargs): return [Decimal(each) for each in right(completions, answer)]
async def awaits(completions, answer, **kwargs):
    async with asyncio.Semaphore(1):
        await asyncio.sleep(0.01)
    return right(completions, answer)

both = [right, short]
def beside(completions, **kwargs): return json.loads(pathlib.Path(__file__).with_name("words.json").read_text())
"""
TOLD = {"both": "name each reward of it", "beside": "as a Python file beside the reward"}


@pytest.mark.slow
def test_pasted_rewards_are_called_as_where_they_come_from(tmp_path: Path) -> None:
    (tmp_path / "q.jsonl").write_text("".join(json.dumps({"question": f"{n} + 1?", "answer": n + 1}) + "\n" for n in range(8)))
    (tmp_path / "r.py").write_text(PASTED)
    (tmp_path / "words.json").write_text("[1.0, 1.0]")
    written = ("verl_keywords verl_all right trl_all short half generator", "mapped array bools decimals awaits", *TOLD)
    names = " ".join(written).split()
    specs = {name: with_row_name(TaskSpec(path=str(tmp_path / "q.jsonl"), reward=f"{tmp_path}/r.py:{name}")) for name in names}

    async def run(spec: TaskSpec) -> tuple[list[float | None], str]:
        job = ScoringJob(ref=TaskRef(dataset=spec.dataset, seed=1, index=3), texts=["4", "5"])
        async with ScorerPool(workers=1, answer_timeout_s=20.0, memory_mb=4096, tasks=[spec]) as pool:
            (result,) = await pool.run([job])
        return result.rewards, result.detail

    for name, spec in specs.items():
        rewards, detail = asyncio.run(run(spec))
        if name in TOLD:
            assert TOLD[name] in detail
        else:
            assert rewards == [0.5 if name == "half" else 1.0, 0.0], (name, detail)
