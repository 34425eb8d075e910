"""Converts an optimizer's `state_dict` between full tensors, as in checkpoints, and
sharded ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor


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
