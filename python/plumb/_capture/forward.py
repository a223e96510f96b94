"""One forward of a live ``torch.nn.Module`` as a graph: :func:`capture`."""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import os
import threading
import types
from typing import Any, Callable, Iterator, Mapping, NamedTuple, Sequence

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .. import _C
from .._errors import Error, ErrorKind
from .._exported import capture_dynamic
from .._graph_module import GraphModule
from .._state import BUFFER, constants_of, in_modes, state_of
from .._transformed import forward_of
from .._trees import (
    PLAIN,
    children,
    flatten_inputs,
    flatten_output,
    hashed,
    in_utf8,
    layout,
    overriding_class,
    plain_value,
    register_named_tuples,
    unflatten,
)
from .._unit_scaled import is_marked, mark_state_dict
from ..parameter import tell_engine
from . import torch_patches
from .attribute_reads import Observer, observed
from .attribute_writes import (
    MISSING,
    Change,
    ModuleStateGuard,
    input_tables,
    refuse_modules,
    written_input,
)
from .call_sites import here
from .custom_functions import opaque_functions
from .guards import Guards, enabled_autocast
from .left_tensors import LeftTensors
from .next_call import Read, path_in_any_mode, refuse_other_paths, watched
from .read_guards import guards_of
from .replacements import replaced
from .spread_modules import refuse_spread_modules
from .tensor_reads import is_check, settings_now, watched_settings, watched_tensors
from .torch_patches import INSIDE

_LEAF = {"type": None, "context": None, "children_spec": []}
# Held by the capture that runs. It is taken before the locks of modules and pipes: a forward may call one of those.
capture_lock = threading.RLock()
# A process is forked between captures: its child has the changes that one makes to torch, and no thread that would undo them.
os.register_at_fork(before=capture_lock.acquire, after_in_parent=capture_lock.release, after_in_child=capture_lock.release)


def _spec_json(spec: Any, num_leaves: int) -> str:
    """torch's own JSON of a tree spec; a flat tuple for types it cannot write."""
    register_named_tuples(spec)
    _refuse_keys(spec)
    try:
        return pytree.treespec_dumps(spec)
    except Exception:
        return json.dumps([1, {"type": "builtins.tuple", "context": "null", "children_spec": [_LEAF] * num_leaves}])


def _refuse_keys(spec: Any) -> None:
    for key in spec.context if isinstance(spec.context, (list, tuple)) else ():
        if isinstance(key, str) and not in_utf8(key):
            raise Error(
                f"an input or output has the key '{key}', which is no text in UTF-8",
                kind=ErrorKind.Unsupported,
                remedy="give it another name",
            )
    for child in children(spec):
        _refuse_keys(child)


