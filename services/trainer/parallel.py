"""Requests of the learner to the processes that train with it (FSDP2), and its implementation for a
single process, `ALONE`. `services.trainer.torchrun` has the one for several.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from shared.model.loading import resolve_device


class Parallel(Protocol):
    """One of `ranks` processes that train one policy.

    All of them make the same calls in the same order. Except for `whole`, results do not depend on
    the rank.
    """

    @property
    def rank(self) -> int: ...

    @property
    def ranks(self) -> int: ...

    def device(self, name: str) -> torch.device:
        """The device to compute on, for `model.device`. Raises FatalError if there is none for this
        process.
        """
        ...

    def load_device(self, device: torch.device) -> torch.device:
        """Where weights are loaded before `shard`, if `device` is where they are used."""
        ...

    def shard(self, model: Any) -> None:
        """Reduce `model` in place to this process's shard of the weights. Forward and backward
        passes are then made by all processes together.
        """
        ...

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """The tensors from all processes, in the order of their ranks; all have one shape and
        dtype.
        """
        ...

    def number(self, tensor: Tensor) -> float:
        """A 0-d result of computing with sharded tensors, such as a norm, as a number."""
        ...

    def whole(self, tensor: Tensor) -> Tensor:
        """A sharded tensor, gathered in rank 0 and empty (0 elements) elsewhere; a plain tensor
        unchanged.
        """
        ...

    def part(self, tensor: Tensor, like: Tensor) -> Tensor:
        """Inverse of `whole`: rank 0's `tensor`, sharded like `like`. Other ranks may pass a tensor
        without content.
        """
        ...


class Alone:
    """A single process, for which nothing is sharded or moved."""

    rank = 0
    ranks = 1

    def device(self, name: str) -> torch.device:
        return resolve_device(name)

    def load_device(self, device: torch.device) -> torch.device:
        return device

    def shard(self, model: Any) -> None:
        """Does nothing."""

    def gather(self, tensor: Tensor) -> list[Tensor]:
        return [tensor]

    def number(self, tensor: Tensor) -> float:
        return float(tensor)

    def whole(self, tensor: Tensor) -> Tensor:
        return tensor

    def part(self, tensor: Tensor, like: Tensor) -> Tensor:
        return tensor


ALONE = Alone()


def whole_optimizer_state(state: dict[str, Any], whole: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    """`state` with `whole` applied to every tensor."""
    return {
        **state,
        "state": {
            number: {name: whole(value) if isinstance(value, Tensor) else value for name, value in parameter_state.items()}
            for number, parameter_state in state["state"].items()
        },
    }


def split_optimizer_state(
    state: dict[str, Any], parameters: Sequence[Tensor], part: Callable[[Tensor, Tensor], Tensor]
) -> dict[str, Any]:
    """Inverse of `whole_optimizer_state`: tensors with a parameter's shape are sharded like it.

    parameters: in the order in which the optimizer numbers them.
    """

    def split(number: int, value: Any) -> Any:
        if not isinstance(value, Tensor) or number >= len(parameters) or value.shape != parameters[number].shape:
            return value
        return part(value, parameters[number])

    return {
        **state,
        "state": {
            number: {name: split(number, value) for name, value in parameter_state.items()}
            for number, parameter_state in state["state"].items()
        },
    }
