"""A live ``torch.nn.Module`` as a graph: :func:`capture` and :class:`GraphModule`."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import sys
import threading
from typing import Any, Callable, Iterator

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from . import _C
from ._calls import here
from ._errors import Error, ErrorKind
from ._graph_module import GraphModule
from ._questions import is_check, watched_tensors
from ._replace import replaced
from ._state import BUFFER, state_of
from ._trees import flatten_inputs, flatten_output
from ._untouched import Untouched, refuse_modules

_INSIDE = [os.path.dirname(torch.__file__) + os.sep, os.path.dirname(__file__) + os.sep]
_LEAF = {"type": None, "context": None, "children_spec": []}
_capture_lock = threading.RLock()


def _spec_json(spec: Any, num_leaves: int) -> str:
    """torch's own JSON of a tree spec; a flat tuple for types it cannot write."""
    try:
        return pytree.treespec_dumps(spec)
    except Exception:
        import json

        return json.dumps([1, {"type": "builtins.tuple", "context": "null", "children_spec": [_LEAF] * num_leaves}])


def _input_names(forward: Callable[..., Any], args: tuple, kwargs: dict) -> list[str]:
    """Each input under the name of its parameter in the forward's signature, and its place inside of that."""
    positional: list[str] = []
    with contextlib.suppress(TypeError, ValueError):
        function = forward.forward if isinstance(forward, nn.Module) else forward
        for p in inspect.signature(function).parameters.values():
            if p.kind not in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD):
                break
            positional.append(p.name)
    names = []
    for path, _ in pytree.tree_flatten_with_path((args, kwargs))[0]:
        keys = [str(getattr(k, "idx", getattr(k, "key", getattr(k, "name", k)))) for k in path]
        if keys[0] == "0" and int(keys[1]) < len(positional):
            keys[1] = positional[int(keys[1])]
        names.append("_".join(keys[1:]))
    return [n if not n[:1].isdigit() else f"arg{n}" for n in names]


@contextlib.contextmanager
def _module_stack(module: nn.Module) -> Iterator[None]:
    """Tells the engine which module's forward runs, by hooks on every module."""
    names: dict[int, str] = {}
    for name, sub in module.named_modules():
        names.setdefault(id(sub), name)

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


@contextlib.contextmanager
def _opaque_functions(open_checkpoints: bool) -> Iterator[None]:
    """While it lasts, ``torch.autograd.Function.apply`` becomes one node that calls the function, backward and all.

    `open_checkpoints`: not what a re-entrant checkpoint calls; a transform is about its operators, and verification asks for
    gradients in a way that such a checkpoint refuses."""
    Function = torch.autograd.Function
    original = Function.__dict__.get("apply")

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        bound = original.__get__(None, cls) if original is not None else super(Function, cls).apply
        reentrant = cls.__name__ == "CheckpointFunction"
        if reentrant and open_checkpoints and any(isinstance(a, Tensor) and a.requires_grad for a in args):
            return args[0](*args[2:])
        if not _C.is_capturing():
            return bound(*args, **kwargs)
        leaves, spec = pytree.tree_flatten((args, kwargs))
        tensors = [a for a in leaves if isinstance(a, Tensor)]
        # Without a gradient to lose its operators may be seen; inside vmap the function has a rule of its own.
        wrapped = any(torch._C._functorch.is_functorch_wrapped_tensor(t) for t in tensors)
        if not reentrant and not any(t.requires_grad for t in tensors):
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
        region = {"dtype": torch.get_autocast_dtype("cpu"), "enabled": torch.is_autocast_enabled("cpu")}

        def run(inputs: list[Tensor]) -> list[Tensor]:
            it = iter(inputs)
            a, k = pytree.tree_unflatten([next(it) if isinstance(x, Tensor) else x for x in leaves], spec)
            with torch.autocast("cpu", **region):
                out = bound(*a, **k)
            many = isinstance(out, tuple)
            outs = list(out) if many else [out]
            shape[:] = [many, [None if isinstance(o, Tensor) else (o,) for o in outs]]
            return [o for o in outs if isinstance(o, Tensor)]

        number = _C.register_opaque(run, f"{cls.__module__}.{cls.__qualname__}")
        results = iter(torch.ops.plumb.python_function(number, tensors))
        many, others = shape
        outs = tuple(next(results) if o is None else o[0] for o in others)
        return outs if many else outs[0]

    Function.apply = classmethod(apply)
    try:
        yield
    finally:
        if original is not None:
            Function.apply = original
        else:
            del Function.apply


