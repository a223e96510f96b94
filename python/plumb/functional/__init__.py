"""Unit-scaled versions of functions in ``torch.nn.functional``.

Inputs and incoming gradients of unit variance give outputs and gradients of unit variance, as far as the constraint lets
them. All work is done by the operators ``torch.ops.plumb.*``.

Common arguments:
    mult: a factor inside a nonlinearity; it makes the function sharper without changing the scale of what comes out.
    constraint: what ties the scales of the output and the input gradients; see :mod:`plumb.constraints`.
    scale_power: exponents of the scales of output, input gradient, and weight and bias gradient.
"""

from __future__ import annotations

from typing import Callable, Dict, Optional, Sequence, Tuple, Union

import torch
import torch.nn.functional as F
from torch import Tensor

from .._ops import ops
from ..constraints import Constraint
from ._common import HALF as _HALF
from ._common import ScalePower
from ._common import reduction_code as _reduction
from ._common import refuse as _refuse
from ._common import tie as _tie
from ._windows import avg_pool1d as avg_pool1d
from ._windows import avg_pool2d as avg_pool2d
from ._windows import avg_pool3d as avg_pool3d
from ._windows import conv1d as conv1d
from ._windows import conv2d as conv2d
from ._windows import conv3d as conv3d
from ._windows import conv_transpose1d as conv_transpose1d
from ._windows import conv_transpose2d as conv_transpose2d
from ._windows import conv_transpose3d as conv_transpose3d
from ._windows import max_pool1d as max_pool1d
from ._windows import max_pool2d as max_pool2d
from ._windows import max_pool3d as max_pool3d


def _elementwise(name: str, input: Tensor, mult: float, constraint: Constraint, **more: str) -> Tensor:
    tied = _tie(constraint, 2, lambda: ops.elementwise_scales(name, mult))
    return getattr(ops, name)(input, mult=mult, **more, **tied)


def gelu(
    input: Tensor, mult: float = 1.0, constraint: Constraint = "to_output_scale", approximate: str = "none"
) -> Tensor:
    """``gelu(mult * input) / mult``."""
    return _elementwise("gelu", input, mult, constraint, approximate=approximate)


def silu(input: Tensor, mult: float = 1.0, constraint: Constraint = "to_output_scale", inplace: bool = False) -> Tensor:
    """``input * sigmoid(mult * input)``."""
    _refuse("silu", inplace=inplace)
    return _elementwise("silu", input, mult, constraint)


def silu_glu(input: Tensor, gate: Tensor, mult: float = 1.0) -> Tensor:
    """``input * silu(gate)``; one scale serves output and gradients."""
    return ops.silu_glu(input, gate, mult=mult)


def softmax(
    input: Tensor,
    dim: int,
    dtype: Optional[torch.dtype] = None,
    constraint: Constraint = "to_output_scale",
    mult: float = 1.0,
) -> Tensor:
    """Softmax of ``mult * input`` over ``dim``; the values sum to a scale instead of 1."""
    tied = _tie(constraint, 2, lambda: ops.softmax_scales(input, dim, mult))
    return ops.softmax(input, dim, dtype, mult=mult, **tied)


def dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Zeroes values with probability ``p`` and restores the variance; without ``training`` the input itself.

    The mask is drawn by a seed from the CPU's generator and each value's place in memory: the same on every device.
    """
    _refuse("dropout", inplace=inplace)
    return ops.dropout(input, p, True) if training else input


def matmul(left: Tensor, right: Tensor, constraint: Constraint = "to_output_scale") -> Tensor:
    """Matrix product of all the ranks that ``torch.matmul`` takes."""
    return ops.matmul(left, right, **_tie(constraint, 3, lambda: ops.matmul_scales(left, right)))


def linear(
    input: Tensor,
    weight: Tensor,
    bias: Optional[Tensor] = None,
    constraint: Constraint = "to_output_scale",
    scale_power: ScalePower = _HALF,
) -> Tensor:
    """``input @ weight.T + bias``. The weight's and bias's gradients are scaled by the batch, under no constraint."""
    tied = _tie(constraint, 2, lambda: ops.linear_scales(input, weight, scale_power=scale_power))
    return ops.linear(input, weight, bias, scale_power=scale_power, **tied)


def linear_readout(
    input: Tensor, weight: Tensor, bias: Optional[Tensor] = None, constraint: Constraint = None
) -> Tensor:
    """Applies the linear layer that makes a network's output: its scale is 1 / sqrt(fan-in), small at every width."""
    power = (1.0, 0.5, 0.5)
    tied = _tie(constraint, 2, lambda: ops.linear_scales(input, weight, scale_power=power))
    return ops.linear_readout(input, weight, bias, **tied)


def relu(input: Tensor, constraint: Optional[str] = "to_output_scale") -> Tensor:
    """``max(input, 0)``; the standard deviation is 1, the mean is not 0."""
    return ops.relu(input, constraint=constraint)


def tanh(input: Tensor, mult: float = 1.0, constraint: Constraint = "to_output_scale") -> Tensor:
    """``tanh(mult * input)``."""
    return _elementwise("tanh", input, mult, constraint)


def sigmoid(input: Tensor, mult: float = 1.0, constraint: Constraint = "to_output_scale") -> Tensor:
    """``sigmoid(mult * input)``; the standard deviation is 1, the mean is not 0."""
    return _elementwise("sigmoid", input, mult, constraint)