def _parameters_of(forward: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Returns the parameters of a forward by name; none where its signature cannot be read."""
    try:
        return inspect.signature(forward.forward if isinstance(forward, nn.Module) else forward).parameters
    except (TypeError, ValueError):
        return {}


def positional_names(forward: Callable[..., Any]) -> list[str]:
    """Returns the names of those parameters of a forward that may be given by position."""
    return [p.name for p in _parameters_of(forward).values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]


def keyword_order(forward: Callable[..., Any], kwargs: dict) -> tuple[str, ...]:
    """Returns the keywords that a forward takes by its ``**kwargs``."""
    parameters = _parameters_of(forward)
    by_dict = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return tuple(name for name in kwargs if name not in parameters) if by_dict else ()


def _input_names(forward: Callable[..., Any], args: tuple, kwargs: dict) -> list[str]:
    """Returns each input under the name of its parameter in the forward's signature, and its place inside of that."""
    positional = positional_names(forward)
    names = []
    for path, _ in pytree.tree_flatten_with_path((args, kwargs))[0]:
        keys = [str(getattr(k, "idx", getattr(k, "key", getattr(k, "name", k)))) for k in path]
        if keys[0] == "0" and int(keys[1]) < len(positional):
            keys[1] = positional[int(keys[1])]
        names.append("_".join(keys[1:]))
    return [n if not n[:1].isdigit() else f"arg{n}" for n in names]


class _Forward:
    """One forward to be captured, as the engine asks about it (``capture_python`` in bindings/capture.cpp)."""

    inside = list(INSIDE)  # whose frames are not the user's lines
    is_check = staticmethod(is_check)
    unit_weights = False

    def __init__(self, module: nn.Module, args: tuple, kwargs: dict, forward: Callable[..., Any] | None, guarded: bool):
        self.module, self.guarded = module, guarded
        self.run = forward if forward is not None else module
        self.one_graph = forward is None  # transformed modules have others
        self.grad_mode = self.one_graph or torch.is_grad_enabled()
        self.asks_layout: list[str] = []  # lines
        self.settings = settings_now()
        self.asks_settings: dict[str, str] = {}  # lines by the function of torch
        self.leaves, self.spec = flatten_inputs(args, kwargs)
        self.inputs = [x if isinstance(x, Tensor) else None for x in self.leaves]
        self.classes = [overriding_class(x) for x in self.leaves]
        self.repeats = () if self.one_graph else repeats(self.leaves)
        self.plain_inputs = [x for x in self.leaves if not isinstance(x, Tensor)]
        self.in_spec = _spec_json(self.spec, len(self.leaves))
        self.input_names = _input_names(self.run, args, kwargs)
        self.state = state_of(module)
        self.training = module.training
        self.library_folders = torch_patches.library_folders()
        self.has_libraries = torch_patches.has_libraries(module)
        self.told_libraries = False
        self.observer: Observer | None = None
        self.functions: list[Any] = []  # those whose reads are followed, and the objects that they read
        self.start_from: list[Change] = []  # attributes that begin with other values
        self.out_spec: Any = None
        self.plain_outputs: list = []
        self.left = LeftTensors([])

    def call(self, flat: list) -> tuple[list, str]:
        if self.called:
            self.state_guard.restore(warn=False)  # every call begins with the same attributes, those of verify, too
        self.called = True
        for change in self.start_from:
            change.put()
        given = [f if isinstance(x, Tensor) else x for f, x in zip(flat, self.leaves)]
        given = [g if cls is None else g.as_subclass(cls) for g, cls in zip(given, self.classes)]
        given = [given[i] for i in self.repeats] or given
        args, kwargs = unflatten(given, self.spec)
        tables = input_tables(args, kwargs)
        try:
            output, self.out_spec = flatten_output(self.run(*args, **kwargs))
        except BaseException:
            self.state_guard.note_outer(ended=True)
            raise
        self.state_guard.note_outer(ended=False)
        if name := written_input(tables):
            _C.refuse(
                f"the forward writes into its input ({name}), and a graph gives back what it returns alone",
                "let the forward return what it writes, or write it where the model is called",
            )
        self.plain_outputs = [None if isinstance(o, Tensor) else o for o in output]
        outputs = [o if isinstance(o, Tensor) else None for o in output]
        self.left = LeftTensors(self.state_guard.tables)
        if self.one_graph or not self.left.outputs:
            return outputs, _spec_json(self.out_spec, len(output))
        both = pytree.tree_unflatten([0] * len(output), self.out_spec), [0] * len(self.left.outputs)
        return outputs + self.left.outputs, _spec_json(pytree.tree_flatten(both)[1], len(output) + len(both[1]))

    def buffers_after(self) -> list[tuple[str, Tensor]]:
        """Buffers that the forward re-assigned: (name, new). The old ones are there again afterwards."""
        changed: list[tuple[str, Tensor]] = []
        of_buffers = [(name, old) for name, kind, old, _ in self.state if kind == BUFFER]
        if not of_buffers:
            return changed
        owners = dict(self.module.named_modules(remove_duplicate=False))  # scripted modules have no get_submodule
        for name, old in of_buffers:
            owner, _, leaf = name.rpartition(".")
            buffers = owners[owner]._buffers
            now = buffers[leaf] if leaf in buffers else None
            if now is not None and now is not old:
                changed.append((name, now))
                buffers[leaf] = old
                self.state_guard.written.add((id(buffers), leaf))
        return changed

    def attributes_after(self) -> list[tuple[str, Tensor, Tensor]]:
        changed = self.state_guard.tensors()
        self.state_guard.refuse_new_parts()
        return changed

    def begin_attempt(self, tell_libraries: bool) -> None:
        self.told_libraries = tell_libraries

    @contextlib.contextmanager
    def traced(self, replace: dict) -> Iterator[None]:
        """Context manager that makes torch as a capture needs it. The module is as before afterwards."""
        with capture_lock, torch_patches.unseen_by_tracers(), contextlib.ExitStack() as stack:
            self.state_guard, self.called = ModuleStateGuard(self.module), False
            try:
                with torch_patches.interrupts_wait():
                    self._change_torch(stack, replace)
                yield
            finally:
                with torch_patches.interrupts_wait():
                    self.changed = self.state_guard.restore()
                    stack.close()

    def _change_torch(self, stack: contextlib.ExitStack, replace: dict) -> None:
        modules = self.state_guard.modules
        if self.guarded and self.observer is None:  # the first capture's reads are those of the graph
            self.observer = stack.enter_context(observed())
            self.observer.begin(modules, self.run, self.plain_inputs)
            attributes = [part for _, sub in modules for part in sub.__dict__.values()]
            self.functions = [*self.observer.seen, *(part for part in attributes if isinstance(part, types.FunctionType))]
        self.state_guard.tables.add_outer(self.functions)
        stack.enter_context(torch_patches.answer_compiling(lambda: self.told_libraries))
        stack.enter_context(torch_patches.module_stack(modules))
        stack.enter_context(torch_patches.refused_seeds())
        stack.enter_context(opaque_functions())
        stack.enter_context(torch_patches.higher_order_operators())
        stack.enter_context(torch_patches.unseen_saved_tensors())
        stack.enter_context(torch_patches.uncached_parametrizations())
        if replace:
            stack.enter_context(replaced(replace))
        stack.enter_context(torch_patches.forced_eager())
        stack.enter_context(torch_patches.unoptimized_scripts(modules))
        answers = {**self.settings, "is_grad_enabled": self.grad_mode}
        self.asks_settings = stack.enter_context(watched_settings(answers))
        self.asks_layout = stack.enter_context(watched_tensors(self.one_graph, self.grad_mode, self.asks_settings))


class Captured(NamedTuple):
    """The captured form of one forward of a module."""

    engine: Any  # the engine's graph module
    in_spec: Any
    out_spec: Any
    plain: list  # by output: the value of what is no tensor
    notes: list[str]
    asks_grad_mode: bool  # whether the forward may take another path under torch.no_grad()
    guards: Callable[..., Guards]  # makes those of what the forward read, when the module is as it is to be again
    left: LeftTensors  # what the graph returns behind its outputs, if the forward was given
    asks_layout: str  # the line that asks for the layout of a tensor, if one does: the forward may take another path for others

    def as_module(self, leaves: list, training: bool, guards: Guards) -> GraphModule:
        """`leaves`: the inputs of the capture."""
        self.engine.mode_read_at = guards.mode_line.encode(errors="backslashreplace").decode()  # a file's name may be any bytes
        plain_inputs = [plain_value(x) for x in leaves]
        graph = GraphModule(
            self.engine, self.in_spec, self.out_spec, plain_inputs, self.plain, self.notes, training=training,
            autocast=enabled_autocast(), guards=guards,
        )  # fmt: skip
        if self.asks_layout:
            graph._input_layouts = self.asks_layout, {p: layout(x) for p, x in enumerate(leaves) if isinstance(x, Tensor)}
        graph._input_classes = {place: cls for place, x in enumerate(leaves) if (cls := overriding_class(x)) is not None}
        return graph


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
    control_values: list[Tensor] | None = None,
    guarded: bool = True,
    unit_weights: bool = False,
) -> Captured:
    """Runs the forward of `module` once and records its operators.

    Args:
        forward: is called instead of ``module(...)``.
        calls: receives (names of results, operator, :class:`plumb._capture.call_sites.Call`) for every operator that Python called.
        replace: functions whose calls go to others.
        guard_values: values that the forward takes out of tensors may be guarded: the graph checks in every run that they
            are the same. Otherwise they are refused.
        control_values: guards values at once, and gives the tensors that such values and sizes come from these values, in
            order.
        guarded: guards of what the forward reads will be made.
        unit_weights: weights have unit scale: results of products are kept from growing from layer to layer.
    """
    refuse_modules(module, with_root=forward is None)
    refuse_spread_modules(module, with_root=forward is None)
    request = _Forward(module, args, kwargs, forward, guarded)
    request.unit_weights = unit_weights
    traced = functools.partial(request.traced, replace or {})
    if verify:  # apart, as its runs go backward and may leave more in attributes than a forward does
        with traced():
            _C.capture(request, True, None, guard_values, control_values)
    with traced():
        engine, notes, found = _C.capture(
            request, False, here if calls is not None else None, guard_values, control_values
        )
    left = request.left
    left.forget_state(engine)
    written = request.state_guard.written
    told = [torch_patches.TOLD_NOTE] if request.told_libraries else []
    if line := request.asks_settings.get("is_grad_enabled"):
        mode = "on" if request.grad_mode else "off"
        told.append(
            "the forward asks torch.is_grad_enabled(), or whether a result requires a gradient: the graph takes the path for "
            f"gradients {mode}, at {line}"
        )
    if request.one_graph and left.names:
        names = ", ".join(f"'{name}'" for name in left.names)
        told.append(f"the forward leaves tensors in {names}: a run of the graph does not (a transformed module does)")
    all_notes = [*notes, *request.changed, *told]
    changes, kept = request.state_guard.changes, request.state_guard.not_written_back(engine)
    if changes or kept:
        request.start_from = [*changes, *kept]

        def capture_again() -> tuple[Any, dict]:
            again = _C.capture(request, False, None, guard_values, control_values)[0]
            return again, request.state_guard.left

        with traced(), watched(changes) as reads:
            all_notes += refuse_other_paths(changes, kept, engine, capture_again, reads)
        left.compare(request.left)
    made_once = _made_once(changes, reads if changes or kept else [], every_table=forward is not None)
    for parameter in module.parameters():
        tell_engine(parameter)
    if calls is not None:
        calls[:] = found
    asks_grad_mode = "is_grad_enabled" in request.asks_settings
    settings = {name: value for name, value in request.settings.items() if name in request.asks_settings}

    def guards(parts: bool = False, tensors: bool = False) -> Guards:
        modules = request.state_guard.modules
        with capture_lock:  # another capture has its own functions in torch's places
            made = guards_of(request.observer, modules, written, forward, parts, request.plain_inputs, made_once, settings)
        if tensors:
            made.add_parameters(modules)
            made.add_buffers(modules, written)
        return made

    return Captured(
        engine, request.spec, request.out_spec, request.plain_outputs, all_notes, asks_grad_mode, guards, left,
        next(iter(request.asks_layout), ""),
    )


