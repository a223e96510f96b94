"""Unit-scaled versions of ``torch.nn`` modules, whose parameters are tagged for u-μP."""

from __future__ import annotations

from typing import Any, Iterable, Optional, Sequence, Tuple, Union

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import functional as U
from .constraints import Constraint
from .core.functional import ResidualScalingFn, transformer_residual_scaling_rule
from .functional._common import refuse
from .parameter import MupType, Parameter, has_parameter_data


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
        self.weight = Parameter(self.weight.data, weight_mup_type)
        if self.bias is not None:
            self.bias = Parameter(self.bias.data, "bias")

    def reset_parameters(self) -> None:
        _unit_init(self)

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
        self.weight = Parameter(self.weight.data, weight_mup_type)
        if self.bias is not None:
            self.bias = Parameter(self.bias.data, "bias")

    def reset_parameters(self) -> None:
        _unit_init(self)

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
        if self.weight is not None:
            self.weight = Parameter(self.weight.data, "norm")
        if self.bias is not None:
            self.bias = Parameter(self.bias.data, "bias")

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

    def forward(self, input: Tensor) -> Tensor:
        return U.rms_norm(input, self.normalized_shape, self.weight, self.eps)

    def extra_repr(self) -> str:
        return f"{self.normalized_shape}, eps={self.eps}, elementwise_affine={self.weight is not None}"


class Embedding(nn.Embedding):
    """See :func:`plumb.functional.embedding`."""

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: Optional[int] = None,
        max_norm: Optional[float] = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        _weight: Optional[Tensor] = None,
        _freeze: bool = False,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        refuse("Embedding", scale_grad_by_freq=scale_grad_by_freq, sparse=sparse)
        super().__init__(
            num_embeddings,
            embedding_dim,
            padding_idx,
            max_norm,
            norm_type,
            _weight=_weight,
            _freeze=_freeze,
            device=device,
            dtype=dtype,
        )
        trained = self.weight.requires_grad
        self.weight = Parameter(self.weight.data, "weight").requires_grad_(trained)

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


class MLP(nn.Module):
    """``linear_2(linear_1(x) * silu(linear_gate(x)))``, with an intermediate size of ``hidden_size * expansion_factor``.

    The layers need no constraint: what one does to the scale of the gradient, the other undoes.
    """

    def __init__(self, hidden_size: int, expansion_factor: int = 4) -> None:
        super().__init__()
        inner = hidden_size * expansion_factor
        self.linear_1 = Linear(hidden_size, inner, constraint=None)
        self.linear_gate = Linear(hidden_size, inner, constraint=None)
        self.linear_2 = Linear(inner, hidden_size, constraint=None)

    def forward(self, input: Tensor) -> Tensor:
        return self.linear_2(U.silu_glu(self.linear_1(input), self.linear_gate(input)))


class MHSA(nn.Module):
    """Multi-head self-attention over ``(batch, sequence, hidden_size)``.

    Args:
        dropout_p: dropout of attention weights while training.
        mult: see :func:`plumb.functional.scaled_dot_product_attention`.
    """

    def __init__(
        self, hidden_size: int, heads: int, is_causal: bool, dropout_p: float = 0.0, mult: float = 1.0
    ) -> None:
        super().__init__()
        if hidden_size % heads:
            raise ValueError(f"MHSA: hidden_size {hidden_size} is not a multiple of {heads} heads.")
        self.heads = heads
        self.is_causal = is_causal
        self.dropout_p = dropout_p
        self.mult = mult
        self.linear_qkv = Linear(hidden_size, 3 * hidden_size)
        self.linear_o = Linear(hidden_size, hidden_size)

    def forward(self, input: Tensor) -> Tensor:
        heads = self.linear_qkv(input).unflatten(-1, (3, self.heads, -1))
        parts = heads.unbind(-3)  # indexed, not iterated over: torch.fx can follow that
        q, k, v = (parts[i].transpose(-3, -2) for i in range(3))
        dropout_p = self.dropout_p if self.training else 0.0
        mixed = U.scaled_dot_product_attention(q, k, v, dropout_p=dropout_p, is_causal=self.is_causal, mult=self.mult)
        return self.linear_o(mixed.transpose(-3, -2).flatten(-2))


