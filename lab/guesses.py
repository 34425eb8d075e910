"""Counts how many questions in a file of answers can be passed with little or no arithmetic.

    python -m lab.guesses base-given.json [TRAINED.json ...]

Some rules compute nothing (a constant, a copied number, identities). Others are rules that a policy
may have learned instead of arithmetic, and are applied on top of the first file's answers: anything
times 0 is 0, `0 - n` is -n, and any other negative result is -1.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from lab.answers import Answer, gain, passes, read_answers

Guess = Callable[[int, str, int], int | None]
"""Two numbers and the operator between them -> an answer, or None if the rule does not apply."""


def identities(first: int, sign: str, second: int) -> int | None:
    """Multiplication by 0 and 1, addition and subtraction of 0."""
    if sign == "*":
        if 0 in (first, second):
            return 0
        return second if first == 1 else first if second == 1 else None
    if second == 0:
        return first
    return second if sign == "+" and first == 0 else None


def three_rules(first: int, sign: str, second: int) -> int | None:
    """Anything times 0 is 0, 0 - n is -n, and any other negative result is -1."""
    if sign == "*" and 0 in (first, second):
        return 0
    if sign == "-" and first < second:
        return -second if first == 0 else -1
    return None


RULES: dict[str, Guess] = {
    "copies the first number": lambda first, sign, second: first,
    "copies the second number": lambda first, sign, second: second,
    "copies the larger number": lambda first, sign, second: max(first, second),
    "copies the smaller number": lambda first, sign, second: min(first, second),
    "identities": identities,
    "identities, else the sum": lambda first, sign, second: (
        first + second if (known := identities(first, sign, second)) is None else known
    ),
    "the sum": lambda first, sign, second: first + second,
    "-n for 0 - n, -1 for what else is below zero, nothing else": lambda first, sign, second: (
        three_rules(first, sign, second) if sign == "-" else None
    ),
}


def right(answers: Sequence[Answer], guess: Guess) -> list[bool]:
    """For each question, which must be arithmetic, whether the rule gives its reference answer."""
    found = []
    for each in answers:
        if each.operation is None:
            raise ValueError(f"{each.question!r} does not ask for a sum, difference or product of two numbers")
        found.append(str(guess(*each.operation)) == each.reference)
    return found


def with_rules(answers: Sequence[Answer], guess: Guess) -> list[Answer]:
    """The answers, each replaced by the rule's answer if the rule applies."""
    changed = []
    for each, hit in zip(answers, right(answers, guess), strict=True):
        assert each.operation is not None
        known = guess(*each.operation)
        changed.append(each if known is None else Answer(each.dataset, each.question, each.reference, str(known), float(hit)))
    return changed


def main(paths: Sequence[str]) -> int:
    """Print each rule's pass rate, and the gain of later files over the first with `three_rules`.
    Returns the exit status.
    """
    if not paths:
        print("usage: python -m lab.guesses BASE.json [TRAINED.json ...]", file=sys.stderr)
        return 2
    try:
        base, *trained = [read_answers(Path(path)) for path in paths]
        constants = Counter(each.reference for each in base)
        by_dataset = {
            name: Counter(each.reference for each in base if each.dataset == name) for name in {each.dataset for each in base}
        }
        print(f"the constant {constants.most_common(1)[0][0]}: {constants.most_common(1)[0][1] / len(base):.3f}")
        print(f"a constant for each dataset: {sum(of.most_common(1)[0][1] for of in by_dataset.values()) / len(base):.3f}")
        for name, of in sorted(by_dataset.items()):
            print(f"    {name}: {of.most_common(1)[0][0]} passes {of.most_common(1)[0][1] / of.total():.3f}")
        for name, guess in RULES.items():
            hits = right(base, guess)
            print(f"{name}: {np.mean(hits):.3f} ({sum(hits)})")
        ruled = with_rules(base, three_rules)
        print(f"the first file's answers: {np.mean([each.reward for each in base]):.3f}")
        print(f"with the three rules: {np.mean([each.reward for each in ruled]):.3f}")
        for path, answers in zip(paths[1:], trained, strict=True):
            found = gain(ruled, answers, passes)
            print(f"{Path(path).stem} over these: {found.mean:+.3f} ({found.low:+.3f} to {found.high:+.3f})")
    except (OSError, ValueError, KeyError) as problem:
        print(problem, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
