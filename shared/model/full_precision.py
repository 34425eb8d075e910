"""Temporarily computes a half-precision model in float32, to reveal errors that would disappear in
the noise of half precision.

The weights keep the model's values; only the arithmetic is more precise. A layer's weights are
copied to float32 when it is called and released when it returns. So the memory must hold the copies
of one layer, the embeddings and the output layer, not of the whole model.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

HALF_TOLERANCE = 0.05
"""Bound on the mean difference, relative to 1 + |logprob|, of two half-precision computations of
the same logprobs. Rounding may route a token to another expert, so only the mean is meaningful, and
it can hide a small error. Correctness is therefore decided in float32; this only catches what half
precision alone breaks, such as a mask that overflows.
"""


def is_half(dtype: torch.dtype) -> bool:
    """Check whether the dtype rounds so coarsely that it hides a small error."""
    return torch.finfo(dtype).bits < 32


@contextmanager
def computing_in_float32(model: nn.Module) -> Iterator[None]:
    """In the block `model` computes with float32 copies of its half-precision weights, without
    gradients; other weights are used unchanged.

    Call the model itself: a weight that is read without calling its module is not converted.
    Sharded weights are copied after they are gathered.
    """
    in_lists = {module for each in model.modules() if isinstance(each, nn.ModuleList) for module in each.modules()}
    casts = [_Cast(list(module.modules()) if module in in_lists else _above_lists(module)) for module in model.modules()]
    hooks = []
    for module, cast in zip(model.modules(), casts, strict=True):
        hooks.append(module.register_forward_pre_hook(lambda *_, cast=cast: cast.enter()))
        # Registered first, so that it runs while sharded weights are still gathered.
        hooks.append(module.register_forward_hook(lambda *_, cast=cast: cast.leave(), prepend=True, always_call=True))
    exact = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(exact[0])
        torch.backends.cudnn.allow_tf32 = exact[1]
        for hook in hooks:
            hook.remove()
        for cast in casts:
            cast.leave()


class _Cast:
    """The float32 copies for one call of a module, except those that an enclosing call has already
    made.
    """

    def __init__(self, modules: list[nn.Module]) -> None:
        self._modules = modules
        self._replaced: list[tuple[dict[str, Tensor | None], str, Tensor, Tensor]] = []

    def enter(self) -> None:
        copies: dict[int, Tensor] = {}
        for module in self._modules:
            for held in (module._parameters, module._buffers):
                for name, value in held.items():
                    if value is None or isinstance(value, DTensor) or not value.is_floating_point() or not is_half(value.dtype):
                        continue
                    if id(value) not in copies:
                        copy = value.detach().float()
                        copies[id(value)] = nn.Parameter(copy, requires_grad=False) if isinstance(value, nn.Parameter) else copy
                    self._replaced.append((held, name, value, copies[id(value)]))  # type: ignore[arg-type]
        for held, name, _, copy in self._replaced:
            held[name] = copy

    def leave(self) -> None:
        for held, name, value, copy in self._replaced:
            if held.get(name) is copy:
                held[name] = value
        self._replaced.clear()


def _above_lists(module: nn.Module) -> list[nn.Module]:
    """The module and its submodules, except its lists of layers, which are called one by one."""
    found = [module]
    for child in module.children():
        if not isinstance(child, nn.ModuleList):
            found += _above_lists(child)
    return found
