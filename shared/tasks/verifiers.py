"""Verifiers: built-in ones, and installed ones from the entry-point group `swarm.verifiers`.

A verifier is a function from a derived task (`Item`) to the scorer of its answers:
`verifier(item)(answer)` is a finite number, used as it is; or a pair of the number and whether the
answer passes. It may raise `TaskError` for a task that it cannot judge. If the scorer raises, is
late or returns anything else, that answer's reward is unknown. It runs in the sandbox's worker,
which has no environment, network or writable files. Its name comes from this node's `[[tasks]]`
entries, never from the wire.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, cast

from shared.contracts.messages import Task
from shared.contracts.wire import MAX_REWARD
from shared.environment_files import EnvironmentSpec, is_environment
from shared.registry import DEFAULT_VERIFIER, SCORED_LOCALLY, VERIFIERS, failure, plugin_errors
from shared.reward_files import Replies, Requests, has_rewards, is_judged
from shared.rewards import LocalOnly, Mark
from shared.tasks.answers import MAX_ANSWER_CHARS, extract_answer
from shared.tasks.derive import Item, TaskError, derive_item, from_package
from shared.tasks.environments import load_environment
from shared.tasks.reward_calls import Rewards, Scored, Word, read_reward

if TYPE_CHECKING:
    from shared.config.task_sections import TaskSpec
    from shared.contracts.messages import TaskRef

AnswerScorer = Callable[[str], Any]
"""Reward for an extracted answer. If it raises, the reward is unknown, and that of a built-in
verifier 0.
"""
Verifier = Callable[[Item], AnswerScorer]


@lru_cache(maxsize=64)
def load_verifier(name: str) -> Verifier:
    """The verifier of this name.

    Raises:
        TaskError: there is none, or it cannot be imported.
    """
    try:
        return cast(Verifier, VERIFIERS.load(name))
    except ValueError as error:
        raise TaskError("task_verifier", str(error)) from error


@lru_cache(maxsize=64)
def load_rewards(name: str) -> Rewards:
    """The rewards of this name, whose files are run. Raises TaskError."""
    return Rewards(name)


def preload(names: Iterable[str]) -> None:
    """Import verifiers and rewards early. A failure is not reported here; it is raised when they
    are needed.
    """
    for name in names:
        try:
            if is_environment(name):
                load_environment(name)
            else:
                load_rewards(name) if has_rewards(name) else load_verifier(name)
        except TaskError:
            continue


def is_built_in(verifier: str, dataset: str) -> bool:
    """Check whether the project's own rule scores this dataset, and not a user's or a package's."""
    if (turns := EnvironmentSpec.of(verifier)) is not None:
        verifier = turns.verifier
    return verifier in VERIFIERS.built_in and not (verifier == DEFAULT_VERIFIER and from_package(dataset))


class VerifierChoice:
    """Selects the verifier of a task from this node's own sources, whoever sent the task."""

    def __init__(self, specs: Sequence[TaskSpec] = ()) -> None:
        """An entry applies to its dataset and config. A dataset's first entry also applies to the
        dataset's other configs.
        """
        self._exact = {(spec.dataset, spec.canonical_config): spec for spec in reversed(specs)}
        self._by_dataset = {spec.dataset: spec for spec in reversed(specs)}
        inside = [spec for spec in specs if spec.sandbox]
        self.names = sorted({DEFAULT_VERIFIER, *(name for spec in inside for name in (spec.verifier, spec.scorer_name))})
        self.names_outside = sorted({spec.verifier for spec in specs if not spec.sandbox})
        """Those that run outside the sandbox."""

    def name_for(self, ref: TaskRef) -> str:
        """The name of the scorer: a verifier, rewards or an environment; reasoning_gym for a
        dataset that is not among the sources.
        """
        spec = self.spec_for(ref)
        return spec.scorer_name if spec else DEFAULT_VERIFIER

    def turns_for(self, ref: TaskRef) -> EnvironmentSpec | None:
        """What the policy's turns meet in a task; None for answers of one turn."""
        spec = self.spec_for(ref)
        return spec.turns if spec else None

    def is_outside(self, ref: TaskRef) -> bool:
        """Check whether the task is scored outside the sandbox."""
        spec = self.spec_for(ref)
        return spec is not None and not spec.sandbox

    @property
    def local_only(self) -> dict[str, LocalOnly]:
        """Datasets whose groups are taken from no other node with the verifier that they have, and
        why. `shared.tasks.reference_checks.try_rewards` finds those whose reward depends on a
        group.
        """
        others = {name for name, spec in self._by_dataset.items() if spec.verifier != DEFAULT_VERIFIER}
        outside = {spec.dataset for spec in self._exact.values() if not spec.sandbox}
        judged = {spec.dataset for spec in self._exact.values() if is_judged(spec.verifier)}
        found = dict.fromkeys(SCORED_LOCALLY - others, LocalOnly.SCORER) | dict.fromkeys(judged, LocalOnly.JUDGED)
        return found | dict.fromkeys(outside, LocalOnly.OUTSIDE_SANDBOX)

    def spec_for(self, ref: TaskRef) -> TaskSpec | None:
        """The source whose verifier scores the task; None if its dataset is not among them."""
        return self._exact.get((ref.dataset, ref.config)) or self._by_dataset.get(ref.dataset)


