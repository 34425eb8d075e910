"""The trainer's model as configured: master weights, adapters, dropout, activation memory; and the
probes that it must pass: adapters learn, the output layer may be computed in chunks, and training
computes the same logprobs as for each text alone.
"""

from __future__ import annotations

import inspect
import re
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import structlog
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from services.trainer.gradient.forward import (
    CHUNK_BYTES,
    LogitTransform,
    SeparateHead,
    completion_logprobs,
    evaluating,
    output_layer,
    set_training_modes,
    silence,
    text_config,
)
from services.trainer.gradient.rows import TokenGroup, build_rows, plan_rows
from services.trainer.parallel import ALONE, Parallel
from shared.config import NodeConfig
from shared.config.trainer_section import LoraSection
from shared.model.configuration import LONGEST_PROBE, attention_windows
from shared.model.full_precision import HALF_TOLERANCE, computing_in_float32, is_half
from shared.model.loading import load_causal_lm, resolve_dtype
from shared.model.reading import load_tokenizer
from shared.model.weights import adapted_layers, plain_name
from shared.seeds import number_from

# Some models read a layer's weight past its adapter, or never call the layer.

_TOKENS = 48
_SECOND_FACTOR = re.compile(r"\.lora_(embedding_)?B\.")


def adapters_without_gradient(model: nn.Module) -> list[str]:
    """Names of adapted layers that no gradient from a few tokens reaches. Numbers in the names are
    left out, because there may be many.

    An expert that no token was routed to is not reported if another expert of its layer learns.
    Clears gradients. All processes of a sharded model must make the same call.
    """
    reached: dict[str, bool] = {}
    with evaluating(model), torch.enable_grad():
        _logprobs(model).sum().backward()  # type: ignore[no-untyped-call]
    for name, parameter in model.named_parameters():
        if match := _SECOND_FACTOR.search(name):
            layer = _one_of_its_experts(plain_name(name[: match.start()]))
            reached[layer] = _is_any(parameter.grad) or reached.get(layer, False)
    model.zero_grad(set_to_none=True)
    return sorted({re.sub(r"\b\d+\b", "*", layer) for layer, learns in reached.items() if not learns})


def _logprobs(model: nn.Module) -> Tensor:
    vocabulary = int(getattr(text_config(model), "vocab_size", 0))
    tokens = torch.randint(vocabulary, (_TOKENS,), generator=torch.Generator().manual_seed(0)).tolist()
    group = TokenGroup(prompt_ids=tokens[:4], completions=[tokens[4:]], behaviour_logprobs=[None], advantages=[0.0])
    rows = build_rows([group], plan_rows([group], packed=False, budget_tokens=_TOKENS), packed=False)
    return completion_logprobs(model, rows.to(next(model.parameters()).device)).logprobs


def _one_of_its_experts(layer: str) -> str:
    """The name with all numbers after the first, which is the layer's, replaced by a
    placeholder.
    """
    head, number, rest = re.match(r"(.*?)(\b\d+\b|$)(.*)", layer).groups()  # type: ignore[union-attr]
    return f"{head}{number}" + re.sub(r"\b\d+\b", "*", rest)


def _is_any(gradient: Tensor | None) -> bool:
    if gradient is None:
        return False
    whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
    return bool(whole.any())


# Tolerance of each value, relative to 1 + |value|. A half-precision product may be rounded
# differently for another number of rows.
_HEAD_TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}
_HALF_PRODUCT_TOLERANCE = 0.05
_LARGE_LOGIT = 60.0
"""The probe raises the largest logit to this value, so that effects on large logits, such as a soft
cap at 30, are detected.
"""


class NotSeparate(Exception):
    """Why logits are not computed in chunks."""


