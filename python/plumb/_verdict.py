"""Which number format a model trains in: :func:`verdict`."""

from __future__ import annotations

import json
import operator
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from . import _C
from ._capture.attribute_writes import refuse_modules
from ._capture.forward import capture
from ._errors import Error, ErrorKind
from ._graph_module import GraphModule
from ._state import state_of, sync_state
from ._trees import children, in_utf8
from .transforms._apply import copy_module


class Verdict:
    """The result of :func:`verdict`. ``print(it)`` shows the conclusion, every recipe, and what stands in its way."""

    def __init__(self, engine: Any):
        self._engine = engine
        found = json.loads(engine.to_json())
        self.conclusion: str = found["conclusion"]
        """A sentence: the fewest bits that will do, and how."""
        self.recipe: str = found["file"]
        """The recommended recipe as a file's text, for ``simulate_format(recipe=...)``, ``use_fp8(recipe=...)`` and
        ``plumb train --formats``."""
        self.recipes: dict[str, dict[str, Any]] = {one["recipe"]: one for one in found["recipes"]}
        """By name: ``backward``, ``forward`` (errors of the gradient; None if it is not finite), ``by_weight``
        (the backward's as a share of each weight's own gradient), ``drift`` (the part of the backward's that moves all
        rows of a weight alike, where no step moves them back), ``score``, ``verdict`` (``"ok"``,
        ``"doubtful"``, ``"no"``), ``sentence``, ``products`` (``product``, ``direction``, ``gain``, the largest gain first),
        ``left`` (what may multiply and stays in full precision, with the reasons), ``last`` and ``remedied`` (the errors of
        the last batch without and with the remedy) and ``file`` (the remedy as a recipe)."""
        self.gradients: int = found["gradients"]
        """The number of gradients that were computed, in full precision and rounded."""

    def page(self, path: str, model: str = "") -> None:
        """Writes the verdict as an HTML page, which needs no other file."""
        _C.write_file(os.fspath(path), self._engine.page(model))

    def __str__(self) -> str:
        return self._engine.to_text()

    def __repr__(self) -> str:
        classes = (f"{name} {one.get('verdict', 'not measured')}" for name, one in self.recipes.items())
        return f"<Verdict: {', '.join(classes)}>"

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"


