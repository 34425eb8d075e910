"""The reward for an answer. Scoring runs no text as code but may take long on hostile text, so
foreign text must be scored in the sandbox.
"""

from __future__ import annotations

import math
from collections.abc import MutableSequence, Sequence
from numbers import Real
from typing import Any

from shared.contracts.messages import Task
from shared.registry import DEFAULT_VERIFIER, PACKAGE_FAILURES, failure, telling
from shared.tasks.answers import extract_answer
from shared.tasks.derive import Item, TaskError, derive_item
from shared.tasks.verifiers import AnswerScorer, load_verifier

_ODD_TEXT = (ValueError, ArithmeticError, LookupError, RecursionError)

Word = memoryview | MutableSequence[int]
"""A writable sequence with an integer at index 0."""


def score_answer(task: Task, text: str, verifier: str = DEFAULT_VERIFIER) -> float:
    """Reward in [0, 1] for a completion's text, in this process.

    The answer is extracted (`extract_answer`) and scored against the task derived again from
    `task.ref`; the question, answer and metadata in `task` are not used. A scorer that raises or
    returns something other than a number counts as 0.

    Raises:
        TaskError: the task cannot be derived from the reference, or the verifier cannot be used for
            it.
    """
    (reward,) = score_texts(derive_item(task.ref), verifier, [text])
    return reward


def scorer_of(verifier: str, item: Item) -> AnswerScorer:
    """The scorer that a verifier makes for a task.

    Raises:
        TaskError: there is no such verifier, or it cannot judge this task: it says so, raises
            anything else, or makes nothing that can be called.
    """
    make = load_verifier(verifier)
    with telling(lambda why: TaskError("task_verifier", f"verifier {verifier} cannot judge this task: {why}"), TaskError):
        score = make(item)
    if not callable(score):
        made = type(score).__name__
        raise TaskError("task_verifier", f"verifier {verifier} made {made} and no function that scores answers: `return` it")
    return score


def trial_problem(verifier: str, item: Item) -> TaskError | None:
    """What is wrong with the reward of the task's own answer: a scorer that returns no number, or
    cannot run, pays 0 for ever. None if nothing is, or if it raises what reading an odd text may
    raise, because a reference answer need not have the form of an answer.
    """
    score = scorer_of(verifier, item)
    if item.task.answer is None:
        return None
    try:
        found = score(item.task.answer)
    except _ODD_TEXT:
        return None
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # as `telling` does
        if isinstance(error, AttributeError) and error.obj is None:  # of a pattern that did not match
            return None
        raised = f"raised {failure(error)} for the reference answer"
        return TaskError("task_verifier", f"verifier {verifier} {raised}, and would pay 0 for every answer: correct it")
    if _is_number(found):
        return None
    return TaskError(
        "task_verifier", f"verifier {verifier} returned {_shown(found)} for the reference answer: have it return a number in [0, 1]"
    )


def score_texts(
    item: Item,
    verifier: str,
    texts: Sequence[str | None],
    progress: Word | None = None,
    first_step: int = 0,
    rewards: list[float] | None = None,
    problems: list[str] | None = None,
) -> list[float]:
    """`score_answer` for many texts of one derived task. A text that is None, or has no
    answer, earns 0.

    `progress[0]` is set to `first_step`, `first_step + 1`, ... before each text. Rewards are
    appended to `rewards` one by one, so that another process can read them before the last one is
    there. What the scorer raised, or returned that is no number, is appended to `problems` for the
    first such text, if one is given.

    Raises:
        TaskError: there is no such verifier, or it cannot be used for this task.
    """
    score = scorer_of(verifier, item)
    word: Word = [0] if progress is None else progress
    rewards = [] if rewards is None else rewards
    step = first_step
    # Inlined, because on cheap datasets each additional call is a tenth of the scorer's own time.
    for text in texts:
        word[0] = step
        step += 1
        raw: Any = 0.0
        answer = None if text is None else extract_answer(text)
        if answer is not None:
            try:
                raw = score(answer)
            except PACKAGE_FAILURES as error:  # whatever a scorer raises on odd text is the answer's fault
                raw = 0.0
                if problems == []:
                    problems.append(f"raised {failure(error)}")
        if type(raw) is float and 0.0 <= raw <= 1.0:
            rewards.append(raw)
            continue
        if problems == [] and not _is_number(raw):
            problems.append(f"returned {_shown(raw)} and no number in [0, 1]")
        rewards.append(_in_unit_interval(raw))
    return rewards


def _shown(found: Any) -> str:
    return f"{type(found).__name__} ({str(found)[:40]})"


def _is_number(raw: Any) -> bool:
    return isinstance(raw, Real) and -math.inf < raw < math.inf  # type: ignore[operator]  # a Real compares with a float


def _in_unit_interval(raw: Any) -> float:
    # Clipped first: not every integer fits into a float.
    return float(min(1, max(0, raw))) if _is_number(raw) else 0.0
