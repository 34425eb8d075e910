"""Compares policies' answers to the same held-out arithmetic questions, before and after training.

    swarm eval MODEL --answers 1000 --json --config FILE > answers.json        for each policy
    python -m lab.answers base.json trained.json ...

A pass rate alone does not show what was learned: to end an answer in its number, or to find the
right number. So answers are also counted by a second rule (the last number in the text) and by kind
of question. The gain is paired by question, with an interval that resamples facts (`3 + 4` and `4 +
3` are one fact), because questions repeat them.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import numpy as np
from pydantic import BaseModel, ValidationError

from shared.tasks.numerals import read_number

RESAMPLES = 10_000
NUMBER = (
    r"(?:(?<![^\W_])(?<![)\]}])[-\u2212])?(?<![0-9])(?<![0-9]\.)"
    r"(?:[0-9]+(?:,[0-9]{3}(?![0-9]))*(?:\.[0-9]+)?|(?<!\.)\.[0-9]+)(?:[eE][+-]?[0-9]{1,3})?"
)
"""A number in a text, for `number_value`. `3-4` is 3 and 4; U+2212 also counts as a minus."""
_NUMBER = re.compile(NUMBER)
# Not part of a longer expression: no decimal, bracket or other operator before or after it.
_QUESTION = re.compile(
    r"(?<![\w.(\u2212-])(?<![-+*/^\u2212] )(-?[0-9]{1,18}) ([+*-]) (-?[0-9]{1,18})(?![\w)!%]|\.[0-9]| ?[-+*/^\u2212])"
)
_TWO_NUMBERS = re.compile(r"\D*\d+\D+\d+\D*")

Rule = Callable[["Answer"], bool]


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


class _Record(BaseModel):
    answers: list[Answer] = []


def number_value(text: str | None) -> Fraction | None:
    """The value of a number that `NUMBER` found or that is a task's reference; None if it is not a
    number.
    """
    return read_number((text or "").replace("\N{MINUS SIGN}", "-"))


def passes(answer: Answer) -> bool:
    """Whether the verifier gave the answer full marks."""
    return answer.reward >= 1.0


def last_number_is_right(answer: Answer) -> bool:
    """Whether the last number in the text is the reference, whatever follows it. This rule is
    looser than any verifier's.
    """
    numbers = _NUMBER.findall(answer.answer)
    reference = number_value(answer.reference)
    return bool(numbers) and reference is not None and number_value(numbers[-1]) == reference


RULES: Mapping[str, Rule] = {"paid": passes, "last number is right": last_number_is_right}


def kinds(answer: Answer) -> Iterable[str]:
    """The lines of the table that an answer counts in."""
    yield "all"
    yield answer.dataset
    if answer.operation is None:
        return
    first, sign, second = answer.operation
    yield f"operator {sign}"
    if max(abs(first), abs(second)) > 10:  # noqa: PLR2004
        yield "a number above 10"
    reference = number_value(answer.reference)
    if reference is not None and reference < 0:
        yield "below zero"


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


def gain(base: Sequence[Answer], trained: Sequence[Answer], rule: Rule) -> Gain:
    """The gain of `trained` over `base` by `rule`.

    Raises:
        ValueError: they answered different questions.
    """
    if [(each.dataset, each.question) for each in base] != [(each.dataset, each.question) for each in trained]:
        raise ValueError("the two files answer different questions: use one configuration and one --n for both")
    changes: dict[str, list[int]] = {}
    for before, after in zip(base, trained, strict=True):
        changes.setdefault(before.fact, []).append(int(rule(after)) - int(rule(before)))
    sums = np.array([sum(fact_changes) for fact_changes in changes.values()])
    counts = np.array([len(fact_changes) for fact_changes in changes.values()])
    drawn = np.random.default_rng(0).integers(len(sums), size=(RESAMPLES, len(sums)))
    low, high = np.quantile(sums[drawn].sum(axis=1) / counts[drawn].sum(axis=1), [0.025, 0.975])
    single = [change for fact_changes in changes.values() for change in fact_changes]
    return Gain(float(np.mean(single)), float(low), float(high), won=single.count(1), lost=single.count(-1), facts=len(changes))


def table(files: Mapping[str, Sequence[Answer]]) -> str:
    """Markdown: one row per kind of question and rule, one column per file, right answers out of
    all.
    """
    names = list(files)
    lines = [f"| rule | questions | {' | '.join(names)} |", f"|---|---|{'---|' * len(names)}"]
    every_kind = list(dict.fromkeys(kind for answers in files.values() for each in answers for kind in kinds(each)))
    datasets = {each.dataset for answers in files.values() for each in answers}
    order = ["all", *sorted(datasets), *sorted(kind for kind in every_kind if kind != "all" and kind not in datasets)]
    for rule, holds in RULES.items():
        for kind in order:
            cells = []
            for name in names:
                judged = [holds(each) for each in files[name] if kind in kinds(each)]
                cells.append(f"{sum(judged)}/{len(judged)} = {sum(judged) / len(judged):.3f}" if judged else "")
            lines.append(f"| {rule} | {kind} | {' | '.join(cells)} |")
    return "\n".join(lines)


def read_files(paths: Sequence[str]) -> dict[str, list[Answer]]:
    """Answers by file name, or by path if two names are equal.

    Raises:
        OSError: a file cannot be read.
        ValueError: a file is named twice, or holds no answers.
    """
    for path in paths:
        if paths.count(path) > 1:
            raise ValueError(f"{path} is named twice: name each file once")
    stems = [Path(path).stem for path in paths]
    names = stems if len(set(stems)) == len(stems) else paths
    return {name: read_answers(Path(path)) for name, path in zip(names, paths, strict=True)}


def main(paths: Sequence[str]) -> int:
    """Print the table, and each later file's gain over the first. Returns the exit status."""
    if not paths:
        print("usage: python -m lab.answers BASE.json [TRAINED.json ...]", file=sys.stderr)
        return 2
    try:
        files = read_files(paths)
        base, *trained = files
        print(table(files))
        for name in trained:
            for rule, holds in RULES.items():
                found = gain(files[base], files[name], holds)
                print(
                    f"\n{name} over {base}, {rule}: {found.mean:+.3f} ({found.low:+.3f} to {found.high:+.3f}; 95 %, "
                    f"resampling {found.facts} facts), {found.won} won, {found.lost} lost"
                )
    except (OSError, ValueError) as problem:
        print(problem, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
