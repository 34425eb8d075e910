"""Estimates the memory of a training step from a model's configuration alone: no weight is read and
nothing is computed.

The model is built without data, and torch reports what one forward pass would keep for the backward
pass. That is exact for torch's attention on a CPU (flash attention), which is similar on a GPU;
`tests/integration/test_memory_need.py` compares it with a measured step.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM

from services.trainer.gradient.forward import CHUNK_BYTES
from services.trainer.policy_model import with_adapters
from services.trainer.torchrun import transformer_blocks
from shared.config.trainer_section import LoraSection
from shared.model.configuration import meant_attention

_GRADIENT_COPIES = 2
_MOMENTS = 2
LOGITS_BYTES = 5 * CHUNK_BYTES
"""Memory for one chunk of logits, as `gradient.forward` computes them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingPlan:
    """Plan by which a policy would be trained.

    dtype: `model.dtype`, used for matrix products; without adapters the weights are float32 in any
    case. tokens: those of one pass, `trainer.token_budget`, in rows of `width`. processes:
    GPUs over which torchrun shards the policy (FSDP2).
    """

    dtype: torch.dtype
    lora_rank: int = 0
    gradient_checkpointing: bool = False
    tokens: int = 16_384
    width: int = 1024
    processes: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryNeed:
    """Bytes that one process holds in a step.

    states: its part of weights, gradients, Adam's two moments and, because of the bound on foreign
    groups, a copy of the gradients. together: what FSDP2 gathers temporarily; 0 with one process.
    activations: what one pass keeps for the backward pass, including copies of the weights in the
    dtype of matrix products. logits: one chunk, and the output layer's own gradient beside the one
    that it is added to. Not included: logits of a model that cannot compute them in chunks (log
    `logits_not_chunked`), and the reference model of `trainer.kl_coefficient`.
    """

    states: int
    together: int
    activations: int
    logits: int

    @property
    def total(self) -> int:
        """The sum, which is more than a step holds at any one time. Torch's allocator and CUDA take
        about 1 GB of a GPU in addition.
        """
        return self.states + self.together + self.activations + self.logits


def memory_need(config: Any, plan: TrainingPlan) -> MemoryNeed:
    """The memory of a step with the causal model that `config`, a transformers configuration,
    describes.

    Raises:
        ValueError, KeyError: there is no causal language model of this kind, its linear layers
            cannot be adapted or its activations recomputed, its positions do not reach `width`, or
            its forward pass cannot be traced without data.
    """
    if plan.width < 1 or plan.tokens < 1:
        raise ValueError(f"{plan.tokens} tokens in rows of {plan.width}: both must be 1 or more")
    longest = int(getattr(config.get_text_config(), "max_position_embeddings", 0) or 0)
    if longest and plan.width > longest:
        raise ValueError(f"it reads texts of up to {longest} tokens, but rows of {plan.width} are requested: use narrower ones")
    model = _without_numbers(copy.deepcopy(config), plan)
    parameters = list(model.parameters())
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    states = _bytes(parameters) + (_GRADIENT_COPIES + _MOMENTS) * _bytes(trained)
    together = 0
    if plan.processes > 1:
        blocks = transformer_blocks(model)
        largest = max((_bytes(block.parameters()) for block in blocks), default=0)
        around = _bytes(parameters) - sum(_bytes(block.parameters()) for block in blocks)
        # The next block is fetched while one computes. What surrounds the blocks stays gathered,
        # with its gradient.
        together = 2 * around + 3 * largest
    return MemoryNeed(
        states=-(-states // plan.processes),
        together=together,
        activations=_activations(model, plan),
        logits=LOGITS_BYTES + _head_bytes(model, plan.dtype),
    )


def _without_numbers(config: Any, plan: TrainingPlan) -> Any:
    with torch.device("meta"):
        dtype = plan.dtype if plan.lora_rank else torch.float32
        attention = meant_attention(config)
        chosen = {} if attention is None else {"attn_implementation": attention}
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype, **chosen)  # type: ignore[no-untyped-call]
        if plan.lora_rank:
            try:
                model = with_adapters(model, LoraSection(rank=plan.lora_rank))
            except RuntimeError as error:
                raise ValueError("only a model with data shows whether its linear layers can be adapted") from error
    return model


def _activations(model: Any, plan: TrainingPlan) -> int:
    # A text that is wider than the budget gets its own pass.
    rows, width = max(1, plan.tokens // plan.width), plan.width
    with FakeTensorMode():
        _give_shapes(model)
        whole = _kept(model, rows, width, plan.dtype)
        if not plan.gradient_checkpointing:
            return whole
        if plan.lora_rank:
            model.enable_input_require_grads()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()
        # In the backward pass, one block's activations at a time are computed again.
        return _kept(model, rows, width, plan.dtype) + whole // max(1, len(transformer_blocks(model)))


def _head_bytes(model: Any, dtype: torch.dtype) -> int:
    head = model.get_output_embeddings()
    if head is None:
        return 0
    weight = head.weight
    rounded = weight.numel() * dtype.itemsize if dtype == torch.bfloat16 and weight.dtype != dtype else 0
    return rounded + (weight.numel() * weight.element_size() if weight.requires_grad else 0)


def _kept(model: Any, rows: int, width: int, dtype: torch.dtype) -> int:
    """Bytes of activations that a forward pass of (rows, width) keeps for its backward pass.
    Tensors that share a storage count once; weights are not included, because they are counted
    elsewhere. Runs on tensors without contents, so an architecture that reads values cannot be
    traced.
    """
    own = {_identity(parameter) for parameter in model.parameters()}
    kept: dict[int, Any] = {}

    def keep(tensor: Tensor) -> Tensor:
        if _identity(tensor) not in own:
            kept[_identity(tensor)] = tensor.untyped_storage()
        return tensor

    causal = model.get_base_model() if hasattr(model, "get_base_model") else model
    ids = torch.zeros((rows, width), dtype=torch.int64)
    autocast = torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16)
    try:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), autocast, _unlogged():
            causal.get_decoder()(input_ids=ids, use_cache=False)
    except (RuntimeError, TypeError, AttributeError) as error:
        raise ValueError(
            "its forward pass cannot be traced without data, for example because the text chooses its experts"
        ) from error
    return sum(storage.nbytes() for storage in kept.values())


@contextmanager
def _unlogged() -> Iterator[None]:
    """Suppress torch's log of a whole stack trace for an operation whose shape depends on data."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def _give_shapes(model: nn.Module) -> None:
    """Replace meta tensors by tensors of the current fake mode, tied ones once, because autocast
    ignores meta tensors.
    """
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                if id(parameter) not in made:
                    empty = torch.empty(parameter.shape, dtype=parameter.dtype)
                    made[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
                module._parameters[name] = made[id(parameter)]
        for name, buffer in list(module._buffers.items()):
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype)


def _identity(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _bytes(parameters: Any) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in parameters)
