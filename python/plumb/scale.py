"""Scale a tensor in one direction only."""

from torch import Tensor

from ._ops import ops


def scale_fwd(input: Tensor, scale: float) -> Tensor:
    """``scale * input`` in the forward pass; the gradient passes unchanged."""
    return ops.scale_fwd(input, scale)


def scale_bwd(input: Tensor, scale: float) -> Tensor:
    """``input`` in the forward pass; the gradient is multiplied by ``scale``."""
    return ops.scale_bwd(input, scale)


__all__ = ["scale_bwd", "scale_fwd"]
