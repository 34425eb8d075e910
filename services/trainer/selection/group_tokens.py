"""The tokens of one group: those that were sampled, or the text encoded again; and what a foreign
group may cost. The trainer trains on exactly what was scored.

A local group comes from this node's generator and verifier and keeps the tokens that were sampled.
Of a foreign group only the derived question and the scored texts are trustworthy
(`services.verifier.border`). So its prompt is rendered here, and an answer's token ids and
behaviour logprobs are used only if the ids decode to exactly that text.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, zip_longest
from typing import Any, TypeVar

from services.trainer.gradient.rows import TextLogprob
from shared.contracts.codec import unpack_ids, unpack_logprobs
from shared.contracts.messages import Completion, Part, PromptMessage, RolloutGroup, ScoredGroup, pieces, user_prompt
from shared.contracts.wire import MessageError, Role
from shared.model.prompts import AnswerTokens, PromptError, TurnTokens, encode_answer, render_prompt

# A foreign group may cost `factor` times the usual group of its batch. All groups of one sender
# together may cost the usual for that many groups, plus `factor - 1` times the usual: one group's
# excess, however many groups there are. A group over its budget is left out completely.

GROUP_BUDGET = "group_budget"
SENDER_BUDGET = "sender_budget"


@dataclass(frozen=True, slots=True)
class PassCost:
    """Positions that a forward pass computes for one group, with its prompt once per completion."""

    node: str
    is_local: bool
    positions: int


def usual_cost(costs: Sequence[PassCost], usual_tokens: int) -> float:
    """The usual cost of a group: the completions of the largest possible local group, or more if
    this batch's costliest local group or its median group costs more.
    """
    if not costs:
        return float(usual_tokens)
    local = [cost.positions for cost in costs if cost.is_local]
    return float(max(usual_tokens, *local, statistics.median_low([cost.positions for cost in costs])))


def over_budget(costs: Sequence[PassCost], usual_tokens: int, factor: float) -> dict[int, str]:
    """Indexes of the foreign groups to leave out, with the reason: GROUP_BUDGET, or SENDER_BUDGET
    for a sender's costliest ones.

    Example: with 100 usual and a factor of 4, `[401, 300, 200]` of one sender loses its first group
    to the group's budget; the rest, 500, is what two groups may cost together.
    """
    usual = usual_cost(costs, usual_tokens)
    left_out = {index: GROUP_BUDGET for index, cost in enumerate(costs) if not cost.is_local and cost.positions > factor * usual}
    by_node: dict[str, list[int]] = {}
    for index, cost in enumerate(costs):
        if not cost.is_local and index not in left_out:
            by_node.setdefault(cost.node, []).append(index)
    for indices in by_node.values():
        cheapest_last = sorted(indices, key=lambda index: (-costs[index].positions, index))
        while sum(costs[index].positions for index in cheapest_last) > (len(cheapest_last) + factor - 1.0) * usual:
            left_out[cheapest_last.pop(0)] = SENDER_BUDGET
    return left_out


_MOST_TEMPLATES = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRules:
    """Limits of the trainer's tokenizer and model. `max_length` counts prompt and completion tokens
    together.

    end_token_id: appended to an answer that ended and is encoded here. end_token_ids: every token
    that ends an answer; empty: only `end_token_id`. max_foreign_tokens: longest foreign completion,
    end token included; None: no limit.
    """

    tokenizer: Any
    tokenizer_hash: str
    end_token_id: int | None
    vocabulary_size: int
    max_length: int
    end_token_ids: tuple[int, ...] = ()
    system_prompt: str = ""
    max_foreign_tokens: int | None = None
    answer_tokens: AnswerTokens = field(init=False, repr=False, compare=False)
    _template_controls: dict[tuple[tuple[Role, ...], str], int] = field(init=False, repr=False, compare=False)
    _between: dict[bool, TurnTokens] = field(init=False, repr=False, compare=False, default_factory=dict)

    def __post_init__(self) -> None:
        """Read the tokenizer once."""
        ends = self.end_token_ids or (() if self.end_token_id is None else (self.end_token_id,))
        answer_tokens = AnswerTokens(self.tokenizer, ends, self.vocabulary_size)
        object.__setattr__(self, "answer_tokens", answer_tokens)
        object.__setattr__(self, "_template_controls", {})
        self.template_controls(user_prompt("a"))

    def prompt_ids(self, prompt: Sequence[PromptMessage], tools: str = "") -> list[int]:
        return render_prompt(self.tokenizer, prompt, self.system_prompt, tools)

    def template_controls(self, prompt: Sequence[PromptMessage], tools: str = "") -> int:
        """The number of control tokens with which the template writes messages of these roles, and
        these tools.
        """
        roles = tuple(message.role for message in prompt)
        if (roles, tools) not in self._template_controls:
            if len(self._template_controls) >= _MOST_TEMPLATES:
                self._template_controls.clear()
            plain = [PromptMessage(role=role, parts=[Part(text="a")]) for role in roles]
            self._template_controls[roles, tools] = self.answer_tokens.control_tokens(self.prompt_ids(plain, tools))
        return self._template_controls[roles, tools]

    def between(self, tools: bool) -> TurnTokens:
        """What stands between the turns of an answer. Raises PromptError."""
        if tools not in self._between:
            ends = self.end_token_ids or (() if self.end_token_id is None else (self.end_token_id,))
            self._between[tools] = TurnTokens(self.tokenizer, ends, tools=tools)
        return self._between[tools]


class SkippedGroup(Exception):
    """A group that cannot be trained on. `reason` is one word that can serve as a metric label."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class GroupTokens:
    """Token ids of a group's prompt and of each completion, and behaviour logprobs where they are
    known.

    reencoded: whether the text of any completion was encoded here. text_logprobs: of those, if
    their senders state them. sampled: of answers of several turns, which tokens the policy said
    (`TokenGroup.sampled`); empty for answers of one turn.
    """

    prompt_ids: list[int]
    completions: list[list[int]]
    behaviour_logprobs: list[list[float] | None]
    reencoded: bool
    text_logprobs: list[TextLogprob | None] = field(default_factory=list)
    sampled: list[list[bool] | None] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Said:
    """What the environment said between the turns of each completion, and the tools that the prompt
    names (`ScoredGroup`); nothing for answers of one turn.
    """

    replies: Sequence[Sequence[str]] = ()
    tools: str = ""

    @classmethod
    def of(cls, scored: ScoredGroup) -> Said:
        return cls(scored.replies or (), scored.tools or "")


