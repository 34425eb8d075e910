"""Scores the texts of a task: with a verifier, with rewards of files, or by playing an environment.
Only the sandbox's processes do this; it runs no text as code, but may take long on hostile text.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

from shared.contracts.wire import MAX_REWARD
from shared.environment_files import is_environment
from shared.reward_files import Replies, Requests, has_rewards
from shared.rewards import Mark
from shared.tasks.answers import MAX_ANSWER_CHARS, extract_answer
from shared.tasks.derive import Item, TaskError
from shared.tasks.environments import load_environment
from shared.tasks.reward_calls import Rewards, Scored, Word, raised_words, read_reward
from shared.tasks.verifiers import is_built_in, load_verifier, scorer_of


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


def requests_of(
    item: Item, verifier: str, texts: Sequence[str | None], progress: Word, first_step: int, problems: list[str]
) -> list[list[Requests]] | None:
    """List what to ask a judge before `score_texts`; None if no judge is asked. Arguments and
    errors are those of `score_texts`.
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
                reward, mark, problem = None, Mark.RAISED, raised_words(error)
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
