"""Reads of tensors that only Python sees while a forward is captured: branches that are mere checks, sizes, lists of values."""

from __future__ import annotations

import contextlib
import sys
from types import FrameType
from typing import Any, Callable, Iterator

import torch
from torch import Tensor, nn

from .. import _C
from .._trees import layout
from .attribute_reads import note_fact, note_result, note_value
from .cpython import line_of, past_modes, running
from .torch_patches import INSIDE, patched

# torch keeps the getters of Tensor that it is first asked for: they must not be those of a capture.
torch.overrides.get_default_nowrap_functions()

_VALUES = ("item", "numpy", "__bool__", "__int__", "__float__", "__complex__", "__index__")  # that Python takes out of a tensor
# Attributes that tell the past of a tensor, each with its value for one that hangs on nothing that requires a gradient.
_PAST = {"is_leaf": True, "grad_fn": None, "output_nr": 0, "retains_grad": False}
# Attributes and methods whose values differ from call to call. Those of a parameter's memory stay.
_MEMORY = ("_base", "_is_view", "is_conj", "is_neg", "data_ptr", "storage_offset", "untyped_storage", "storage")
_CHANGING = ("grad", "_version", "_backward_hooks", *_MEMORY)


def is_check() -> bool:
    """Returns whether the caller branches on the tensor only to raise an exception in one of the branches. A function that returns
    the truth of the tensor leaves the branch to its own caller."""
    frame: FrameType | None = _reader()
    while frame is not None and (found := running(frame)):
        code, n = found
        if not code.returns_truth(n):
            return code.decides_a_raise(n)
        frame = frame.f_back
    return False


def _reader() -> FrameType:
    """The caller of the function that calls this: not torch's function modes, and not a watch that they call again."""
    frame = past_modes(sys._getframe(2))
    while frame.f_code.co_filename == __file__ and frame.f_back is not None:
        frame = past_modes(frame.f_back)
    return frame


