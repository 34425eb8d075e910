"""The trainer's model as configured: master weights, adapters, dropout, activation memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import structlog
import torch
from torch import Tensor, nn

from services.trainer.gradient.modes import set_training_modes, silence
from services.trainer.parallel.protocol import ALONE, Parallel
from services.trainer.probes.adapter_probe import adapters_without_gradient
from services.trainer.probes.trainable import check_trainable
from shared.config import NodeConfig
from shared.config.sections import LoraSection
from shared.model.adapter_merge import adapted_layers
from shared.model.loading import load_causal_lm, resolve_dtype
from shared.model.reading import load_tokenizer
from shared.model.weights import plain_name
from shared.seeds import number_from


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
            lora_dropout=lora.dropout,
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
    """Whether a layer that is named linear, but may have its own implementation, computes the same
    as a linear layer.
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
