"""Everything that depends on the insides of CPython, but for its builtin functions (python/bindings/builtin_calls.cpp). If a new
Python breaks plumb, look here and there.

- `running()` reads the bytecode of running frames: the instruction that runs, and the ones around it. Instructions that a newer Python
  joins or splits are told apart here.
- `calls_go_to()` swaps the ``__code__`` of a Python function. Nothing else reaches callers that hold the function itself (``from
  torch.nn.functional import gelu``, a default argument, a closure).

Only the standard library is used, so that tests can run this under every Python that plumb is for (tests/test_python_versions.py). Run
them before a new version of Python is named in pyproject.toml.
"""

from __future__ import annotations

import bisect
import contextlib
import dis
import functools
import itertools
from types import CodeType, FrameType, FunctionType
from typing import Any, Callable, Iterator, NamedTuple

_LONGEST_RAISE = 120  # instructions
# They do nothing that a reader of the program cares about.
_SKIPPED = ("CACHE", "EXTENDED_ARG", "NOT_TAKEN")
_SAME = {"LOAD_FAST_BORROW": "LOAD_FAST", "LOAD_FAST_CHECK": "LOAD_FAST", "LOAD_SMALL_INT": "LOAD_CONST"}
_JOINED = {  # since 3.13
    "STORE_FAST_STORE_FAST": ("STORE_FAST", "STORE_FAST"),
    "STORE_FAST_LOAD_FAST": ("STORE_FAST", "LOAD_FAST"),
    "LOAD_FAST_LOAD_FAST": ("LOAD_FAST", "LOAD_FAST"),
    "LOAD_FAST_BORROW_LOAD_FAST_BORROW": ("LOAD_FAST", "LOAD_FAST"),
}
_STORES = ("STORE_FAST", "STORE_NAME", "STORE_DEREF", "STORE_GLOBAL")
_OUTER = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_GLOBALS")


class Instruction(NamedTuple):
    opname: str
    arg: Any
    argval: Any
    argrepr: str
    offset: int
    # (line, column) of the first and behind the last character of its source; None if unknown (Python 3.10)
    start: tuple[int, int] | None
    end: tuple[int, int] | None

    @property
    def is_call(self) -> bool:
        return self.opname.startswith("CALL") or self.opname == "PRECALL"

    @property
    def is_subscript(self) -> bool:
        return self.opname == "BINARY_SUBSCR" or (self.opname == "BINARY_OP" and self.argrepr == "[]")


def _plain(i: dis.Instruction) -> list[Instruction]:
    p = getattr(i, "positions", None)
    known = p is not None and None not in (p.lineno, p.col_offset, p.end_lineno, p.end_col_offset)
    places = ((p.lineno, p.col_offset), (p.end_lineno, p.end_col_offset)) if known else (None, None)
    if i.opname in _JOINED:
        return [Instruction(n, None, v, v, i.offset, *places) for n, v in zip(_JOINED[i.opname], i.argval)]
    return [Instruction(_SAME.get(i.opname, i.opname), i.arg, i.argval, i.argrepr, i.offset, *places)]