def _made_once(changes: list[Change], reads: list[Read], every_table: bool) -> list[Change]:
    """Returns changes of slots that the forward reads besides: it fills them where they are empty. `every_table`: also those of dicts
    and lists whose reads nobody notes."""
    read = {r.name for r in reads}
    return [
        c
        for c in changes
        if isinstance(c.now, PLAIN)
        and (c.before is MISSING or isinstance(c.before, PLAIN))
        and c.key is not None
        and (c.name in read if c.table.module is not None else every_table)
    ]


def _same_in_other_mode(module: nn.Module, args: tuple, kwargs: dict, engine: Any) -> bool:
    """Returns whether the forward of a module that asks for its mode takes the same path in the other one."""
    modules = list(module.modules())
    try:
        with in_modes(modules, [not sub.training for sub in modules]):
            other = capture_engine(module, args, kwargs, guarded=False).engine
    except Exception:  # it takes another path there at any rate
        return False
    constants = [constants_of(e).values() for e in (engine, other)]
    return path_in_any_mode(engine) == path_in_any_mode(other) and all(map(torch.equal, *constants))


def repeats(leaves: Sequence[Any]) -> tuple[int, ...]:
    """Returns for each input where its tensor comes first, nothing if each comes once: ``attention(x, x, x)`` may ask whether its
    inputs are one."""
    if len(leaves) < 2 or len(set(map(id, leaves))) == len(leaves):
        return ()
    first: dict[int, int] = {}
    places = tuple(first.setdefault(id(x), i) if isinstance(x, Tensor) else i for i, x in enumerate(leaves))
    return places if places != tuple(range(len(leaves))) else ()


