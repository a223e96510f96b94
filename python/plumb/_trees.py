"""Nested inputs and outputs, flattened by ``torch.utils._pytree``. Classes that it does not know are made known to it where
what they hold is plain to see."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import enum
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ._errors import Error, ErrorKind

PLAIN = (int, float, bool, str, bytes, complex, type(None), enum.Enum, np.generic)
PLAIN += (torch.dtype, torch.device, torch.layout, torch.memory_format)


def _register_mapping(cls: type) -> None:
    pytree.register_pytree_node(
        cls,
        lambda d: (list(d.data.values()), list(d.data)),
        lambda values, keys: cls(dict(zip(keys, values))),
        flatten_with_keys_fn=lambda d: ([(pytree.MappingKey(k), v) for k, v in d.data.items()], list(d.data)),
    )


def _register_caches() -> None:
    from transformers.cache_utils import EncoderDecoderCache
    from transformers.integrations.executorch import register_dynamic_cache_export_support

    register_dynamic_cache_export_support()
    names = ("self_attention_cache", "cross_attention_cache")
    pytree.register_pytree_node(
        EncoderDecoderCache,
        lambda c: ([getattr(c, n) for n in names], None),
        lambda caches, _: EncoderDecoderCache(*caches),
        flatten_with_keys_fn=lambda c: ([(pytree.GetAttrKey(n), getattr(c, n)) for n in names], None),
    )


def _register(value: Any) -> bool:
    """Makes this object's class known, if it is one of those whose parts are plain to see."""
    cls = type(value)
    if cls in pytree.SUPPORTED_NODES:
        return False
    with contextlib.suppress(Exception):
        if cls.__name__ in ("DynamicCache", "EncoderDecoderCache"):
            _register_caches()
        elif dataclasses.is_dataclass(cls):
            torch.export.register_dataclass(cls, serialized_type_name=f"{cls.__module__}.{cls.__qualname__}")
        elif isinstance(value, collections.UserDict):
            _register_mapping(cls)
    return cls in pytree.SUPPORTED_NODES


def flatten(tree: Any) -> tuple[list, Any]:
    while True:
        leaves, spec = pytree.tree_flatten(tree)
        if not any([not isinstance(x, (Tensor, *PLAIN)) and _register(x) for x in leaves]):
            return leaves, spec


def _has_sizes(spec: Any) -> bool:
    return spec.type is torch.Size or any(map(_has_sizes, children(spec)))


def _build(spec: Any, leaves: Iterator) -> Any:
    if spec.is_leaf():
        return next(leaves)
    parts = [_build(child, leaves) for child in children(spec)]
    if spec.type is torch.Size and all(isinstance(n, int) for n in parts):
        return torch.Size(parts)
    return pytree.SUPPORTED_NODES[spec.type].unflatten_fn(parts, spec.context)


def unflatten(leaves: list, spec: Any) -> Any:
    """Builds a tree from its leaves, as torch.utils._pytree, which makes a tuple of a torch.Size."""
    return _build(spec, iter(leaves)) if _has_sizes(spec) else pytree.tree_unflatten(leaves, spec)


def in_utf8(text: str) -> bool:
    """Returns whether UTF-8 has this text: not with a lone surrogate, which names of files may bring."""
    try:
        return text.isascii() or bool(text.encode())
    except UnicodeEncodeError:
        return False


def plain_value(x: Any) -> Any:
    """Returns an input that is no tensor, to be compared with those of later calls; arrays may be written meanwhile."""
    return None if isinstance(x, Tensor) else x.copy() if isinstance(x, np.ndarray) else x


def hashed(x: Any) -> Any:
    """Returns a key that tells inputs that are no tensors apart: 1, 1.0 and True are three, 0.0 and -0.0 two, NaN is
    NaN."""
    if isinstance(x, np.ndarray):
        return type(x), x.dtype.str, x.shape, x.tobytes()
    return type(x), repr(x) if isinstance(x, (float, complex)) else x


def holds_tensors(value: Any, depth: int = 3) -> bool:
    if isinstance(value, Tensor):
        return True
    if depth == 0 or isinstance(value, (*PLAIN, type, torch.nn.Module)):
        return False
    parts = value.values() if isinstance(value, collections.abc.Mapping) else getattr(value, "__dict__", {}).values()
    if isinstance(value, (list, tuple, set)):
        parts = value
    return any(holds_tensors(p, depth - 1) for p in parts)


_REMEDY = "tensors, tuples, lists, dicts and dataclasses, or register the class with torch.utils._pytree.register_pytree_node"


