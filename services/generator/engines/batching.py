"""Ways of computing completions in batches without changing their logprobs, tested on the model
when it is loaded.

Architectures differ in how they treat padding and repeated caches, and a wrong method often raises
no error. So every method is tested on a few tokens, past the model's attention windows, against
each text computed alone. The fastest correct method is used, and a model without one is refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shared.model.configuration import LONGEST_PROBE, attention_windows
from shared.model.full_precision import HALF_TOLERANCE, computing_in_float32, is_half

_STEPS = 4
# Tolerance relative to 1 + |logprob|; in half precision it is `HALF_TOLERANCE` for the mean.
_TOLERANCE = 1e-4


class UnsafeModel(Exception):
    """No sampling method gives the same logprobs as computing each text alone. The message has the
    findings.
    """


@dataclass(frozen=True, slots=True)
class Batching:
    """Way in which rows share a batch.

    padded: prompts of different lengths share a batch, padded on the left. repeats: a prompt is
    computed once and its cache repeated for each completion; otherwise each completion computes its
    prompt. cached: a step computes one token; otherwise the whole text again.
    """

    padded: bool
    repeats: bool
    cached: bool

    @property
    def name(self) -> str:
        """Description for the log and for the table of architectures."""
        if self.padded:
            return "padded"
        return "equal lengths" if self.repeats else "own prompts" if self.cached else "no cache"


WAYS = (
    Batching(padded=True, repeats=True, cached=True),
    Batching(padded=False, repeats=True, cached=True),
    Batching(padded=False, repeats=False, cached=True),
    Batching(padded=False, repeats=False, cached=False),
)
"""All methods, fastest first."""


def batches(prompts: Sequence[Sequence[int]], way: Batching, prompts_at_once: int) -> Iterator[list[int]]:
    """Indexes of the prompts that are computed together, at most `prompts_at_once`; all of one
    length unless `way` pads.
    """
    numbers = range(len(prompts))
    lengths = {len(prompt) for prompt in prompts}
    alike = [list(numbers)] if way.padded else [[i for i in numbers if len(prompts[i]) == length] for length in sorted(lengths)]
    for group in alike:
        for first in range(0, len(group), prompts_at_once):
            yield group[first : first + prompts_at_once]


class BatchRows:
    """The texts of one batch while they grow.

    `logits` are those of each row's next token, `[rows, vocabulary]`. The rows are ordered by
    prompt, `n` for each.
    """

    def __init__(self, model: Any, prompts: Sequence[Sequence[int]], n: int, way: Batching, pad_token_id: int) -> None:
        self._model = model
        self._way = way
        accepted = inspect.signature(model.forward).parameters
        self._cache_name = "cache_params" if "cache_params" in accepted else "past_key_values"
        self._takes_positions = "position_ids" in accepted
        self._takes_last_only = "logits_to_keep" in accepted
        self._cache: Any = None
        if not way.repeats:
            prompts = [prompt for prompt in prompts for _ in range(n)]
        longest = max(map(len, prompts))
        padding = [longest - len(prompt) for prompt in prompts]
        self._ids = torch.tensor(
            [[pad_token_id] * pads + list(prompt) for pads, prompt in zip(padding, prompts, strict=True)], device=model.device
        )
        self._mask: Tensor | None = None
        if any(padding):
            self._mask = torch.arange(longest, device=model.device) >= torch.tensor(padding, device=model.device)[:, None]
        self.logits = self._forward(self._ids)
        if way.repeats and n > 1:
            self.keep(torch.arange(len(prompts), device=model.device).repeat_interleave(n))

    def append(self, chosen: Tensor) -> None:
        """Append one token to each row, `[rows, 1]`."""
        if self._mask is not None:
            self._mask = torch.nn.functional.pad(self._mask, (0, 1), value=True)
        if not self._way.cached:
            self._ids = torch.cat([self._ids, chosen], dim=1)
        self.logits = self._forward(chosen if self._way.cached else self._ids)

    @property
    def can_keep(self) -> bool:
        """Check whether rows can be dropped. If not, they are computed to the end."""
        return self._way.repeats or not self._way.cached

    @property
    def carries_state(self) -> bool:
        """Check whether a layer reads a text token by token into a state. Padding would change that
        state, if only a little.
        """
        layers = getattr(self._cache, "layers", ())
        return any(hasattr(layer, "conv_states") or hasattr(layer, "recurrent_states") for layer in layers)

    def keep(self, rows: Tensor) -> None:
        """Continue with only these rows, in this order; a row may occur more than once."""
        if self._cache is not None:
            self._cache.reorder_cache(rows)
        self._ids = self._ids[rows]
        self._mask = None if self._mask is None else self._mask[rows]
        self.logits = self.logits[rows]

    def _forward(self, ids: Tensor) -> Tensor:
        """Logits (rows, vocabulary) of the next token. Architectures differ in the arguments of
        their forward pass: with a mask but no positions they would count the padding on the left as
        text, and without `logits_to_keep` they would compute logits of the whole prompt and discard
        them.
        """
        inputs: dict[str, Any] = {"input_ids": ids, "use_cache": self._way.cached}
        if self._takes_last_only:
            inputs["logits_to_keep"] = 1
        if self._mask is not None:
            inputs["attention_mask"] = self._mask.long()
            if self._takes_positions:
                inputs["position_ids"] = (self._mask.long().cumsum(dim=-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        if self._cache is not None:
            inputs[self._cache_name] = self._cache
        out = self._model(**inputs)
        if self._way.cached:
            self._cache = getattr(out, self._cache_name)
        logits: Tensor = out.logits[:, -1]
        return logits


@torch.inference_mode()
def choose_batching(model: Any, *, context_length: int, pad_token_id: int) -> Batching:
    """The fastest of `WAYS` with which this model's logprobs equal those of each text computed
    alone.

    Raises:
        UnsafeModel: there is none, or the logprobs of a text's tokens depend on what follows them.
    """
    windows = [width for width in attention_windows(model.config) if width < context_length]
    probed = max((width for width in windows if width <= LONGEST_PROBE), default=0)
    prompts, answers = _texts(model, min(probed, context_length - _STEPS - 6), pad_token_id)
    rounded = (False, True) if is_half(model.dtype) else (False,)
    expected = {each: _alone(model, prompts, answers, rounded=each) for each in rounded}
    found = []
    for way in WAYS:
        if way.padded and windows and windows[-1] > LONGEST_PROBE:
            found.append(f"padded: a window of {windows[-1]} tokens is too long to try")
            continue
        try:
            tried = (_disagreement(model, prompts, answers, expected[each], way, pad_token_id, rounded=each) for each in rounded)
            problem = next(filter(None, tried), "")
        except Exception as error:  # noqa: BLE001 (a model says in its own way that it cannot; whichever way, the answer is no)
            problem = f"{type(error).__name__}: {str(error).splitlines()[0][:120] if str(error) else ''}"
        if not problem:
            return way
        found.append(f"{way.name}: {problem}")
    raise UnsafeModel("no sampling method gives the same logprobs as computing each text alone (" + "; ".join(found) + ")")


def _texts(model: Any, window: int, pad_token_id: int) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts of different lengths, the last longer than the window and the middle one just
    shorter, with two answers each that cross it.
    """
    vocabulary = int(model.get_input_embeddings().weight.shape[0])
    generator = torch.Generator().manual_seed(0)

    def tokens(count: int) -> list[int]:
        return torch.randint(vocabulary, (count,), generator=generator).tolist()

    prompts = [tokens(3), tokens(max(4, window - 1)), tokens(max(6, window + 3))]
    answers = [tokens(_STEPS) for _ in range(2 * len(prompts))]
    # A policy may sample its padding token, and some models derive positions from it.
    answers[0][1] = answers[3][1] = min(pad_token_id, vocabulary - 1)
    return prompts, answers


