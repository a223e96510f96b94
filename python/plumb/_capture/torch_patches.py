"""Small changes to torch while a forward is captured. Each is a context manager that undoes its change."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from typing import Any, Callable, ContextManager, Iterator

import torch
from torch import nn
from torch._ops import HigherOrderOperator
from torch.nn.utils import parametrize

from .. import _C
from .cpython import calls_go_to

TORCH = os.path.dirname(torch.__file__) + os.sep
PLUMB = os.path.dirname(os.path.dirname(__file__)) + os.sep
INSIDE = (TORCH, PLUMB)  # folders whose frames are not the user's
Modules = list[tuple[str, nn.Module]]  # as ``named_modules()`` yields them: a walk costs as much as the forward of a few


class _Arrived(list):
    """A handler of interrupts that keeps them."""

    def __call__(self, *interrupt: Any) -> None:
        self.append(interrupt)


@contextlib.contextmanager
def interrupts_wait() -> Iterator[None]:
    """Context manager at whose end an interrupt (Ctrl-C) of the main thread is handled: changes to torch are made and undone whole."""
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler) or isinstance(handler, _Arrived) or threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived = _Arrived()
    signal.signal(signal.SIGINT, arrived)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if arrived:
            handler(*arrived[0])


@contextlib.contextmanager
def patched(owner: Any, **attributes: Any) -> Iterator[None]:
    """Context manager in which a class or module has these attributes."""
    before = {name: owner.__dict__.get(name) for name in attributes}  # None: inherited
    try:
        with interrupts_wait():
            for name, value in attributes.items():
                setattr(owner, name, value)
        yield
    finally:
        with interrupts_wait():
            for name, value in before.items():
                delattr(owner, name) if value is None else setattr(owner, name, value)


@contextlib.contextmanager
def forced_eager() -> Iterator[None]:
    """Context manager in which compiled functions run as they were written, those that are compiled within it, too.
    ``torch.compile`` is loaded by its first use, not here: that takes a second."""
    with contextlib.ExitStack() as stack:
        original = torch.compile

        def force() -> None:
            with contextlib.suppress(Exception):
                stack.enter_context(torch.compiler.set_stance("force_eager"))

        def compile(*args: Any, **settings: Any) -> Any:  # noqa: A001
            force()
            return original(*args, **settings)

        if "torch._dynamo" in sys.modules:
            force()
        else:
            stack.enter_context(patched(torch, compile=compile))
        yield


@contextlib.contextmanager
def unseen_by_tracers() -> Iterator[None]:
    """Context manager in which torch.jit.trace and dispatch modes (of make_fx, a counter of flops) see nothing: they see the graph's run."""
    state = torch._C._get_tracing_state()
    torch._C._set_tracing_state(None)
    try:
        with torch.utils._python_dispatch._disable_current_modes():
            yield
    finally:
        torch._C._set_tracing_state(state)