def _name(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def register_named_tuples(spec: Any) -> None:
    """Gives the classes of named tuples in `spec` the name that a file knows them by, so that a file keeps them. A class
    that no other process could find by its name has none."""
    cls = spec.context
    if hasattr(cls, "_fields") and cls not in pytree.SUPPORTED_NODES:
        name = f"{cls.__module__}.{cls.__qualname__}"
        if cls.__module__ != "__main__" and _find_named_tuple(name) is cls:
            pytree._register_namedtuple(cls, serialized_type_name=name)
    for child in children(spec):
        register_named_tuples(child)


def _find_named_tuple(name: str) -> type | None:
    """Returns the class of this full name, if a module that is imported already has it."""
    module, _, path = name.rpartition(".")
    found = getattr(sys.modules.get(module), "__dict__", {}).get(path)
    return found if isinstance(found, type) and issubclass(found, tuple) and hasattr(found, "_fields") else None


def overriding_class(x: Any) -> type | None:
    """Returns the class of a tensor whose ``__torch_function__`` eager calls and that a forward may ask for; None of all others."""
    cls = type(x)
    if cls is Tensor or cls is torch.nn.Parameter or not isinstance(x, Tensor):
        return None
    if cls.__torch_function__ is torch._C._disabled_torch_function_impl:
        return None
    return cls if cls.__torch_dispatch__ is Tensor.__torch_dispatch__ else None


def layout(x: Tensor) -> Any:
    """Returns True for a contiguous tensor, the strides of any other strided one, and the name of another layout."""
    return (x.is_contiguous() or x.stride()) if x.layout is torch.strided and not x.is_nested else str(x.layout)


def _layout_in_words(kind: Any) -> str:
    """Returns words for what `layout` returns."""
    return "contiguous memory" if kind is True else f"strides {kind}" if isinstance(kind, tuple) else str(kind)


def input_error(name: str, was: str, now: str, made: str, why: str, again: str, like_before: str) -> Error:
    """Returns the error for a tensor of another kind than it had. `like_before`: what makes it one as before."""
    return Error(
        f"input '{name}' is a {now} and was a {was} when {made}: {why}",
        kind=ErrorKind.InvalidState,
        remedy=f"{again} with such an input, or give the graph one as before ({name}{like_before}, for example)",
    )


def check_layouts(leaves: Any, asked: tuple[str, Mapping[int, Any]], names: Callable[[], list[str]], made: str, again: str) -> None:
    """Raises `plumb.Error` for a tensor of another layout than it had, if the forward asks for layouts. `asked`: the line that does, and
    the layouts by the input's place; `made`, `again`: "the graph was captured", "capture again" and the like, for the message."""
    line, layouts = asked
    for place, known in layouts.items():
        x = leaves[place]
        if isinstance(x, Tensor) and layout(x) != known:
            was, now = (f"tensor of {_layout_in_words(kind)}" for kind in (known, layout(x)))
            raise input_error(names()[place], was, now, made, f"the forward asks for the layout at {line}", again, ".contiguous()")


def flatten_inputs(args: tuple, kwargs: dict) -> tuple[list, Any]:
    leaves, spec = flatten((args, kwargs))
    for x in leaves:
        if isinstance(x, torch.fx.Proxy):
            raise Error(
                "torch.fx.symbolic_trace goes through a module that runs a graph, which takes tensors",
                kind=ErrorKind.Unsupported,
                remedy="a torch.fx.Tracer whose is_leaf_module(module, name) is true for it; or, of the whole model,"
                " plumb.capture(model, *inputs).to_fx()",
            )
        if not isinstance(x, (Tensor, *PLAIN)) and holds_tensors(x):
            raise Error(
                f"an input of the model is a {_name(x)} that holds tensors, which a graph would take for constants",
                kind=ErrorKind.Capture,
                remedy=f"give the model {_REMEDY}",
            )
    return leaves, spec


def flatten_output(output: Any) -> tuple[list, Any]:
    leaves, spec = flatten(output)
    for x in leaves:
        if not isinstance(x, (Tensor, *PLAIN)):
            raise Error(
                f"the model returns a {_name(x)}, whose tensors a graph cannot see",
                kind=ErrorKind.Capture,
                remedy=f"return {_REMEDY} (a cache: use_cache=False)",
            )
    return leaves, spec


def children(spec: Any) -> list:
    """Returns the parts of a tree spec."""
    return spec.children() if hasattr(spec, "children") else spec.children_specs  # older torch has the list alone


def _in_words(spec: Any) -> str:
    if spec.is_leaf():
        return "one tensor or value"
    if isinstance(spec.type, type) and issubclass(spec.type, dict) and isinstance(spec.context, (list, tuple)):
        return f"a {spec.type.__name__} of {', '.join(map(repr, spec.context)) or 'nothing'}"
    cls = spec.context if hasattr(spec.context, "_fields") else spec.type
    return f"a {getattr(cls, '__name__', cls)} of {len(children(spec))}"


def differences(want: Any, got: Any, name: str) -> list[str]:
    """Returns how an input differs from what is expected, by name: one difference for each place."""
    if want == got:
        return []
    w, g = children(want), children(got)
    if want.is_leaf() or got.is_leaf() or want.type != got.type or want.context != got.context or len(w) != len(g):
        return [f"input {name} should be {_in_words(want)}, got {_in_words(got)}"]
    keys = want.context if isinstance(want.context, (list, tuple)) and len(want.context) == len(w) else range(len(w))
    return [d for key, a, b in zip(keys, w, g) for d in differences(a, b, f"{name}[{key!r}]")]


def structure_error(args: tuple, kwargs: dict, in_spec: Any, names: list[str], remedy: str) -> Error:
    """Returns the error for inputs that are built differently from what a graph was made for, in terms of the call.
    `names`: one for each leaf of the inputs; a positional input that is no leaf is known by its number."""
    want_args, want_kwargs = map(children, children(in_spec))
    keywords = dict(zip(children(in_spec)[1].context or [], want_kwargs))
    positional, leaf = [], 0
    for i, part in enumerate(want_args):
        positional.append(f"'{names[leaf]}'" if part.is_leaf() and leaf < len(names) else str(i))
        leaf += part.num_leaves
    found = []
    if len(args) != len(want_args):
        takes = f"{len(want_args)} positional input{'' if len(want_args) == 1 else 's'}"
        found.append(f"the model takes {takes} ({', '.join(positional)}), got {len(args)}")
    else:
        for name, want, value in zip(positional, want_args, args):
            found += differences(want, flatten(value)[1], name)
    found += [f"keyword input '{name}' is missing" for name in keywords if name not in kwargs]
    found += [f"the model has no keyword input '{name}'" for name in kwargs if name not in keywords]
    for name in keywords.keys() & kwargs.keys():
        found += differences(keywords[name], flatten(kwargs[name])[1], f"'{name}'")
    if not found and len(keywords) > 1 and list(kwargs) != list(keywords):
        found.append("the keyword inputs come in another order, which the forward's **kwargs keeps")
    message = "; ".join(found) or "the inputs are not built as those that the graph was made for"
    return Error(message, kind=ErrorKind.StructureMismatch, remedy=remedy)


def check_plain_inputs(leaves: list, known: list, takes_tensor: list[bool], made: str, remedy: str) -> None:
    """Raises `plumb.Error` unless tensors are given where tensors were and plain values are those that were given. `known`:
    the plain values; `made`: "the graph was captured" and the like, for the message."""
    for given, value, tensor in zip(leaves, known, takes_tensor):
        if isinstance(given, Tensor) != tensor or (not tensor and given is not value and hashed(given) != hashed(value)):
            was, now = "a tensor" if tensor else repr(value), "a tensor" if isinstance(given, Tensor) else repr(given)
            raise Error(f"{made} with {was} where {now} is given", kind=ErrorKind.StructureMismatch, remedy=remedy)


_FACTORIES = {f"builtins.{name}" for name in ("bool", "dict", "float", "int", "list", "set", "str", "tuple")}


def _check_enum(context: dict) -> dict:
    """Raises `plumb.Error` for what torch would import a module for, or look up in one."""
    if "__enum__" in context:
        module, _, path = str(context.get("fqn")).partition(":")
        found: Any = sys.modules.get(module)
        for part in path.split("."):
            found = getattr(found, "__dict__", {}).get(part)
        if not (isinstance(found, type) and issubclass(found, enum.Enum) and context.get("name") in found.__members__):
            raise Error(
                f"a key is of the enumeration '{module}.{path}', which this process does not know", kind=ErrorKind.BadFile
            )
    return context


def load_spec(text: str) -> Any:
    """torch's tree spec of this JSON, which may come from anywhere. torch would import whatever modules it names.

    Raises `plumb.Error` for those, and what torch raises for what it cannot read."""
    left = [json.loads(text)[1]]
    while left:
        spec = left.pop()
        context = spec["context"]
        if spec["type"] == "collections.namedtuple" and context not in pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE:
            cls = _find_named_tuple(str(context))
            if cls is None:
                raise Error(
                    f"a named tuple is of the class '{context}', which this process does not know",
                    kind=ErrorKind.Unsupported,
                    remedy=f"import {str(context).rpartition('.')[0]}, which defines it, first",
                )
            pytree._register_namedtuple(cls, serialized_type_name=context)
        elif spec["type"] is not None and spec["type"] not in pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE:
            module = str(spec["type"]).rpartition(".")[0]
            raise Error(
                f"its inputs or outputs hold a '{spec['type']}', which this process does not know",
                kind=ErrorKind.Unsupported,
                remedy=f"import {module} first, which defines and registers it; it is of the package {module.partition('.')[0]}",
            )
        elif isinstance(context, str):
            with contextlib.suppress(ValueError):
                json.loads(context, object_hook=_check_enum)
        elif isinstance(context, dict) and "default_factory_name" in context:
            factory = f"{context.get('default_factory_module')}.{context['default_factory_name']}"
            if factory not in _FACTORIES:
                raise Error(
                    f"a defaultdict makes its values by '{factory}', which no text may choose", kind=ErrorKind.BadFile
                )
        left += spec["children_spec"]
    return pytree.treespec_loads(text)
