"""What the other ranks need of a state that rank 0 restores: everything but the contents of the
tensors that it scatters.
"""

from __future__ import annotations

import io

import torch
from torch import Tensor

from services.trainer.parallel.optimizer_state import whole_optimizer_state
from services.trainer.state import LearnerState


def pack_state(state: LearnerState) -> bytes:
    """Names, shapes, numbers and the random state; scalars such as the optimizer's step counts with
    their values.
    """
    packed = io.BytesIO()
    outline = {
        "weights": {name: _outline(value) for name, value in state.weights.items()},
        "optimizer": whole_optimizer_state(state.optimizer, _outline),
        "random": state.random,
        "earlier_groups": state.earlier_groups,
    }
    torch.save(outline, packed)
    return packed.getvalue()


def unpack_state(packed: bytes) -> LearnerState:
    """Inverse of `pack_state`; tensors with more than one number have a shape and no content."""
    outline = torch.load(io.BytesIO(packed), weights_only=True)
    return LearnerState(outline["weights"], outline["optimizer"], outline["random"], outline["earlier_groups"])


def _outline(tensor: Tensor) -> Tensor:
    return tensor.to("meta") if tensor.ndim else tensor