class Code:
    """The instructions of a code object."""

    def __init__(self, code: CodeType):
        self.instructions = [
            plain for i in dis.get_instructions(code) if i.opname not in _SKIPPED for plain in _plain(i)
        ]
        self.offsets = [i.offset for i in self.instructions]

    def assigned(self, n: int) -> list[str] | None | bool:
        """The variables that take the value of instruction n; None if unknown, True if it is returned to the caller."""
        following = self.instructions[n + 1 :]
        if not following:
            return None
        first = following[0]
        if first.opname == "RETURN_VALUE":
            return True
        if first.opname == "UNPACK_SEQUENCE":
            names = [i.argval if i.opname.startswith("STORE_") else None for i in following[1 : 1 + first.arg]]
            return names if all(isinstance(x, str) for x in names) else None
        if first.opname in ("COPY", "DUP_TOP") and len(following) > 1:
            first = following[1]
        return [first.argval] if first.opname in _STORES else None

    def function_of(self, n: int) -> int | None:
        """The instruction that loads the function which the call at instruction n calls; None if that is unknown."""
        call = self.instructions[n]
        if call.start is None:
            return None
        for m in range(n - 1, -1, -1):
            i = self.instructions[m]
            # A constant there is the tuple of the call's keywords, which Python 3.14 places so, too.
            if i.opname.startswith("LOAD_") and i.opname != "LOAD_CONST" and i.start == call.start and i.end < call.end:
                return m
        return None

    def only_raises(self, start: int) -> bool:
        """Returns whether the instructions from here on do nothing but raise."""
        for i in self.instructions[start : start + _LONGEST_RAISE]:
            if i.opname in ("RAISE_VARARGS", "RERAISE"):
                return True
            if "JUMP" in i.opname or i.opname.startswith(("RETURN_", "YIELD_", "FOR_", "STORE_ATTR", "STORE_SUBSCR")):
                return False
        return False

    def _after_truth(self, n: int) -> int:
        """Returns the number of the instruction that takes the truth of what instruction n made."""
        instructions = self.instructions
        # bool(t), or a conversion before a jump; from Python 3.13 on a comparison before a jump converts what it got.
        if instructions[n].opname.startswith("CALL") or instructions[n].opname == "COMPARE_OP":
            n += 1
        while n < len(instructions) and instructions[n].opname in ("UNARY_NOT", "TO_BOOL"):
            n += 1
        return n

    def returns_truth(self, n: int) -> bool:
        """Returns whether the truth of what instruction n made is what the code returns, as in ``return bool(t)``."""
        return [i.opname for i in self.instructions[self._after_truth(n) :][:1]] == ["RETURN_VALUE"]

    def decides_a_raise(self, n: int) -> bool:
        """Returns whether instruction n decides a branch of which one way does nothing but raise an exception."""
        instructions = self.instructions
        n = self._after_truth(n)
        if n >= len(instructions):
            return False
        jump = instructions[n]
        if not jump.opname.startswith("POP_JUMP") or "_NONE" in jump.opname:
            return False
        targets = [m for m, i in enumerate(instructions) if i.offset >= jump.argval][:1]
        return any(self.only_raises(start) for start in [n + 1, *targets])

    def updates_attribute(self, n: int, name: str) -> bool:
        """Returns whether instruction n reads an attribute only for its own new value, as in ``self.calls += 1``."""
        owner = self.instructions[n - 1]
        for m in range(n + 1, len(self.instructions)):
            i = self.instructions[m]
            if i.opname.startswith("STORE_"):
                target = self.instructions[m - 1]
                same = owner.opname in ("COPY", "DUP_TOP") or (owner.opname, owner.argval) == (target.opname, target.argval)
                return i.opname == "STORE_ATTR" and i.argval == name and same
            if "JUMP" in i.opname or i.opname.startswith(("RETURN_", "YIELD_", "FOR_", "POP_TOP", "COMPARE_OP", "DELETE_")):
                return False
        return False

    @functools.cached_property
    def outer_reads(self) -> list[tuple[str, tuple[str, ...]]]:
        """Returns names that the code reads from outside of itself (globals, cells, modules that it imports), each with the
        attributes that follow it: N of ``N``, C and ("sizes", "width") of ``C.sizes.width``, "import a" and ("N",) of ``from a
        import N``. A local variable that is another name for one of these counts as that one."""
        found: dict[tuple[str, tuple[str, ...]], None] = {}
        aliases: dict[str, list[tuple[str, tuple[str, ...]]]] = {}
        imported = ""

        def add(start: int, origins: list[tuple[str, tuple[str, ...]]]) -> None:
            end = start
            while end < len(self.instructions) and self.instructions[end].opname in ("LOAD_ATTR", "LOAD_METHOD"):
                end += 1
            chain = tuple(i.argval for i in self.instructions[start:end])
            reads = [(name, before + chain) for name, before in origins]
            found.update(dict.fromkeys(reads))
            if end < len(self.instructions) and self.instructions[end].opname in _STORES:
                known = aliases.setdefault(self.instructions[end].argval, [])
                known += [read for read in reads if read not in known]

        for n, i in enumerate(self.instructions):
            if i.opname in _OUTER:
                add(n + 1, [(i.argval, ())])
            elif i.opname == "IMPORT_NAME":
                level, names = (before.argval for before in self.instructions[n - 2 : n])
                name = "import " + "." * (level or 0) + i.argval
                if names:  # each is taken by an IMPORT_FROM
                    imported = name
                elif n + 1 < len(self.instructions) and self.instructions[n + 1].opname == "IMPORT_FROM":
                    imported = name.rpartition(".")[0]  # import a.b as c
                else:
                    imported = ""
                    add(n + 1, [(name.partition(".")[0] if not level else name, ())])
            elif i.opname == "IMPORT_FROM" and imported:
                rest = itertools.takewhile(lambda x: x.opname in ("SWAP", "ROT_TWO", "POP_TOP"), self.instructions[n + 1 :])
                add(n + 1 + len(list(rest)), [(imported, (i.argval,))])
            if i.opname in ("LOAD_FAST", "LOAD_NAME", "LOAD_DEREF", "LOAD_GLOBAL") and i.argval in aliases:
                add(n + 1, list(aliases[i.argval]))
        return list(found)

    @functools.cached_property
    def class_reads(self) -> set[str]:
        """Returns names of the attributes that the code reads from a class: of ``super()``, ``type(x)``, ``x.__class__`` or its parameter
        `cls`."""
        names = set()
        for n, i in enumerate(self.instructions[:-1]):
            following = self.instructions[n + 1 : n + 8]
            if (i.opname in ("LOAD_ATTR", "LOAD_METHOD") and i.argval == "__class__") or (
                i.opname == "LOAD_FAST" and i.argval == "cls"
            ):
                read = following[0]
            elif i.opname in ("LOAD_GLOBAL", "LOAD_NAME") and i.argval in ("super", "type"):
                calls = [m for m, f in enumerate(following[:-1]) if f.opname.startswith("CALL")]
                opened = [f for f in following if f.opname == "LOAD_SUPER_ATTR"]
                if not calls and not opened:
                    continue
                read = opened[0] if opened else following[calls[0] + 1]
            else:
                continue
            if read.opname in ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR"):
                names.add(read.argval)
        return names

    def asks_for_emptiness(self, n: int) -> bool:
        """Returns whether the size that instruction n reads is only compared with zero."""
        following = self.instructions[n + 1 :][:5]
        if len(following) > 1 and following[0].opname == "LOAD_CONST" and following[1].is_subscript:
            following = following[2:]
        if not following:
            return False
        first = following[0]
        if first.opname == "LOAD_CONST" and len(following) > 1 and following[1].opname == "COMPARE_OP":
            compare = str(following[1].argval)
            return first.argval == 0 and ">=" not in compare and any(c in compare for c in (">", "==", "!="))
        return first.opname.startswith("POP_JUMP") or first.opname in ("UNARY_NOT", "TO_BOOL")