def verdict(
    net: nn.Module,
    data: Iterable,
    loss: Callable[..., Tensor] | None = None,
    *,
    recipes: Sequence[str | os.PathLike] | str | None = None,
    steps: int = 4,
    warmup: int = 0,
    optimizer: Callable[..., Any] | None = None,
    explain: bool = True,
) -> Verdict:
    """Says in which number formats `net` will train, and what stands in the way, from the gradients of a few batches.

    ::

        print(plumb.verdict(net, loader, torch.nn.functional.cross_entropy, recipes=["fp8", "mxfp4"]))

    Gradients are rounded by each recipe forward only and backward only, and compared with those of the module as it is,
    which is trained meanwhile: a copy of it, so that nothing of `net` changes, and no random number is drawn.

    data: batches, ``inputs`` or ``(inputs, targets)``, each a tensor or a tuple of tensors, all of one shape. Inputs may be a
        dict: the forward gets it by keyword if it takes these names, else as its one input.
    loss: takes the module's output and the targets. None: the module returns its loss, and a batch is its inputs.
    recipes: names (``"fp16"``, ``"bf16"``, ``"fp8"``, ``"unit-fp8"``, ``"tensorwise"``, ``"rowwise"``, ``"blocks128"``, ``"mxfp8"``,
        ``"nvfp4"``, ``"mxfp4"``, any other format, ``"e4m3fn-SR/none"`` forward and backward) and recipe files (``NAME.toml``).
        None: those named here.
    steps: as many are measured, half of them behind `warmup` steps of the training.
    optimizer: makes the optimizer of the copy's parameters, ``lambda p: torch.optim.AdamW(p, lr=3e-4)``, or an object of
        your own with ``step()`` and ``zero_grad()``, which may hold a schedule of the rate as well; None: AdamW as it comes.
    explain: look for what mends a recipe that is not ok: a loss scale, unit scaling, products in a wider format.

    A forecast of the loss is not made: the classes *ok*, *doubtful* and *no* are what a few gradients can tell. Raises
    :class:`plumb.Error` for a module that :func:`plumb.capture` refuses or whose products are rounded already, for data that
    ends too early, and if no recipe can be measured.
    """
    if not isinstance(net, nn.Module):
        raise Error(f"the model is a {type(net).__name__}", remedy="a torch.nn.Module; plumb.load_pt2(file) makes one")
    if isinstance(data, (Tensor, Mapping)) or not any(hasattr(data, name) for name in ("__iter__", "__getitem__")):
        raise Error(f"the data is a {type(data).__name__}", remedy="batches, [(inputs, targets), ...]: a DataLoader")
    for name, given in (("loss", loss), ("optimizer", optimizer)):
        if given is not None and not callable(given):
            raise Error(f"{name} is a {type(given).__name__}", remedy=f"a function; {_FUNCTIONS[name]}")
    steps, warmup = (operator.index(n) if hasattr(n, "__index__") else n for n in (steps, warmup))
    if not all(isinstance(number, int) and abs(number) < 2**63 for number in (steps, warmup)):
        raise Error(f"steps={steps!r}, warmup={warmup!r}", remedy="two whole numbers")
    if not isinstance(explain, bool):
        raise Error(f"explain={explain!r}", remedy="True or False")
    refuse_modules(net, with_root=True)
    if empty := [name for name, _, tensor, _ in state_of(net) if tensor.is_meta]:
        raise Error(f"'{empty[0]}' is on the meta device, without values", remedy="net.to_empty(device=...), and weights for it")
    names = _names(_C.default_verdict_recipes() if recipes is None else recipes)
    measured = _C.verdict_steps(steps, warmup)
    devices = sorted({p.device.index for p in net.parameters() if p.device.type == "cuda"})
    with torch.random.fork_rng(devices=devices), torch.inference_mode(False), torch.enable_grad():
        return _judge(copy_module(net), iter(data), loss, names, measured, optimizer, explain)


_FUNCTIONS = {
    "loss": "torch.nn.functional.cross_entropy",
    "optimizer": "lambda parameters: torch.optim.AdamW(parameters, lr=3e-4)",
}


def _names(recipes: Any) -> list[str]:
    if not isinstance(recipes, (str, os.PathLike, Iterable)):
        raise Error(f"recipes is a {type(recipes).__name__}", remedy='names, ["fp8", "mxfp4"], or None for the usual ones')
    given = [recipes] if isinstance(recipes, (str, os.PathLike)) else list(recipes)
    for recipe in given:
        if not isinstance(recipe, (str, os.PathLike)):
            raise Error(f"the recipe {recipe!r} is a {type(recipe).__name__}", remedy="a name or a recipe file")
        if not in_utf8(os.fspath(recipe)):
            raise Error(f"the recipe's name {recipe!r} is no text in UTF-8", remedy="give the file another name")
    if not given:
        raise Error("no recipe is asked for", remedy='recipes=["fp8", "mxfp4"], or None for the usual ones')
    return [os.fspath(recipe) for recipe in given]


