"""Token rows: how the prompts and completions of rollout groups are laid out for the model, which
of them share a micro-batch, and which each process computes.

A slice is one prompt with one or more of its completions: `prompt, completion, completion, ...`.
Every completion sees the prompt and itself, and its positions continue where the prompt ends. So
each is computed as if it were alone, while the prompt is computed once. *Packed*, the slices of a
micro-batch are one row, one after another (`packed_attention`). For models that cannot do that each
completion with its prompt is a row of its own, padded on the right.

The split into micro-batches and processes changes no result, only the cost, because the normaliser
is fixed for the whole step beforehand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor


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
    """Completions `start` to `stop` of group number `group` behind their prompt, `width` tokens.
    Sorts by width.
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
    """R rows of W tokens that hold N completions of at most T tokens, in the order of `sequences`.

    input_ids, position_ids: (R, W) int64. predicted_from: (N, T) int64, index into the R x W
    flattened positions of the previous token, whose hidden state predicts this one. targets: (N, T)
    int64. layout: of a packed row, (1, 1, 1, n) int64 on the CPU: of each slice the tokens of its
    prompt, the number of its completions and the tokens of each; None: padded rows of one
    completion.
    """

    input_ids: Tensor
    position_ids: Tensor
    predicted_from: Tensor
    targets: Tensor
    layout: Tensor | None

    def to(self, device: torch.device | str) -> TokenRows:
        moved = {
            field.name: getattr(self, field.name).to(device)
            for field in fields(self)
            if isinstance(getattr(self, field.name), Tensor) and field.name != "layout"
        }
        return replace(self, **moved)


def build_rows(groups: Sequence[TokenGroup], slices: Sequence[RowSlice], *, packed: bool) -> TokenRows:
    """Lay out the sliced completions of `groups`, in one row or in one row per slice, as CPU
    tensors.
    """
    width = sum(piece.width for piece in slices) if packed else max(piece.width for piece in slices)
    longest = max(len(tokens) for piece in slices for tokens in groups[piece.group].completions[piece.start : piece.stop])
    count = sum(piece.stop - piece.start for piece in slices)
    input_ids = torch.zeros(1 if packed else len(slices), width, dtype=torch.int64)
    position_ids = torch.zeros_like(input_ids)
    flat_ids, flat_positions = input_ids.view(-1), position_ids.view(-1)
    predicted_from = torch.zeros(count, longest, dtype=torch.int64)
    targets = torch.zeros_like(predicted_from)
    mask = torch.zeros(count, longest, dtype=torch.bool)
    sequences: list[tuple[int, int]] = []
    layout: list[int] = []
    begin = 0
    for number, piece in enumerate(slices):
        group = groups[piece.group]
        prompt_length = len(group.prompt_ids)
        layout += [prompt_length, piece.stop - piece.start, *group.completion_lengths[piece.start : piece.stop]]
        begin = begin if packed else number * width
        flat_ids[begin : begin + prompt_length] = torch.tensor(list(group.prompt_ids))
        flat_positions[begin : begin + prompt_length] = torch.arange(prompt_length)
        begin += prompt_length
        last_of_prompt = begin - 1
        for completion in range(piece.start, piece.stop):
            tokens = torch.tensor(list(group.completions[completion]))
            length = len(tokens)
            flat_ids[begin : begin + length] = tokens
            flat_positions[begin : begin + length] = torch.arange(prompt_length, prompt_length + length)
            sequence = len(sequences)
            predicted_from[sequence, 0] = last_of_prompt
            predicted_from[sequence, 1:length] = torch.arange(begin, begin + length - 1)
            targets[sequence, :length] = tokens
            sampled = group.sampled_of(completion)
            mask[sequence, :length] = True if sampled is None else torch.tensor(list(sampled))
            sequences.append((piece.group, completion))
            begin += length
    return TokenRows(
        input_ids=input_ids,
        position_ids=position_ids,
        predicted_from=predicted_from,
        targets=targets,
        mask=mask,
        sequences=sequences,
        layout=torch.tensor(layout).view(1, 1, 1, -1) if packed else None,
    )


def plan_rows(groups: Sequence[TokenGroup], *, packed: bool, budget_tokens: int) -> list[RowSlice]:
    """Split every group into slices: one completion each, or, packed, as many as the budget takes.

    A slice stays within `budget_tokens` unless a single completion with its prompt does not fit.
    """
    rows: list[RowSlice] = []
    for index, group in enumerate(groups):
        prompt, lengths = len(group.prompt_ids), group.completion_lengths
        start, width = 0, prompt
        for number, length in enumerate(lengths):
            if number > start and not (packed and width + length <= budget_tokens):
                rows.append(RowSlice(width, index, start, number))
                start, width = number, prompt
            width += length
        if lengths:
            rows.append(RowSlice(width, index, start, len(lengths)))
    return rows


def plan_micro_batches(rows: Sequence[RowSlice], budget_tokens: int, *, packed: bool) -> list[list[RowSlice]]:
    """Gather slices, sorted by width, whose tokens stay within `budget_tokens`; unless packed, as
    many as that many rows of the largest width have.

    A slice wider than the budget gets its own micro-batch. The order depends only on the slices, so
    the same batch is always split the same way.
    """
    if budget_tokens < 1:
        raise ValueError(f"micro-batch budget is {budget_tokens} tokens: it must be 1 or more")
    batches: list[list[RowSlice]] = []
    for row in sorted(rows):
        last = batches[-1] if batches else []
        tokens = sum(each.width for each in last) + row.width if packed else (len(last) + 1) * row.width
        if last and tokens <= budget_tokens:
            last.append(row)
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


def micro_batches_of(rank: int, ranks: int, rows: Sequence[RowSlice], budget_tokens: int, *, packed: bool) -> list[MicroBatch]:
    """The micro-batches of process `rank`. Every process gets equally many, because sharded passes
    are made together.

    A process with fewer micro-batches processes the narrowest row of the step again, with weight 0.
    Example: rows of 9, 5 and 3 tokens, a budget of 9, two processes: [9], [3 with weight 0] and
    [3], [5].
    """
    if not rows:
        return []
    plans = [plan_micro_batches(share, budget_tokens, packed=packed) for share in shares(rows, ranks)]
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
