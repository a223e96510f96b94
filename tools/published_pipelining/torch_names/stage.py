"""Private names of torch's ``stage``."""

from ._utils import (  # noqa: F401
    _TensorMeta,
    extract_tensor_meta,
    extract_tensor_metas,
    flatten_args,
    validate_and_normalize_to_tuple,
    validate_tensors_metadata,
)