def separate_head(model: nn.Module, budget_tokens: int) -> SeparateHead | None:
    """Find how to compute the model's logits in chunks. None, with a line in the log, if that is
    not certain to give the same result.

    budget_tokens: of one forward pass; if their logits fit into one chunk there is nothing to gain
    (None, without a line). All processes of a sharded model must make the same call. The model's
    mode is restored.
    """
    if budget_tokens * int(getattr(text_config(model), "vocab_size", 0)) * 4 <= CHUNK_BYTES:
        return None
    try:
        with evaluating(model):
            return probed(model)
    except (NotSeparate, RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError) as reason:
        structlog.get_logger("trainer").warning(
            "logits_not_chunked",
            reason=str(reason),
            consequence="all logits of a forward pass are kept in memory at once: lower trainer.token_budget if they do not fit",
        )
        return None


@torch.no_grad()
def probed(model: nn.Module) -> SeparateHead:
    """The model's separate head, tested on a few tokens. Raises NotSeparate, or the model's own
    error if it cannot be tested.
    """
    head = output_layer(model)
    if type(head) is not nn.Linear:
        raise NotSeparate(f"the output layer is a {type(head).__name__}, not a plain linear layer")
    if head._forward_hooks or head._forward_pre_hooks or head._backward_hooks or "forward" in vars(head):
        raise NotSeparate("a hook is registered on the output layer")
    config = text_config(model)
    softcap = getattr(config, "final_logit_softcapping", None)
    transform = LogitTransform(
        multiplier=float(getattr(config, "logit_scale", None) or 1.0),
        divisor=float(getattr(config, "logits_scaling", None) or 1.0),
        softcap=None if softcap is None else float(softcap),
    )
    tokens = torch.randint(int(config.vocab_size), (12,), generator=torch.Generator().manual_seed(0)).tolist()  # type: ignore[attr-defined]
    largest = max(_compared(model, head, tokens, transform, 1.0), 1e-6)
    _compared(model, head, tokens, transform, _LARGE_LOGIT / largest)
    separate = SeparateHead(transform=transform, always=isinstance(head.weight, DTensor))
    group = TokenGroup(prompt_ids=tokens[:4], completions=[tokens[4:]], behaviour_logprobs=[None], advantages=[0.0])
    rows = build_rows([group], plan_rows([group], packed=False, budget_tokens=99), packed=False)
    rows = rows.to(next(model.parameters()).device)
    at_once = completion_logprobs(model, rows).logprobs
    chunked = completion_logprobs(model, rows, separate_head=replace(separate, always=True)).logprobs
    _same(chunked, at_once, head.weight.dtype, "logprobs")
    return separate


