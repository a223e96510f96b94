"""Transformed modules: a copy of the user's module whose ``forward`` runs a captured and rewritten graph."""

from __future__ import annotations

import copy
import functools
import inspect
import logging
import threading
import types
import weakref
from dataclasses import dataclass, field
from typing import Any, Callable, ContextManager, TypeVar

import torch
from torch import Tensor, nn

from .. import _C
from .._capture.attribute_reads import include
from .._capture.attribute_writes import refuse_modules
from .._capture.call_sites import Call, hint
from .._capture.forward import capture_engine, capture_lock, signature
from .._capture.guards import GraphStore, Guards, Tree, enabled_autocast
from .._capture.left_tensors import LeftTensors
from .._capture.replacements import Replacements
from .._capture.spread_modules import refuse_spread_modules
from .._capture.tensor_reads import as_given
from .._errors import Error, ErrorKind
from .._graph_module import new_handle
from .._state import CONSTANT, slot_of, sync_state
from .._transformed import keep_forward, replaceable_forward, run_kept
from .._trees import flatten, hashed, unflatten
from .._unit_scaled import capturing
from . import _tracers
from ._before_run import BeforeRun
from ._own_copies import keep_transforms, own_hooks

logger = logging.getLogger("plumb.transforms")

Module = TypeVar("Module", bound=nn.Module)  # a transform returns a copy of the class that it is given

MAX_GRAPHS = 64  # signatures of one module; the one unused for longest goes first
MAX_VARIANTS = 16  # graphs for one signature, which differ in what the forward read besides its inputs
MAX_PATHS = 16  # graphs for one signature, which differ in the values that the forward read
MAX_CAPTURES = 256  # that are made for one signature
MAX_TRIES = 64  # captures until a graph takes the path that it was made for


@dataclass
class CapturedGraph:
    """A graph for one signature of inputs, and what is known of it."""

    engine: Any
    out_spec: Any
    plain: list
    slots: list = field(default_factory=list)
    reports: list[dict] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    calls: dict[str, Call] = field(default_factory=dict)  # by the names of the results
    replaced: set = field(default_factory=set)  # the functions whose calls went to others
    results: dict[str, Any] = field(default_factory=dict)  # what a pass keeps, by its name
    simple: bool = False
    # The graph as torch.fx on the state of these names and the inputs: for torch.compile, and for backends, which have
    # the last word. And which of its outputs are tensors.
    gm: Any = None
    attributes: list[str] = field(default_factory=list)
    is_tensor: list[bool] = field(default_factory=list)
    by_backend: bool = False
    # Whether the graph has guards (an expert got no rows, ...), and whether they are about values that choose a path. The
    # first graph of a signature also has the graphs for all paths, the last one used first, and how many were made.
    guarded: bool = False
    takes_values: bool = False
    asks_grad_mode: bool = False
    known: list[CapturedGraph] = field(default_factory=list)
    made: int = 1
    guards: Guards = field(default_factory=Guards)  # guards on what the forward read besides its inputs
    left: LeftTensors | None = None  # what the graph returns behind its outputs
    writes: tuple[list[str], list[int]] = ([], [])  # names of the state and numbers of the inputs that a guarded graph writes

    def run(self, leaves: list, seen: bool = True) -> Any:
        """`seen`: tensors that the forward leaves are put into place."""
        sync_state(self.engine, self.slots)
        if self.by_backend:
            state = {name: tensor for _, _, name, tensor in self.slots}
            out = self.gm(*[state[n] for n in self.attributes], *[x for x in leaves if isinstance(x, Tensor)])
        else:
            flat = [x if isinstance(x, Tensor) else None for x in leaves]
            out = _C.run_recorded(self.engine, flat) if _C.is_capturing() else self.engine.run(flat)
        if self.left is not None and seen:
            self.left.put(out[len(self.plain) :])
        return out[0] if self.simple else self.unflatten(out)

    def unflatten(self, out: Any) -> Any:
        return unflatten([p if p is not None else o for o, p in zip(out, self.plain)], self.out_spec)


@dataclass
class Pass:
    """One transform: `run(module, captured)` changes the graph of `captured` in place and returns its report (a dict)."""

    name: str
    run: Callable[[nn.Module, CapturedGraph], dict]
    before: tuple[str, ...] = ()  # passes that this one must come before
    replace: dict = field(default_factory=dict)  # functions whose calls go to others while the module is captured
    methods: tuple = ()  # (name, function of the module): methods that the module gets
    unit_weights: bool = False  # the module's weights have unit scale, its forward has no factors