def _watched(read: Callable[..., Any]) -> Callable[..., Any]:
    def watch(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        if _C.size_depends_on_values(self):
            found = running(_reader())
            _C.guard_size(self, found is None or not found[0].asks_for_emptiness(found[1]))
        return read(self, *args, **kwargs)

    return watch


def _requires_grad(guarded: bool, grad_mode: bool, asked: dict[str, str]) -> Callable[[Tensor], bool]:
    """Makes the replacement of ``Tensor.requires_grad``. Inputs of a capture always require grad, and gradients are on: the
    model's own code, which may branch on it, gets the value for the given inputs and the caller's mode. torch's code does not:
    its fused paths for inference have no gradients. `asked` gets the line that asks a result, which hangs on the mode."""

    def ask(self: Tensor) -> bool:
        known = torch._C.TensorBase.requires_grad.__get__(self)
        if not _C.is_capturing() or (reader := _reader()).f_code.co_filename.startswith(INSIDE):
            return known
        if not isinstance(self, nn.Parameter) and _C.is_result(self):
            note_result()
            if known:
                asked.setdefault("is_grad_enabled", line_of(reader))
                known = grad_mode
                if not grad_mode and "enable_grad" in asked:
                    _C.refuse(
                        "under torch.no_grad() the forward enters torch.enable_grad() and asks whether a result requires a gradient",
                        "call it with gradients on, or let it ask torch.is_grad_enabled() where it computes the result",
                    )
        elif not _C.is_computed(self):
            note_fact(self, "requires_grad", known)
        return known and _C.requires_grad_as_given(self, guarded)

    return ask


def _layout(read: Callable[..., Any], lines: list[str]) -> Callable[..., Any]:
    def ask(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        if _C.is_capturing() and not (reader := _reader()).f_code.co_filename.startswith(INSIDE):
            lines.append(line_of(reader))
            if not _C.is_computed(self):
                note_fact(self, "layout", layout(self))
        return read(self, *args, **kwargs)

    return ask


def _unknown(name: str) -> Any:
    """Makes the replacement of an attribute or method whose value for the tensors of its runs no graph knows."""
    read, constant = getattr(Tensor, name), name in _PAST or name in _MEMORY

    def ask(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        known = read(self, *args, **kwargs) if callable(read) else read.__get__(self)
        is_parameter = isinstance(self, nn.Parameter)
        if not _C.is_capturing() or (is_parameter and constant) or _reader().f_code.co_filename.startswith(INSIDE):
            return known
        if name in _PAST and not self.requires_grad:  # as given
            return _PAST[name]
        if name == "grad" and known is not None and _C.is_result(self):  # a backward of the forward's own has made it
            return known
        if name == "grad" and known is None and not _C.is_computed(self) and not self.requires_grad:  # a buffer without
            note_fact(self, "grad", None)
            return known
        _C.refuse(
            f"the forward asks a tensor for {name}, which differs from call to call, and a graph has the answer of its capture",
            "ask where the model is called, and pass the answer as an input that is no tensor",
        )

    return ask if callable(read) else property(ask, read.__set__)


def as_given(x: Any) -> Any:
    """An input of a part that is captured inside of another capture, as it was given where it hangs on inputs of that."""
    asks = isinstance(x, Tensor) and x.requires_grad and not _C.requires_grad_as_given(x, False)
    if not asks:
        return x
    with _C.PausedCapture():
        return x.detach()


def _set_requires_grad(self: Tensor, value: bool) -> None:
    known = torch._C.TensorBase.requires_grad.__get__(self)
    if isinstance(self, nn.Parameter) and bool(value) != known and _C.is_capturing():
        _C.refuse(
            f"the forward sets requires_grad of a parameter ({self.dtype}, {tuple(self.shape)}) to {bool(value)}, "
            "which no run of a graph does",
            "set it before the capture; for parameters that one step does not train use them detached, parameter.detach()",
        )
    # Inputs of a capture are no leaves and require grad already: setting it to True changes nothing.
    if not (value and known):
        torch._C.TensorBase.requires_grad.__set__(self, value)


def _set_data(self: Tensor, value: Any) -> None:
    if _C.is_capturing() and isinstance(value, Tensor):
        _C.assign_data(self, value)
    else:
        torch._C.TensorBase.data.__set__(self, value)


def _set_grad(self: Tensor, value: Any) -> None:
    if not _C.is_capturing():
        torch._C.TensorBase.grad.__set__(self, value)
        return
    with _C.PausedCapture():  # as what runs then, this may be in the place of a backward: the end of the capture looks for it
        torch._C.TensorBase.grad.__set__(self, value)


def _taken(read: Callable[..., Any]) -> Callable[..., Any]:
    def take(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        if _C.is_capturing() and not _C.is_computed(self):
            note_value()
        return read(self, *args, **kwargs)

    return take


@_taken
def _tolist(self: Tensor) -> Any:
    known = _C.guard_values(self)
    return torch._C.TensorBase.tolist(self if known is None else known)


# Functions of torch that return a setting of a thread or a process, of which graphs are made for one value.
SETTINGS = (
    "is_inference_mode_enabled", "are_deterministic_algorithms_enabled", "get_deterministic_debug_mode", "is_anomaly_enabled",
    "get_num_threads", "get_num_interop_threads", "get_float32_matmul_precision", "is_warn_always_enabled",
)  # fmt: skip
_WITHIN = {"is_grad_enabled": True, "is_inference_mode_enabled": False}  # as a capture always runs


_enabled_by: list[torch.enable_grad] = []  # those blocks that the captured forward is in: gradients are on whatever the caller has


def settings_now() -> dict[str, Any]:
    return {name: getattr(torch, name)() for name in SETTINGS}


@contextlib.contextmanager
def watched_settings(answers: dict[str, Any]) -> Iterator[dict[str, str]]:
    """Makes these functions of torch return these values to the model's own code, where it has not changed the setting itself
    (``with torch.no_grad():``). Yields the functions that it asks, each with the first line that does; and "enable_grad" if
    it enters that."""
    asked: dict[str, str] = {}

    def watched(name: str, original: Callable[[], Any]) -> Callable[[], Any]:
        def setting() -> Any:
            frame = past_modes(sys._getframe(1))
            now = original()
            if now != _WITHIN.get(name, answers[name]) or not _C.is_capturing() or frame.f_code.co_filename.startswith(INSIDE):
                return now
            asked.setdefault(name, line_of(frame))
            return answers[name] or (name == "is_grad_enabled" and bool(_enabled_by))

        return setting

    enter, leave = torch.enable_grad.__enter__, torch.enable_grad.__exit__

    def begin(self: Any) -> None:
        enter(self)
        if _C.is_capturing():
            _enabled_by.append(self)
            asked["enable_grad"] = ""

    def end(self: Any, *error: Any) -> None:
        leave(self, *error)
        if _C.is_capturing():
            _enabled_by.remove(self)

    functions = {name: watched(name, getattr(torch, name)) for name in answers}
    with patched(torch, **functions), patched(torch.enable_grad, __enter__=begin, __exit__=end):
        yield asked


@contextlib.contextmanager
def watched_tensors(one_graph: bool, grad_mode: bool, asked: dict[str, str]) -> Iterator[list[str]]:
    """Context manager that notices reads of sizes that depend on the data, of lists of values, and assignments to ``.data``, and refuses
    hooks on tensors and other ``requires_grad`` of parameters. `one_graph`: no other graph exists for inputs whose ``requires_grad``
    differs, so reads of it are guarded. `grad_mode`: whether the caller has gradients on. `asked`: the settings that the forward asks for.
    Yields the user's lines that ask for the layout of a tensor."""
    base = torch._C.TensorBase
    lines: list[str] = []
    if "shape" in Tensor.__dict__:  # a capture inside of another
        yield lines
        return
    hook, accumulated, set_in_place = Tensor.register_hook, Tensor.register_post_accumulate_grad_hook, Tensor.requires_grad_
    saved_hooks = torch.autograd.graph.saved_tensors_hooks
    saved_hooks_enter = saved_hooks.__enter__
    node_hooks: Any = getattr(torch.autograd.graph, "node_creation_hook", None)  # since torch 2.15
    node_hooks_enter = node_hooks and node_hooks.__enter__

    def requires_grad_(self: Tensor, requires_grad: bool = True) -> Tensor:
        if not isinstance(self, nn.Parameter):
            return set_in_place(self, requires_grad)
        _set_requires_grad(self, requires_grad)
        return self

    def refuse_hook(kind: str) -> None:
        _C.refuse(
            f"a hook {kind} in the forward, which a graph would not call",
            "write it as a torch.autograd.Function, or register the hook outside of the forward, on the model's output or on a parameter",
        )

    def register_hook(self: Tensor, function: Callable[..., Any]) -> Any:
        outer = isinstance(self, nn.Parameter) or not base.is_leaf.__get__(self)  # the forward may call backward on a leaf that it makes
        if _C.is_capturing() and base.requires_grad.__get__(self) and outer:
            refuse_hook("is registered on a tensor")
        return hook(self, function)

    def register_post_accumulate_grad_hook(self: Tensor, function: Callable[..., Any]) -> Any:
        if _C.is_capturing() and isinstance(self, nn.Parameter):
            refuse_hook("is registered on a tensor")
        return accumulated(self, function)

    def enter(self: Any) -> None:
        code = getattr(self.pack_hook, "__code__", None)
        if _C.is_capturing() and not (code is not None and code.co_filename.startswith(INSIDE)):
            refuse_hook("sees the tensors that autograd saves")
        saved_hooks_enter(self)

    def refuse_node_hook(self: Any) -> None:
        if _C.is_capturing():
            refuse_hook("sees the nodes that autograd makes")
        node_hooks_enter(self)

    watches: dict[str, Any] = {name: _watched(getattr(Tensor, name)) for name in ("size", "numel", "nelement", "__len__")}
    watches["shape"] = property(_watched(base.shape.__get__))
    watches["requires_grad"] = property(_requires_grad(one_graph, grad_mode, asked), _set_requires_grad)
    watches["data"] = property(base.data.__get__, _set_data)
    watches |= {name: _taken(getattr(Tensor, name)) for name in _VALUES}
    watches |= {name: _layout(getattr(Tensor, name), lines) for name in ("is_contiguous", "stride", "dim_order")}
    watches |= {name: _unknown(name) for name in (*_PAST, *_CHANGING)}
    watches["grad"] = watches["grad"].setter(_set_grad)
    watches |= {"register_hook": register_hook, "register_post_accumulate_grad_hook": register_post_accumulate_grad_hook}
    on_nodes = patched(node_hooks, __enter__=refuse_node_hook) if node_hooks else contextlib.nullcontext()
    with patched(Tensor, requires_grad_=requires_grad_, tolist=_tolist, **watches), patched(saved_hooks, __enter__=enter), on_nodes:
        yield lines