_codes: dict[CodeType, Code] = {}


# Between a call and the operator while a function mode is on, such as that of torch.set_default_device.
_MODES = ("torch/overrides.py", "torch/utils/_device.py")


def of_mode(frame: FrameType) -> bool:
    return frame.f_code.co_filename.endswith(_MODES)


def line_of(frame: FrameType) -> str:
    """Returns the file and the line that a frame is at."""
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def past_modes(frame: FrameType) -> FrameType:
    """Returns the frame, or the one that called torch's function modes that it is part of."""
    while of_mode(frame) and frame.f_back is not None:
        frame = frame.f_back
    return frame


def instructions_of(code: CodeType) -> Code:
    known = _codes.get(code)
    if known is None:
        known = _codes[code] = Code(code)
    return known


def running(frame: FrameType) -> tuple[Code, int] | None:
    """Returns the code of a frame and the number of the instruction that runs."""
    code = instructions_of(frame.f_code)
    # While a Python function runs, its caller may stand in the cache entries behind the call.
    n = bisect.bisect_right(code.offsets, frame.f_lasti) - 1
    return (code, n) if n >= 0 else None


@contextlib.contextmanager
def calls_go_to(function: FunctionType, target: Callable[[FunctionType, tuple, dict], Any]) -> Iterator[None]:
    """Context manager in which ``function(*args, **kwargs)`` is ``target(original, args, kwargs)``. `original` is a copy of the function
    as it was. The swap relies on three details of CPython:

    - a running interpreter reads a function's code anew at every call, so that the next call sees the swap;
    - code with other free variables is refused, so the new code claims those of the old, which it does not read;
    - a constant of a code object may be any object, so the new code carries its target as a constant.

    The whole process sees the swap. The target therefore asks whether a call concerns it, and passes other calls to `original`.
    """
    code = function.__code__
    original = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    original.__kwdefaults__ = function.__kwdefaults__

    def redirect(args: tuple, kwargs: dict) -> Any:
        return target(original, args, kwargs)

    def calls_a_constant(*args: Any, **kwargs: Any) -> Any:
        return "redirect".__call__(args, kwargs)  # the constant becomes the function above

    consts = tuple(redirect if c == "redirect" else c for c in calls_a_constant.__code__.co_consts)
    defaults, kwdefaults = function.__defaults__, function.__kwdefaults__
    function.__code__ = calls_a_constant.__code__.replace(
        co_consts=consts, co_freevars=code.co_freevars, co_name=code.co_name
    )
    function.__defaults__ = function.__kwdefaults__ = None
    try:
        yield
    finally:
        function.__code__, function.__defaults__, function.__kwdefaults__ = code, defaults, kwdefaults
