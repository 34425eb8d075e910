"""Token rows: how the prompts and completions of rollout groups are laid out for the model, which
rows share a micro-batch, and which of them each process computes.

A row holds one prompt and one or more of its completions: `prompt, completion, completion, ...`.
Every completion sees the prompt and itself, and its positions continue where the prompt ends. So
each is computed as if it were alone, while the prompt is computed once. A row with one completion
is an ordinary causal row.

The split into micro-batches and processes changes no result, only the cost, because the normaliser
is fixed for the whole step beforehand.
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
    counts, in the loss and in what the loss is divided by (`gradient.bounded_step`). text_logprobs:
    per completion, the likelihood that its sender's policy gave to a text encoded again here; None:
    unknown. Empty: all unknown. replayed: a local group that an earlier step trained on
    (`sampler.replay`). masked: per completion, the tokens that the objective gives no
    loss in this update, 1 or 0 each, although they count in its mean; empty: none. places: the
    index of each completion among the scored group's answers; empty: unknown. sampled: per
    completion of several turns, for each token whether the policy sampled it (True) or read it as
    what an environment said, which is never trained on; None, or empty: the policy sampled all of
    them. Raises ValueError if lengths disagree.
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
    sampled: Sequence[Sequence[bool] | None] = ()

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
            sampled = self.sampled_of(index)
            if sampled is not None and (len(sampled) != len(tokens) or not any(sampled)):
                raise ValueError(f"completion {index} has {len(tokens)} tokens: mark each as sampled or not, and one as sampled")

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
            sampled=[self.sampled[number] for number in numbers] if self.sampled else (),
        )

    def sampled_of(self, completion: int) -> Sequence[bool] | None:
        """Which tokens of one completion the policy sampled; None: all."""
        return self.sampled[completion] if self.sampled else None

    def text_logprob(self, completion: int) -> TextLogprob | None:
        return self.text_logprobs[completion] if self.text_logprobs else None

    @property
    def completion_lengths(self) -> list[int]:
        return [len(tokens) for tokens in self.completions]

    @property
    def sampled_lengths(self) -> list[int]:
        """Number of tokens of each completion that the policy sampled."""
        marks = [self.sampled_of(number) for number in range(len(self.completions))]
        return [len(tokens) if of_it is None else sum(of_it) for tokens, of_it in zip(self.completions, marks, strict=True)]

    @property
    def moves_policy(self) -> bool:
        """Say whether the group can move the policy: its weight and at least one advantage are not
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
    """N completions of at most T tokens. mask: (N, T) bool, True on the completion tokens that the
    policy sampled. sequences: (group, completion) of each.
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
            sampled = group.sampled_of(completion)
            mask[sequence, :length] = True if sampled is None else torch.tensor(list(sampled))
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


WIDEST_SHARED_ROW = 16_384
"""Largest width in tokens. A row's mask takes two bytes for each pair of tokens in bfloat16, 0.54
GB, and four in float32; plain rows need none.
"""


def plan_rows(groups: Sequence[TokenGroup], *, shared_prompt: bool, budget_tokens: int, hidden_size: int) -> list[RowSlice]:
    """Split every group into rows: one completion per row, or, with `shared_prompt`, the number
    that is cheapest.

    A row stays within `budget_tokens` unless a single completion with its prompt does not fit.
    """
    rows: list[RowSlice] = []
    for index, group in enumerate(groups):
        prompt, lengths = len(group.prompt_ids), group.completion_lengths
        per_row = 1
        if shared_prompt:
            per_row = completions_per_row(prompt, lengths, budget_tokens=budget_tokens, hidden_size=hidden_size)
        for start in range(0, len(lengths), per_row):
            stop = min(start + per_row, len(lengths))
            rows.append(RowSlice(prompt + sum(lengths[start:stop]), index, start, stop))
    return rows


def completions_per_row(prompt: int, lengths: Sequence[int], *, budget_tokens: int, hidden_size: int) -> int:
    """Choose how many completions follow one prompt, so that the group costs the fewest operations.

    Sharing saves the prompt's linear layers but widens the row, and with a custom mask attention
    pays for the whole square, in time and in memory, so no shared row is wider than
    `WIDEST_SHARED_ROW`. Per layer and token about 24 h^2 operations are linear and 4 h W are
    attention (h `hidden_size`, W the row's width), which gives the cost `6 h W + W^2` of a row.
    """

    def widths(per_row: int) -> list[int]:
        return [prompt + sum(lengths[start : start + per_row]) for start in range(0, len(lengths), per_row)]

    widest = min(budget_tokens, WIDEST_SHARED_ROW)
    allowed = [n for n in range(1, len(lengths) + 1) if n == 1 or max(widths(n)) <= widest]
    return min(allowed, key=lambda n: (sum(6 * hidden_size * width + width**2 for width in widths(n)), n))


def plan_micro_batches(rows: Sequence[RowSlice], budget_tokens: int) -> list[list[RowSlice]]:
    """Pack rows, sorted by width, so that the number of rows times the largest width stays within
    `budget_tokens`.

    A row wider than the budget gets its own micro-batch. The order depends only on the rows, so the
    same batch is always split the same way.
    """
    if budget_tokens < 1:
        raise ValueError(f"micro-batch budget is {budget_tokens} tokens: it must be 1 or more")
    batches: list[list[RowSlice]] = []
    for row in sorted(rows):
        if batches and (len(batches[-1]) + 1) * row.width <= budget_tokens:
            batches[-1].append(row)
        else:
            batches.append([row])
    return batches


# Every process computes all shares and takes its own. Rows are never cut, and a row holds whole
# completions, so objectives over whole sequences work. The normaliser is that of the whole step, so
# the processes' gradients add up to that of one process.


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Rows of one forward pass. `counted` is False if the pass only keeps in step with the other
    processes; its loss then has weight 0.
    """

    rows: list[RowSlice]
    counted: bool = True


def micro_batches_of(rank: int, ranks: int, rows: Sequence[RowSlice], budget_tokens: int) -> list[MicroBatch]:
    """The micro-batches of process `rank`. Every process gets equally many, because sharded passes
    are made together.

    A process with fewer micro-batches processes the narrowest row of the step again, with weight 0.
    Example: rows of 9, 5 and 3 tokens, a budget of 9, two processes: [9], [3 with weight 0] and
    [3], [5].
    """
    if not rows:
        return []
    plans = [plan_micro_batches(share, budget_tokens) for share in shares(rows, ranks)]
    passes = max(len(plan) for plan in plans)
    own = [MicroBatch(batch) for batch in plans[rank]]
    return own + [MicroBatch([min(rows)], counted=False)] * (passes - len(own))


def shares(rows: Sequence[RowSlice], ranks: int) -> list[list[RowSlice]]:
    """Distribute rows, the widest first, each to the process with the fewest tokens so far (the
    first among equals).
    """
    dealt: list[list[RowSlice]] = [[] for _ in range(ranks)]
    tokens = [0] * ranks
    for row in sorted(rows, reverse=True):
        least = tokens.index(min(tokens))
        dealt[least].append(row)
        tokens[least] += row.width
    return dealt