@contextlib.contextmanager
def _unoptimised_scripts(module: nn.Module) -> Iterator[None]:
    """Scripted code runs operator by operator, not as functions with a backward of their own."""
    for sub in module.modules():
        if isinstance(sub, torch.jit.ScriptModule) and hasattr(getattr(sub, "forward", None), "_debug_flush_compilation_cache"):
            sub.forward._debug_flush_compilation_cache()
    function, call = torch.jit.ScriptFunction, torch.jit.ScriptFunction.__call__

    def flush_and_call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _C.is_capturing():
            self._debug_flush_compilation_cache()
        return call(self, *args, **kwargs)

    function.__call__ = flush_and_call
    try:
        with torch.jit.optimized_execution(False):
            yield
    finally:
        function.__call__ = call


@contextlib.contextmanager
def _answer_compiling(*packages: str) -> Iterator[None]:
    """``torch.compiler.is_compiling()`` answers yes to these packages alone: they then take their own way without
    branches on tensor values."""
    original = torch.compiler.is_compiling

    def is_compiling() -> bool:
        caller = sys._getframe(1).f_globals.get("__name__", "")
        return caller.partition(".")[0] in packages or original()

    torch.compiler.is_compiling = is_compiling
    try:
        yield
    finally:
        torch.compiler.is_compiling = original


def capture_engine(
    module: nn.Module,
    args: tuple,
    kwargs: dict,
    *,
    forward: Callable[..., Any] | None = None,
    verify: bool = False,
    calls: list | None = None,
    replace: dict | None = None,
    guard_values: bool = False,
    decisions: list[Tensor] | None = None,
) -> tuple[Any, Any, Any, list[str]]:
    """The engine's graph module, the tree spec of inputs and outputs, and notes. `forward` replaces ``module(...)``.

    `calls`, if given, receives (names of results, operator, :class:`plumb._calls.Call`) for every operator that Python
    called. `replace`: functions whose calls go to others. `guard_values`: where the forward takes values out of tensors
    the graph checks in every run that they are the same; else that is refused. `decisions`: what the tensors are to hold
    that such values and sizes hang on, in order."""
    refuse_modules(module, with_root=forward is None)
    once = functools.partial(_capture_once, module, args, kwargs, forward, verify, calls, replace or {})
    note = "transformers was told that a graph is being made: its data-dependent shortcuts (all-ones masks) are not taken"
    if decisions is None:
        try:
            return once(None, False, [])
        except Error as error:
            # transformers branches on mask values, but has a way without when it is told that a graph is made.
            told = f"{os.sep}transformers{os.sep}" in error.where
            if not told and not guard_values:
                raise
        if told:
            try:
                engine, in_spec, out, notes = once("transformers", False, [])
                return engine, in_spec, out, [*notes, note]
            except Error:
                if not guard_values:
                    raise
    told = any(type(m).__module__.startswith("transformers.") for m in module.modules())
    engine, in_spec, out, notes = once("transformers" if told else None, True, decisions or [])
    return engine, in_spec, out, [*notes, note] if told else notes


