"""What a cut is told beside its places: which output is the loss, and what becomes of shared parameters."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from enum import Enum
from typing import Any, Union

from ._errors import InvalidValue
from ._sources import Source
from ._wrappers import TrivialLossWrapper


class MultiUseParameterConfig(Enum):
    """What becomes of a parameter that several stages use: the first stage owns it and sends it with every microbatch,
    or each stage has a copy, whose gradients are summed before the optimiser's step."""

    TRANSMIT = 1
    REPLICATE = 2


MultiUseParamSpec = Union[MultiUseParameterConfig, dict[str, MultiUseParameterConfig]]


def find_loss_spec(module: Any, source: Source, spec: Any) -> Any:
    if spec is None:
        return None
    if isinstance(module, TrivialLossWrapper):
        return TrivialLossWrapper.loss_spec
    if spec != "auto":
        return spec
    keys = _keys(source.out_spec)
    if "loss" not in keys:
        raise InvalidValue(
            "output_loss_value_spec='auto' finds no loss: the model returns no dict with a 'loss'",
            remedy="the outputs' structure with True for the loss and False elsewhere",
        )
    return {key: key == "loss" for key in keys}


def _keys(spec: Any) -> list:
    """Keys of a dict, or of a class like transformers' outputs that is flattened as one."""
    context = spec.context
    for keys in (context, *(context if isinstance(context, tuple) else ())):
        if isinstance(keys, list) and len(keys) == spec.num_children and all(isinstance(k, str) for k in keys):
            return keys
    return []


def plain_loss_spec(loss: Any, spec: Any) -> Any:
    """Dicts as sequences where the model returns a class that only looks like a dict."""
    children = spec.children() if hasattr(spec, "children") else spec.children_specs
    if isinstance(loss, dict) and spec.type not in (dict, OrderedDict) and (keys := _keys(spec)):
        if set(loss) != set(keys):
            raise InvalidValue(f"the loss spec has the keys {sorted(loss)}, the outputs {sorted(keys)}")
        loss = [loss[k] for k in keys]
        return [plain_loss_spec(part, child) for part, child in zip(loss, children)]
    if isinstance(loss, dict) and set(loss) == set(spec.context or []):
        return {k: plain_loss_spec(loss[k], c) for k, c in zip(spec.context, children)}
    if isinstance(loss, (tuple, list)) and len(loss) == len(children):
        return type(loss)(plain_loss_spec(part, child) for part, child in zip(loss, children))
    return loss


def multi_use_arguments(spec: Any) -> dict[str, Any]:
    def transmit(value: Any, message: str) -> bool:
        name = getattr(value, "name", None)
        if name not in ("TRANSMIT", "REPLICATE"):
            raise InvalidValue(message, remedy="MultiUseParameterConfig.TRANSMIT or MultiUseParameterConfig.REPLICATE")
        return name == "TRANSMIT"

    if spec is None:
        return {}
    if isinstance(spec, Mapping):
        unknown = "Unknown multi-use config value {} specified for {}"
        return {"transmit_by_name": {name: transmit(v, unknown.format(v, name)) for name, v in spec.items()}}
    return {"transmit": transmit(spec, f"multi_use_param_spec must be MultiUseParamSpec enum or dict, not {spec!r}")}
