"""Measures how much of a gain is only answer format: what a policy answers if the beginning of its
answer is given (`3 + 4 =`).

    python -m lab.given_form MODEL --config config/smollm2.toml > given.json
    python -m lab.answers base.json given.json

A policy trained on sums learns two things: to write `3 + 4 = 7` and nothing else, and what 3 + 4
is. Giving the base policy the first four symbols shows what the format alone is worth. Its answer
is then the first number in its continuation.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from lab.answers import NUMBER, Answer, number_value
from services.generator.engines import EngineError, SamplingParams, create_engine
from shared.config import NodeConfig, load_config
from shared.config.sections import ModelSection
from shared.contracts.messages import Task
from shared.model.prompts import render_prompt
from shared.model.reading import load_tokenizer
from shared.runtime.exits import FatalError
from shared.tasks import held_out_tasks

NEW_TOKENS = 10
# `7/2`, `7,5`, `7*2` and `7th` are not 7, while ` 7 + 1` is 7 with more text after it.
_NUMBER = re.compile(rf"\s*({NUMBER})(?!\w|%|[-+*/^.,]+[0-9])")


def begun(question: str) -> str:
    """How the answer to an arithmetic question begins.

    Raises:
        ValueError: the question has no `a + b` in it.
    """
    operation = Answer("", question, "", "", 0.0).operation
    if operation is None:
        raise ValueError(f"{question!r} does not ask for a sum, difference or product of two numbers")
    first, sign, second = operation
    return f"{first} {sign} {second} ="


def judged(task: Task, beginning: str, rest: str) -> Answer:
    """The answer up to its first number, and whether that number is the reference; the whole answer
    if it does not start with a number.
    """
    found = _NUMBER.match(rest)
    reference = number_value(task.answer)
    right = found is not None and reference is not None and number_value(found[1]) == reference
    said = f"{beginning} {found[1]}" if found else beginning + rest
    return Answer(task.ref.dataset, task.question, task.answer or "", said, float(right))


async def answers(model: str, config: NodeConfig) -> list[Answer]:
    """The policy's greedy answers to a configuration's held-out questions, with the beginning of
    each answer given.

    Raises: EngineError, ModelLoadError: the model cannot be run or loaded. ValueError: the
    configuration has no held-out questions, one cannot be derived, or one is not of the form `a +
    b`.
    """
    tasks = held_out_tasks(config.tasks, config.eval.tasks, draw=config.eval.draw)
    if not tasks:
        raise ValueError(f"the configuration has no held-out questions (eval.tasks is {config.eval.tasks}): set eval.tasks to 200")
    tokenizer = load_tokenizer(ModelSection(path=model))
    beginnings = [begun(task.question) for task in tasks]
    prompts = [
        [
            *render_prompt(tokenizer, task.question, config.model.system_prompt),
            *tokenizer(text, add_special_tokens=False)["input_ids"],
        ]
        for task, text in zip(tasks, beginnings, strict=True)
    ]
    engine = create_engine("transformers", model, device=config.model.device, dtype=config.model.dtype)
    await engine.start()
    try:
        samples = await engine.generate(prompts, 1, SamplingParams(temperature=0.0, max_new_tokens=NEW_TOKENS), seed=0)
    finally:
        await engine.close()
    return [judged(task, text, only.text) for task, text, (only,) in zip(tasks, beginnings, samples, strict=True)]


def main(arguments: Sequence[str]) -> int:
    """Print the answers in the format of `swarm eval --answers N --json`, with the fields that
    `lab.answers` reads. Returns the exit status.
    """
    parser = argparse.ArgumentParser(prog="python -m lab.given_form", description="Answers whose beginning is given.")
    parser.add_argument("model", help="Model folder.")
    parser.add_argument("--config", type=Path, required=True, help="Whose held-out tasks are asked.")
    chosen = parser.parse_args(arguments)
    try:
        found = asyncio.run(answers(chosen.model, load_config(chosen.config)))
    except (EngineError, FatalError, ValueError) as problem:
        print(problem, file=sys.stderr)
        return 1
    passed = sum(each.reward for each in found) / len(found)
    print(json.dumps({"model": chosen.model, "pass_rate": passed, "answers": [asdict(each) for each in found]}, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
