"""An attack that knows the defences: rewards for answers that are not right, else as much nonsense
before a right answer as is still likely enough.

A group's advantages depend on which of its answers earned more, not on whether any is right. So if
no answer is right, one that earns a little partial credit is reinforced as strongly as a right one
would be. Training makes the nonsense more likely, so more of it passes in the next round.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

from lab.attacks.view import WORDS, Hostile, answered, halves, under_names, ways_to_answer, with_texts, wrong_texts
from shared.contracts.messages import RolloutGroup
from shared.tasks.evaluation import PASS_REWARD

_PREMISE = re.compile(r"^\.?\s*\d+\.\s+(.+)$", re.MULTILINE)
_CONSTANTS = ("x", "0", "7", "[7]", "a -> a", "True", "nan")


def informed(view: Hostile) -> list[RolloutGroup]:
    """Honest until `start_round`. After that, for every name and each task, the most harmful text
    that passes the checks: partial credit if there is any, else bounded poison.

    Every group has a different task and different text, none is longer than an honest one, and no
    name sends more than an honest node, so quotas, digests and budgets detect nothing. Tokens and
    rewards are true.
    """
    if view.number < view.attack.start_round:
        return under_names(view, [group for group, _ in view.made])
    paid = [crumbs(view, group, rewards) for group, rewards in view.made]
    usable = _within_bound(view, paid)
    rest = bounded_poison(view, [each for each, found in zip(view.made, usable, strict=True) if found is None])
    left = iter(rest)
    return under_names(view, [next(left) if found is None else found for found in usable])


def _within_bound(view: Hostile, groups: Sequence[RolloutGroup | None]) -> list[RolloutGroup | None]:
    """Each group if all its answers pass the policy check, else None."""
    wanted = [group for group in groups if group is not None]
    passing = {
        id(group)
        for group, means in zip(wanted, view.likelihood(wanted) if wanted else [], strict=True)
        if min(means) >= view.bound + view.attack.margin
    }
    return [group if group is not None and id(group) in passing else None for group in groups]


def bounded_poison(view: Hostile, made: Sequence[tuple[RolloutGroup, Sequence[float]]]) -> list[RolloutGroup]:
    """In each group `right_share` of the answers are right, in the least likely form that passes:
    after nonsense, or in an odd spelling. The others are wrong answers that the policy gave.
    """
    ladders = [with_texts(view, group, _ladder(view, group)) for group, _ in made]
    likelihoods = view.likelihood(ladders) if ladders else []
    groups = []
    for (group, rewards), ladder, rung_likelihoods in zip(made, ladders, likelihoods, strict=True):
        best = least_likely(view, ladder, rung_likelihoods) or view.answer(group.task.ref)
        right, wrong = halves(len(group.completions), view.attack.right_share)
        groups.append(with_texts(view, group, [best] * right + wrong_texts(view, group, rewards, wrong)))
    return groups


def least_likely(view: Hostile, candidates: RolloutGroup, likelihoods: Sequence[float]) -> str | None:
    """The rewarded text with the lowest mean logprob among those that pass the policy check; None
    if none does.
    """
    texts = [completion.text for completion in candidates.completions]
    rewards = view.score(candidates.task.ref, texts)
    passing = [
        (mean, text)
        for text, mean, reward in zip(texts, likelihoods, rewards, strict=True)
        if reward >= PASS_REWARD and mean >= view.bound + view.attack.margin
    ]
    return min(passing)[1] if passing else None


def _ladder(view: Hostile, group: RolloutGroup) -> list[str]:
    """Right answers after up to `filler_words` words of nonsense, and in other spellings. The
    nonsense is always the same, so that it becomes likely.
    """
    answer = view.answer(group.task.ref)
    words = random.Random("the same nonsense for ever").choices(WORDS, k=view.attack.filler_words)
    lengths = sorted({round(view.attack.filler_words * rung / 6) for rung in range(1, 7)}, reverse=True)
    behind = [answered(answer, " ".join(words[:length])) for length in lengths]
    return [text for text in (*behind, *ways_to_answer(answer)) if len(view.encode(text)) <= view.max_tokens] or [answer]


def crumbs(view: Hostile, group: RolloutGroup, rewards: Sequence[float]) -> RolloutGroup | None:
    """`right_share` of the answers are the wrong answer with the highest reward, and the others
    earn less; None if no wrong answer earns more than others.
    """
    wrong = wrong_answers(view.answer(group.task.ref), group.task.text)
    candidates = [written for answer in wrong for written in (answer, answered(answer))]
    paid = view.score(group.task.ref, candidates)
    best = max(range(len(candidates)), key=lambda place: paid[place])
    least = [*wrong_texts(view, group, rewards, 1), answered("")]
    unpaid = view.score(group.task.ref, least)
    if paid[best] <= min(unpaid):
        return None
    many, few = halves(len(group.completions), view.attack.right_share)
    return with_texts(view, group, [candidates[best]] * many + [least[unpaid.index(min(unpaid))]] * few)


def wrong_answers(answer: str, question: str) -> list[str]:
    """Wrong answers for any task: close to the right one, copied from the question, or the same for
    all questions.
    """
    near = [f"{answer}7", f"{answer} 7", f"7{answer}"]
    copied = [premise for premise in _PREMISE.findall(question) if premise != answer]
    return [*near, *copied[:4], *(constant for constant in _CONSTANTS if constant != answer)]