def autocast_regions() -> tuple[tuple[str, bool, torch.dtype], ...]:
    """Returns whether autocast is on, and to which dtype, on the CPU, and on the accelerator if there is one."""
    accelerator = torch.accelerator.current_accelerator()
    devices = ["cpu"] if accelerator is None else ["cpu", accelerator.type]
    return tuple((d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in devices)


_KINDS_OF_HOOKS = ("forward_pre", "forward", "backward_pre", "backward")


class HooksOfAllModules:
    """The hooks that torch calls for every module, but those of captures: another thread may have one at work."""

    @property
    def now(self) -> tuple:
        torch_module = nn.modules.module
        tables = [getattr(torch_module, f"_global_{kind}_hooks") for kind in _KINDS_OF_HOOKS]
        # A tuple that is made of an empty list is always one object, so that a guard sees it unchanged.
        return tuple([item for table in tables for item in list(table.items()) if not hasattr(item[1], "of_capture")])


@contextlib.contextmanager
def module_stack(modules: Modules) -> Iterator[None]:
    """Tells the engine which module's forward runs, by hooks on every module. `modules`: those with a name."""
    names = {id(sub): name for name, sub in modules}

    def enter(sub: nn.Module, _args: Any) -> None:
        _C.push_module(names.get(id(sub), ""), type(sub).__name__)

    def leave(_sub: nn.Module, _args: Any, _output: Any) -> None:
        _C.pop_module()

    enter.of_capture = leave.of_capture = True
    hooks = [
        nn.modules.module.register_module_forward_pre_hook(enter),
        nn.modules.module.register_module_forward_hook(leave, always_call=True),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def higher_order_operators() -> ContextManager:
    """Context manager in which ``torch.cond`` and ``torch.while_loop`` run as what they mean, so that their conditions are seen like any
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


def unseen_saved_tensors() -> ContextManager:
    """Context manager in which the caller's hooks do not see the tensors that autograd saves: a checkpoint around a first call counts
    them, and computes again without a capture."""

    def keep(saved: torch.Tensor) -> torch.Tensor:
        return saved

    hooked = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
    return torch.autograd.graph.saved_tensors_hooks(keep, keep) if hooked else contextlib.nullcontext()


def uncached_parametrizations() -> ContextManager:
    """Context manager in which a forward computes parametrized weights itself, also within the caller's ``parametrize.cached()``, where
    torch would give it those of the call before. A ``cached()`` of the forward's own works."""
    return patched(parametrize, _cache_enabled=0, _cache={})


@contextlib.contextmanager
def unoptimized_scripts(modules: Modules) -> Iterator[None]:
    """Scripted code runs operator by operator, not as functions with a backward of their own."""
    for _, sub in modules:
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


@contextlib.contextmanager
def refused_seeds() -> Iterator[None]:
    """Refuses a forward that sets torch's random state. Torch's own functions may: a checkpoint does."""

    def refusing(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            frame = sys._getframe(1)
            while frame.f_code.co_filename in (torch.random.__file__, contextlib.__file__) and frame.f_back is not None:
                frame = frame.f_back  # a fork_rng that was taken before
            if _C.is_capturing() and kwargs.get("enabled", True) and not frame.f_code.co_filename.startswith(INSIDE):
                _C.refuse(
                    f"the forward sets torch's random state ({original.__name__}), and a graph draws from the state that it finds",
                    "set it before the call; for draws that stay the same keep them in a buffer",
                )
            return original(*args, **kwargs)

        return call

    with contextlib.ExitStack() as stack:
        for owner in (torch, torch.random):
            found = {name: getattr(owner, name, None) for name in ("manual_seed", "seed", "set_rng_state", "fork_rng")}
            stack.enter_context(patched(owner, **{name: refusing(f) for name, f in found.items() if f is not None}))
        yield


# Libraries with code of their own for graph makers. They branch on tensor values (are all masks ones?), and do not when
# torch.compiler.is_compiling() says yes.
_LIBRARIES = ("transformers",)
TOLD_NOTE = "transformers was told that a graph is being made: its data-dependent shortcuts (all-ones masks) are not taken"


def library_folders() -> list[str]:
    """Returns the folders of such libraries that are imported."""
    found = [getattr(sys.modules.get(name), "__file__", None) for name in _LIBRARIES]
    return [os.path.dirname(file) + os.sep for file in found if file]


def has_libraries(module: nn.Module) -> bool:
    return any(type(m).__module__.partition(".")[0] in _LIBRARIES for m in module.modules())


def answer_compiling(tell: Callable[[], bool]) -> ContextManager:
    """``torch.compiler.is_compiling()`` returns yes to such libraries alone, on this thread, while `tell` returns true. It stays the
    same function: torch.compile knows it by that, and may be loaded meanwhile."""
    thread = threading.get_ident()

    def answer(original: Callable[[], bool], *_: Any) -> bool:
        caller = sys._getframe(3).f_globals.get("__name__", "")  # behind is_compiling and calls_go_to
        told = threading.get_ident() == thread and tell()
        return (told and caller.partition(".")[0] in _LIBRARIES) or original()

    return calls_go_to(torch.compiler.is_compiling, answer)
