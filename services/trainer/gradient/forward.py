"""Logprobs and entropy of completion tokens under a causal LM, over packed or padded rows, without
dropout and with one chunk of logits at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial

from services.trainer.gradient.packed_attention import PACKED, windows_asked
from services.trainer.gradient.rows import TokenGroup, TokenRows, build_rows, plan_rows
from shared.model.configuration import LONGEST_PROBE, attention_windows
from shared.model.full_precision import HALF_TOLERANCE, computing_in_float32, is_half

# The policy being trained must be the policy that sampled, so it has no dropout. That hides in
# `nn.Dropout` modules, in functional calls that read `self.training`, in layers that are skipped at
# random and in noise on a router. So the model stays in eval mode, as in the generator. Only two
# things are in train mode: the adapters' own dropout, which is wanted, and the layers that
# recompute activations, because transformers ties that to the mode.


def silence(model: nn.Module) -> None:
    """Set every rate of dropout and of layer skipping in the model's modules to 0. Call it before
    adapters are added.

    Eval mode alone is not enough for layers that recompute activations. A router's jitter stays,
    because Phi-MoE's eval mode reads it too.
    """
    for module in model.modules():
        rates = [name for name, value in vars(module).items() if isinstance(value, float) and "drop" in name.lower()]
        for name in rates:
            setattr(module, name, 0.0)


def set_training_modes(model: nn.Module) -> None:
    """Put everything into eval mode except the adapters' dropout and layers that recompute
    activations.
    """
    model.eval()
    for name, module in model.named_modules():
        if getattr(module, "gradient_checkpointing", False):
            module.training = True
        elif isinstance(module, nn.Dropout) and "lora_dropout" in name:
            module.train()


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put the whole model into eval mode inside the block; afterwards restore each module's
    mode.
    """
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


# A model's logits are by far the largest tensor of a step (16,384 tokens of a vocabulary of
# 151,936: 10 GB in float32), and automatic differentiation keeps several copies. Here the logits of
# one chunk of tokens are computed, reduced to two numbers per token and discarded; the backward
# pass computes them again. This needs memory for one chunk, small parts of it in float32, and the
# gradients themselves. The result equals the unchunked computation except for the order of
# additions in the weight's gradient.

CHUNK_BYTES = 160 * 2**20
"""Size of one chunk of logits; on a GPU a chunk is twice as large. Logits that fit into this are
computed directly, which needs five times this memory: 0.84 GB. Chunks with what is computed from
them need less, on a GPU 0.67 GB.
"""

_PIECES = 16
_GPU_FACTOR, _GPU_PIECES = 2, 4
"""A GPU is done with a small piece before the next is launched."""


@dataclass(frozen=True, slots=True)
class LogitTransform:
    """Transformation of a model's output layer's product: `softcap * tanh(x * multiplier / divisor
    / softcap)`; None: no soft cap.

    Gemma 2 caps (`final_logit_softcapping`), Cohere multiplies (`logit_scale`), Granite divides
    (`logits_scaling`).
    """

    multiplier: float = 1.0
    divisor: float = 1.0
    softcap: float | None = None

    def apply_(self, logits: Tensor) -> Tensor:
        """Apply it in place and in the logits' own dtype, as the models do."""
        if self.multiplier != 1.0:
            logits.mul_(self.multiplier)
        if self.divisor != 1.0:
            logits.div_(self.divisor)
        if self.softcap is not None:
            logits.div_(self.softcap).tanh_().mul_(self.softcap)
        return logits

    def slope(self, transformed: Tensor) -> Tensor | float:
        """Derivative at the logit whose transformed value is given."""
        constant = self.multiplier / self.divisor
        if self.softcap is None:
            return constant
        return transformed.div(self.softcap).square_().neg_().add_(1.0).mul_(constant)


