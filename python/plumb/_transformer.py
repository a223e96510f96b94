"""Unit-scaled transformers, and containers that know their depth."""

from __future__ import annotations

from typing import Any, Iterable

from torch import Tensor, nn

from . import functional as U
from ._modules import Embedding, Linear, LinearReadout, RMSNorm
from .core.functional import ResidualScalingFn, transformer_residual_scaling_rule
from .parameter import has_parameter_data


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
        if heads < 1 or hidden_size % heads:
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
        if layers < 0:
            raise ValueError(f"TransformerStack: layers is {layers}.")
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
