"""Private names of torch's ``stage``."""

from __future__ import annotations

from typing import Any

import torch

from ._utils import (  # noqa: F401
    _TensorMeta,
    extract_tensor_meta,
    extract_tensor_metas,
    flatten_args,
    validate_and_normalize_to_tuple,
    validate_tensors_metadata,
)


class _RecvInfo:
    """The source of a stage's input: described by stages that make their own messages."""

    def __init__(
        self,
        input_name: str,
        source: int | None,
        buffer: torch.Tensor | None = None,
        tensor_meta: Any = None,
        *,
        is_root_arg: bool = False,
    ):
        self.input_name, self.source, self.buffer = input_name, source, buffer
        self.tensor_meta, self.is_root_arg = tensor_meta, is_root_arg

    def __repr__(self) -> str:
        where = "a model input" if self.is_root_arg else f"stage {self.source}"
        return f"_RecvInfo({self.input_name} from {where})"
