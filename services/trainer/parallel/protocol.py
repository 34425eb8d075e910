"""The learner's requests to the processes that train with it, and their implementation for a single
process.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from shared.model.loading import resolve_device


class Parallel(Protocol):
    """One of `ranks` processes that train one policy.

    All of them make the same calls in the same order. What they return depends on no rank, but for
    `whole`.
    """

    @property
    def rank(self) -> int:
        """This process's number, from 0."""
        ...

    @property
    def ranks(self) -> int:
        """How many processes there are."""
        ...

    def device(self, name: str) -> torch.device:
        """The device to compute on, for `model.device`. Raises FatalError when there is none for
        this process.
        """
        ...

    def load_device(self, device: torch.device) -> torch.device:
        """Where weights are loaded to before `shard`, when `device` is where they are computed
        with.
        """
        ...

    def shard(self, model: Any) -> None:
        """Leave each process its part of `model`'s weights, in place; forward and backward passes
        are then made together.
        """
        ...

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """The tensors that all processes gave, in the order of their ranks; all have one shape and
        dtype.
        """
        ...

    def number(self, tensor: Tensor) -> float:
        """A 0-d result of computing with sharded tensors, such as a norm."""
        ...

    def whole(self, tensor: Tensor) -> Tensor:
        """A sharded tensor gathered in rank 0, and empty (0 elements) elsewhere; a plain tensor
        unchanged.
        """
        ...

    def part(self, tensor: Tensor, like: Tensor) -> Tensor:
        """Inverse of `whole`: rank 0's `tensor`, sharded as `like` is. Other ranks may give a
        tensor without content.
        """
        ...


class Alone:
    """The only process: nothing is shared, nothing is moved, nothing is changed."""

    rank = 0
    ranks = 1

    def device(self, name: str) -> torch.device:
        """What the configuration names."""
        return resolve_device(name)

    def load_device(self, device: torch.device) -> torch.device:
        """Where they stay."""
        return device

    def shard(self, model: Any) -> None:
        """Nothing to do."""

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """The one there is."""
        return [tensor]

    def number(self, tensor: Tensor) -> float:
        """Its value."""
        return float(tensor)

    def whole(self, tensor: Tensor) -> Tensor:
        """It is whole."""
        return tensor

    def part(self, tensor: Tensor, like: Tensor) -> Tensor:
        """All of it."""
        return tensor


ALONE = Alone()
