"""Marks for cuts of a model: in its forward, marks put around its modules, and models that mark themselves."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from enum import Enum
from types import MethodType
from typing import Any

import torch
from torch import fx, nn

from .. import _C  # noqa: F401  (registers the operator)
from .._errors import Error, ErrorKind
from ._utils import InvalidType, InvalidValue

aten_pipe_split_alias = torch.ops.plumb.pipe_split.default
fx.has_side_effect(aten_pipe_split_alias)  # torch.export and torch.fx keep it although nothing uses it


class NoSuchModule(Error, AttributeError):
    """A split point names a module that the model does not have."""

    default_kind = ErrorKind.UnknownName


class SplitPoint(Enum):
    """The side of a named module to cut at: before or after each call of it."""

    BEGINNING = 1
    END = 2


class PipeSplitWrapper:
    """The former home of `SplitPoint`."""

    SplitPoint = SplitPoint


def pipe_split() -> None:
    """Marks the boundary of two stages in a model's forward. Does nothing when the model runs by itself."""
    torch.ops.plumb.pipe_split()


def is_mark(target: Any) -> bool:
    """True for every form in which torch.fx may hold a mark: the operator or the function, plumb's or torch's."""
    name = getattr(target, "_qualified_op_name", None) or getattr(target, "_name", None) or getattr(target, "__name__", "")
    return target is pipe_split or name in ("plumb::pipe_split", "pippy::_pipe_split", "pipe_split")


def _point(value: Any) -> SplitPoint:
    try:
        return SplitPoint[value.name]  # torch's own enum too
    except (AttributeError, KeyError):
        raise InvalidValue(f"Unknown split point type {value!r}: give SplitPoint.BEGINNING or SplitPoint.END") from None


def _module(root: nn.Module, name: str) -> nn.Module:
    module: Any = root
    parts = name.split(".") if name else []
    for i, part in enumerate(parts):
        module = getattr(module, part, None)
        if not isinstance(module, nn.Module):
            raise NoSuchModule(
                f"Specified target {name} referenced nonexistent module {'.'.join(parts[: i + 1])}",
                remedy="a name of model.named_modules()",
            )
    return module


def check_split_spec(mod: nn.Module | None, spec: Mapping[str, SplitPoint]) -> list[tuple[nn.Module, SplitPoint]]:
    """The modules and points that `spec` names. Raises `plumb.Error` (a TypeError too) for a spec that is no dict, and (an
    AttributeError too) for a name that is none. None for a model of which no modules are there: only the first."""
    if not isinstance(spec, Mapping):
        raise InvalidType(
            f"split_spec is a {type(spec).__name__}, not a dict from names of modules to split points",
            remedy='split_spec={"layers.4": SplitPoint.BEGINNING}',
        )
    return [(_module(mod, name), _point(value)) for name, value in spec.items()] if mod is not None else []


class _Points(set):
    """The marks of a module, the forward that it had, and whether the module was called since."""

    called = False
    forward: Any

    def run(self, *args: Any, **kwargs: Any) -> Any:
        self.called = True
        if SplitPoint.BEGINNING in self:
            pipe_split()
        output = self.forward(*args, **kwargs)
        if SplitPoint.END in self:
            pipe_split()
        return output


def _forward_with_marks(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return self._plumb_split_points.run(*args, **kwargs)


def unmarked_forward(module: nn.Module) -> Any:
    """Returns the forward that a module had before it was marked; the module itself if it is not."""
    points = module.__dict__.get("_plumb_split_points")
    return module if points is None else points.forward


class Marks:
    """Marks that `annotate_split_points` put on a model. ``remove()``, or the end of a ``with`` block, takes them off.
    """

    def __init__(self, added: list[tuple[nn.Module, SplitPoint]], names: dict[nn.Module, str]):
        self._added, self._names = added, names

    def check_called(self) -> None:
        """Raises `plumb.Error` if a marked module has not been called: the model would not be cut there."""
        for module, _ in self._added:
            if not module.__dict__["_plumb_split_points"].called:
                raise NoSuchModule(
                    f"split_spec names '{self._names[module]}', which the forward does not call: it cannot be cut there",
                    remedy="a module whose forward runs",
                )

    def remove(self) -> None:
        while self._added:
            module, point = self._added.pop()
            points = module.__dict__.get("_plumb_split_points", set())
            points.discard(point)
            forward = module.__dict__.get("forward")
            if points or getattr(forward, "__func__", None) is not _forward_with_marks:
                continue  # marked by others still, or wrapped by somebody since, who calls this forward
            del module.__dict__["_plumb_split_points"], module.__dict__["forward"]
            if getattr(points.forward, "__func__", None) is not type(module).forward:
                module.__dict__["forward"] = points.forward  # it had a forward of its own before

    def __enter__(self) -> Marks:
        return self

    def __exit__(self, *_: Any) -> None:
        self.remove()


def annotate_split_points(mod: nn.Module, spec: Mapping[str, SplitPoint]) -> Marks:
    """Marks cuts before or after the modules that `spec` names, at every call of them.

    A mark that is there already is not put twice. The model stays marked until ``remove()`` of the result, which may
    also be used in a ``with`` statement; `pipeline(split_spec=...)` does all this by itself. Raises `plumb.Error` (an
    AttributeError too) for a name that is no module, and changes nothing then.
    """
    wanted = check_split_spec(mod, spec)
    added = []
    for module, point in wanted:
        points = module.__dict__.get("_plumb_split_points")
        if points is None:
            points = module.__dict__["_plumb_split_points"] = _Points()
            points.forward = module.forward
            module.__dict__["forward"] = MethodType(_forward_with_marks, module)
        if point not in points:
            points.add(point)
            added.append((module, point))
    return Marks(added, {module: name for name, (module, _) in zip(spec, wanted)})


class PipeSequential(nn.Sequential):
    """A sequence with a mark between any two neighbors: one stage a module."""

    @staticmethod
    def from_sequential(sequential_instance: nn.Sequential) -> PipeSequential:
        """Returns the same modules (shallow copies, shared parameters) under the same names."""
        marked = PipeSequential()
        for name, module in sequential_instance.named_children():
            marked.add_module(name, copy.copy(module))
        return marked

    def forward(self, input: Any) -> Any:
        for i, module in enumerate(self):
            if i:
                pipe_split()
            input = module(input)
        return input


class LossWrapper(nn.Module):
    """A model together with its loss: subclasses say in ``forward`` how they are connected.

    ``self.module`` and ``self.loss_fn`` hold the two; what ``forward`` returns holds the loss.
    """

    def __init__(self, module: nn.Module, loss_fn: Any):
        super().__init__()
        self.module = module
        self.loss_fn = loss_fn

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(
            f"{type(self).__name__} has no forward: say there how inputs, self.module, self.loss_fn and the loss hang together"
        )


class TrivialLossWrapper(LossWrapper):
    """``loss_fn(module(x), targets)``; its one output is the loss."""

    loss_spec = True

    def forward(self, x: Any, targets: Any) -> Any:
        return self.loss_fn(self.module(x), targets)
