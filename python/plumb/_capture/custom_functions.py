"""Calls of ``torch.autograd.Function.apply``: each becomes one node of the graph that calls the function, backward and all."""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
import types
from typing import Any, Callable, ContextManager, Iterator

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .. import _C
from .._errors import Error, ErrorKind
from .._unit_scaled import inside_function
from .cpython import calls_go_to
from .tensor_reads import as_given
from .torch_patches import autocast_regions

# Custom functions by number that were given a module, or a function that holds one: they compute with the weights of the module
# that was captured.
_holders: dict[int, str] = {}
_DEEPEST = 8


def _held(value: Any, found: list, seen: set[int], called: bool = False, depth: int = 0) -> list:
    """Adds the modules and tensors that a function's argument holds to `found`: itself if it is a module, else what its closure,
    defaults and object refer to. `called`: `value` is part of something that can be called."""
    if id(value) in seen or depth > _DEEPEST:
        return found
    seen.add(id(value))
    if isinstance(value, nn.Module) or (isinstance(value, Tensor) and called):
        found.append(value)
        return found
    if isinstance(value, (Tensor, type)):
        return found
    parts: list[Any] = []
    if isinstance(value, types.FunctionType):
        cells = [c for c in value.__closure__ or () if c != types.CellType()]
        parts = [c.cell_contents for c in cells] + [value.__defaults__, value.__kwdefaults__]
    elif isinstance(value, types.MethodType):
        parts = [value.__self__, value.__func__]
    elif isinstance(value, functools.partial):
        parts = [value.func, value.args, value.keywords]
    elif isinstance(value, (list, tuple, set)):
        parts = list(value)
    elif isinstance(value, dict):
        parts = list(value.values())
    elif called or callable(value):
        parts = [getattr(value, "__dict__", None)]
    inside = called or callable(value)
    for part in parts:
        _held(part, found, seen, inside, depth + 1)
    return found


def _place(tensor: Tensor) -> tuple:
    return tensor.data_ptr(), tensor.shape, tensor.dtype


def _in_place_of(inputs: list[Tensor], held: list) -> list[Tensor]:
    """Returns the inputs, and for one that shows the memory of a parameter which the function holds the parameter
    itself: the function asks autograd for its gradient."""
    own = [p for h in held for p in (h.parameters() if isinstance(h, nn.Module) else [h])]
    by_place = {_place(p): p for p in own if p.requires_grad and p.is_leaf and p.data_ptr()}
    return [by_place.get(_place(x), x) if x.requires_grad and x.layout == torch.strided else x for x in inputs]


def refuse_holders(graph: Any, what: str) -> None:
    """Raises `plumb.Error` if a graph that is to be `what` calls a custom function that holds a module with parameters."""
    for node in graph.nodes if _holders else []:
        if node.target == "plumb::python_function" and node.args[0] in _holders:
            raise Error(
                f"the custom autograd function {_holders[node.args[0]]} is given a module, or a function that holds one, so it "
                f"computes with the weights of the model that was captured: the graph cannot be {what}",
                kind=ErrorKind.Unsupported,
                where=f"{node.source[0]}:{node.source[1]}" if node.source else node.module_path,
                remedy="give the function the weights as tensors in place of the module",
            )


def _with_tensors(value: Any, instead: dict[int, Tensor], depth: int = 0) -> Any:
    """Returns a function's argument that holds other tensors in place of those of these ids: closures, partial
    functions and containers are made anew where they hold one. All else is the same object."""
    if isinstance(value, Tensor):
        return instead.get(id(value), value)
    if depth > _DEEPEST:
        return value

    def of(parts: Any) -> list:
        return [_with_tensors(part, instead, depth + 1) for part in parts]

    if isinstance(value, types.FunctionType) and value.__closure__:
        before = [None if c == types.CellType() else c.cell_contents for c in value.__closure__]
        now = of(before)
        if all(x is y for x, y in zip(before, now)):
            return value
        cells = tuple(c if x is y else types.CellType(y) for c, x, y in zip(value.__closure__, before, now))
        made = types.FunctionType(value.__code__, value.__globals__, value.__name__, value.__defaults__, cells)
        made.__kwdefaults__ = value.__kwdefaults__
        return made
    if isinstance(value, types.MethodType):
        return types.MethodType(_with_tensors(value.__func__, instead, depth + 1), value.__self__)
    if isinstance(value, functools.partial):
        return functools.partial(*of([value.func, *value.args]), **dict(zip(value.keywords, of(value.keywords.values()))))
    if type(value) in (list, tuple):
        return type(value)(of(value))
    if type(value) is dict:
        return dict(zip(value, of(value.values())))
    return value