def local_tokens(group: RolloutGroup, rules: TokenRules, said: Said = Said()) -> GroupTokens:
    """The tokens of a group that this node sampled. Raises SkippedGroup: `text_alone` for a group
    from a server that does not return its tokens, because another encoding of the text is not what
    its policy sampled.
    """
    if any(completion.token_ids is None for completion in group.completions):
        raise SkippedGroup("text_alone")
    same_tokenizer = group.model.tokenizer_hash == rules.tokenizer_hash
    if same_tokenizer:
        return _fitting(_with_replies(_as_sampled(group, rules, said), _ends_in_tokens(group), rules, said), rules)
    completions, ends = [], []
    for completion in group.completions:
        turns = [
            encode_answer(rules.tokenizer, turn, ended=ended, end_token_id=rules.end_token_id) for turn, ended in _turns(completion)
        ]
        completions.append([token for turn in turns for token in turn])
        ends.append([*accumulate(map(len, turns))])
    encoded = GroupTokens(_prompt_ids(group, rules, said), completions, [None] * len(completions), True)
    return _fitting(_with_replies(encoded, ends, rules, said), rules)


def foreign_tokens(group: RolloutGroup, rules: TokenRules, said: Said = Said()) -> GroupTokens:
    """The tokens of a group that another node sent. Raises SkippedGroup: `control_text` if its text
    would become control tokens, `changed_question` if the chat template cannot write its question.
    """
    prompt_ids = _prompt_ids(group, rules, said)
    try:
        of_the_template = rules.template_controls(group.task.prompt, said.tools)
    except PromptError:
        raise SkippedGroup("changed_question") from None
    if rules.answer_tokens.control_tokens(prompt_ids) != of_the_template:
        raise SkippedGroup("control_text")
    same_tokenizer = group.model.tokenizer_hash == rules.tokenizer_hash
    kept = [_compared(completion, rules) if same_tokenizer else None for completion in group.completions]
    completions, logprobs, ends = [], [], _ends_in_tokens(group)
    for place, (completion, sampled) in enumerate(zip(group.completions, kept, strict=True)):
        if sampled is None:
            turns = [rules.answer_tokens.encode(turn, ended=ended) for turn, ended in _turns(completion)]
            known = [turn for turn in turns if turn is not None]
            if len(known) < len(turns):
                raise SkippedGroup("control_text")
            sampled = [token for turn in known for token in turn], None
            ends[place] = [*accumulate(map(len, known))]
        completions.append(sampled[0])
        logprobs.append(sampled[1])
    if rules.max_foreign_tokens is not None and max(map(len, completions)) > rules.max_foreign_tokens:
        raise SkippedGroup("too_long")
    texts = [
        # With the same tokenizer, ids that do not decode to the text have logprobs that do not
        # belong to it.
        None if same_tokenizer or sampled is not None else _text_logprob(completion)
        for completion, sampled in zip(group.completions, kept, strict=True)
    ]
    made = GroupTokens(prompt_ids, completions, logprobs, reencoded=None in kept, text_logprobs=texts)
    return _fitting(_with_replies(made, ends, rules, said), rules)


def _turns(completion: Completion) -> list[tuple[str, bool]]:
    """The policy's turns, and whether it ended each: all but the last have a reply."""
    turns = completion.turns
    return [(turn, number < len(turns) or completion.finish_reason == "stop") for number, turn in enumerate(turns, 1)]


def _ends_in_tokens(group: RolloutGroup) -> list[list[int]]:
    """Where each turn of each completion ends in the tokens that were sampled."""
    return [[each.token_count] if each.turn_tokens is None else unpack_ids(each.turn_tokens) for each in group.completions]


