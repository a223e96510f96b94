"""Changes to torch while a forward is captured. Each is a context manager that undoes its change."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Any, Callable, ContextManager, Iterator

import torch
from torch import Tensor, nn
from torch._ops import HigherOrderOperator
from torch.utils import _pytree as pytree

from . import _C
from ._errors import Error, ErrorKind
from ._unit_scaled import inside_function


@contextlib.contextmanager
def patched(owner: Any, **attributes: Any) -> Iterator[None]:
    """While it lasts, a class or module has these attributes."""
    before = {name: owner.__dict__.get(name) for name in attributes}  # None: inherited
    try:
        for name, value in attributes.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            delattr(owner, name) if value is None else setattr(owner, name, value)


def autocast_regions() -> tuple[tuple[str, bool, torch.dtype], ...]:
    """Of the CPU, and of the accelerator if there is one: whether autocast is on, and to which dtype."""
    accelerator = torch.accelerator.current_accelerator()
    devices = ["cpu"] if accelerator is None else ["cpu", accelerator.type]
    return tuple((d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in devices)


@contextlib.contextmanager
def module_stack(module: nn.Module) -> Iterator[None]:
    """Tells the engine which module's forward runs, by hooks on every module."""
    names = {id(sub): name for name, sub in module.named_modules()}

    def enter(sub: nn.Module, _args: Any) -> None:
        _C.push_module(names.get(id(sub), ""), type(sub).__name__)

    def leave(_sub: nn.Module, _args: Any, _output: Any) -> None:
        _C.pop_module()

    hooks = [
        nn.modules.module.register_module_forward_pre_hook(enter),
        nn.modules.module.register_module_forward_hook(leave, always_call=True),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


# Custom functions by number that were given a module: they compute with the weights of the module that was captured.
_holders: dict[int, str] = {}


def refuse_holders(graph: Any, what: str) -> None:
    """Raises `plumb.Error` if a graph that is to be `what` calls a custom function that holds a module with parameters."""
    for node in graph.nodes if _holders else []:
        if node.target == "plumb::python_function" and node.args[0] in _holders:
            raise Error(
                f"the custom autograd function {_holders[node.args[0]]} is given a module, so it computes with the weights of "
                f"the model that was captured: the graph cannot be {what}",
                kind=ErrorKind.Unsupported,
                where=f"{node.source[0]}:{node.source[1]}" if node.source else node.module_path,
                remedy="give the function the weights as tensors in place of the module",
            )


def opaque_functions() -> ContextManager:
    """While it lasts, ``torch.autograd.Function.apply`` becomes one node that calls the function, backward and all.

    The function of a re-entrant checkpoint is captured instead: it would give its parameters' gradients to the module that was
    captured, also where a copy or a stage of the graph runs."""
    Function = torch.autograd.Function
    original = Function.__dict__.get("apply")

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        bound = original.__get__(None, cls) if original is not None else super(Function, cls).apply
        if cls.__name__ == "CheckpointFunction" and any(isinstance(a, Tensor) and a.requires_grad for a in args):
            return args[0](*args[2:])
        if not _C.is_capturing():
            return bound(*args, **kwargs)
        leaves, spec = pytree.tree_flatten((args, kwargs))
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
        shape: list[Any] = []
        regions = autocast_regions()

        def run(inputs: list[Tensor]) -> list[Tensor]:
            it = iter(inputs)
            a, k = pytree.tree_unflatten([next(it) if isinstance(x, Tensor) else x for x in leaves], spec)
            with contextlib.ExitStack() as stack:
                stack.enter_context(inside_function())
                for device, enabled, dtype in regions:
                    stack.enter_context(torch.autocast(device, dtype=dtype, enabled=enabled))
                out = bound(*a, **k)
            many = isinstance(out, tuple)
            outs = list(out) if many else [out]
            shape[:] = [many, [None if isinstance(o, Tensor) else (o,) for o in outs]]
            return [o for o in outs if isinstance(o, Tensor)]

        number = _C.register_opaque(run, f"{cls.__module__}.{cls.__qualname__}")
        if any(next(m.parameters(), None) is not None for m in leaves if isinstance(m, nn.Module)):
            _holders[number] = cls.__qualname__
        results = iter(torch.ops.plumb.python_function(number, tensors))
        many, others = shape
        outs = tuple(next(results) if o is None else o[0] for o in others)
        return outs if many else outs[0]

    return patched(Function, apply=classmethod(apply))


def higher_order_operators() -> ContextManager:
    """While it lasts, ``torch.cond`` and ``torch.while_loop`` run as what they mean, so that their conditions are seen like any
    other value that chooses a path; torch's other operators on functions are refused by name."""
    original = HigherOrderOperator.__call__

    def run_while(condition: Callable, body: Callable, carried: tuple, additional: tuple = ()) -> tuple:
        while condition(*carried, *additional):
            carried = body(*carried, *additional)
        return carried

    def call(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        if not _C.is_capturing():
            return original(self, *args, **kwargs)
        if self.name() == "cond":
            condition, true, false, operands = args
            return (true if condition else false)(*operands)
        if self.name() == "while_loop":
            return run_while(*args)
        _C.refuse(
            f"the forward calls the operator {self.name()} of torch.ops.higher_order, which works on functions",
            "write it with plain operators: attention as scaled_dot_product_attention with a mask, loops in Python",
        )

    return patched(HigherOrderOperator, __call__=call)


@contextlib.contextmanager
def unoptimised_scripts(module: nn.Module) -> Iterator[None]:
    """Scripted code runs operator by operator, not as functions with a backward of their own."""
    for sub in module.modules():
        if isinstance(sub, torch.jit.ScriptModule) and hasattr(getattr(sub, "forward", None), "_debug_flush_compilation_cache"):
            sub.forward._debug_flush_compilation_cache()
    function = torch.jit.ScriptFunction
    call = function.__call__

    def flush_and_call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _C.is_capturing():
            self._debug_flush_compilation_cache()
        return call(self, *args, **kwargs)

    with patched(function, __call__=flush_and_call), torch.jit.optimized_execution(False):
        yield


# Libraries with code of their own for graph makers. They branch on tensor values (are all masks ones?), and do not when
# torch.compiler.is_compiling() says yes.
_LIBRARIES = ("transformers",)
TOLD_NOTE = "transformers was told that a graph is being made: its data-dependent shortcuts (all-ones masks) are not taken"


def library_folders() -> list[str]:
    """The folders of such libraries that are imported."""
    found = [getattr(sys.modules.get(name), "__file__", None) for name in _LIBRARIES]
    return [os.path.dirname(file) + os.sep for file in found if file]


def has_libraries(module: nn.Module) -> bool:
    return any(type(m).__module__.partition(".")[0] in _LIBRARIES for m in module.modules())


def answer_compiling(tell: Callable[[], bool]) -> ContextManager:
    """``torch.compiler.is_compiling()`` answers yes to such libraries alone, while `tell` answers true."""
    original = torch.compiler.is_compiling

    def is_compiling() -> bool:
        caller = sys._getframe(1).f_globals.get("__name__", "")
        return (tell() and caller.partition(".")[0] in _LIBRARIES) or original()

    return patched(torch.compiler, is_compiling=is_compiling)