def _capture_once(
    module: nn.Module,
    args: tuple,
    kwargs: dict,
    forward: Callable[..., Any] | None,
    verify: bool,
    calls: list | None,
    replace: dict,
    package: str | None,
    guard_values: bool,
    decisions: list[Tensor],
) -> tuple[Any, Any, Any, list[str]]:
    leaves, in_spec = flatten_inputs(args, kwargs)
    state = state_of(module)
    buffers = [(n, t) for n, k, t, _ in state if k == BUFFER]
    found: dict[str, Any] = {}
    run = forward if forward is not None else module
    tensors = [x if isinstance(x, Tensor) else None for x in leaves]

    def call(flat: list) -> tuple[list, str]:
        given = [f if isinstance(x, Tensor) else x for f, x in zip(flat, leaves)]
        a, k = pytree.tree_unflatten(given, in_spec)
        output, out_spec = flatten_output(run(*a, **k))
        found["spec"] = out_spec
        found["plain"] = [None if isinstance(o, Tensor) else o for o in output]
        return [o if isinstance(o, Tensor) else None for o in output], _spec_json(out_spec, len(output))

    def buffers_after() -> list[tuple[str, Tensor]]:
        now = []
        for name, old in buffers:
            owner, _, leaf = name.rpartition(".")
            sub = module.get_submodule(owner)
            tensor = sub._buffers.get(leaf)
            if tensor is not None and tensor is not old:
                now.append((name, tensor))
                sub._buffers[leaf] = old
        return now

    with _capture_lock, contextlib.ExitStack() as stack:
        untouched = Untouched(module)
        if package:
            stack.enter_context(_answer_compiling(package))
        stack.enter_context(_module_stack(module))
        stack.enter_context(_opaque_functions(open_checkpoints=verify or calls is not None))
        stack.enter_context(replaced(replace))
        with contextlib.suppress(Exception):
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(_unoptimised_scripts(module))
        stack.enter_context(watched_tensors())
        try:
            engine, notes, found_calls = _C.capture(
                state, tensors, _input_names(run, args, kwargs), _spec_json(in_spec, len(leaves)), call, buffers_after,
                untouched.tensors, is_check, _INSIDE, module.training, verify, here if calls is not None else None,
                guard_values, decisions,
            )
            if calls is not None:
                calls[:] = found_calls
        finally:
            changed = untouched.restore()
    return engine, in_spec, (found["spec"], found["plain"]), list(notes) + changed


def signature(leaves: list) -> tuple:
    """What a graph is specialised to, of its inputs."""
    return tuple(
        (x.dtype, x.shape, x.device, x.requires_grad) if isinstance(x, Tensor) else (type(x), x) for x in leaves
    )


def _as_captured(tensor: Tensor) -> Tensor:
    """As the forward sees an input while it is captured."""
    return tensor.detach().requires_grad_() if tensor.is_floating_point() or tensor.is_complex() else tensor


def capture(module: nn.Module, *args: Any, plumb_verify: bool = False, **kwargs: Any) -> GraphModule:
    """Captures one forward of `module` on these inputs as a :class:`GraphModule`.

    The graph holds every operator call at the level it was written (``linear``, ``layer_norm``, ...), bit for bit what
    eager computes, forward and backward. The module is as before afterwards. ``plumb_verify=True`` captures twice on
    other input values and compares a replay with eager.

    Raises :class:`plumb.Error` naming operator, module and line when the forward takes a value out of a tensor.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"plumb.capture takes a torch.nn.Module, got {type(module).__name__}")
    forward = module.__dict__.get("forward")
    if hasattr(forward, "prepare"):  # a transformed module's own capture cannot run inside of this one
        seen = pytree.tree_map_only(Tensor, _as_captured, (args, kwargs))
        forward.prepare(*seen)
    leaves, _ = flatten_inputs(args, kwargs)
    engine, in_spec, (out_spec, plain), notes = capture_engine(module, args, kwargs, verify=plumb_verify)
    plain_inputs = [None if isinstance(x, Tensor) else x for x in leaves]
    return GraphModule(engine, in_spec, out_spec, plain_inputs, plain, notes, training=module.training)