def _compared(model: nn.Module, head: nn.Linear, tokens: list[int], transform: LogitTransform, factor: float) -> float:
    """Compares the model's logits with those computed from the head's input and `transform`.
    Returns the head's largest product.

    factor: multiplies the head's input, so that its products are that much larger than the model's
    usual ones.
    """
    products: list[Tensor] = []

    def enlarge(_module: nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (arguments[0] * factor, *arguments[1:])

    def compute(module: nn.Module, arguments: tuple[Tensor, ...], output: Tensor) -> None:
        assert isinstance(module, nn.Linear)
        # Inside this block the weights of a sharded model are gathered.
        products.append(functional.linear(arguments[0], module.weight, module.bias))
        _same(output, products[-1], output.dtype, "output layer's products")

    hooks = [head.register_forward_pre_hook(enlarge), head.register_forward_hook(compute)]
    try:
        inputs = torch.tensor([tokens], device=next(model.parameters()).device)
        logits = model(input_ids=inputs, use_cache=False).logits
    finally:
        for hook in hooks:
            hook.remove()
    if len(products) != 1:
        raise NotSeparate(f"the output layer is called {len(products)} times in a forward pass")
    largest = float(products[0].abs().max())
    _same(logits, transform.apply_(products[0].clone()), products[0].dtype, "logits")
    return largest


def _same(found: Tensor, expected: Tensor, dtype: torch.dtype, what: str) -> None:
    if found.shape != expected.shape:
        raise NotSeparate(f"{what} have shape {tuple(found.shape)}, expected {tuple(expected.shape)}")
    difference = (found - expected).abs() / (1.0 + expected.abs())
    if not bool((difference <= _HEAD_TOLERANCE.get(dtype, _HALF_PRODUCT_TOLERANCE)).all()):
        raise NotSeparate(f"the model's {what} are not those of its output layer, by up to {float(difference.max()):.1e}")


# Tolerance relative to 1 + |logprob|; in half precision it is `HALF_TOLERANCE` for the mean.
_TOLERANCE = 1e-4
_DOUBLE_TOLERANCE = 1e-6
_BEYOND = 16


class UntrainableModel(ValueError):
    """Training would use other logprobs than sampling. The message has the findings and the
    remedy.
    """


def check_trainable(model: nn.Module) -> None:
    """Test the model on a few tokens in the modes used for training.

    Raises:
        UntrainableModel: a later token or padding changes the logprobs, two passes disagree, or the
            model cannot take rows.
    """
    _check(model, rounded=False)
    if is_half(next(model.parameters()).dtype):
        _check(model, rounded=True)


def _check(model: nn.Module, *, rounded: bool) -> None:
    """Like `check_trainable`; rounded: in the model's own half precision instead of float32."""
    with nullcontext() if rounded else computing_in_float32(model):
        _compare(model, rounded)


def _compare(model: nn.Module, rounded: bool) -> None:
    groups = _groups(int(getattr(text_config(model), "vocab_size", 0)))
    try:
        with torch.no_grad():
            with evaluating(model):
                expected = _alone(model, groups)
                otherwise_ended = _alone(model, [_with_other_ends(group) for group in groups])
                padded = _in_rows(model, groups)
                shorter, longer = _beyond_windows(model)
            passes = [_in_rows(model, groups) for _ in range(2)]
    except Exception as error:
        # Models raise different errors if they cannot.
        raise UntrainableModel(f"{_name(model)} does not compute rows of tokens ({type(error).__name__}: {error})") from error
    if not torch.cat([expected, otherwise_ended, padded, shorter, longer, *passes]).isfinite().all():
        raise UntrainableModel(f"{_name(model)}: its logprobs are not numbers: check its configuration's numbers and weights")
    before_ends = _all_but_last(groups)
    # Test both, because padding may be masked where text is not.
    moved = _difference(otherwise_ended[before_ends], expected[before_ends], rounded) or _difference(longer, shorter, rounded)
    if problem := moved or _difference(padded, expected, rounded):
        raise UntrainableModel(
            f"{_name(model)} gives a text's tokens other logprobs when text or padding follows them ({problem}): it is not a "
            "causal language model, and cannot be trained here"
        )
    for found in passes:
        if problem := _difference(found, expected, rounded):
            raise UntrainableModel(
                f"{_name(model)} does not compute the same logprobs in training ({problem}): it keeps dropout or noise on; "
                "set its rates in the model's config.json to 0, or trainer.gradient_checkpointing to false"
            )


def _difference(found: Tensor, expected: Tensor, rounded: bool) -> str:
    """Why two sets of logprobs differ; empty if they do not."""
    apart = (found - expected).abs()
    relative = apart / (1.0 + expected.abs())
    tolerance = _DOUBLE_TOLERANCE if found.dtype == torch.float64 else _TOLERANCE
    same = float(relative.mean()) <= HALF_TOLERANCE if rounded else float(relative.max()) <= tolerance
    return "" if same else f"they differ by {float(apart.max()):.2g} nats" + (" in half precision" if rounded else "")


def _groups(vocabulary: int) -> list[TokenGroup]:
    generator = torch.Generator().manual_seed(0)

    def group(prompt: int, *lengths: int) -> TokenGroup:
        ids = [torch.randint(vocabulary, (length,), generator=generator).tolist() for length in (prompt, *lengths)]
        count = len(lengths)
        return TokenGroup(prompt_ids=ids[0], completions=ids[1:], behaviour_logprobs=[None] * count, advantages=[0.0] * count)

    return [group(5, 4, 9), group(11, 3)]


def _with_other_ends(group: TokenGroup) -> TokenGroup:
    return replace(group, completions=[[*tokens[:-1], 1 - min(tokens[-1], 1)] for tokens in group.completions])


def _all_but_last(groups: list[TokenGroup]) -> Tensor:
    """Mask over all completion tokens except the last of each completion."""
    return torch.tensor([place + 1 < length for group in groups for length in group.completion_lengths for place in range(length)])


def _in_rows(model: nn.Module, groups: list[TokenGroup]) -> Tensor:
    """Every completion token's logprob as training computes it: rows in a batch, padded on the
    right.
    """
    planned = plan_rows(groups, packed=False, budget_tokens=1 << 20)
    rows = build_rows(groups, planned, packed=False).to(next(model.parameters()).device)
    scored = completion_logprobs(model, rows).logprobs
    by_sequence = {sequence: scored[row][rows.mask[row]] for row, sequence in enumerate(rows.sequences)}
    return torch.cat([by_sequence[sequence] for sequence in sorted(by_sequence)])


def _alone(model: nn.Module, groups: list[TokenGroup]) -> Tensor:
    texts = [(group.prompt_ids, completion) for group in groups for completion in group.completions]
    return torch.cat([_text_alone(model, [*prompt, *completion], len(completion)) for prompt, completion in texts])


def _beyond_windows(model: nn.Module) -> tuple[Tensor, Tensor]:
    """Logprobs of the same tokens, past the widest window that can be tested: at the end of a text,
    and with more tokens after them.
    """
    config = text_config(model)
    context = int(getattr(config, "max_position_embeddings", None) or 2 * LONGEST_PROBE)
    beyond = min(_BEYOND, context // 3)
    widest = max(
        (width for width in attention_windows(model.config) if width <= min(LONGEST_PROBE, context - 3 * beyond)), default=0
    )
    vocabulary = int(getattr(config, "vocab_size", 0))
    text = torch.randint(vocabulary, (widest + 3 * beyond,), generator=torch.Generator().manual_seed(1)).tolist()
    return _text_alone(model, text[:-beyond], beyond), _text_alone(model, text, 2 * beyond)[:beyond]


def _text_alone(model: nn.Module, text: list[int], count: int) -> Tensor:
    """Logprobs of a text's last `count` tokens, `(count,)`; computes only the logits that these
    need if the model supports it.
    """
    ids = torch.tensor([text], device=next(model.parameters()).device)
    base = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    fewer = {"logits_to_keep": count + 1} if "logits_to_keep" in inspect.signature(base.forward).parameters else {}
    logits: Tensor = model(input_ids=ids, use_cache=False, **fewer).logits[0, -count - 1 : -1]
    at_least_float32 = logits if logits.dtype == torch.float64 else logits.float()
    return at_least_float32.log_softmax(-1).gather(1, ids[0, -count:, None]).squeeze(1)


def _name(model: nn.Module) -> str:
    return f"the model ({getattr(text_config(model), 'model_type', type(model).__name__)})"


@dataclass(frozen=True, slots=True)
class PolicyModel:
    """`model` is trained in float32 (weights that LoRA freezes stay in `dtype`); `dtype` is that of
    matrix products and published weights.
    """

    model: Any
    tokenizer: Any
    device: torch.device
    dtype: torch.dtype


def load_policy_model(config: NodeConfig, parallel: Parallel = ALONE) -> PolicyModel:
    """Load the base policy for training.

    Raises:
        ModelLoadError: the model is missing or broken.
        ValueError: LoRA's target modules are not in the model, or it cannot be trained correctly
            (`UntrainableModel`).
    """
    device = parallel.device(config.model.device)
    dtype = resolve_dtype(config.model.dtype, device)
    rank = config.trainer.lora.rank
    tokenizer = load_tokenizer(config.model)
    load_device = parallel.load_device(device)
    model: Any = load_causal_lm(config.model, dtype=dtype if rank else torch.float32, device=load_device)
    torch.manual_seed(node_seed(config))
    silence(model)
    if rank:
        model = with_adapters(model, config.trainer.lora)
    if config.trainer.gradient_checkpointing:
        if rank:
            model.enable_input_require_grads()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    parallel.shard(model)
    set_training_modes(model)
    check_trainable(model)
    if rank:
        _tell_of_idle_adapters(model, parallel)
    return PolicyModel(model, tokenizer, device, dtype)


def load_reference_model(config: NodeConfig, policy: PolicyModel, parallel: Parallel = ALONE) -> Any:
    """The base policy, frozen, for the divergence to it."""
    model = load_causal_lm(config.model, dtype=policy.dtype, device=parallel.load_device(policy.device))
    model.requires_grad_(False)
    parallel.shard(model)
    return model.train(False)


def node_seed(config: NodeConfig) -> int:
    """Seed of the trainer's own random choices: the node's seed and id."""
    return number_from(f"trainer/{config.node.id}/{config.node.seed}", 6)


def with_adapters(model: Any, lora: LoraSection) -> Any:
    """`model` with low-rank adapters of rank `lora.rank`, in float32 whatever the model's dtype;
    only they are trained.

    Raises:
        ValueError: the target modules are not in the model, or a policy with these adapters merged
            cannot be published.
    """
    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(
        model,
        LoraConfig(
            r=lora.rank,
            lora_alpha=lora.alpha,
            target_modules=lora.target_modules,
            task_type="CAUSAL_LM",
        ),
    )
    _check_mergeable(adapted)
    return adapted


def _tell_of_idle_adapters(model: Any, parallel: Parallel) -> None:
    idle = adapters_without_gradient(model)
    if idle and parallel.rank == 0:
        structlog.get_logger("trainer").warning(
            "adapters_without_gradient",
            modules=idle,
            consequence="these adapters do not affect the logprobs of a short text, so they learn nothing: omit "
            "them from trainer.lora.target_modules",
        )


def _check_mergeable(adapted: Any) -> None:
    """Refuse adapters that cannot be merged: on one use of a shared weight, and on modules that are
    not layers with a weight.
    """
    from peft.tuners.lora.layer import ParamWrapper

    for name, module in adapted.named_modules():
        if isinstance(module, ParamWrapper):
            raise ValueError(
                f"trainer.lora.target_modules adapts {plain_name(name)}, which is not a linear layer but holds bare weights, as "
                'fused experts do, and these cannot be merged for publishing: name linear layers, e.g. ["q_proj", "k_proj", '
                '"v_proj", "o_proj"]'
            )
    for name, layer in adapted_layers(adapted).items():
        if isinstance(layer.base_layer, nn.Linear) and not _is_linear(layer.base_layer):
            adapted_name = plain_name(name).removesuffix(".weight")
            raise ValueError(
                f"trainer.lora.target_modules adapts {adapted_name}, a {type(layer.base_layer).__name__} that computes something "
                "other than a linear layer, as routers do, so no adapter fits it: name linear layers, e.g. "
                '["q_proj", "k_proj", "v_proj", "o_proj"]'
            )
    ties = getattr(adapted.get_base_model(), "all_tied_weights_keys", None) or {}
    tied = sorted({plain_name(name) for name in adapted_layers(adapted)} & {*ties, *ties.values()})
    if tied:
        raise ValueError(
            f"trainer.lora.target_modules adapts {tied[0]}, a weight that this model uses in two places (tied embeddings: "
            "input and output): only one use would learn, but a published policy has one weight for both; name other modules"
        )


@torch.no_grad()
def _is_linear(layer: nn.Linear) -> bool:
    """Say whether a layer that is named linear, but may have its own implementation, computes the
    same as a linear layer.
    """
    if type(layer).forward is nn.Linear.forward:
        return True
    weight = layer.weight
    inputs = torch.linspace(-1.0, 1.0, 2 * weight.shape[1], device=weight.device, dtype=weight.dtype).reshape(2, -1)
    try:
        found = layer(inputs)
    except Exception:  # noqa: BLE001 (each layer says in its own way what it wants; it is not what a linear layer wants)
        return False
    expected = nn.functional.linear(inputs, weight, layer.bias)
    return isinstance(found, Tensor) and found.shape == expected.shape and torch.allclose(found, expected, rtol=0.02, atol=0.02)