def _name_values(captured: CapturedGraph, found: list) -> None:
    """Gives values the names of the user's variables, and keeps what called each operator."""
    names: list[tuple[str, str]] = []
    for results, target, call in found:
        given = call.names if call.names and len(call.names) == len(results) else None
        fallback = hint(call, target)
        call.operator = target
        names += [(old, given[i] if given else fallback) for i, old in enumerate(results)]
    renamed = iter(_C.rename_values(captured.engine, names))
    captured.calls = {next(renamed): call for results, _, call in found for _ in results}


class TransformedForward:
    """The ``forward`` of a transformed module.

    The first call with new shapes, dtypes, devices, modes or constants captures the module's own forward and applies the
    passes in order; the graph is kept for the next call like it. So does a call where something else is new that the forward
    reads: an attribute, a hook, a part's forward (see _capture/guards.py). `own`: the forward that was set on this module itself, as a
    function of it (`bound`) or as it is; its class's otherwise. `copied_from`: the module that this one is a copy of.
    """

    # Without a __dict__: functools.wraps() would give that to what a library wraps around this.
    __slots__ = (
        "module", "passes", "own", "copied_from", "last", "compiled", "handle", "_cache", "_lock", "_tree", "_asks_grad_mode",
        "_told_variants", "_told_signatures", "__weakref__",
    )  # fmt: skip

    def __init__(self, module: nn.Module, passes: list[Pass], own: tuple | None = None, copied_from: Any = None):
        # The module may be in the making (copied, unpickled): what is made of it waits for the first call.
        self.module, self.passes, self.own, self.copied_from = module, passes, own, copied_from
        self._cache = GraphStore(MAX_GRAPHS, MAX_VARIANTS)  # CapturedGraph objects, by signature
        self._lock = threading.RLock()  # lock of what is known of graphs; running one without guards needs none
        self._tree: Tree | None = None
        self._asks_grad_mode = False
        self._told_variants = self._told_signatures = False
        self.last: CapturedGraph | None = None
        self.compiled: CapturedGraph | None = None  # the last graph that torch.compile took
        self.handle = new_handle(self)

    @property
    def __code__(self) -> Any:
        """Code of the module's own forward: torch.export reads the arguments' names from it."""
        return self.original.__code__

    @property
    def __func__(self) -> Callable[..., Any]:
        """The function that this is a method of: libraries wrap it and bind the result to the module, as with methods."""
        return run_kept

    @property
    def __globals__(self) -> dict:
        _tracers.refuse_script(self.module)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.original)

    @property
    def original(self) -> Callable[..., Any]:
        if self.own is None:
            return type(self.module).forward.__get__(self.module)
        function, bound = self.own
        return function.__get__(self.module) if bound else function

    def _capture(self, args: tuple, kwargs: dict, control_values: list[Tensor] | None = None) -> CapturedGraph:
        # Inside of another capture (of a model that holds this module, of a pipeline to be cut) this one is unseen. That
        # one's graph is for one path alone.
        guard_values = not _C.is_capturing()
        with _C.PausedCapture(), capturing(self.module):
            return self._capture_unseen(args, kwargs, guard_values, control_values)

    def _capture_unseen(
        self, args: tuple, kwargs: dict, guard_values: bool, control_values: list[Tensor] | None
    ) -> CapturedGraph:
        found: list = []
        replace = Replacements({k: v for p in self.passes for k, v in p.replace.items()})
        engine, _, out_spec, plain, notes, asks_grad_mode, make_guards, left, *_ = capture_engine(
            self.module, args, kwargs, forward=self.original, calls=found, replace=replace, guard_values=guard_values,
            control_values=control_values, unit_weights=any(p.unit_weights for p in self.passes),
        )  # fmt: skip
        model = self.copied_from and self.copied_from()  # while it is there
        tensors = [] if model is None else [*model.named_parameters(), *model.named_buffers()]
        originals = {id(tensor): name for name, tensor in tensors}
        for _, kind, tensor, _ in engine.state():
            if kind == CONSTANT and (name := originals.get(id(tensor))):
                raise Error(
                    f"the forward computes with '{name}' of the model that was given, and a transform is a copy: a function"
                    " that was set on a module (module.forward = ...) holds that model",
                    kind=ErrorKind.Capture,
                    remedy="set it as a method: module.forward = types.MethodType(function, module)",
                )
            if kind == CONSTANT and (name := getattr(tensor, _COMPUTED, None)):
                raise Error(
                    f"the forward reads '{name}', a tensor that was computed before with gradients on: what it was computed"
                    " from would get no gradient",
                    kind=ErrorKind.Capture,
                    remedy="compute it in the forward, or keep its detach()",
                )
        captured = CapturedGraph(engine, out_spec, plain, notes=notes, simple=out_spec.is_leaf() and plain == [None])
        captured.guards, captured.left, captured.replaced = make_guards(), left, replace.called
        _name_values(captured, found)
        for p in self.passes:
            captured.reports.append(p.run(self.module, captured))
        captured.by_backend = captured.gm is not None
        captured.asks_grad_mode = asks_grad_mode
        captured.guarded = any(n.target.startswith("plumb::guard_") for n in engine.graph.nodes)
        captured.writes = engine.written() if captured.guarded else ([], [])
        captured.takes_values = any(n.target == "plumb::control_value" for n in engine.graph.nodes)
        for name, kind, tensor, _ in engine.state():
            if kind != CONSTANT:
                captured.slots.append((*slot_of(self.module, name), name, tensor))
        captured.guards.add_state(captured.slots)
        return captured

    def _key(self, leaves: list, spec: Any) -> Any:
        if self._tree is None or not self._tree.is_current():
            self._cache.clear()
            self._tree = Tree(self.module)
        autocast = enabled_autocast()
        modes = self._tree.modes()
        if self._asks_grad_mode:
            modes = (modes, torch.is_grad_enabled())
        key = (spec, signature(leaves), modes, autocast)
        try:
            hash(key)
        except TypeError:
            plain = repr([None if isinstance(x, Tensor) else hashed(x) for x in leaves])
            key = (str(spec), plain, signature([x for x in leaves if isinstance(x, Tensor)]), modes, autocast)
        return key

    def prepare(self, args: tuple, kwargs: dict) -> tuple[CapturedGraph, Any]:
        """Returns the graph for inputs like these, captured now if there is none yet; and the inputs' leaves."""
        leaves, spec = self._leaves(args, kwargs)
        with self._lock:
            captured = self._cache.find(self._key(leaves, spec))
        if captured is None:
            with capture_lock, self._lock:
                key = self._key(leaves, spec)
                captured = self._cache.find(key)
                if captured is None:  # no other thread has made it meanwhile
                    captured = self._capture(args, kwargs)
                    if captured.asks_grad_mode and not self._asks_grad_mode:
                        self._asks_grad_mode = True  # from now on every mode has its graphs
                        self._cache.clear()
                        key = self._key(leaves, spec)
                    self._keep(key, captured)
        self.last = captured
        if _C.is_capturing():
            include(captured.guards)
        return captured, leaves

    def _keep(self, key: Any, captured: CapturedGraph) -> None:
        full = len(self._cache) == MAX_GRAPHS and key not in self._cache
        gone = self._cache.add(key, captured)
        if full and not self._told_signatures:
            logger.warning(
                "inputs of more than %d kinds have come (sizes, dtypes, modes): each new one takes the place of the graph that was"
                " unused for longest, and takes a capture when it comes back; with fewer lengths (pad_to_multiple_of=32) it does not",
                MAX_GRAPHS,
            )
            self._told_signatures = True
        if gone is not None and not self._told_variants:
            what = gone.guards.broken
            logger.warning("the forward reads '%s', which keeps changing: each of its values takes a capture", what)
            self._told_variants = True

    def known_for(self, args: tuple, kwargs: dict) -> CapturedGraph | None:
        """Returns the graph for inputs like these, if there is one."""
        with self._lock:
            return self._cache.find(self._key(*self._leaves(args, kwargs)))

    @staticmethod
    def _leaves(args: tuple, kwargs: dict) -> tuple[Any, Any]:
        if not kwargs and all([type(a) is Tensor for a in args]):
            return args, len(args)
        return flatten((args, kwargs))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return _tracers.call(self.handle, self.module, args, kwargs)
        if _C.is_capturing():
            leaves, spec = flatten((args, kwargs))
            args, kwargs = unflatten([as_given(x) for x in leaves], spec)
            captured, _ = self.prepare(args, kwargs)
        else:
            captured, leaves = self.prepare(args, kwargs)
        if not captured.guarded:
            return captured.run(leaves)
        with self._lock:  # a run that is given up puts random state and buffers back
            found = self._run_guarded(captured, leaves, args, kwargs, may_capture=False)
        if found is None:
            with capture_lock, self._lock:
                found = self._run_guarded(captured, leaves, args, kwargs, may_capture=True)
        return found[0]

    def _run_guarded(
        self, first: CapturedGraph, leaves: list, args: tuple, kwargs: dict, may_capture: bool
    ) -> tuple[Any] | None:
        """Runs the graph whose guards these values pass. If there is none, makes one if it may, and else returns None."""
        if _C.is_capturing():  # a failed attempt would leave its checks in the graph that is being made
            captured = self._capture(args, kwargs)
            include(captured.guards)
            return (captured.run(leaves),)
        known = first.known = first.known or [first]
        control_values: list[Tensor] = []  # as far as any graph has come

        def attempt(captured: CapturedGraph) -> tuple[Any, Error | None]:
            nonlocal control_values
            log, before = _C.ControlValueLog(), BeforeRun(self.module, captured, leaves)
            try:
                with log:
                    if (unseen := self._unmeasured() or before.trial()) is not None:
                        with unseen, torch.no_grad():
                            captured.run(leaves, seen=False)
                        before.put_back()
                    out = captured.run(leaves)
            except Error as error:
                if error.kind is not ErrorKind.GuardFailed:
                    raise
                if len(log.tensors) > len(control_values):
                    control_values = log.tensors
                before.put_back()
                return None, error
            self.last = captured
            return out, None

        known[:] = [captured for captured in known if captured is first or captured.guards.hold()]
        for place, captured in enumerate(known):
            out, error = attempt(captured)
            if error is None:
                known.insert(0, known.pop(place))
                return (out,)
        if not may_capture:
            return None
        if first.made >= MAX_CAPTURES:
            raise Error(
                f"{first.made} graphs have been made for one input signature, because the forward keeps branching on new "
                f"tensor values; the last time: {error.message}",
                kind=ErrorKind.DataDependent,
                where=error.where,
                remedy=error.remedy,
            )
        # The module's own arithmetic may decide otherwise than that of the transformed graph, whose path is to be taken.
        for n in range(MAX_TRIES):
            fresh = self._capture(args, kwargs, control_values if n or first.takes_values else None)
            first.made += 1
            out, error = attempt(fresh)
            if error is None:
                known[:] = [fresh, *known[: MAX_PATHS - 1]]
                return (out,)
        raise error

    def _unmeasured(self) -> ContextManager | None:
        """Turns off measurements, which a run that is given up must not leave, until its end; None if there are none."""
        return None

    # A copy belongs to the copied module and captures afresh; the passes know how to copy what they hold.
    def passes_to_copy(self) -> list[Pass]:
        for p in self.passes:
            if hasattr(p.run, "before_copy"):
                p.run.before_copy(self.module)
        return self.passes

    def __deepcopy__(self, memo: dict) -> TransformedForward:
        module, passes, own = copy.deepcopy((self.module, self.passes_to_copy(), self.own), memo)
        return TransformedForward(module, passes, own, self.copied_from)

    def __getstate__(self) -> dict:
        return {"module": self.module, "passes": self.passes_to_copy(), "own": self.own}

    def __setstate__(self, state: dict) -> None:
        TransformedForward.__init__(self, **state)