class TransformerLayer(nn.Module):
    """A pre-norm transformer layer: attention and MLP, each a residual branch of its own weight tau.

    Args:
        dropout_p: dropout of attention weights and at the end of each branch, while training.
    """

    def __init__(
        self,
        hidden_size: int,
        heads: int,
        mhsa_tau: float,
        mlp_tau: float,
        is_causal: bool,
        dropout_p: float = 0.0,
    ) -> None:
        super().__init__()
        self.dropout_p = dropout_p
        self.mhsa_tau = mhsa_tau
        self.mlp_tau = mlp_tau
        self.mhsa_norm = RMSNorm(hidden_size)
        self.mhsa = MHSA(hidden_size, heads, is_causal=is_causal, dropout_p=dropout_p)
        self.mlp_norm = RMSNorm(hidden_size)
        self.mlp = MLP(hidden_size)

    def forward(self, input: Tensor) -> Tensor:
        def branch(norm: nn.Module, body: nn.Module, x: Tensor) -> Tensor:
            return U.dropout(body(norm(x)), self.dropout_p, self.training)

        input = U.residual_apply(lambda x: branch(self.mhsa_norm, self.mhsa, x), input, self.mhsa_tau)
        return U.residual_apply(lambda x: branch(self.mlp_norm, self.mlp, x), input, self.mlp_tau)


class DepthModuleList(nn.ModuleList):
    """A ``torch.nn.ModuleList`` that tells its parameters how many modules it has, as of its construction."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        super().__init__(modules)
        _set_depth(self, len(self))


class DepthSequential(nn.Sequential):
    """A ``torch.nn.Sequential`` that tells its parameters how many modules it has, as of its construction."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        _set_depth(self, len(self))


class TransformerStack(DepthSequential):
    """``layers`` transformer layers whose taus follow ``residual_scaling``; other arguments are TransformerLayer's."""

    def __init__(
        self,
        layers: int,
        residual_scaling: ResidualScalingFn = transformer_residual_scaling_rule(),
        **kwargs: Any,
    ) -> None:
        taus = [residual_scaling(branch, 2 * layers) for branch in range(2 * layers)]
        super().__init__(
            *(
                TransformerLayer(mhsa_tau=attention, mlp_tau=mlp, **kwargs)
                for attention, mlp in zip(taus[::2], taus[1::2])
            )
        )


class TransformerDecoder(nn.Sequential):
    """A decoder-only language model: embedding, causal layers, norm, readout. It has no positions and no padding mask.

    Args:
        dropout_p: see :class:`TransformerLayer`.
        residual_scaling: gives each residual branch its tau.
    """

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        layers: int,
        heads: int,
        dropout_p: float = 0.0,
        residual_scaling: ResidualScalingFn = transformer_residual_scaling_rule(),
    ) -> None:
        super().__init__()
        self.embedding = Embedding(vocab_size, hidden_size)
        self.layers = TransformerStack(
            layers,
            residual_scaling,
            hidden_size=hidden_size,
            heads=heads,
            is_causal=True,
            dropout_p=dropout_p,
        )
        self.final_norm = RMSNorm(hidden_size)
        self.projection = LinearReadout(hidden_size, vocab_size)

    def loss(self, input_ids: Tensor) -> Tensor:
        """Cross entropy of each token given those before it."""
        logits = self(input_ids)[..., :-1, :].float()
        return U.cross_entropy(logits.flatten(0, -2), input_ids[..., 1:].flatten())


def _unit_init(module: nn.Module) -> None:
    nn.init.normal_(module.weight)
    if module.bias is not None:
        nn.init.zeros_(module.bias)


def _set_depth(module: nn.Module, depth: int) -> None:
    for name, parameter in module.named_parameters():
        if not has_parameter_data(parameter):
            raise ValueError(
                f"Parameter {name} of {type(module).__name__} has no mup_type: it must be a plumb.Parameter."
            )
        if parameter.mup_scaling_depth is not None:
            raise ValueError(
                f"Parameter {name} of {type(module).__name__} is in a stack of depth"
                f" {parameter.mup_scaling_depth} already."
            )
        parameter.mup_scaling_depth = depth


__all__ = [
    "GELU",
    "MHSA",
    "MLP",
    "Conv1d",
    "CrossEntropyLoss",
    "DepthModuleList",
    "DepthSequential",
    "Dropout",
    "Embedding",
    "LayerNorm",
    "Linear",
    "LinearReadout",
    "RMSNorm",
    "SiLU",
    "Softmax",
    "TransformerDecoder",
    "TransformerLayer",
    "TransformerStack",
]
