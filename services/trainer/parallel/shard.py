"""Shards a policy over processes with FSDP2: weights, gradients and optimizer states are sharded,
and a layer is gathered when used.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from services.trainer.parallel.group import Place


class Sharded:
    """`Parallel` over the joined process group. `device`: this process's."""

    def __init__(self, place: Place, device: torch.device) -> None:
        self.rank, self.ranks = place.rank, place.ranks
        self._device = device
        self._mesh = init_device_mesh(device.type, (place.ranks,))

    def device(self, name: str) -> torch.device:
        """The device chosen when the process joined."""
        return self._device

    def load_device(self, device: torch.device) -> torch.device:
        """The host's memory, because a policy that is sharded may be too large for a single
        device.
        """
        return torch.device("cpu")

    def shard(self, model: Any) -> None:
        """Apply FSDP2 to each transformer block and to the rest. Gradients are summed, because the
        loss is divided for the whole step.
        """
        for module in [*transformer_blocks(model), model]:
            # Parameters that stay gathered after a pass would be stale after the optimizer's step
            # or a restore.
            fully_shard(module, mesh=self._mesh, reshard_after_forward=True)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """The tensors of all ranks."""
        found = [torch.empty_like(tensor) for _ in range(self.ranks)]
        dist.all_gather(found, tensor.contiguous())
        return found

    def number(self, tensor: Tensor) -> float:
        """The same float in every rank."""
        return float(tensor.full_tensor() if isinstance(tensor, DTensor) else tensor)

    def whole(self, tensor: Tensor) -> Tensor:
        """The whole tensor in rank 0, on the host, because it need not fit into a device."""
        if not isinstance(tensor, DTensor):
            return tensor
        full = tensor.full_tensor()
        return full.cpu() if self.rank == 0 else torch.empty(0, dtype=full.dtype)

    def part(self, tensor: Tensor, like: Tensor) -> Tensor:
        """This rank's part of the tensor that rank 0 scatters."""
        if not isinstance(like, DTensor):
            return tensor
        if self.rank == 0:
            content = tensor.to(self._device, like.dtype)
        else:
            content = torch.empty(like.shape, dtype=like.dtype, device=self._device)
        return cast(Tensor, distribute_tensor(content, like.device_mesh, like.placements, src_data_rank=0))


def transformer_blocks(model: Any) -> list[nn.Module]:
    """Modules that the model's authors declare must stay on one device: the transformer blocks.
    Without any, only the whole model is sharded.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    names = set(getattr(base, "_no_split_modules", None) or ())
    # Inner modules come first, as FSDP2 requires.
    return [module for module in reversed(list(model.modules())) if type(module).__name__ in names]