_COMPUTED = "_plumb_computed"  # on a copy of what autograd had made: the attribute that holds it


def _leaves(kept: Any) -> list[Any]:
    """Returns what is in nested lists, tuples and dicts, which may hold each other."""
    leaves, left, seen = [], [kept], set()
    while left:
        value = left.pop()
        if not isinstance(value, (list, tuple, dict)):
            leaves.append(value)
        elif id(value) not in seen:
            seen.add(id(value))
            left += (part for part in (value.values() if isinstance(value, dict) else value))  # a subclass may have no len()
    return leaves


def copy_module(module: nn.Module) -> nn.Module:
    """Returns a deep copy, of modules too that keep what torch does not copy: results of their last forward (features
    of a hook, pruned weights) are kept as plain tensors, scripted functions and hooks of parameters as they are."""
    memo: dict[int, Any] = {}
    for path, sub in module.named_modules():
        for key, kept in sub.__dict__.items():
            if not isinstance(kept, (Tensor, list, tuple, dict, torch.jit.ScriptFunction)):
                continue
            for value in _leaves(kept):
                if isinstance(value, torch.jit.ScriptFunction):
                    memo[id(value)] = value
                elif isinstance(value, Tensor) and not value.is_leaf:
                    memo[id(value)] = plain = value.detach().clone()
                    setattr(plain, _COMPUTED, f"{path}.{key}" if path else key)
    try:
        # torch copies parameters of scripted modules by an operator; inference mode would make tensors that do not train
        with torch.inference_mode(False), torch.no_grad():
            copied = copy.deepcopy(module, memo)
        own_hooks(copied, memo)
    except Exception as error:
        raise Error(
            f"the {type(module).__name__} cannot be copied, and a transform is a copy: {error}",
            kind=ErrorKind.Unsupported,
            remedy="copy.deepcopy(model) says the same: keep what it names out of the model's attributes, or give it a __deepcopy__",
        ) from error
    for p, q in zip(module.parameters(), copied.parameters()):
        if q.requires_grad != p.requires_grad:
            q.requires_grad_(p.requires_grad)
        for hook in (p._backward_hooks or {}).values():
            q.register_hook(hook)
        for hook in (p._post_accumulate_grad_hooks or {}).values():
            q.register_post_accumulate_grad_hook(hook)
    return copied