def _alone(model: Any, prompts: list[list[int]], answers: list[list[int]], *, rounded: bool) -> Tensor:
    """Logprobs of every token of the vocabulary, `[answers, steps, vocabulary]`, each text computed
    alone. rounded: in the model's own half precision.
    """
    rows = []
    for number, answer in enumerate(answers):
        text = [*prompts[number // 2], *answer]
        try:
            with nullcontext() if rounded else computing_in_float32(model):
                longer, shorter = _last_logprobs(model, text, _STEPS + 1), _last_logprobs(model, text[:-1], _STEPS)
        except Exception as error:  # noqa: BLE001
            raise UnsafeModel(f"it does not compute a text without a cache ({type(error).__name__}: {error})") from error
        if longer.isnan().any():
            raise UnsafeModel("its logprobs are not numbers (check its configuration's numbers and weights)")
        if problem := _difference(longer[:-1], shorter, rounded):
            raise UnsafeModel(f"it is not a causal model: a later token changes earlier logprobs ({problem})")
        rows.append(longer[:-1])
    return torch.stack(rows)


def _last_logprobs(model: Any, text: list[int], count: int) -> Tensor:
    inputs: dict[str, Any] = {"input_ids": torch.tensor([text], device=model.device), "use_cache": False}
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        inputs["logits_to_keep"] = count
    return _logprobs(model(**inputs).logits[0, -count:])


def _disagreement(
    model: Any,
    prompts: list[list[int]],
    answers: list[list[int]],
    expected: Tensor,
    way: Batching,
    pad_token_id: int,
    *,
    rounded: bool,
) -> str:
    """Describe the first fault in the logprobs that the engine computes in this way, or return "".
    One row is dropped half-way.
    """
    with nullcontext() if rounded else computing_in_float32(model):
        for numbers in batches(prompts, way, len(prompts)):
            rows = BatchRows(model, [prompts[number] for number in numbers], 2, way, pad_token_id)
            if way.padded and rows.carries_state:
                return "its layers carry a state over padding"
            left = [row for number in numbers for row in (2 * number, 2 * number + 1)]
            for step in range(_STEPS):
                if problem := _difference(_logprobs(rows.logits), expected[left, step], rounded):
                    return problem
                if step == _STEPS - 1:
                    break
                rows.append(torch.tensor([[answers[row][step]] for row in left], device=model.device))
                if step == 1 and rows.can_keep:
                    rows.keep(torch.arange(1, len(left), device=model.device))
                    left = left[1:]
    return ""


def _logprobs(logits: Tensor) -> Tensor:
    return torch.log_softmax(logits.float(), dim=-1)


def _difference(found: Tensor, expected: Tensor, rounded: bool) -> str:
    """Why the two differ; empty if they do not."""
    apart = torch.where(found == expected, 0.0, (found - expected).abs())
    relative = torch.where(apart == 0.0, 0.0, apart / (1.0 + expected.abs()))
    if float(relative.mean() if rounded else relative.max()) <= (HALF_TOLERANCE if rounded else _TOLERANCE):
        return ""
    return f"logprobs differ by {float(apart.max()):.2g} nats" + (" in half precision" if rounded else "")
