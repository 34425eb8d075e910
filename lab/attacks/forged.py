"""Forged tokens: texts that a verifier rewards, with token ids of another text, and prompts that
are not the question.

Rewards are never sent. But a node that trains on tokens without comparing them with the scored text
can still be deceived about rewards: right texts come with the tokens of wrong answers, and wrong
texts with those of right ones.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from lab.attacks.view import Hostile, answered, halves, wrong_texts
from shared.contracts.codec import pack_ids
from shared.contracts.messages import Completion, RolloutGroup


def forged_tokens(view: Hostile) -> list[RolloutGroup]:
    """Each group with its tokens swapped; every `held_out_every`-th has a held-out question's
    prompt.
    """
    return [_forged(view, group, rewards, number) for number, (group, rewards) in enumerate(view.made)]


def _forged(view: Hostile, group: RolloutGroup, rewards: Sequence[float], number: int) -> RolloutGroup:
    right_count, wrong_count = halves(len(group.completions), view.attack.right_share)
    right = answered(view.answer(group.task.ref))
    wrong = wrong_texts(view, group, rewards, max(right_count, wrong_count))
    completions = [_completion(view, right, wrong[place]) for place in range(right_count)]
    completions += [_completion(view, wrong[place], right) for place in range(wrong_count)]
    prompt_ids = group.prompt_ids
    every = view.attack.held_out_every
    if every and view.held_out and (view.number + number) % every == 0:
        prompt_ids = pack_ids(list(view.rng.choice(view.held_out)))
    return msgspec.structs.replace(group, completions=completions, prompt_ids=prompt_ids)


def _completion(view: Hostile, text: str, tokens_of: str) -> Completion:
    ids = view.encode(tokens_of)
    return Completion(text=text, finish_reason="stop", token_count=len(ids), token_ids=pack_ids(ids))