def _judge(
    net: nn.Module,
    batches: Any,
    loss: Callable[..., Tensor] | None,
    names: list[str],
    measured: list[int],
    make_optimizer: Callable[..., Any] | None,
    explain: bool,
) -> Verdict:
    graph = engine = optimizer = None
    step, first = 0, []
    while True:
        step, batch = step + 1, next(batches, None)
        if batch is None:
            raise Error(
                f"the data ended after {step - 1} batches, and {measured[-1]} are needed",
                kind=ErrorKind.InvalidArgument,
                remedy="more batches, or fewer steps",
            )
        if loss is not None and not (isinstance(batch, (tuple, list)) and len(batch) == 2):
            what = f"{len(batch)} parts" if isinstance(batch, (tuple, list)) else f"a {type(batch).__name__}"
            raise Error(f"batch {step} is {what}", remedy="(inputs, targets): a tensor or a tuple of tensors each")
        inputs, targets = batch if loss is not None else (batch, None)
        args, kwargs = _arguments(net, inputs)
        shapes = [tuple(x.shape) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if shapes != (first := first or shapes):
            raise Error(
                f"the inputs of batch {step} are of other shapes than those of the first: {shapes}, {first}",
                remedy="batches of one shape; DataLoader(..., drop_last=True) leaves out a smaller last one",
            )
        if graph is None:
            graph = net if isinstance(net, GraphModule) and net.runs_its_graph else capture(net, *args, **kwargs)
            sync_state(graph._engine, graph._slots)
            engine = _C.Verdict(graph._engine, names, explain)
            parameters = [p for p in graph.parameters() if p.requires_grad]
            optimizer = make_optimizer(parameters) if make_optimizer else torch.optim.AdamW(parameters)
            if not all(callable(getattr(optimizer, name, None)) for name in ("step", "zero_grad")):
                raise Error(f"optimizer returns a {type(optimizer).__name__}", remedy=_FUNCTIONS["optimizer"])
            own = {id(p) for p in parameters}
            if not all(id(p) in own for group in getattr(optimizer, "param_groups", ()) for p in group["params"]):
                raise Error("the optimizer has parameters that it was not given", remedy=_FUNCTIONS["optimizer"])
            if isinstance(optimizer, torch.optim.LBFGS):
                raise Error("a step of LBFGS takes several gradients", remedy=_FUNCTIONS["optimizer"])
        of_batch = _Losses(graph, args, kwargs, targets, loss)
        if step in measured:
            engine.measure(of_batch)
        if step == measured[-1]:
            return Verdict(engine.conclude(of_batch))
        optimizer.zero_grad()
        of_batch(graph._engine).backward()
        try:
            optimizer.step()
        except RuntimeError as error:
            if make_optimizer is not None or not any(p.grad is not None and p.grad.is_sparse for p in parameters):
                raise
            raise Error(
                f"AdamW, which the verdict trains with, takes no sparse gradients: {error}",
                remedy="optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1)",
            ) from None


def _arguments(net: nn.Module, inputs: Any) -> tuple[tuple, dict[str, Any]]:
    """Returns the arguments of a forward for a batch's inputs."""
    if not isinstance(inputs, Mapping):
        return tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,), {}
    if isinstance(net, GraphModule):
        by_name = set(inputs) == set(children(net._in_spec)[1].context or ())
    else:
        try:
            by_name = bool(signature(net.forward).bind(**inputs))
        except (TypeError, ValueError):
            by_name = False
    return ((), dict(inputs)) if by_name else ((inputs,), {})


class _Losses:
    """The loss of a batch by an engine that takes what the graph takes."""

    def __init__(self, graph: GraphModule, args: tuple, kwargs: dict, targets: Any, loss: Callable[..., Tensor] | None):
        self.graph, self.args, self.kwargs, self.targets, self.loss = graph, args, kwargs, targets, loss

    def __call__(self, engine: Any) -> Tensor:
        graph = self.graph if engine is self.graph._engine else self.graph.on(engine)
        out = graph(*self.args, **self.kwargs)
        if self.loss is not None:
            if engine is not self.graph._engine:
                # The loss draws the same numbers whatever the graph drew; the engine puts the generators back.
                torch.manual_seed(0)
            value = self.loss(out, self.targets)
            if not isinstance(value, Tensor):
                raise Error(f"the loss is a {type(value).__name__}", remedy="return a tensor of one element")
            return value
        if isinstance(out, dict):
            out = out.get("loss", out)
        if isinstance(out, (tuple, list)) and out:
            numbers = [x for x in out if isinstance(x, Tensor) and x.numel() == 1 and x.requires_grad]
            if len(numbers) > 1:
                raise Error(f"the module returns {len(numbers)} numbers that could be its loss", remedy='{"loss": ...}, or one number')
            out = out[0]
        if not isinstance(out, Tensor):
            raise Error(f"the module returns a {type(out).__name__} and no loss", remedy="verdict(net, data, loss)")
        return out
