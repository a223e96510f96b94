"""Unit-scaled versions of the layers of ``torch.nn``, whose parameters are tagged for u-μP."""

from __future__ import annotations

import functools
from typing import Any, Optional, Sequence, Tuple, Union

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import functional as U
from .constraints import Constraint
from .functional._common import refuse
from .parameter import MupType, Parameter, keep_tags


def _tag(module: nn.Module, weight_type: MupType) -> None:
    module.register_load_state_dict_pre_hook(keep_tags)
    for name, kind in (("weight", weight_type), ("bias", "bias")):
        if (parameter := getattr(module, name)) is not None:
            setattr(module, name, Parameter(parameter.data, kind))


def _unit_init(module: nn.Module) -> None:
    nn.init.normal_(module.weight)
    if module.bias is not None:
        nn.init.zeros_(module.bias)


class GELU(nn.GELU):
    """See :func:`plumb.functional.gelu`."""

    def __init__(
        self, mult: float = 1.0, constraint: Constraint = "to_output_scale", approximate: str = "none"
    ) -> None:
        super().__init__(approximate=approximate)
        self.mult = mult
        self.constraint = constraint

    def forward(self, input: Tensor) -> Tensor:
        return U.gelu(input, self.mult, self.constraint, self.approximate)


class SiLU(nn.SiLU):
    """See :func:`plumb.functional.silu`."""

    def __init__(self, mult: float = 1.0, constraint: Constraint = "to_output_scale", inplace: bool = False) -> None:
        refuse("SiLU", inplace=inplace)
        super().__init__(inplace=inplace)
        self.mult = mult
        self.constraint = constraint

    def forward(self, input: Tensor) -> Tensor:
        return U.silu(input, self.mult, self.constraint)


class Softmax(nn.Softmax):
    """See :func:`plumb.functional.softmax`: over n values the output sums to about n for small inputs, not to 1."""

    def __init__(self, dim: int, mult: float = 1.0, constraint: Constraint = "to_output_scale") -> None:
        super().__init__(dim=dim)
        self.mult = mult
        self.constraint = constraint

    def forward(self, input: Tensor) -> Tensor:
        return U.softmax(input, self.dim, constraint=self.constraint, mult=self.mult)


class Dropout(nn.Dropout):
    """See :func:`plumb.functional.dropout`; the input itself in evaluation."""

    def __init__(self, p: float = 0.5, inplace: bool = False) -> None:
        refuse("Dropout", inplace=inplace)
        super().__init__(p, inplace)

    def forward(self, input: Tensor) -> Tensor:
        return U.dropout(input, self.p, self.training)


class Linear(nn.Linear):
    """See :func:`plumb.functional.linear`. Weights start with unit variance; there is no bias unless asked for."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = False,
        device: Any = None,
        dtype: Any = None,
        constraint: Constraint = "to_output_scale",
        weight_mup_type: MupType = "weight",
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self.constraint = constraint
        _tag(self, weight_mup_type)

    reset_parameters = _unit_init

    def forward(self, input: Tensor) -> Tensor:
        return U.linear(input, self.weight, self.bias, self.constraint)


class LinearReadout(Linear):
    """See :func:`plumb.functional.linear_readout`: a network's last layer."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = False,
        device: Any = None,
        dtype: Any = None,
        constraint: Constraint = None,
        weight_mup_type: MupType = "output",
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype, constraint, weight_mup_type)

    def forward(self, input: Tensor) -> Tensor:
        return U.linear_readout(input, self.weight, self.bias, self.constraint)


class Conv1d(nn.Conv1d):
    """See :func:`plumb.functional.conv1d`. Weights start with unit variance; there is no bias unless asked for."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Union[int, Tuple[int]],
        stride: Union[int, Tuple[int]] = 1,
        padding: Union[str, int, Tuple[int]] = 0,
        dilation: Union[int, Tuple[int]] = 1,
        groups: int = 1,
        bias: bool = False,
        padding_mode: str = "zeros",
        device: Any = None,
        dtype: Any = None,
        constraint: Constraint = "to_output_scale",
        weight_mup_type: MupType = "weight",
    ) -> None:
        super().__init__(
            in_channels,
            out_channels,
            kernel_size,
            stride,
            padding,
            dilation,
            groups,
            bias,
            padding_mode,
            device,
            dtype,
        )
        self.constraint = constraint
        _tag(self, weight_mup_type)

    reset_parameters = _unit_init

    def forward(self, input: Tensor) -> Tensor:
        padding = self.padding
        if self.padding_mode != "zeros":
            input = F.pad(input, self._reversed_padding_repeated_twice, mode=self.padding_mode)
            padding = 0
        return U.conv1d(
            input, self.weight, self.bias, self.stride, padding, self.dilation, self.groups, self.constraint
        )


class LayerNorm(nn.LayerNorm):
    """See :func:`plumb.functional.layer_norm`. There are no weight and bias unless asked for."""

    def __init__(
        self,
        normalized_shape: Union[int, Sequence[int]],
        eps: float = 1e-5,
        elementwise_affine: bool = False,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, bias, device, dtype)
        _tag(self, "norm")

    def forward(self, input: Tensor) -> Tensor:
        return U.layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)


class RMSNorm(nn.Module):
    """Division by the root mean square over the last dimensions (arXiv 1910.07467).

    Args:
        normalized_shape: the sizes of those dimensions.
        eps: added to the mean square.
        elementwise_affine: multiply by a learned ``weight``, ones at the start.
    """

    def __init__(
        self, normalized_shape: Union[int, Sequence[int]], eps: float = 1e-5, elementwise_affine: bool = False
    ) -> None:
        super().__init__()
        self.normalized_shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
        self.eps = eps
        self.weight = Parameter(torch.ones(self.normalized_shape), "norm") if elementwise_affine else None
        self.register_load_state_dict_pre_hook(keep_tags)

    def forward(self, input: Tensor) -> Tensor:
        return U.rms_norm(input, self.normalized_shape, self.weight, self.eps)

    def extra_repr(self) -> str:
        return f"{self.normalized_shape}, eps={self.eps}, elementwise_affine={self.weight is not None}"


class Embedding(nn.Embedding):
    """See :func:`plumb.functional.embedding`."""

    @functools.wraps(nn.Embedding.__init__)
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        refuse("Embedding", scale_grad_by_freq=self.scale_grad_by_freq, sparse=self.sparse)
        trained = self.weight.requires_grad
        self.weight = Parameter(self.weight.data, "weight").requires_grad_(trained)
        self.register_load_state_dict_pre_hook(keep_tags)

    def forward(self, input: Tensor) -> Tensor:
        return U.embedding(input, self.weight, self.padding_idx, self.max_norm, self.norm_type)


class CrossEntropyLoss(nn.CrossEntropyLoss):
    """See :func:`plumb.functional.cross_entropy`."""

    def __init__(
        self,
        mult: float = 1.0,
        weight: Optional[Tensor] = None,
        size_average: Optional[bool] = None,
        ignore_index: int = -100,
        reduce: Optional[bool] = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> None:
        refuse("CrossEntropyLoss", size_average=size_average, reduce=reduce)
        super().__init__(weight, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing)
        self.mult = mult

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return U.cross_entropy(
            input,
            target,
            self.weight,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            label_smoothing=self.label_smoothing,
            mult=self.mult,
        )
