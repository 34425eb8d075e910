"""Token rows: how the prompts and completions of rollout groups are laid out for the model.

A row holds one prompt and one or more of its completions: `prompt, completion, completion, ...`.
Every completion sees the prompt and itself, and its positions continue where the prompt ends. So
each is computed as if it were alone, while the prompt is computed once. A row with one completion
is an ordinary causal row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

PADDING_SEGMENT = -1
PROMPT_SEGMENT = 0


@dataclass(frozen=True, slots=True)
class TextLogprob:
    """Log-probability of a whole answer under the policy that sampled it, as its sender states it:
    a sum over the sender's own `tokens`.
    """

    total: float
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenGroup:
    """A rollout group in the trainer's own tokens.

    prompt_ids: at least one token. completions: token ids of each, end token included, at least one
    token. behaviour_logprobs: per completion, one per token, or None if it was sampled with another
    tokenizer; a value that is not finite is allowed and drops the token. advantages: one per
    completion. weight: factor on the loss of the whole group. share: part of its tokens that
    counts, in the loss and in what the loss is divided by (`services.trainer.gradient.influence`).
    text_logprobs: per completion, the likelihood that its sender's policy gave to a text encoded
    again here; None: unknown. Empty: all unknown. replayed: a local group that an earlier step
    trained on (`sampler.replay`). masked: per completion, the tokens that the objective gives no
    loss in this update, 1 or 0 each, although they count in its mean; empty: none. places: the
    index of each completion among the scored group's answers; empty: unknown. Raises ValueError if
    lengths disagree.
    """

    prompt_ids: Sequence[int]
    completions: Sequence[Sequence[int]]
    behaviour_logprobs: Sequence[Sequence[float] | None]
    advantages: Sequence[float]
    is_local: bool = True
    weight: float = 1.0
    share: float = 1.0
    text_logprobs: Sequence[TextLogprob | None] = ()
    replayed: bool = False
    masked: Sequence[Sequence[float]] = ()
    places: Sequence[int] = ()

    def __post_init__(self) -> None:
        """Refuse a group whose parts do not match."""
        count = len(self.completions)
        if not self.prompt_ids:
            raise ValueError("a group's prompt is empty: nothing predicts the first completion token")
        if len(self.behaviour_logprobs) != count or len(self.advantages) != count:
            raise ValueError(
                f"a group has {count} completions, {len(self.behaviour_logprobs)} lists of behaviour logprobs and "
                f"{len(self.advantages)} advantages: give one of each per completion"
            )
        if self.text_logprobs and len(self.text_logprobs) != count:
            raise ValueError(
                f"a group has {count} completions, but {len(self.text_logprobs)} text logprobs: give one per completion"
            )
        for index, (tokens, logprobs) in enumerate(zip(self.completions, self.behaviour_logprobs, strict=True)):
            if not tokens:
                raise ValueError(f"completion {index} has no tokens: keep its end token, or leave it out")
            if logprobs is not None and len(logprobs) != len(tokens):
                raise ValueError(f"completion {index} has {len(tokens)} tokens but {len(logprobs)} behaviour logprobs")

    def only(self, numbers: Sequence[int]) -> TokenGroup:
        """The group with only some of its completions; the others' rewards stay in the advantages
        of these.
        """
        return replace(
            self,
            completions=[self.completions[number] for number in numbers],
            behaviour_logprobs=[self.behaviour_logprobs[number] for number in numbers],
            advantages=[self.advantages[number] for number in numbers],
            text_logprobs=[self.text_logprobs[number] for number in numbers] if self.text_logprobs else (),
            masked=[self.masked[number] for number in numbers] if self.masked else (),
            places=[self.places[number] for number in numbers] if self.places else (),
        )

    def text_logprob(self, completion: int) -> TextLogprob | None:
        """The text logprob of one completion."""
        return self.text_logprobs[completion] if self.text_logprobs else None

    @property
    def completion_lengths(self) -> list[int]:
        """Number of tokens of each completion."""
        return [len(tokens) for tokens in self.completions]

    @property
    def moves_policy(self) -> bool:
        """Whether the group can move the policy: its weight and at least one advantage are not
        0.
        """
        return self.weight != 0.0 and any(advantage != 0.0 for advantage in self.advantages)


@dataclass(frozen=True, slots=True, order=True)
class RowSlice:
    """Completions `start` to `stop` of group number `group`, as one row of `width` tokens. Sorts by
    width.
    """

    width: int
    group: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRows:
    """N completions of at most T tokens. mask: (N, T) bool, True on completion tokens. sequences:
    (group, completion) of each.
    """

    mask: Tensor
    sequences: list[tuple[int, int]]

    def pad(self, values: Sequence[Sequence[Sequence[float] | Tensor | None]], dtype: torch.dtype = torch.float32) -> Tensor:
        """(N, T) of `values[group][completion]`, one number per completion token; 0 on padding and
        for None.
        """
        padded = torch.zeros(self.mask.shape, dtype=dtype)
        for row, (group, completion) in enumerate(self.sequences):
            numbers = values[group][completion]
            if numbers is not None:
                padded[row, : len(numbers)] = torch.as_tensor(numbers, dtype=dtype)
        return padded.to(self.mask.device)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRows(CompletionRows):
    """R rows of W tokens, right-padded, that hold N completions of at most T tokens, in the order
    of `sequences`.

    input_ids, position_ids, segment_ids: (R, W) int64; segments are 0 for the prompt, 1.. for
    completions, -1 for padding. predicted_from: (N, T) int64, index into the R x W flattened
    positions of the previous token, whose hidden state predicts this one. targets: (N, T) int64.
    shared: whether any row holds more than one completion.
    """

    input_ids: Tensor
    position_ids: Tensor
    segment_ids: Tensor
    predicted_from: Tensor
    targets: Tensor
    shared: bool

    def to(self, device: torch.device | str) -> TokenRows:
        """The same rows on another device."""
        moved = {
            field.name: getattr(self, field.name).to(device)
            for field in fields(self)
            if isinstance(getattr(self, field.name), Tensor)
        }
        return replace(self, **moved)


def build_rows(groups: Sequence[TokenGroup], slices: Sequence[RowSlice]) -> TokenRows:
    """Lay out the sliced completions of `groups`, one row per slice, as CPU tensors."""
    width = max(piece.width for piece in slices)
    longest = max(len(tokens) for piece in slices for tokens in groups[piece.group].completions[piece.start : piece.stop])
    count = sum(piece.stop - piece.start for piece in slices)
    input_ids = torch.zeros(len(slices), width, dtype=torch.int64)
    position_ids = torch.zeros_like(input_ids)
    segment_ids = torch.full_like(input_ids, PADDING_SEGMENT)
    predicted_from = torch.zeros(count, longest, dtype=torch.int64)
    targets = torch.zeros_like(predicted_from)
    mask = torch.zeros(count, longest, dtype=torch.bool)
    sequences: list[tuple[int, int]] = []
    for row, piece in enumerate(slices):
        group = groups[piece.group]
        prompt_length = len(group.prompt_ids)
        input_ids[row, :prompt_length] = torch.tensor(list(group.prompt_ids))
        position_ids[row, :prompt_length] = torch.arange(prompt_length)
        segment_ids[row, :prompt_length] = PROMPT_SEGMENT
        begin = prompt_length
        for segment, completion in enumerate(range(piece.start, piece.stop), start=1):
            tokens = torch.tensor(list(group.completions[completion]))
            length = len(tokens)
            input_ids[row, begin : begin + length] = tokens
            position_ids[row, begin : begin + length] = torch.arange(prompt_length, prompt_length + length)
            segment_ids[row, begin : begin + length] = segment
            sequence = len(sequences)
            predicted_from[sequence, 0] = row * width + prompt_length - 1
            predicted_from[sequence, 1:length] = row * width + torch.arange(begin, begin + length - 1)
            targets[sequence, :length] = tokens
            mask[sequence, :length] = True
            sequences.append((piece.group, completion))
            begin += length
    return TokenRows(
        input_ids=input_ids,
        position_ids=position_ids,
        segment_ids=segment_ids,
        predicted_from=predicted_from,
        targets=targets,
        mask=mask,
        sequences=sequences,
        shared=any(piece.stop - piece.start > 1 for piece in slices),
    )


def block_causal_mask(segment_ids: Tensor) -> Tensor:
    """(R, 1, W, W) bool, True where a query (dim 2) sees a key (dim 3), from segments (R, W).

    A token sees what precedes it in the prompt and in its own completion. Padding sees itself,
    because a softmax over nothing is NaN; nothing else sees it.
    """
    queries, keys = segment_ids.unsqueeze(2), segment_ids.unsqueeze(1)
    # In place, because this is the largest tensor of a wide row.
    allowed = keys == queries
    allowed |= keys == PROMPT_SEGMENT
    allowed &= keys != PADDING_SEGMENT
    allowed &= queries != PADDING_SEGMENT
    allowed.tril_().diagonal(dim1=1, dim2=2).fill_(True)
    return allowed.unsqueeze(1)
