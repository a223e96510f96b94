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
from ._questions import is_check, watched_tensors
from ._replace import replaced
from ._state import BUFFER, put_state, state_of, sync_state
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
            told = f"{os.sep}transformers{os.sep}" in str(error)
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


def _member(module: nn.Module, name: str) -> Tensor:
    *path, leaf = name.split(".")
    for part in path:
        module = module._modules[part]
    return module._parameters[leaf] if leaf in module._parameters else module._buffers[leaf]


@torch._dynamo.assume_constant_result
def _make_fx(module: GraphModule) -> tuple[str, ...]:
    """Makes the module's torch.fx graph, which Dynamo cannot follow; answers the names of the tensors that it takes."""
    return tuple(module.to_fx().attributes)


class GraphModule(nn.Module):
    """A captured module: called like the original, sharing its parameters under the same names.

    ``.graph`` is the graph; ``print(m.graph)`` shows it. ``.notes`` lists what the capture noticed (constants kept,
    buffers re-assigned). It is made for the dtypes, shapes and devices of the inputs it was captured with: others are
    refused (transformed modules of :mod:`plumb.transforms` capture again by themselves).
    """

    def __init__(
        self,
        engine: Any,
        in_spec: Any,
        out_spec: Any,
        plain_inputs: list | None,  # what is no tensor, and None elsewhere; None altogether: the graph has every input
        plain_outputs: list,
        notes: list[str],
        program: Any = None,  # what the file that it came from knows besides
    ):
        super().__init__()
        self.__dict__["_engine"] = engine
        self._program = program
        self._in_spec, self._out_spec = in_spec, out_spec
        self._plain_inputs, self._plain_outputs = plain_inputs, plain_outputs
        self.notes = notes
        self.__dict__["_fx"] = None
        self._register()

    def _register(self) -> None:
        self.__dict__["_slots"] = put_state(self, self._engine.state())
        leaves = self._in_spec.num_leaves
        # Older torch has the list alone, newer torch warns about it.
        args, kwargs = self._in_spec.children() if hasattr(self._in_spec, "children") else self._in_spec.children_specs
        parts = args.children() if hasattr(args, "children") else args.children_specs
        simple_in = kwargs.num_leaves == 0 and len(parts) == leaves and all(p.is_leaf() for p in parts) and not any(
            p is not None for p in self._plain_inputs or []
        )
        simple_out = self._out_spec.is_leaf() and self._plain_outputs == [None]
        if self._plain_inputs is None:  # a file's only output may be a number
            simple_out = simple_out and [v.is_tensor for v in self.graph.nodes[-1].inputs] == [True]
        self.__dict__["_simple"] = leaves if simple_in and simple_out else -1

    @property
    def graph(self) -> Any:
        return self._engine.graph

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return self._fx_forward(*args, **kwargs)
        sync_state(self._engine, self._slots)
        if self._simple == len(args) and not kwargs:
            return self._engine.run1(*args)
        leaves = self._leaves(args, kwargs)
        if self._plain_inputs is not None:
            for given, known in zip(leaves, self._plain_inputs):
                if not isinstance(given, Tensor) and given is not known and given != known:
                    raise Error(
                        f"the graph was captured with {known!r} where {given!r} is given",
                        kind=ErrorKind.StructureMismatch,
                        remedy="capture again",
                    )
            leaves = [x if isinstance(x, Tensor) else None for x in leaves]
        out = self._engine.run(leaves)
        return pytree.tree_unflatten([p if p is not None else o for o, p in zip(out, self._plain_outputs)], self._out_spec)

    def _leaves(self, args: tuple, kwargs: dict) -> list:
        known = self._in_spec.children()[1] if hasattr(self._in_spec, "children") else self._in_spec.children_specs[1]
        if kwargs and known.type is dict and set(kwargs) == set(known.context):
            kwargs = {name: kwargs[name] for name in known.context}  # keywords come in any order
        leaves, spec = pytree.tree_flatten((args, kwargs))
        if spec != self._in_spec:
            raise Error(
                f"the inputs' structure differs from the graph's: {spec} instead of {self._in_spec}",
                kind=ErrorKind.StructureMismatch,
                remedy="call it as it was captured or exported, or capture again",
            )
        return leaves

    def to_fx(self) -> torch.fx.GraphModule:
        """The same graph as ``torch.fx`` on ``torch.ops``: what ``torch.compile`` and ``torch.export`` see."""
        from ._fx import to_fx

        if self.__dict__.get("_fx") is None:
            self.__dict__["_fx"] = to_fx(self)  # no submodule: names and state_dict stay as they are
        return self.__dict__["_fx"]

    def _fx_forward(self, *args: Any, **kwargs: Any) -> Any:
        leaves = self._leaves(args, kwargs)
        names = _make_fx(self)
        gm = self.__dict__["_fx"]
        state = [_member(self, name) for name in names]
        out = gm(*state, *[x for x in leaves if isinstance(x, Tensor)])
        return pytree.tree_unflatten([p if p is not None else o for o, p in zip(out, self._plain_outputs)], self._out_spec)

    # --- copies: the graph travels as text, the state as tensors ---
    def __getstate__(self) -> dict:
        state = {k: v for k, v in self.__dict__.items() if k not in ("_engine", "_slots", "_fx")}
        state["_text"] = self._engine.graph.to_string()
        state["_specs"] = self._engine.specs()
        sync_state(self._engine, self._slots)
        state["_state"] = self._engine.state()
        return state

    def __setstate__(self, state: dict) -> None:
        text, specs, tensors = state.pop("_text"), state.pop("_specs"), state.pop("_state")
        self.__dict__.update(state)
        self.__dict__["_fx"] = None
        self.__dict__["_engine"] = _C.Engine(text, tensors, *specs)
        self._modules.clear()
        self._parameters.clear()
        self._buffers.clear()
        self._register()


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
    gm = GraphModule(engine, in_spec, out_spec, [None if isinstance(x, Tensor) else x for x in leaves], plain, notes)
    gm.training = module.training
    return gm