def group_norm(
    input: Tensor,
    num_groups: int,
    weight: Optional[Tensor] = None,
    bias: Optional[Tensor] = None,
    eps: float = 1e-5,
) -> Tensor:
    """Group normalization, with weight and bias gradients of unit scale."""
    return ops.group_norm(input, num_groups, weight, bias, eps)


def batch_norm(
    input: Tensor,
    running_mean: Optional[Tensor],
    running_var: Optional[Tensor],
    weight: Optional[Tensor] = None,
    bias: Optional[Tensor] = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Batch normalization, with weight and bias gradients of unit scale."""
    return ops.batch_norm(input, weight, bias, running_mean, running_var, training, momentum, eps)


def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Optional[Tensor] = None,
    bias: Optional[Tensor] = None,
    eps: float = 1e-5,
) -> Tensor:
    """Layer normalization, with weight and bias gradients of unit scale."""
    return ops.layer_norm(input, list(normalized_shape), weight, bias, eps)


def rms_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Optional[Tensor] = None, eps: float = 1e-5
) -> Tensor:
    """Division by the root of the mean square over the last dimensions; see :class:`plumb.RMSNorm`."""
    return ops.rms_norm(input, list(normalized_shape), weight, eps)


def add(
    input: Union[Tensor, int, float],
    other: Union[Tensor, int, float],
    constraint: Constraint = "to_output_scale",
    alpha: int = 1,
    out: Optional[Tensor] = None,
) -> Tensor:
    """``input + alpha * other``. A number, or a tensor of one value, shifts the other operand and scales nothing."""
    if not isinstance(input, Tensor) or not isinstance(other, Tensor):
        return torch.add(input, other, alpha=alpha, out=out)
    total = ops.add(input, other, alpha=alpha, **_tie(constraint, 3, lambda: ops.add_scales(input, other)))
    return total if out is None else out.copy_(total)


def residual_split(input: Tensor, tau: float = 1.0) -> Tuple[Tensor, Tensor]:
    """``(residual, skip)`` around a residual branch that weighs ``tau`` times the skip; see :func:`residual_add`.

    Gradients are weighed here and values in :func:`residual_add`, so both have unit scale inside the branch. While
    autograd records, both results are views of the input and refuse in-place writes.
    """
    return ops.residual_split(input, tau)


def residual_add(residual: Tensor, skip: Tensor, tau: float = 1.0) -> Tensor:
    """Closes what :func:`residual_split` opened, with the same ``tau``."""
    return ops.residual_add(residual, skip, tau)


def residual_apply(fn: Callable[[Tensor], Tensor], input: Tensor, tau: float = 1.0) -> Tensor:
    """``fn`` as a residual branch of weight ``tau``."""
    residual, skip = residual_split(input, tau)
    return residual_add(fn(residual), skip, tau)


def embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: Optional[int] = None,
    max_norm: Optional[float] = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """Rows of ``weight``; its gradient is scaled by how often a row is looked up on average."""
    _refuse("embedding", scale_grad_by_freq=scale_grad_by_freq, sparse=sparse)
    rows = weight.shape[0]
    if padding_idx is not None and not -rows <= padding_idx < rows:
        raise ValueError(f"embedding: padding_idx {padding_idx} is outside of a table of {rows} rows.")
    if max_norm is not None:
        with torch.no_grad():
            torch.embedding_renorm_(weight, input.contiguous(), max_norm, norm_type)
    padding = -1 if padding_idx is None else padding_idx % rows
    return ops.embedding(weight, input, padding)


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Optional[Tensor] = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    mult: float = 1.0,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention with logits scaled by ``mult / head size``.

    The scale for causal attention holds with ``is_causal``; what a mask hides is not looked into.
    """
    return ops.scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p, is_causal, mult=mult, enable_gqa=enable_gqa
    )


def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Optional[Tensor] = None,
    size_average: Optional[bool] = None,
    ignore_index: int = -100,
    reduce: Optional[bool] = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    mult: float = 1.0,
) -> Tensor:
    """``torch``'s cross entropy of ``mult * input``; the gradient is the summed loss's, with unit variance."""
    code = _reduction("cross_entropy", reduction, size_average, reduce)
    return ops.cross_entropy(input, target, weight, code, ignore_index, label_smoothing, mult=mult)


def mse_loss(
    input: Tensor,
    target: Tensor,
    size_average: Optional[bool] = None,
    reduce: Optional[bool] = None,
    reduction: str = "mean",
) -> Tensor:
    """Squared error of tensors of one shape; the gradient is the summed loss's, with unit variance."""
    if input.shape != target.shape:
        raise ValueError(f"mse_loss: input {tuple(input.shape)} and target {tuple(target.shape)} must have one shape.")
    return ops.mse_loss(input, target, _reduction("mse_loss", reduction, size_average, reduce))


# The functions above and those of _windows, by the module that they say they are of.
__all__ = [name for name, f in sorted(globals().items()) if getattr(f, "__module__", "") == __name__ and name[0] != "_"]

# Each torch function that has a unit-scaled version of the same name, and that version.
torch_map: Dict[Callable, Callable] = {
    getattr(namespace, name): globals()[name] for name in __all__ for namespace in (torch, F) if hasattr(namespace, name)
}
