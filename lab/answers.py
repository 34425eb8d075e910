"""Compares policies' answers to the same held-out arithmetic questions, before and after training.

    swarm eval MODEL --answers 1000 --json --config FILE > answers.json      for each policy
    python -m lab.answers --begun MODEL --config FILE > begun.json           with each answer begun
    python -m lab.answers base.json trained.json ...

A policy trained on sums learns two things: to write `3 + 4 = 7` and nothing else, and what 3 + 4
is. Giving the base policy the first four symbols shows what the format alone is worth; its answer
is then the first number in its continuation. A gain is paired by question, with an interval that
resamples facts (`3 + 4` and `4 + 3` are one fact), because questions repeat them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path

import numpy as np
from pydantic import BaseModel, ValidationError

from services.generator.engines import EngineError, SamplingParams, create_engine
from shared.config import NodeConfig, load_config
from shared.config.model_section import ModelSection
from shared.contracts.messages import Task
from shared.model.prompts import render_prompt
from shared.model.reading import load_tokenizer
from shared.runtime.exits import FatalError
from shared.tasks import held_out_tasks
from shared.tasks.numerals import read_number

RESAMPLES = 10_000
NEW_TOKENS = 10
_NUMBER = (
    r"(?:(?<![^\W_])(?<![)\]}])[-\u2212])?(?<![0-9])(?<![0-9]\.)"
    r"(?:[0-9]+(?:,[0-9]{3}(?![0-9]))*(?:\.[0-9]+)?|(?<!\.)\.[0-9]+)(?:[eE][+-]?[0-9]{1,3})?"
)
"""A number in a text, for `_value`. `3-4` is 3 and 4; U+2212 also counts as a minus."""
# `7/2`, `7,5`, `7*2` and `7th` are not 7, while ` 7 + 1` is 7 with more text after it.
_FIRST_NUMBER = re.compile(rf"\s*({_NUMBER})(?!\w|%|[-+*/^.,]+[0-9])")
# Not part of a longer expression: no decimal, bracket or other operator before or after it.
_QUESTION = re.compile(
    r"(?<![\w.(\u2212-])(?<![-+*/^\u2212] )(-?[0-9]{1,18}) ([+*-]) (-?[0-9]{1,18})(?![\w)!%]|\.[0-9]| ?[-+*/^\u2212])"
)
_TWO_NUMBERS = re.compile(r"\D*\d+\D+\d+\D*")


@dataclass(frozen=True, slots=True)
class Answer:
    """One line of `answers` in what `swarm eval --json` prints."""

    dataset: str
    question: str
    reference: str | None
    answer: str
    reward: float

    @property
    def operation(self) -> tuple[int, str, int] | None:
        """The question's two whole numbers and the operator between them; None if it asks for
        anything else or more.
        """
        found = _QUESTION.search(self.question) if _TWO_NUMBERS.fullmatch(self.question) else None
        return (int(found[1]), found[2], int(found[3])) if found else None

    @property
    def fact(self) -> str:
        """The fact that the question tests: the same for `3 + 4` and `4 + 3`, however they are
        worded.
        """
        if self.operation is None:
            return self.question
        first, sign, second = self.operation
        if sign != "-":
            first, second = sorted((first, second))
        return f"{first} {sign} {second}"

    @property
    def passed(self) -> bool:
        """Whether the verifier gave it full marks."""
        return self.reward >= 1.0


class _Record(BaseModel):
    answers: list[Answer] = []


def read_answers(path: Path) -> list[Answer]:
    """Answers from a file written by `swarm eval --answers N --json`, by dataset and question.

    Raises: OSError: it cannot be read. ValueError: it holds no answers, or something else.
    """
    try:
        answers = _Record.model_validate_json(path.read_bytes(), strict=True).answers
        problem = "" if answers else " contains no answers"
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        problem = f" is not a record of answers ({': '.join([*map(str, first['loc']), first['msg']])})"
    if problem:
        raise ValueError(f"{path}{problem}: make it with `swarm eval MODEL --answers 1000 --json`")
    return sorted(answers, key=lambda each: (each.dataset, each.question))


@dataclass(frozen=True, slots=True)
class Gain:
    """The gain of one policy over another on the same questions: fractions of the questions, and a
    95 % interval over facts.
    """

    mean: float
    low: float
    high: float
    won: int
    lost: int
    facts: int


def gain(base: Sequence[Answer], trained: Sequence[Answer]) -> Gain:
    """The gain of `trained` over `base`.

    Raises:
        ValueError: they answered different questions.
    """
    if [(each.dataset, each.question) for each in base] != [(each.dataset, each.question) for each in trained]:
        raise ValueError("the two files answer different questions: use one configuration and one --n for both")
    changes: dict[str, list[int]] = {}
    for before, after in zip(base, trained, strict=True):
        changes.setdefault(before.fact, []).append(after.passed - before.passed)
    sums = np.array([sum(fact_changes) for fact_changes in changes.values()])
    counts = np.array([len(fact_changes) for fact_changes in changes.values()])
    drawn = np.random.default_rng(0).integers(len(sums), size=(RESAMPLES, len(sums)))
    low, high = np.quantile(sums[drawn].sum(axis=1) / counts[drawn].sum(axis=1), [0.025, 0.975])
    single = [change for fact_changes in changes.values() for change in fact_changes]
    return Gain(float(np.mean(single)), float(low), float(high), won=single.count(1), lost=single.count(-1), facts=len(changes))


def gain_lines(files: Mapping[str, Sequence[Answer]]) -> list[str]:
    """Each file's pass rate, and each later file's gain over the first."""
    (base, base_answers), *trained = files.items()
    lines = [f"{name}: {sum(each.passed for each in answers)}/{len(answers)} passed" for name, answers in files.items()]
    for name, answers in trained:
        found = gain(base_answers, answers)
        lines.append(
            f"{name} over {base}: {found.mean:+.3f} ({found.low:+.3f} to {found.high:+.3f}; 95 %, "
            f"resampling {found.facts} facts), {found.won} won, {found.lost} lost"
        )
    return lines


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
    found = _FIRST_NUMBER.match(rest)
    reference = _value(task.answer)
    right = found is not None and reference is not None and _value(found[1]) == reference
    said = f"{beginning} {found[1]}" if found else beginning + rest
    return Answer(task.ref.dataset, task.text, task.answer or "", said, float(right))


def _value(text: str | None) -> Fraction | None:
    return read_number((text or "").replace("\N{MINUS SIGN}", "-"))


async def begun_answers(model: str, config: NodeConfig) -> list[Answer]:
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
    beginnings = [begun(task.text) for task in tasks]
    prompts = [
        [
            *render_prompt(tokenizer, task.prompt, config.model.system_prompt),
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
    """Print gains, or with --begun the answers in the format of `swarm eval --answers N --json`.
    Returns the exit status.
    """
    parser = argparse.ArgumentParser(prog="python -m lab.answers", description="Gains of policies over the first one.")
    parser.add_argument("files", nargs="*", type=Path, help="files of answers, the base policy's first")
    parser.add_argument("--begun", metavar="MODEL", help="instead answer the held-out questions with each answer begun")
    parser.add_argument("--config", type=Path, help="whose held-out questions --begun asks")
    asked = parser.parse_args(arguments)
    try:
        if asked.begun and asked.config:
            found = asyncio.run(begun_answers(asked.begun, load_config(asked.config)))
            passed = sum(each.reward for each in found) / len(found)
            print(json.dumps({"model": asked.begun, "pass_rate": passed, "answers": [asdict(each) for each in found]}, indent=2))
        elif asked.files:
            print("\n".join(gain_lines({path.stem: read_answers(path) for path in asked.files})))
        else:
            parser.error("name the files, or give --begun with --config")
    except (OSError, EngineError, FatalError, ValueError) as problem:
        print(problem, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