def chunked_logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    stride: int = 1,
    transform: LogitTransform | None = None,
    chunk_bytes: int = CHUNK_BYTES,
) -> tuple[Tensor, Tensor]:
    """Logprobs of `targets` with gradient, and entropies in nats without: both (M,), float32, or
    float64 if hidden is.

    hidden: (M, H). weight: (V, H). bias: (V,). targets: (M,) int64. stride: the entropy of each
    token at a multiple of it is computed; 0: of none. The others' is NaN. Products are
    computed in autocast's dtype if it is on.
    """
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    with torch.autocast(device, enabled=False):
        found: tuple[Tensor, Tensor] = _ChunkedLogprobs.apply(  # type: ignore[no-untyped-call]
            hidden, weight, bias, targets, temperature, stride, transform or LogitTransform(), dtype, chunk_bytes
        )
    return found


class _ChunkedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        stride: int,
        transform: LogitTransform,
        dtype: torch.dtype,
        chunk_bytes: int,
    ) -> tuple[Tensor, Tensor]:
        count = len(targets)
        exact = torch.float64 if dtype == torch.float64 else torch.float32
        logprobs, log_partition = (torch.empty(count, dtype=exact, device=hidden.device) for _ in range(2))
        entropy = torch.full_like(logprobs, torch.nan)
        chunk_bytes, pieces = _sizes(hidden.device, chunk_bytes)
        for where, logits in _chunks(hidden, weight.to(dtype), bias, chunk_bytes):
            for piece, part in _pieces(logits, where, pieces):
                sampled = slice(-part.start % stride, None, stride) if stride else slice(0)
                logprobs[part], entropy[part][sampled], log_partition[part] = _scores(
                    piece, targets[part], temperature, sampled, transform, exact
                )
        ctx.save_for_backward(hidden, weight, bias, targets, log_partition)
        ctx.settings = temperature, transform, dtype, chunk_bytes, pieces
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, log_partition = ctx.saved_tensors
        temperature, transform, dtype, chunk_bytes, pieces = ctx.settings
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        upstream = gradients[0]
        with torch.autocast(hidden.device.type, enabled=False):
            product = weight.to(dtype)
            hidden_grad = torch.empty_like(hidden, dtype=dtype) if wants_hidden else None
            weight_grad = torch.zeros_like(weight) if wants_weight else None
            bias_grad = torch.zeros_like(bias) if wants_bias else None
            for where, logits in _chunks(hidden, product, bias, chunk_bytes):
                for piece, part in _pieces(logits, where, pieces):
                    pull = upstream[part].unsqueeze(-1) / temperature
                    _replace_by_gradient(piece, targets[part], log_partition[part], pull, temperature, transform)
                if hidden_grad is not None:
                    torch.mm(logits, product, out=hidden_grad[where])
                if weight_grad is not None:
                    _add_outer(weight_grad, logits, hidden[where].to(dtype), pieces)
                if bias_grad is not None:
                    bias_grad += logits.sum(dim=0, dtype=log_partition.dtype).to(bias_grad.dtype)
        return None if hidden_grad is None else hidden_grad.to(hidden.dtype), weight_grad, bias_grad, *[None] * 6


