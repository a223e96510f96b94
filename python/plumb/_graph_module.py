"""A graph as a ``torch.nn.Module``."""

from __future__ import annotations

import itertools
import types
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from . import _C
from ._capture.custom_functions import refuse_holders
from ._capture.guards import Guards, enabled_autocast
from ._errors import Error, ErrorKind
from ._state import kept_ties, member, own_parameters, put_state, sync_state
from ._trees import (
    check_layouts,
    check_plain_inputs,
    children,
    input_error,
    overriding_class,
    structure_error,
    unflatten,
)


def constant_result(function: Any) -> Any:
    """As ``torch.compiler.assume_constant_result``, without loading Dynamo, which takes a second. If a test of
    test_transform_compile fails, torch changed, look here: it has renamed the mark."""
    function._dynamo_marked_constant = True
    return function


by_handle: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def new_handle(target: Any) -> str:
    """Returns a name by which compiled code finds an object in `by_handle` as long as that lives: functions of constant results
    take literals alone. No number: Dynamo makes one that differs between two modules of one class a symbol, and then knows
    neither of them."""
    handle = f"handle {next(_numbers)}"
    by_handle[handle] = target
    return handle


@constant_result
def _make_fx(handle: str) -> tuple[str, ...]:
    """Makes the module's torch.fx graph, which Dynamo cannot follow; returns the names of the tensors that it takes."""
    return tuple(by_handle[handle].to_fx().attributes)


@constant_result
def _asked(handle: str) -> tuple[tuple[int, bool], ...]:
    """Returns, for each input whose requires_grad the forward has read, its number and the value."""
    nodes = by_handle[handle].graph.nodes
    places = {node.results[0].name: i for i, node in enumerate(n for n in nodes if n.op == "placeholder")}
    return tuple((places[n.args[0][1]], n.args[1]) for n in nodes if n.target == "plumb::guard_requires_grad")


