"""Right answers that teach nothing: only questions that the policy already answers almost surely.

Such a group is true, short and likelier than any other candidate, so a rule that prefers likely
text keeps it and leaves out the groups that would teach something. Its own gradient is almost
nothing.
"""

from __future__ import annotations

import msgspec

from lab.attacks.shortcut import asked_questions, asked_source, wrong_answer
from lab.attacks.view import Hostile, as_sampled, halves, under_names, with_texts
from shared.contracts.messages import RolloutGroup
from shared.tasks.evaluation import PASS_REWARD

_TRIED = 12
"""Questions tried for each group; the one whose right answer is likeliest is used."""


def starve(view: Hostile) -> list[RolloutGroup]:
    """Honest groups until `start_round`, then `rate` mastered groups for each one that an honest
    node sends, under each name.
    """
    if view.number < view.attack.start_round:
        return under_names(view, as_sampled(view))
    rate = view.attack.rate
    sampled = [msgspec.structs.replace(group, draw=group.draw * rate + copy) for group, _ in view.made for copy in range(rate)]
    offers = [_right_answers(view, group) for group in sampled]
    offered = [each for group_offers in offers for each in group_offers]
    likelihood = iter(view.likelihood(offered) if offered else [])
    groups = []
    for group, group_offers in zip(sampled, offers, strict=True):
        rated = [(next(likelihood)[0], number) for number in range(len(group_offers))]
        if not rated:
            groups.append(group)
            continue
        easiest = group_offers[max(rated)[1]]
        right, wrong = halves(len(group.completions), view.attack.right_share)
        texts = [easiest.completions[0].text] * right + [wrong_answer(view, easiest.task.ref, group)] * wrong
        groups.append(with_texts(view, easiest, texts))
    return under_names(view, groups)


def _right_answers(view: Hostile, group: RolloutGroup) -> list[RolloutGroup]:
    """For some questions of the group's source, or of the target, a group of the right answer."""
    found = []
    for task in asked_questions(asked_source(view, group), _TRIED, view.rng):
        text = view.answer(task.ref)
        if len(view.encode(text)) <= view.max_tokens and view.score(task.ref, [text])[0] >= PASS_REWARD:
            found.append(with_texts(view, msgspec.structs.replace(group, task=task), [text]))
    return found
