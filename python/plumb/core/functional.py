"""Building blocks for unit-scaled functions of your own."""

from __future__ import annotations

import math
from typing import Any, Callable, Optional, Tuple

import torch
from torch import Tensor

from ..constraints import Constraint, apply_constraint
from ..scale import scale_bwd, scale_fwd


def scale_elementwise(
    f: Callable[..., Tensor],
    output_scale: float,
    grad_input_scale: float,
    constraint: Constraint = "to_output_scale",
) -> Callable[..., Tensor]:
    """Returns a version of ``f(input, ...)`` whose output and input gradient are multiplied by the two scales.

    The scales go through the constraint first.
    """
    output_scale, grad_input_scale = apply_constraint(constraint, output_scale, grad_input_scale)

    def scaled(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return scale_fwd(f(scale_bwd(input, grad_input_scale), *args, **kwargs), output_scale)

    return scaled


def logarithmic_interpolation(alpha: float, lower: float, upper: float) -> float:
    """From ``lower`` (alpha 0) to ``upper`` (alpha 1) in equal ratios; both must be positive."""
    return math.exp(alpha * math.log(upper) + (1 - alpha) * math.log(lower))


def rms(x: Tensor, dims: Optional[Tuple[int, ...]] = None, keepdim: bool = False, eps: float = 0.0) -> Tensor:
    """Returns the root of the mean square (plus ``eps``) over ``dims``; half types are computed in float32."""
    wide = x if x.dtype == torch.float64 else x.float()
    return (wide.square().mean(dims, keepdim=keepdim) + eps).sqrt().to(x.dtype)


ResidualScalingFn = Callable[[int, int], float]
"""Returns the weight tau of a residual branch, of its number and the number of all branches."""


def transformer_residual_scaling_rule(
    residual_mult: float = 1.0, residual_attn_ratio: float = 1.0
) -> ResidualScalingFn:
    """tau for each residual branch of a transformer, as ``fn(index, layers)`` (u-μP, appendix G).

    Branches alternate, attention first. All attention branches contribute alike, and all MLP branches; in variance,
    their average to the embedding is as ``residual_mult`` to 1, attention to MLP as ``residual_attn_ratio`` to 1.
    """
    mlp = residual_mult * math.sqrt(2 / (1 + residual_attn_ratio**2))
    attn = residual_attn_ratio * mlp

    def tau(index: int, layers: int) -> float:
        before = layers / 2 + (index + 1) // 2 * attn**2 + index // 2 * mlp**2
        return (mlp if index % 2 else attn) / math.sqrt(before)

    return tau


__all__ = [
    "ResidualScalingFn",
    "logarithmic_interpolation",
    "rms",
    "scale_elementwise",
    "transformer_residual_scaling_rule",
]
