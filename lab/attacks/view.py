"""The knowledge of a hostile node when it attacks, and functions with which attacks write
groups.
"""

from __future__ import annotations

import random
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass

import msgspec

from lab.spec import Attack
from shared.config import TaskSpec
from shared.contracts.messages import Completion, RolloutGroup, TaskRef
from shared.tasks.audit.candidates import copies

WORDS = ("zq", "vx", "kw", "jj", "xh", "qp", "ww", "zz", "vk", "hx")


@dataclass(frozen=True, slots=True, order=True)
class Shortcut:
    """An answer that takes no skill: a copy of the named kind from the question, or else a
    constant.
    """

    copy: str = ""
    constant: str = ""

    def answer(self, question: str) -> str | None:
        """The answer; None if the question has no copy of that kind."""
        if not self.copy:
            return self.constant
        return next((candidate.text for candidate in copies(question) if candidate.name == self.copy), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hostile:
    """What a hostile node knows in a round.

    made: the groups it sampled, with their rewards. names: its names, each carried by the groups
    sent under it. answer: a task's right answer, which anyone can derive. score: rewards of texts.
    encode: token ids of a text, end token included. likelihood: mean logprob per token of each text
    of each group under an honest policy. max_tokens: length of the longest answer that is accepted.
    bound: the lowest mean logprob that passes the policy check, minus infinity without that check.
    sources: its task sources. shortcuts: the chosen shortcut by dataset and configuration, for the
    attack `shortcut`.
    """

    number: int
    attack: Attack
    rng: random.Random
    made: Sequence[tuple[RolloutGroup, Sequence[float]]]
    names: Sequence[str]
    answer: Callable[[TaskRef], str]
    score: Callable[[TaskRef, Sequence[str]], list[float]]
    encode: Callable[[str], list[int]]
    likelihood: Callable[[Sequence[RolloutGroup]], list[list[float]]]
    max_tokens: int
    bound: float
    sources: Sequence[TaskSpec]
    shortcuts: MutableMapping[tuple[str, str], Shortcut]


def answered(answer: str, before: str = "") -> str:
    """A completion that ends in an answer."""
    return f"{before}<answer>{answer}</answer>"


def ways_to_answer(answer: str) -> list[str]:
    """Completions with this answer: in tags, plain, and in other spellings. A scorer rewards some
    of them, and one or two of them are likely under a policy.
    """
    number = answer.removeprefix("-").replace(".", "", 1)
    as_number = [f"+{answer}", f"0{answer}", f"{answer}.0" if "." not in answer else f"{answer}0"] if number.isdigit() else []
    spaced = [f" {answer}", f"{answer} ", f"{answer}\n", f"\n{answer}", f"  {answer}  \n"]
    return [answered(answer), *as_number, *spaced, answer.upper(), answer.lower(), answer]


def with_texts(view: Hostile, group: RolloutGroup, texts: Sequence[str]) -> RolloutGroup:
    """The group with only these texts as its completions, and their token counts."""
    completions = [Completion(text=text, finish_reason="stop", token_count=len(view.encode(text))) for text in texts]
    return msgspec.structs.replace(group, completions=completions, prompt_ids=None)


def halves(count: int, share: float) -> tuple[int, int]:
    """How many of a group's answers should be right and how many wrong; at least one of each if
    there are two or more.
    """
    right = max(1, min(count - 1, round(share * count)))
    return right, count - right


def wrong_texts(view: Hostile, group: RolloutGroup, rewards: Sequence[float], count: int) -> list[str]:
    """The `count` answers with the lowest rewards, those sampled from the policy first. Training
    makes these less likely.
    """
    least = min(rewards)
    own = [completion.text for completion, reward in zip(group.completions, rewards, strict=True) if reward == least < 1.0]
    found = own or [answered("")]
    return [found[number % len(found)] for number in range(count)]


def under_names(view: Hostile, groups: Sequence[RolloutGroup]) -> list[RolloutGroup]:
    """The groups, distributed over all of the node's names in turn."""
    return [msgspec.structs.replace(group, node=view.names[number % len(view.names)]) for number, group in enumerate(groups)]


def as_sampled(view: Hostile) -> list[RolloutGroup]:
    """All groups, unchanged."""
    return [group for group, _ in view.made]
