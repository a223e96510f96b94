"""Attributes of modules that a forward changes, such as counters of its calls. A graph has one path: this finds out whether another call
would take another one."""

from __future__ import annotations

import contextlib
import itertools
import re
import sys
from typing import Any, Callable, Iterator, NamedTuple

import numpy as np
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .._errors import Error, ErrorKind
from .._state import constants_of
from .attribute_reads import caller_of_read
from .attribute_writes import Change, same_objects
from .cpython import line_of, running


class Read(NamedTuple):
    name: str
    line: str


def _watching(cls: type, keys: dict[str, str], reads: list[Read]) -> type:
    """Returns a subclass that notes the lines which read these attributes for anything but their own new value. What a call
    has written before it reads it is its own."""

    def watched(key: str, name: str) -> property:
        first: dict[int, str] = {}  # by module, what was done first

        def read(self: nn.Module) -> Any:
            if first.setdefault(id(self), "read") == "written":
                return self.__dict__[key]
            frame = caller_of_read(sys._getframe(1))
            found = running(frame)
            if found is None or not found[0].updates_attribute(found[1], key):
                reads.append(Read(name, line_of(frame)))
            return self.__dict__[key]

        def write(self: nn.Module, value: Any) -> None:
            first.setdefault(id(self), "written")
            self.__dict__[key] = value

        return property(read, write)

    names = {key: watched(key, name) for key, name in keys.items()}
    return type(cls.__name__, (cls,), {"__module__": cls.__module__, "__qualname__": cls.__qualname__, **names})


@contextlib.contextmanager
def watched(changes: list[Change]) -> Iterator[list[Read]]:
    """Yields the list of reads of these attributes while it lasts."""
    reads: list[Read] = []
    keys: dict[int, tuple[nn.Module, dict[str, str]]] = {}
    for change in changes:
        if (module := change.table.module) is not None:
            keys.setdefault(id(module), (module, {}))[1][change.key] = change.name
    classes = []
    try:
        for module, names in keys.values():
            cls = type(module)
            with contextlib.suppress(TypeError):  # a class that cannot be swapped, as of a scripted module
                module.__class__ = _watching(cls, names, reads)
                classes.append((module, cls))
        yield reads
    finally:
        for module, cls in classes:
            module.__class__ = cls


def path_of(engine: Any) -> str:
    """Returns the text of the graph without the numbers of Python functions, which are new in every capture."""
    return re.sub(r"plumb::python_function\(\d+", "plumb::python_function(", engine.graph.to_string(locations=False))


_MODES = ("train", "training", "use_input_stats", "dropout_p")  # arguments of operators that say the mode


def path_in_any_mode(engine: Any) -> list:
    """Returns the graph's operators and their arguments, without what an operator or its layout alone does in one mode only: arguments that
    say the mode, the count of batches that a batch norm keeps in training, `contiguous`."""
    known: dict[str, Any] = {}  # values by name, as the other mode may have other names

    def plain(arg: Any) -> Any:
        if isinstance(arg, tuple) and arg[:1] == ("value",):
            return known[arg[1]]
        return [plain(a) for a in arg] if isinstance(arg, (list, tuple)) else repr(arg)

    path: list = []
    for node in engine.graph.nodes:
        if node.op not in ("get_attr", "placeholder", "call_function", "output"):
            return [path_of(engine)]  # a nested graph
        if node.op in ("get_attr", "placeholder"):
            known[node.results[0].name] = node.target
            continue
        names = [name for name, _ in node.arg_names]
        args = [plain(a) for a, name in itertools.zip_longest(node.args, names) if name not in _MODES]
        counts = node.target == "aten::add_.Tensor" and str(args[0]).endswith("num_batches_tracked")
        if counts or node.target == "aten::contiguous":
            known[node.results[0].name] = args[0]
            continue
        if node.target == "plumb::python_function":
            args = args[1:]  # its number is another one in every capture
        path.append((node.target, args))
        known.update({value.name: (len(path), i) for i, value in enumerate(node.results)})
    return path


def _alike(a: Any, b: Any) -> bool:
    """Returns whether two values of an attribute are equal; for arrays of NumPy, in every element."""
    if a is b:
        return True
    try:
        return bool(np.array_equal(a, b)) if isinstance(a, np.ndarray) and isinstance(b, np.ndarray) else bool(a == b)
    except Exception:  # a comparison of the user's, or of arrays in a container
        return False


def _reads_kept(kept: list[Change], again: Any, left: dict[str, Any]) -> bool:
    """Returns whether the call `again` reads tensors that the call before it left in slots that held none, as tables
    that are made once. `left`: what `again` left in such slots. Raises `plumb.Error` for tensors that every call makes
    anew, as a state is."""
    read = set(map(id, constants_of(again).values()))
    used = [c for c in kept if any(id(t) in read for t in pytree.tree_leaves(c.now) if isinstance(t, Tensor))]
    for change in used:
        if change.computed or not same_objects(left.get(change.name), change.now):
            raise Error(
                f"the forward keeps a tensor in '{change.name}' for its next call, and a graph begins every call as the first",
                kind=ErrorKind.Capture,
                remedy="register it as a buffer of one size before the capture, or pass it in and return it",
            )
    return bool(used)


def refuse_other_paths(
    changes: list[Change],
    kept: list[Change],
    engine: Any,
    capture_again: Callable[[], tuple[Any, dict]],
    reads: list[Read],
) -> list[str]:
    """`capture_again` captures a call that begins with what the first call left, and returns the engine and the tensors that this
    call leaves; `reads` is what watched() yields.

    Raises `plumb.Error` if that call takes another path, or if a later one may. Returns notes."""
    names = ", ".join(f"'{change.name}'" for change in [*changes, *kept])
    remedy = (
        "keep it out of the forward, register it as a buffer and compute with it as a tensor, or pass it as an input"
    )
    try:
        again, left = capture_again()
    except Exception as error:
        return [f"another call of the forward, which changes {names}, could not be tried: {error}"]
    if _reads_kept(kept, again, left):
        return [f"the forward makes {names} in its first call and keeps them: the graph makes them in every run"]
    if changes and path_of(engine) != path_of(again):
        raise Error(
            f"the forward changes the attribute {names} and takes another path in the next call, which a graph does not",
            kind=ErrorKind.DataDependent,
            where=next((read.line for read in reads), ""),
            remedy="if only the first call differs (a table that is made once), call the model once before; else " + remedy,
        )
    goes_on = {c.name for c in changes if c.table.module is not None and not _alike(c.table.live.get(c.key), c.now)}
    for read in reads:
        if read.name in goes_on:
            raise Error(
                f"the forward reads the attribute '{read.name}', which it changes in every call: a graph has one value of it",
                kind=ErrorKind.DataDependent,
                where=read.line,
                remedy=remedy,
            )
    return []
