"""Groups as others are given them: without tokens, with at most some completions; and answers of
several turns, as the verifier plays them again: for the scorers, the border and the trainer.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, TypeVar

import msgspec
from msgspec import UNSET

from shared.contracts.messages import RolloutGroup, ScoredGroup
from shared.environment_files import EnvironmentSpec
from shared.tasks.sandbox import JobResult

T = TypeVar("T")


def answers_of(group: RolloutGroup, turns: EnvironmentSpec | None) -> Sequence[str | Sequence[str]]:
    """The answers as `ScoringJob` takes them: texts, or the policy's turns for an environment."""
    return [completion.text if turns is None else completion.turns for completion in group.completions]


def turns_problem(group: RolloutGroup, result: JobResult, turns: EnvironmentSpec | None) -> str:
    """Why no policy can have said these turns; empty if one can. Of an answer without a reward
    nothing is known.

    An episode ends when the environment has no reply. It may also end before: with the last turn
    that the source allows, or where the length limit cut it off.
    """
    if turns is None:
        return ""
    for place, (completion, replies, reward) in enumerate(zip(group.completions, result.said, result.rewards, strict=True)):
        said = len(completion.turns)
        if reward is None:
            continue
        if said > turns.max_turns:
            return f"answer {place + 1} has {said} turns, at most {turns.max_turns}"
        if len(replies) < said - 1:
            return f"answer {place + 1} goes on for {said} turns, and the episode ends with turn {len(replies) + 1}"
        if len(replies) == said < turns.max_turns and completion.finish_reason == "stop":
            return f"answer {place + 1} ends with turn {said}, to which the environment replies"
    return ""


def with_replies(scored: ScoredGroup, result: JobResult, turns: EnvironmentSpec) -> ScoredGroup:
    """The group with what the environment said between the turns of each answer that is left in it,
    and with the tools that its prompt names.
    """
    known = [replies for replies, reward in zip(result.said, result.rewards, strict=True) if reward is not None]
    between = [replies[: len(completion.turns) - 1] for replies, completion in zip(known, scored.group.completions, strict=True)]
    return msgspec.structs.replace(scored, replies=between, tools=turns.tools_json or UNSET)


class Unpacking(partial[T]):
    """Work on a group that may be a thousand times as large as its message."""


def with_first_completions(group: RolloutGroup, count: int) -> RolloutGroup:
    """The group with at most its first `count` completions, so that groups of a node that samples
    more are accepted up to that number.
    """
    if len(group.completions) <= count:
        return group
    return msgspec.structs.replace(group, completions=group.completions[:count])


def without_prompt(group: RolloutGroup) -> RolloutGroup:
    """The group without its sender's prompt tokens; the trainer renders the prompt from the derived
    question.
    """
    return group if group.prompt_ids is None else msgspec.structs.replace(group, prompt_ids=None)


def without_token_ids(group: RolloutGroup) -> RolloutGroup:
    """The group as a node with another tokenizer uses it: its texts, and how likely they were under
    the sender's policy.
    """
    completions = [msgspec.structs.replace(each, token_ids=None) for each in group.completions]
    return msgspec.structs.replace(group, completions=completions, prompt_ids=None)


def without_tokens(group: RolloutGroup) -> RolloutGroup:
    """The group with its texts only."""
    bare: dict[str, Any] = {"token_ids": None, "behaviour_logprobs": None, "canonical": UNSET}
    completions = [msgspec.structs.replace(each, **bare) for each in group.completions]
    return msgspec.structs.replace(group, completions=completions, prompt_ids=None)
