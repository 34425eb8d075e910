"""Training without dropout, however a model applies it, because the policy being trained must be
the policy that sampled.

Dropout hides in `nn.Dropout` modules, in functional calls that read `self.training`, in layers that
are skipped at random and in noise on a router. So the model stays in eval mode, as in the
generator. Only two things are in train mode: the adapters' own dropout, which is wanted, and the
layers that recompute activations, because transformers ties that to the mode.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


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