# The reward for an answer. Scoring runs no text as code but may take long on hostile text, so
# foreign text must be scored in the sandbox.


def score_answer(task: Task, text: str, verifier: str = DEFAULT_VERIFIER) -> float:
    """Reward for a completion's text, in this process.

    The answer is extracted (`extract_answer`) and scored against the task derived again from
    `task.ref`; everything else in `task` is not used.

    Raises:
        TaskError: the task cannot be derived from the reference, or the verifier cannot be used for
            it; or the reward is unknown.
    """
    problems: list[str] = []
    (reward,), _ = score_texts(derive_item(task.ref), verifier, [text], problems=problems)
    if reward is None:
        raise TaskError("reward_unknown", f"verifier {verifier} {''.join(problems)}")
    return reward


def scorer_of(verifier: str, item: Item) -> AnswerScorer:
    """The scorer that a verifier makes for a task.

    Raises:
        TaskError: there is no such verifier, or it cannot judge this task: it says so, raises
            anything else, or makes nothing that can be called.
    """
    make = load_verifier(verifier)
    with plugin_errors(lambda why: TaskError("task_verifier", f"verifier {verifier} cannot judge this task: {why}"), TaskError):
        score = make(item)
    if not callable(score):
        made = type(score).__name__
        raise TaskError("task_verifier", f"verifier {verifier} made {made} and no function that scores answers: `return` it")
    return score


def requests_of(
    item: Item, verifier: str, texts: Sequence[str | None], progress: Word, first_step: int, problems: list[str]
) -> list[list[Requests]] | None:
    """What to ask a judge before `score_texts`; None if no judge is asked. Arguments and errors are
    those of `score_texts`.
    """
    if not has_rewards(verifier) or not (rewards := load_rewards(verifier)).is_judged:
        return None
    return rewards.requests(item, texts, progress, first_step, problems)


def score_texts(
    item: Item,
    verifier: str,
    texts: Sequence[str | None],
    progress: Word | None = None,
    first_step: int = 0,
    problems: list[str] | None = None,
    parts: dict[str, list[float | None]] | None = None,
    replies: Sequence[Sequence[Replies]] | None = None,
) -> tuple[list[float | None], list[Mark]]:
    """The rewards of many texts of one derived task, None where unknown, and what else is known
    about each. A text that is None has cost a worker before: it is not scored. A verifier of one's
    own is given the empty answer if a text has none, unless the text is too long.

    A scorer's number is used as it is. What it raises, or returns that is no finite number, makes
    that answer's reward unknown. Built-in verifiers judge the text alone: one that cannot read a
    text, or finds it too long, gives 0.

    `progress[0]` is set to `first_step`, `first_step + 1`, ... before each text. What the scorer
    raised, or returned that is no number, is appended to `problems` for the first such text.
    `parts` gets the own values of several rewards, by their names. `replies`: a judge's, to
    `requests_of`.

    Raises:
        TaskError: there is no such verifier, or it cannot be used for this task.
    """
    word: Word = [0] if progress is None else progress
    if has_rewards(verifier):
        scored = load_rewards(verifier).score(item, texts, word, first_step, _scored, replies)
        if scored.problem and problems == []:
            problems.append(scored.problem)
        if parts is not None:
            parts.update(scored.parts)
        return scored.rewards, scored.marks
    score = scorer_of(verifier, item)
    unread_is_wrong = is_built_in(verifier, item.task.ref.dataset)
    rewards: list[float | None] = []
    marks: list[Mark] = []
    unsaid, step = Mark.UNSAID, first_step
    # Inlined, because on cheap datasets each additional call is a tenth of the scorer's own time.
    for text in texts:
        word[0] = step
        step += 1
        problem = ""
        answer = None if text is None else extract_answer(text)
        if text is None:
            reward, mark = None, Mark.TIMEOUT
        elif answer is None and unread_is_wrong:
            reward, mark = 0.0, Mark.FAILED
        elif answer is None and len(text) > MAX_ANSWER_CHARS:
            reward, mark, problem = None, Mark.TOO_LONG, f"scores answers of at most {MAX_ANSWER_CHARS:,} characters"
        else:
            try:
                raw = score(answer or "")
                if type(raw) is float and -MAX_REWARD <= raw <= MAX_REWARD:
                    rewards.append(raw)
                    marks.append(unsaid)
                    continue
                reward, mark, problem = read_reward(raw)
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # as `plugin_errors` does
                reward, mark, problem = None, Mark.RAISED, f"raised {failure(error)}"
            if reward is None and unread_is_wrong:
                reward, mark, problem = 0.0, Mark.FAILED, ""
        if problem and problems == []:
            problems.append(problem)
        rewards.append(reward)
        marks.append(mark)
    return rewards, marks


def _scored(verifier: str, item: Item, texts: Sequence[str | None], word: Word, first_step: int) -> Scored:
    problems: list[str] = []
    rewards, marks = score_texts(item, verifier, texts, word, first_step, problems)
    return Scored(rewards, marks, "".join(problems))