def _scores(
    logits: Tensor, targets: Tensor, temperature: float, sampled: slice, transform: LogitTransform, exact: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Logprobs (n,), entropies of the `sampled` rows and log partition functions (n,) in dtype
    `exact`, from the output layer's products (n, V), which are overwritten.
    """
    scaled = transform.apply_(logits).to(exact)
    if temperature != 1.0:
        scaled.div_(temperature)
    top = scaled.amax(dim=-1, keepdim=True)
    chosen = scaled.sub_(top).gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    # If a model excludes a token its logit is -inf, and 0 x -inf is NaN; the token's share of the
    # entropy is 0.
    finite = scaled[sampled].clamp(min=torch.finfo(exact).min)
    unnormalised = scaled.exp_()
    total = unnormalised.sum(dim=-1)
    mean = torch.bmm(unnormalised[sampled].unsqueeze(1), finite.unsqueeze(2)).flatten() / total[sampled]
    return chosen - total.log(), total[sampled].log() - mean, top.squeeze(-1) + total.log()


def _replace_by_gradient(
    logits: Tensor, targets: Tensor, log_partition: Tensor, pull: Tensor, temperature: float, transform: LogitTransform
) -> None:
    """Replace the output layer's products (n, V) by the loss's gradient with respect to them. pull:
    (n, 1), the gradient with respect to the logprobs, divided by the temperature.
    """
    scaled = transform.apply_(logits).to(log_partition.dtype)
    slope = transform.slope(scaled)
    if temperature != 1.0:
        scaled.div_(temperature)
    by_logit = scaled.sub_(log_partition.unsqueeze(-1)).exp_().mul_(-pull)
    chosen = targets.unsqueeze(-1)
    by_logit.scatter_(-1, chosen, by_logit.gather(-1, chosen) + pull)
    # Copies nothing if the work was done in place.
    logits.copy_(by_logit if isinstance(slope, float) and slope == 1.0 else by_logit.mul_(slope))


def _chunks(hidden: Tensor, weight: Tensor, bias: Tensor | None, chunk_bytes: int) -> Iterator[tuple[slice, Tensor]]:
    """Rows and their logits (rows, V), all in one buffer, which the next chunk overwrites."""
    vocabulary = len(weight)
    rows = max(1, min(len(hidden), chunk_bytes // (vocabulary * weight.element_size())))
    buffer = torch.empty(rows, vocabulary, dtype=weight.dtype, device=weight.device)
    for start in range(0, len(hidden), rows):
        where = slice(start, min(start + rows, len(hidden)))
        logits = buffer[: where.stop - start]
        torch.mm(hidden[where].to(weight.dtype), weight.t(), out=logits)
        if bias is not None:
            logits.add_(bias.to(weight.dtype))
        yield where, logits


def _sizes(device: torch.device, chunk_bytes: int) -> tuple[int, int]:
    """Bytes of a chunk, and the number of its pieces."""
    return (chunk_bytes * _GPU_FACTOR, _GPU_PIECES) if device.type == "cuda" else (chunk_bytes, _PIECES)


def _pieces(logits: Tensor, where: slice, count: int) -> Iterator[tuple[Tensor, slice]]:
    """Parts of a chunk with the rows they belong to, so that temporary results stay small compared
    with the chunk.
    """
    rows = -(-len(logits) // count)
    for start in range(0, len(logits), rows):
        piece = logits[start : start + rows]
        yield piece, slice(where.start + start, where.start + start + len(piece))


def _add_outer(total: Tensor, logits: Tensor, hidden: Tensor, pieces: int) -> None:
    """`total += logits^T hidden`; half-precision products are summed in the precision of
    `total`.
    """
    if total.dtype == logits.dtype:
        total.addmm_(logits.t(), hidden)
        return
    rows = -(-len(total) // pieces)
    for start in range(0, len(total), rows):
        total[start : start + rows] += logits[:, start : start + rows].t() @ hidden


# A probe on the model itself: are texts that share a row computed exactly as if each were alone?

# Tolerance relative to 1 + |logprob|; in half precision it is `HALF_TOLERANCE` for the mean.
_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-6}
# Experts that also get other texts' tokens sum in another order.
_LEAK_TOLERANCE = 1e-5


def plain_rows_reason(model: nn.Module) -> str:
    """Why every completion needs a padded row of its own; empty if rows may be packed, which then
    is how the model's attention is set.

    Packing needs attention in every layer that transformers lets one replace. Whether its results
    are those of plain rows, and do not change with another text's tokens, is tested on a few texts,
    longer than any window that is not a layer's own argument. Each module's mode is restored.
    """
    before = attention_implementation(model)
    if before not in ("sdpa", "eager", PACKED):
        return f"attention {before!r} cannot be replaced"
    try:
        with torch.no_grad(), evaluating(model):
            with computing_in_float32(model):
                reason = _probe(model, before, rounded=False)
            if not reason and is_half(next(model.parameters()).dtype):
                reason = _probe(model, before, rounded=True)
    except Exception as error:
        # Models that cannot take packed rows raise different errors; any of them means that packing
        # is not possible.
        reason = f"it does not take a row of several texts ({type(error).__name__})"
    if reason:
        _set_attention(model, before)
    return reason


def _set_attention(model: nn.Module, name: str) -> None:
    if attention_implementation(model) != name:
        model.set_attn_implementation(name)  # type: ignore[operator]
    if attention_implementation(model) != name:  # transformers only warns
        raise ValueError("the model's attention cannot be replaced, so texts cannot share a row: plan rows with packed=False")


def _probe(model: nn.Module, attention: str, *, rounded: bool) -> str:
    """Why packed rows are wrong, compared with plain ones under `attention`; empty if they are
    right. rounded: in the model's own half precision, as far as its accuracy allows.
    """
    config = text_config(model)
    named = [] if _attends_to_all(config) else attention_windows(config)
    window = max((width for width in named if width <= LONGEST_PROBE), default=0)
    vocabulary = int(getattr(config, "vocab_size", 0))
    generator = torch.Generator().manual_seed(0)

    def group(prompt: int, *lengths: int) -> TokenGroup:
        first, *others = (torch.randint(vocabulary, (length,), generator=generator).tolist() for length in (prompt, *lengths))
        count = len(lengths)
        return TokenGroup(prompt_ids=first, completions=others, behaviour_logprobs=[None] * count, advantages=[0.0] * count)

    def logprobs(groups: Sequence[TokenGroup], *, packed: bool) -> tuple[Tensor, set[int]]:
        rows = build_rows(groups, plan_rows(groups, packed=packed, budget_tokens=1 << 30), packed=packed)
        rows = rows.to(next(model.parameters()).device)
        found = completion_logprobs(model, rows).logprobs
        return found, set() if rows.layout is None else windows_asked(rows.layout)

    first, *others = group(5, 4, window + 6, 3), group(window + 7, 4, 2), group(3, 5)
    changed = replace(first, completions=[[(token + 1) % vocabulary for token in first.completions[0]], *first.completions[1:]])
    _set_attention(model, attention)
    plain, _ = logprobs([first, *others], packed=False)
    packed, asked = logprobs([first, *others], packed=True)
    moved, _ = logprobs([changed, *others], packed=True)
    relative = (packed - plain).abs() / (1.0 + plain.abs())
    same_as_plain = float(relative.mean()) <= HALF_TOLERANCE if rounded else float(relative.max()) <= _TOLERANCE[plain.dtype]
    blind_to_others = rounded or bool(((packed[1:] - moved[1:]).abs() <= _LEAK_TOLERANCE).all())
    if not (same_as_plain and blind_to_others):
        return "it computes texts that share a row otherwise than each alone"
    untried = [width for width in named if width > LONGEST_PROBE and width not in asked]
    if untried:
        return f"its configuration names a window of {untried[0]} tokens, too long to try whether its layers keep to it"
    return ""


def _attends_to_all(config: object) -> bool:
    """Say whether no layer uses a window that the configuration may name."""
    layer_types = getattr(config, "layer_types", None)
    if layer_types is not None:
        return all(kind == "full_attention" for kind in layer_types)
    return getattr(config, "use_sliding_window", True) is False


@dataclass(frozen=True, slots=True)
class CompletionLogprobs:
    """logprobs: (N, T), with gradient. entropy: (N, T) in nats, without; NaN where it was not asked
    for. Both 0 on padding.

    float32, or float64 if the model is. Both are those of the policy at the requested temperature.
    """

    logprobs: Tensor
    entropy: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class SeparateHead:
    """States that a model's logits are `transform` of its output layer's product, so that they need
    not be in memory all at once.

    Determined by `services.trainer.policy_model`. chunk_bytes: size of the logits in memory at
    once. always: also use chunks if all logits fit into one; processes that share a sharded output
    layer must do so, because each has another number of tokens.
    """

    transform: LogitTransform = LogitTransform()
    chunk_bytes: int = CHUNK_BYTES
    always: bool = False

    def is_used(self, head: nn.Module, tokens: int) -> bool:
        """Say whether the logits of this many tokens are computed in chunks."""
        assert isinstance(head.weight, Tensor)
        return self.always or tokens * len(head.weight) * 4 > self.chunk_bytes


ENTROPIES = 256
"""Number of tokens of a forward pass whose entropy is computed for the metric. It costs several
passes over all logits, which is a tenth of a step where the vocabulary is large.
"""


def completion_logprobs(
    model: nn.Module,
    rows: TokenRows,
    *,
    temperature: float = 1.0,
    separate_head: SeparateHead | None = None,
    entropies: int | None = None,
) -> CompletionLogprobs:
    """Run `model` once over `rows` (on its device) and score every completion token at
    `temperature`.

    The output layer sees only the positions that predict a completion token: never the prompt,
    never padding. separate_head: how to compute logits in chunks; None: all at once, through the
    model's own forward pass. entropies: of about so many tokens, evenly spread, the entropy is
    computed too; None: of all. Raises ValueError if the temperature is not positive, or if the rows
    are packed and the model's attention cannot be replaced.
    """
    if not temperature > 0.0:
        raise ValueError(f"temperature is {temperature}: behaviour logprobs need one above 0")
    positions, targets = rows.predicted_from[rows.mask], rows.targets[rows.mask]
    stride = _stride(len(targets), entropies)
    head = output_layer(model)
    if separate_head is not None and head is not None and separate_head.is_used(head, len(positions)):
        logprobs, entropy = _in_chunks(model, head, rows, positions, targets, temperature, stride, separate_head)
    else:
        logprobs, entropy = _at_once(_logits_at(model, rows, positions), targets, temperature, stride)
    empty = torch.zeros(rows.mask.shape, dtype=logprobs.dtype, device=logprobs.device)
    return CompletionLogprobs(
        logprobs=empty.masked_scatter(rows.mask, logprobs),
        entropy=empty.masked_scatter(rows.mask, entropy),
    )


def _stride(tokens: int, wanted: int | None) -> int:
    """Distance of the tokens whose entropy is computed; 0 for none. It has no divisor in common
    with the number of tokens, or of answers of equal length always the same places would be taken.
    """
    if wanted is None or not wanted:
        return 1 if wanted is None else 0
    stride = max(1, tokens // wanted)
    while math.gcd(stride, tokens) > 1:
        stride += 1
    return stride


def output_layer(model: nn.Module) -> nn.Module | None:
    """The module that computes logits from hidden states, or None if the model does not declare it;
    wrappers such as LoRA's are unwrapped.
    """
    head: nn.Module | None = model.get_output_embeddings()  # type: ignore[operator]
    return head


def text_config(model: nn.Module) -> object:
    """The configuration of the model's language part; wrappers such as LoRA's are unwrapped."""
    return model.config.get_text_config()  # type: ignore[operator, union-attr]


def attention_implementation(model: nn.Module) -> str:
    """The attention that transformers chose for the model, such as `sdpa`, `eager` or
    `flash_attention_2`.
    """
    return str(getattr(text_config(model), "_attn_implementation", "unknown"))


def _at_once(logits: Tensor, targets: Tensor, temperature: float, stride: int) -> tuple[Tensor, Tensor]:
    """Logprobs and entropies (M,) from (M, vocabulary) logits; the latter NaN except every `stride`
    tokens.
    """
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if temperature != 1.0:
        logits = logits / temperature
    log_partition = logits.logsumexp(dim=-1)
    logprobs = logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1) - log_partition
    entropy = torch.full_like(logprobs.detach(), torch.nan)
    if stride:
        with torch.no_grad():
            log_probabilities = logits.detach()[::stride] - log_partition.detach()[::stride].unsqueeze(-1)
            # If a model excludes a token its logit is -inf, and 0 x -inf is NaN; the token's share
            # of the entropy is 0.
            probabilities = log_probabilities.exp()
            entropy[::stride] = -probabilities.mul_(log_probabilities.clamp_(min=torch.finfo(logits.dtype).min)).sum(-1)
    return logprobs, entropy


def _in_chunks(
    model: nn.Module,
    head: nn.Module,
    rows: TokenRows,
    positions: Tensor,
    targets: Tensor,
    temperature: float,
    stride: int,
    separate_head: SeparateHead,
) -> tuple[Tensor, Tensor]:
    """Like `_at_once`, from the hidden states before the output layer."""
    taken: list[Tensor] = []

    def take(_module: nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        taken.append(arguments[0].flatten(0, 1).index_select(0, positions))
        # The model's own logits are not used; computing them for one position is enough for its
        # forward pass.
        return (arguments[0][:1, :1], *arguments[1:])

    with _before(head, take):
        logits = _forward(model, rows)
    sharded = isinstance(head.weight, DTensor)
    logprobs, entropy = chunked_logprobs(
        taken[0],
        _whole(head.weight),
        None if head.bias is None else _whole(head.bias),
        targets,
        temperature=temperature,
        stride=stride,
        transform=separate_head.transform,
        chunk_bytes=separate_head.chunk_bytes,
    )
    return (_Through.apply(logprobs, logits) if sharded else logprobs), entropy  # type: ignore[no-untyped-call]


def _whole(parameter: object) -> Tensor:
    """A sharded parameter, gathered. Its gradient is the sum over all processes, each of which
    keeps its shard.
    """
    if isinstance(parameter, DTensor):
        return parameter.full_tensor(grad_placements=[Partial()])
    assert isinstance(parameter, Tensor)
    return parameter


class _Through(torch.autograd.Function):
    """Returns its first argument; the second gets a gradient of 0. FSDP2 gathers a module's weights
    for the backward pass when the module's output gets a gradient, and hidden states alone are not
    its output.
    """

    @staticmethod
    def forward(ctx: Any, value: Tensor, output: Tensor) -> Tensor:
        ctx.save_for_backward(output)
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        return gradients[0], torch.zeros_like(ctx.saved_tensors[0])


def _logits_at(model: nn.Module, rows: TokenRows, positions: Tensor) -> Tensor:
    """(M, vocabulary) logits at M flattened positions, through the model's own forward pass and
    output layer.

    The output layer sees (1, M, hidden) instead of (R, W, hidden). Because the model's own forward
    pass is used, whatever it does to logits (scaling, soft caps) and whatever wraps it (LoRA, FSDP)
    still applies.
    """

    def narrow(_module: nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (arguments[0].flatten(0, 1).index_select(0, positions).unsqueeze(0), *arguments[1:])

    head = output_layer(model)
    with _before(head, narrow) if head is not None else nullcontext():
        logits = _forward(model, rows)
    if logits.shape[:2] == (1, len(positions)):
        return logits[0]
    return logits.flatten(0, 1).index_select(0, positions)


def _forward(model: nn.Module, rows: TokenRows) -> Tensor:
    inputs: dict[str, Tensor] = {"input_ids": rows.input_ids}
    if rows.layout is not None:
        # Set once: layers that recompute their activations ask for it again in the backward pass.
        _set_attention(model, PACKED)
        inputs |= {"attention_mask": rows.layout, "position_ids": rows.position_ids}
    # Padded rows need no mask: padding is on the right, where causal attention never looks, and
    # attention kernels are fastest without a mask.
    logits: Tensor = model(**inputs, use_cache=False).logits
    return logits


@contextmanager
def _before(module: nn.Module, hook: Callable[[nn.Module, tuple[Tensor, ...]], tuple[Tensor, ...]]) -> Iterator[None]:
    """Inside the block, `hook` changes the arguments of the module's calls."""
    registered = module.register_forward_pre_hook(hook)
    try:
        yield
    finally:
        registered.remove()