class _AsIfRequired(torch.autograd.Function):
    """Tensors as they are, which require a gradient since the first one does. It never gives one: only a capture sees them."""

    @staticmethod
    def forward(ctx: Any, required: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.mark_non_differentiable(*[t for t in tensors if not (t.is_floating_point() or t.is_complex())])
        return tensors

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[None, ...]:
        return (None,) * (len(gradients) + 1)


def _computed_in(held: list, leaves: list, name: str) -> tuple[list[Tensor], list[Tensor], list]:
    """Returns the tensors that the forward has computed among what a function holds, stand-ins for them, and `leaves` with
    these in their places: the engine keeps the function for the life of the process. Every run gives such tensors anew:
    raises `plumb.Error` where they are in what cannot be made anew."""
    computed = [h for h in held if isinstance(h, Tensor) and _C.is_computed(h)]
    stand_ins = [torch.empty(0, device="meta") for _ in computed]
    leaves = _with_tensors(leaves, {id(t): stand_in for t, stand_in in zip(computed, stand_ins)})
    if computed and any(x is t for x in _held(leaves, [], set()) for t in computed):
        _C.refuse(
            f"the custom autograd function {name} is given an object that holds a tensor which the forward has computed",
            "give the tensor to apply() as an argument of its own",
        )
    return computed, stand_ins, leaves


def _apply_goes_to(target: Callable[[Callable[..., Any], tuple, dict], Any]) -> ContextManager:
    """Context manager in which ``cls.apply(*args, **kwargs)`` is ``target(original, (cls, *args), kwargs)``."""
    apply = torch.autograd.Function.__dict__["apply"]
    if isinstance(apply, classmethod):
        return calls_go_to(apply.__func__, target)
    return _builtin_goes_to(torch.autograd.Function.apply, target)  # since torch 2.14


@contextlib.contextmanager
def _builtin_goes_to(function: Callable[..., Any], target: Callable[..., Any]) -> Iterator[None]:
    _C.redirect_builtin(function, target)
    try:
        yield
    finally:
        _C.restore_builtin()


def opaque_functions() -> ContextManager:
    """Context manager in which ``torch.autograd.Function.apply`` becomes one node that calls the function, backward and all, also where
    ``apply`` was taken before.

    The function of a re-entrant checkpoint is captured instead: it would give its parameters' gradients to the module that was
    captured, also where a copy or a stage of the graph runs."""
    Function, thread = torch.autograd.Function, threading.get_ident()

    def apply(original: Callable[..., Any], given: tuple, kwargs: dict) -> Any:
        cls, *args = given
        bound = functools.partial(original, cls)
        if threading.get_ident() != thread:
            return bound(*args, **kwargs)
        if cls.__name__ == "CheckpointFunction" and any(isinstance(a, Tensor) and a.requires_grad for a in args):
            return args[0](*args[2:])
        if not _C.is_capturing():
            return bound(*args, **kwargs)
        leaves, spec = pytree.tree_flatten((tuple(args), kwargs))
        tensors = [a for a in leaves if isinstance(a, Tensor)]
        # Without a gradient to lose its operators may be seen; inside vmap the function has a rule of its own.
        wrapped = any(torch._C._functorch.is_functorch_wrapped_tensor(t) for t in tensors)
        if not any(t.requires_grad for t in tensors):
            if not wrapped:
                return bound(*args, **kwargs)
            # torch.func's own call for functions cannot run under the capture's key: the forward alone can.
            if cls.setup_context is not Function.setup_context:
                return cls.forward(*args, **kwargs)
            return cls.forward(torch.autograd.function.FunctionCtx(), *args, **kwargs)
        if wrapped:
            raise Error(
                f"the custom autograd function {cls.__qualname__} is used inside torch.func (vmap, grad): a graph cannot hold "
                "its backward",
                kind=ErrorKind.Capture,
                remedy="write it with torch operators there",
            )
        held = _held(leaves, [], set())
        computed, stand_ins, leaves = _computed_in(held, leaves, cls.__qualname__)
        held = [h for h in held if not any(h is t for t in computed)]
        slots = [None if isinstance(x, Tensor) else (x,) for x in leaves]
        shape: list[Any] = []
        regions = autocast_regions()
        # The capture alone lets these require grad: the function gets them as the caller gave them, and its results require
        # grad again, so that a function which takes them is a node, too.
        detached = [as_given(t) is not t for t in tensors]

        def run(inputs: list[Tensor]) -> list[Tensor]:
            required = [x for x, d in zip(inputs, detached) if d]
            inputs = [x.detach() if d else x for x, d in itertools.zip_longest(inputs, detached)]
            detached.clear()  # later runs get inputs of their own
            it = iter(_in_place_of(inputs, held) if held else inputs)
            others = [next(it) if x is None else x[0] for x in slots]
            if stand_ins:
                others = _with_tensors(others, {id(t): new for t, new in zip(stand_ins, it)})
            a, k = pytree.tree_unflatten(others, spec)
            with contextlib.ExitStack() as stack:
                stack.enter_context(inside_function())
                for device, enabled, dtype in regions:
                    stack.enter_context(torch.autocast(device, dtype=dtype, enabled=enabled))
                out = bound(*a, **k)
            many = isinstance(out, tuple)
            outs = list(out) if many else [out]
            shape[:] = [many, [None if isinstance(o, Tensor) else (o,) for o in outs]]
            results = [o for o in outs if isinstance(o, Tensor)]
            return list(original(_AsIfRequired, required[0], *results)) if required else results

        number = _C.register_opaque(run, f"{cls.__module__}.{cls.__qualname__}")
        if any(h.requires_grad if isinstance(h, Tensor) else next(h.parameters(), None) is not None for h in held):
            _holders[number] = cls.__qualname__
        results = iter(torch.ops.plumb.python_function(number, tensors + computed))
        many, others = shape
        outs = tuple(next(results) if o is None else o[0] for o in others)
        return outs if many else outs[0]

    return _apply_goes_to(apply)