class GraphModule(nn.Module):
    """A captured module: called like the original, sharing its parameters under the same names.

    ``.graph`` is the graph; ``print(m.graph)`` shows it. ``.notes`` lists what the capture noticed (constants kept,
    buffers re-assigned). It is made for the dtypes, shapes and devices of the inputs it was captured with, and for the
    training mode: others are refused (transformed modules of :mod:`plumb.transforms` capture again by themselves). So are inputs of
    another class with a ``__torch_function__``, of another layout if the forward asks for layouts, and autocast that was off when it
    was captured; a graph that was captured under autocast holds the casts. As long as the original lives, a call is refused also
    when something has changed there that its forward had read: an attribute, a hook, a part's forward. A copy, and what is read from
    a file, knows nothing of the original and stays what it is.
    """

    _reports: tuple[dict, ...] = ()  # reports of the transforms that rewrote it
    _input_layouts: tuple[str, Mapping[int, Any]] = ("", types.MappingProxyType({}))  # by the input's place; and the line that asks for one
    _keyword_order: tuple[str, ...] = ()  # the keywords that the forward takes as ``**kwargs`` and so hears the order of
    _input_classes: Mapping[int, type] = types.MappingProxyType({})  # by the input's place, of those with a __torch_function__ of their own

    def __init__(
        self,
        engine: Any,
        in_spec: Any,
        out_spec: Any,
        plain_inputs: list | None,  # what is no tensor, and None elsewhere; None altogether: the graph has every input
        plain_outputs: list,
        notes: list[str],
        program: Any = None,  # what the file that it came from knows besides
        training: bool = True,  # the mode that the graph was made in
        autocast: tuple | None = None,  # the regions that it was captured in, if that is known
        guards: Guards | None = None,  # guards on what the original's forward had read
    ):
        super().__init__()
        self._autocast = autocast
        self.__dict__["_guards"] = guards or Guards()
        self.training = self._made_in_training = training
        self._has_mode: bool | None = None
        self.__dict__["_engine"] = engine
        self._program = program
        self._in_spec, self._out_spec = in_spec, out_spec
        self._plain_inputs, self._plain_outputs = plain_inputs, plain_outputs
        self.notes = notes
        self.__dict__["_fx"] = None
        self._register()

    def _register(self) -> None:
        if "_handle" not in self.__dict__:
            self.__dict__["_handle"] = new_handle(self)
        self.__dict__["_slots"] = put_state(self, self._engine.state())
        nodes = self.graph.nodes
        inputs = [node.results[0] for node in nodes if node.op == "placeholder"]
        self.__dict__["_takes_tensor"] = [value.is_tensor for value in inputs]
        leaves = self._in_spec.num_leaves
        args, kwargs = children(self._in_spec)
        parts = children(args)
        simple_in = kwargs.num_leaves == 0 and len(parts) == leaves and all(p.is_leaf() for p in parts) and (
            self._plain_inputs is None or all(self._takes_tensor)
        )
        simple_out = self._out_spec.is_leaf() and self._plain_outputs == [None]
        simple_out = simple_out and [v.is_tensor for v in nodes[-1].inputs] == [True]  # no number of a file, no None
        self.__dict__["_simple"] = leaves if simple_in and simple_out else -1

    @property
    def graph(self) -> _C.Graph:
        return self._engine.graph

    if TYPE_CHECKING:  # submodules, parameters and buffers have the names of the model's

        def __getattr__(self, name: str) -> Any: ...

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return self._fx_forward(*args, **kwargs)
        self.check_call()
        sync_state(self._engine, self._slots)
        inside = _C.is_capturing()
        if self._simple == len(args) and not kwargs and not inside:
            self._check_inputs(args)
            return self._engine.run1(*args)
        leaves = self._leaves(args, kwargs)
        self._check_inputs(leaves)
        if self._plain_inputs is not None:
            leaves = [x if isinstance(x, Tensor) else None for x in leaves]
        out = _C.run_recorded(self._engine, leaves) if inside else self._engine.run(leaves)
        return unflatten([p if p is not None else o for o, p in zip(out, self._plain_outputs)], self._out_spec)

    def _leaves(self, args: tuple, kwargs: dict) -> list:
        known = children(self._in_spec)[1]
        if kwargs and known.type is dict and set(kwargs) == set(known.context):
            if self._keeps_order(kwargs):
                kwargs = {name: kwargs[name] for name in known.context}  # others come in any order
        leaves, spec = pytree.tree_flatten((args, kwargs))
        if spec != self._in_spec:
            remedy = "call it as it was captured or exported, or capture again"
            raise structure_error(args, kwargs, self._in_spec, self._names(), remedy)
        if self._plain_inputs is not None:
            check_plain_inputs(leaves, self._plain_inputs, self._takes_tensor, self._made_how, self._make_again)
        return leaves

    def _keeps_order(self, kwargs: dict) -> bool:
        """Returns whether keywords come in the order of the capture where the forward hears it."""
        return tuple(name for name in kwargs if name in self._keyword_order) == self._keyword_order

    def _check_inputs(self, leaves: Any) -> None:
        """Raises `plumb.Error` for a tensor that the forward may treat otherwise than the one before: one of a class that answers
        torch's functions itself, or of another layout if the forward asks for layouts."""
        for place, x in enumerate(leaves):
            if (type(x) is not Tensor or self._input_classes) and overriding_class(x) is not self._input_classes.get(place):
                was, now = (cls.__qualname__ if cls else "plain tensor" for cls in (self._input_classes.get(place), overriding_class(x)))
                why = "with its own __torch_function__ eager may compute something else"
                raise input_error(self._names()[place], was, now, self._made_how, why, self._make_again, ".as_subclass(torch.Tensor)")
        if self._input_layouts[1]:
            check_layouts(leaves, self._input_layouts, self._names, self._made_how, self._make_again)

    def _names(self) -> list[str]:
        return [node.target for node in self.graph.nodes if node.op == "placeholder"]

    _made_how, _make_again = "the graph was captured", "capture again"

    @property
    def runs_its_graph(self) -> bool:
        """False if another forward was set on the module, as transforms that capture it anew do."""
        return "forward" not in self.__dict__

    def require_its_graph(self, task: str) -> None:
        """Raises `plumb.Error` if another forward was set on the module: `task` would take the graph without it."""
        if not self.runs_its_graph:
            raise Error(
                f"{task} takes the graph of the module, which was given another forward, by a transform for example: the graph"
                " is the one before that",
                kind=ErrorKind.InvalidState,
                remedy="plumb.capture(module, *inputs), whose graph has the transforms in it",
            )

    def check_call(self) -> None:
        """Raises `plumb.Error` if what the graph was made for besides its inputs has changed: mode, autocast, reads."""
        self.check_mode()
        if (now := enabled_autocast()) and not self._holds_casts():
            dtypes = ", ".join(f"{dtype} ({device})" for device, dtype in now)
            raise Error(
                f"{self._made_how} without autocast and is called under autocast to {dtypes}",
                kind=ErrorKind.InvalidState,
                remedy=f"{self._make_again} under autocast, or leave it for the call: a graph keeps the dtypes it was made with",
            )
        if not self._guards.hold():
            raise Error(
                f"'{self._guards.broken}', which the forward had read, has changed since {self._made_how}",
                kind=ErrorKind.InvalidState,
                remedy=f"{self._make_again}, or put it back; copy.deepcopy(graph) made before is a graph by itself, which no change"
                " of the original concerns",
            )

    def _holds_casts(self) -> bool:
        """Returns whether the graph was captured under autocast; of one of unknown origin: whether it has any value of
        half precision."""
        if self._autocast is None:
            values = [value.meta for node in self.graph.nodes for value in node.results if value.is_tensor]
            half = any(meta is not None and meta["dtype"] in (torch.bfloat16, torch.float16) for meta in values)
            self._autocast = (("unknown", None),) if half else ()
        return bool(self._autocast)

    def check_mode(self) -> None:
        """A graph is made for one training mode. Raises `plumb.Error` if the module is in the other one and that would
        change the arithmetic of an operator (dropout, batch norm), or if the forward had asked for the mode itself."""
        if self.training == self._made_in_training:
            return
        if self._has_mode is None:
            self._has_mode = bool(self._engine.mode_read_at) or _C.depends_on_mode(self.graph, self._made_in_training)
        if self._has_mode:
            modes, line = ("evaluation", "training"), self._engine.mode_read_at
            raise Error(
                f"{self._made_how} in {modes[self._made_in_training]} mode and cannot change to "
                f"{modes[self.training]} mode",
                kind=ErrorKind.InvalidState,
                where=line and f"the forward reads self.training: {line}",
                remedy=f"set the model to the other mode, model.{'train' if self.training else 'eval'}(), and do it again; "
                "to have both, capture or save both",
            )

    def __repr__(self) -> str:
        mode = "training" if self._made_in_training else "evaluation"
        parameters = sum(1 for _ in self.parameters())
        return f"{type(self).__name__}({_C.summary(self.graph)}; {parameters} parameters, made in {mode} mode)"

    def to_fx(self) -> torch.fx.GraphModule:
        """Returns the graph as a ``torch.fx`` graph on ``torch.ops``, for ``torch.compile`` and ``torch.export``."""
        from ._fx import to_fx

        self.require_its_graph("to_fx")
        if self.__dict__.get("_fx") is None:
            self.__dict__["_fx"] = to_fx(self)  # no submodule: names and state_dict stay as they are
        return self.__dict__["_fx"]

    def _fx_forward(self, *args: Any, **kwargs: Any) -> Any:
        leaves = self._leaves(args, kwargs)
        if any(leaves[place].requires_grad != answer for place, answer in _asked(self._handle)):
            self._engine.run([x if isinstance(x, Tensor) else None for x in leaves])  # which refuses them
        names = _make_fx(self._handle)
        gm = self.__dict__["_fx"]
        state = [member(self, name) for name in names]
        out = gm(*state, *[x for x in leaves if isinstance(x, Tensor)])
        return unflatten([p if p is not None else o for o, p in zip(out, self._plain_outputs)], self._out_spec)

    def _apply(self, fn: Any, recurse: bool = True) -> GraphModule:
        with kept_ties(self._slots):
            super()._apply(fn, recurse)
        return self

    def on(self, engine: Any) -> GraphModule:
        """Another graph that is called like this one and knows of its file what this one does."""
        own_parameters(engine)
        call = (self._in_spec, self._out_spec, self._plain_inputs, self._plain_outputs)
        made = GraphModule(engine, *call, self.notes, self._program, self._made_in_training, self._autocast)
        made._keyword_order = self._keyword_order
        made._input_classes, made._input_layouts = dict(self._input_classes), (self._input_layouts[0], dict(self._input_layouts[1]))
        return made.train(self.training)

    # --- copies: the graph travels as text, the state as tensors ---
    def __getstate__(self) -> dict:
        refuse_holders(self.graph, "copied")
        state = {k: v for k, v in self.__dict__.items() if k not in ("_engine", "_slots", "_fx", "_guards", "_handle")}
        state["_text"] = self._engine.graph.to_string()
        state["_specs"] = self._engine.specs()
        state["_mode"] = self._engine.training, self._engine.mode_read_at
        sync_state(self._engine, self._slots)
        state["_state"] = self._engine.state()
        return state

    def __setstate__(self, state: dict) -> None:
        text, specs, tensors, mode = (state.pop(key) for key in ("_text", "_specs", "_state", "_mode"))
        self.__dict__.update(state)
        # Tables of its own: a shallow copy would empty those of the graph that it is a copy of.
        self.__dict__.update(_fx=None, _guards=Guards(), _modules={}, _parameters={}, _buffers={})
        self.__dict__["_engine"] = _C.GraphModule(text, tensors, *specs)
        self._engine.training, self._engine.mode_read_at = mode
        self.take_state()

    def take_state(self) -> None:
        """Shows the tensors that the engine has by now."""
        own_parameters(self._engine)
        for table in (self._modules, self._parameters, self._buffers):
            table.clear()
        self._register()