def _with_replies(tokens: GroupTokens, ends: Sequence[Sequence[int]], rules: TokenRules, said: Said) -> GroupTokens:
    """The tokens with what the environment said between the turns, which has no behaviour logprob.

    Raises:
        SkippedGroup: `changed_question` if the chat template cannot write a second turn, or
            `malformed_tokens` if there are not as many replies as turns to reply to.
    """
    if not any(said.replies):
        if any(len(each) > 1 for each in ends):
            raise SkippedGroup("malformed_tokens")
        return tokens
    try:
        between = rules.between(bool(said.tools))
    except PromptError:
        raise SkippedGroup("changed_question") from None
    if [len(replies) + 1 for replies in said.replies] != [len(each) for each in ends]:
        raise SkippedGroup("malformed_tokens")
    completions: list[list[int]] = []
    logprobs: list[list[float] | None] = []
    sampled: list[list[bool] | None] = []
    for own, behaviour, of_turns, replies in zip(tokens.completions, tokens.behaviour_logprobs, ends, said.replies, strict=True):
        words = [between.between(reply) for reply in replies]
        turns = pieces(own, of_turns)
        completions.append(_woven(turns, words))
        sampled.append(_woven([[True] * len(turn) for turn in turns], [[False] * len(each) for each in words]))
        unknown = [[math.nan] * len(each) for each in words]
        logprobs.append(None if behaviour is None else _woven(pieces(behaviour, of_turns), unknown))
    return replace(tokens, completions=completions, behaviour_logprobs=logprobs, sampled=sampled)


V = TypeVar("V")


def _woven(turns: Sequence[list[V]], replies: Sequence[list[V]]) -> list[V]:
    """A turn, the reply to it, the next turn, and so on."""
    return [value for turn, reply in zip_longest(turns, replies, fillvalue=list[V]()) for part in (turn, reply) for value in part]


def _prompt_ids(group: RolloutGroup, rules: TokenRules, said: Said) -> list[int]:
    try:
        return rules.prompt_ids(group.task.prompt, said.tools)
    except PromptError:
        raise SkippedGroup("changed_question") from None


def _fitting(tokens: GroupTokens, rules: TokenRules) -> GroupTokens:
    if not tokens.prompt_ids or not any(tokens.completions):
        raise SkippedGroup("empty")
    if len(tokens.prompt_ids) + max(map(len, tokens.completions)) > rules.max_length:
        raise SkippedGroup("too_long")
    return tokens


def _compared(completion: Completion, rules: TokenRules) -> tuple[list[int], list[float] | None] | None:
    """A foreign completion's own tokens if they decode to the scored text; None: encode the text
    instead.
    """
    if completion.token_ids is None:
        return None
    try:
        ids = unpack_ids(completion.token_ids)
        logprobs = None if completion.behaviour_logprobs is None else unpack_logprobs(completion.behaviour_logprobs)
    except MessageError:
        raise SkippedGroup("malformed_tokens") from None
    if logprobs is not None and (len(logprobs) != len(ids) or not all(map(math.isfinite, logprobs))):
        raise SkippedGroup("malformed_tokens")
    ends = [len(ids)] if completion.turn_tokens is None else unpack_ids(completion.turn_tokens)
    says = all(
        rules.answer_tokens.says(turn_ids, turn, ended=ended or len(ends) > 1 and rules.answer_tokens.is_end(turn_ids[-1:]))
        for turn_ids, (turn, ended) in zip(pieces(ids, ends), _turns(completion), strict=True)
    )
    return (ids, logprobs) if says else None


def _text_logprob(completion: Completion) -> TextLogprob | None:
    """The likelihood that the sender's policy gave to the text in its own tokens, of which only the
    number matters here.
    """
    if completion.behaviour_logprobs is None:
        return None
    try:
        logprobs = unpack_logprobs(completion.behaviour_logprobs)
    except MessageError:
        raise SkippedGroup("malformed_tokens") from None
    if not logprobs or not all(math.isfinite(logprob) and logprob <= 0.0 for logprob in logprobs):
        return None
    return TextLogprob(math.fsum(logprobs), len(logprobs))


def _as_sampled(group: RolloutGroup, rules: TokenRules, said: Said) -> GroupTokens:
    try:
        if group.prompt_ids is not None:
            prompt_ids = _checked_ids(group.prompt_ids, rules.vocabulary_size)
        else:
            prompt_ids = _prompt_ids(group, rules, said)
        completions = [_completion_ids(completion, rules.vocabulary_size) for completion in group.completions]
        logprobs = [_completion_logprobs(completion) for completion in group.completions]
    except MessageError:
        raise SkippedGroup("malformed_tokens") from None
    return GroupTokens(prompt_ids, completions, logprobs, reencoded=False)


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


def answers_present(completions: Sequence[Sequence[int]]) -> list[int]:
    """Indexes of the completions with at least one token."""
    return [index for index, completion in enumerate(completions) if completion]