def _extra_repr(module: nn.Module) -> str:
    """Returns the ``extra_repr`` of a transformed module: the module's own, then its transforms."""
    forward = replaceable_forward(module)
    own = type(module).extra_repr(module)
    if forward is None:
        return own
    graphs = sum(map(len, forward._cache.values()))
    what = f"{graphs} graph{'' if graphs == 1 else 's'}" if graphs else "no graph yet"
    mine = f"plumb: {', '.join(p.name for p in forward.passes)} ({what})"
    return f"{own}\n{mine}" if own else mine


def own_forward(module: nn.Module) -> tuple | None:
    """Returns the forward that was set on this very module, as TransformedForward keeps it."""
    if (known := replaceable_forward(module)) is not None:
        return known.own
    forward = module.__dict__.get("forward")
    bound = isinstance(forward, types.MethodType) and forward.__self__ is module
    return None if forward is None else (forward.__func__ if bound else forward, bound)


_METHODS = (("extra_repr", _extra_repr), ("_get_name", _tracers.get_name))


def attach_passes(module: nn.Module, passes: list[Pass], copied_from: Any = None, made: TransformedForward | None = None) -> None:
    """Lets `module` run its own forward with `passes` applied: none for a copy of a model that was recorded. `made`: what does so
    already."""
    keep_forward(module, made or TransformedForward(module, passes, own_forward(module), copied_from))
    for name, method in [*_METHODS, *(method for p in passes for method in p.methods)]:
        module.__dict__[name] = functools.partial(method, module)
    keep_transforms(module, attach_passes)


def apply_pass(module: Module, new: Pass) -> Module:
    """Returns a deep copy of `module` whose forward applies `new` after the transforms it has already (or before those
    that must follow it)."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"a transform takes a torch.nn.Module, got {type(module).__name__}")
    _tracers.refuse_compiled(module)
    refuse_modules(module, with_root=False)
    refuse_spread_modules(module, with_root=True)
    compiled = module._compiled_call_impl is not None
    known = replaceable_forward(module)
    first = known.copied_from if known else weakref.ref(module)
    module = copy_module(module)
    known = replaceable_forward(module)
    passes = list(known.passes) if known else []
    place = next((i for i, p in enumerate(passes) if p.name in new.before or new.name != p.name == "backend"), len(passes))
    for later in passes[place:]:
        logger.info("moving %s backend to precede %s backend", display_name(new.name), display_name(later.name))
    passes.insert(place, new)
    attach_passes(module, passes, first)
    if compiled:
        module.compile(**module.__dict__.get("compile_options", {}))
    return module


def display_name(name: str) -> str:
    return {"unit_scale": "unit scaling", "simulate_format": "quantisation", "use_fp8": "FP8", "track_scales": "tracking"}.get(name, name)