def signature(leaves: Sequence[Any]) -> tuple:
    """The facts about inputs that a graph is specialized to. A forward may ask for a layout, and an operator refuse it."""
    try:
        return repeats(leaves), *[
            (overriding_class(x), x.dtype, x.shape, x.device, x.requires_grad, x.is_contiguous() or x.stride())
            if isinstance(x, Tensor) else hashed(x)
            for x in leaves
        ]
    except RuntimeError:  # sparse and nested tensors have no strides, nested ones no sizes
        return repeats(leaves), *[
            (x.dtype, None if x.is_nested else x.shape, x.device, x.layout, x.requires_grad) if isinstance(x, Tensor) else hashed(x)
            for x in leaves
        ]


def capture(
    module: nn.Module, *args: Any, plumb_verify: bool = False, dynamic_shapes: Any = None, **kwargs: Any
) -> GraphModule:
    """Captures one forward of `module` on these inputs as a :class:`GraphModule`.

    The graph holds every operator call at the level it was written (``linear``, ``layer_norm``, ...), bit for bit what
    eager computes, forward and backward. The module is as before afterwards. ``plumb_verify=True`` captures twice on
    other input values and compares a replay with eager.

    ``dynamic_shapes`` says which sizes may vary, in the words of ``torch.export.export``: ``({0: torch.export.Dim("batch")},)``
    for the first dimension of the first input. Then ``torch.export`` makes the graph, with what it refuses, and one graph
    takes every batch, the last one too; ``plumb_verify`` is not for it.

    Raises :class:`plumb.Error` naming operator, module and line when the forward takes a value out of a tensor.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"plumb.capture takes a torch.nn.Module, got {type(module).__name__}")
    if dynamic_shapes is not None:
        if plumb_verify:
            raise Error("plumb_verify captures twice at one size", remedy="it, or dynamic_shapes")
        refuse_modules(module, with_root=True)
        refuse_spread_modules(module, with_root=True)
        if any(forward_of(sub) is not None for sub in module.modules()):
            raise Error(
                "dynamic_shapes: a transformed module has a graph for each size",
                kind=ErrorKind.Unsupported,
                remedy="graph = plumb.capture(plain_module, ..., dynamic_shapes=...), then "
                'plumb.transforms.run_passes(graph, "unit_scale", "simulate_format")',
            )
        return capture_dynamic(module, args, kwargs, dynamic_shapes)
    forward = module.__dict__.get("forward")
    if hasattr(forward, "prepare"):  # a transformed module's own capture cannot run inside of this one
        forward.prepare(args, kwargs)
    leaves, _ = flatten_inputs(args, kwargs)
    captured = capture_engine(module, args, kwargs, verify=plumb_verify)
    guards = captured.guards(parts=True, tensors=True)
    guards.end_with(module)
    if guards.mode_line and _same_in_other_mode(module, args, kwargs, captured.engine):
        guards.mode_line = ""
    graph = captured.as_module(leaves, module.training, guards)
    graph._keyword_order = keyword_order(module, kwargs)
    if is_marked(module):
        mark_state_dict(graph)
    return graph
