"""From a batch's messages to groups in the trainer's own tokens.

Groups sampled under the trainer's tokenizer keep the very tokens that were sampled and their behaviour logprobs; all others
are encoded again from their text. A group that cannot be used is left out and counted, whatever is wrong with it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from services.trainer.advantages import AdvantageConfig, batch_advantages
from services.trainer.rows import TokenGroup
from shared.messages import Batch, Completion, MessageError, RolloutGroup, ScoredGroup, unpack_ids, unpack_logprobs
from shared.model.prompts import encode_answer, render_prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class IntakeRules:
    """What the trainer's tokenizer and model can take. `max_length` counts prompt and completion tokens together."""

    tokenizer: Any
    tokenizer_hash: str
    end_token_id: int | None
    vocabulary_size: int
    max_length: int
    system_prompt: str = ""
    external_weight: float = 1.0
    advantages: AdvantageConfig = field(default_factory=AdvantageConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class Intake:
    """The groups to train on and what became of the rest.

    authors: node and group id of each of `groups`. local, external: groups taken in.
    with_behaviour: those whose behaviour logprobs are known. reencoded: those encoded again.
    zero_advantage: those without spread in their rewards. skipped: groups left out, by reason. rewards_local,
    rewards_external: of every completion of the groups taken in.
    """

    groups: list[TokenGroup]
    authors: list[tuple[str, str]]
    local: int
    external: int
    with_behaviour: int
    reencoded: int
    zero_advantage: int
    skipped: Counter[str]
    rewards_local: list[float]
    rewards_external: list[float]


class SkippedGroup(Exception):
    """A group that cannot be trained on. `reason` is one word, fit for a metric label."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class _Tokens:
    prompt_ids: list[int]
    completions: list[list[int]]
    behaviour_logprobs: list[list[float] | None]
    reencoded: bool


def take_in(batch: Batch, rules: IntakeRules) -> Intake:
    """Turn a batch into token groups with advantages; groups come in the batch's order."""
    taken: list[tuple[ScoredGroup, _Tokens]] = []
    skipped: Counter[str] = Counter()
    for item in batch.items:
        try:
            taken.append((item.scored, _tokens_of(item.scored, rules)))
        except SkippedGroup as bad:
            skipped[bad.reason] += 1
    advantages = batch_advantages([scored.rewards for scored, _ in taken], rules.advantages)
    local = [scored for scored, _ in taken if scored.origin == "local"]
    external = [scored for scored, _ in taken if scored.origin == "external"]
    return Intake(
        groups=[
            _token_group(scored, tokens, of_group, rules) for (scored, tokens), of_group in zip(taken, advantages, strict=True)
        ],
        authors=[(scored.group.node, scored.group_id) for scored, _ in taken],
        local=len(local),
        external=len(external),
        with_behaviour=sum(all(logprobs is not None for logprobs in tokens.behaviour_logprobs) for _, tokens in taken),
        reencoded=sum(tokens.reencoded for _, tokens in taken),
        zero_advantage=sum(not any(of_group) for of_group in advantages),
        skipped=skipped,
        rewards_local=[reward for scored in local for reward in scored.rewards],
        rewards_external=[reward for scored in external for reward in scored.rewards],
    )


def _token_group(scored: ScoredGroup, tokens: _Tokens, advantages: Sequence[float], rules: IntakeRules) -> TokenGroup:
    # An answer without tokens still counts in its group's baseline, but there is nothing of it to make likelier.
    present = [index for index, completion in enumerate(tokens.completions) if completion]
    is_local = scored.origin == "local"
    return TokenGroup(
        prompt_ids=tokens.prompt_ids,
        completions=[tokens.completions[index] for index in present],
        behaviour_logprobs=[tokens.behaviour_logprobs[index] for index in present],
        advantages=[advantages[index] for index in present],
        is_local=is_local,
        weight=1.0 if is_local else rules.external_weight,
    )


def _tokens_of(scored: ScoredGroup, rules: IntakeRules) -> _Tokens:
    group = scored.group
    if scored.failure is not None or len(scored.rewards) != len(group.completions):
        raise SkippedGroup("unscored")
    same_tokenizer = group.model.tokenizer_hash == rules.tokenizer_hash
    if same_tokenizer and all(completion.token_ids is not None for completion in group.completions):
        tokens = _sampled_tokens(group, rules)
    else:
        tokens = _encode_again(group, rules)
    if not tokens.prompt_ids or not any(tokens.completions):
        raise SkippedGroup("empty")
    if len(tokens.prompt_ids) + max(map(len, tokens.completions)) > rules.max_length:
        raise SkippedGroup("too_long")
    return tokens


def _sampled_tokens(group: RolloutGroup, rules: IntakeRules) -> _Tokens:
    try:
        if group.prompt_ids is not None:
            prompt_ids = _checked_ids(group.prompt_ids, rules.vocabulary_size)
        else:
            prompt_ids = render_prompt(rules.tokenizer, group.task.question, rules.system_prompt)
        completions = [_completion_ids(completion, rules.vocabulary_size) for completion in group.completions]
        logprobs = [_completion_logprobs(completion) for completion in group.completions]
    except MessageError:
        raise SkippedGroup("malformed_tokens") from None
    return _Tokens(prompt_ids, completions, logprobs, reencoded=False)


def _encode_again(group: RolloutGroup, rules: IntakeRules) -> _Tokens:
    prompt_ids = render_prompt(rules.tokenizer, group.task.question, rules.system_prompt)
    completions = [
        encode_answer(rules.tokenizer, completion.text, ended=completion.finish_reason == "stop", end_token_id=rules.end_token_id)
        for completion in group.completions
    ]
    return _Tokens(prompt_ids, completions, [None] * len(completions), reencoded=True)


def _completion_ids(completion: Completion, vocabulary_size: int) -> list[int]:
    ids = _checked_ids(completion.token_ids or b"", vocabulary_size)
    if len(ids) != completion.token_count:
        raise SkippedGroup("malformed_tokens")
    return ids


def _completion_logprobs(completion: Completion) -> list[float] | None:
    if completion.behaviour_logprobs is None:
        return None
    logprobs = unpack_logprobs(completion.behaviour_logprobs)
    if len(logprobs) != completion.token_count:
        raise SkippedGroup("malformed_tokens")
    return logprobs


def _checked_ids(packed: bytes, vocabulary_size: int) -> list[int]:
    ids = unpack_ids(packed)
    if ids and max(ids) >= vocabulary_size:
        raise SkippedGroup("unknown_token")
    return ids
