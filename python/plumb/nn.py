"""Unit-scaled modules, as ``plumb.nn.Linear`` and so on."""

from ._modules import (
    GELU,
    Conv1d,
    CrossEntropyLoss,
    Dropout,
    Embedding,
    LayerNorm,
    Linear,
    LinearReadout,
    RMSNorm,
    SiLU,
    Softmax,
)
from ._transformer import (
    MHSA,
    MLP,
    DepthModuleList,
    DepthSequential,
    TransformerDecoder,
    TransformerLayer,
    TransformerStack,
)

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
