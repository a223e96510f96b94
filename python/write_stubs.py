"""Writes plumb/_C.pyi beside the extension module, from what pybind11 says of every function. The build runs it."""

from __future__ import annotations

import ast
import inspect
import keyword
import pathlib
import re
import sys
from typing import Any

HEAD = """# Written by python/write_stubs.py when the module is built.
import collections.abc
import datetime
import typing
from typing import Any

import numpy
import numpy.typing
import torch
"""


def signatures(name: str, doc: str | None) -> list[str]:
    """`(x: int) -> str` for every overload in a docstring of pybind11's."""
    found = []
    for line in (doc or "").splitlines():
        match = re.match(rf"(?:\d+\. )?{re.escape(name)}(\(.*\) -> .+)$", line.strip())
        if match and match.group(1) != "(*args, **kwargs) -> Any":
            found.append(match.group(1))
    return found


def explanation(name: str, doc: str | None) -> str:
    """Returns the text of a pybind11 docstring without the signature."""
    lines = [line for line in inspect.cleandoc(doc or "").splitlines() if not line.startswith(f"{name}(")]
    return "\n".join(lines).strip()


def docstring(text: str, indent: str) -> list[str]:
    quoted = '"""' + text.replace("\\", "\\\\") + '"""'
    return [indent + line if line else "" for line in quoted.splitlines()] if text else []


def declared(declaration: str, text: str) -> list[str]:
    """Returns a declaration that ends in "...", with a docstring if there is one."""
    indent = " " * (len(declaration) - len(declaration.lstrip()) + 4)
    return [declaration.removesuffix(" ..."), *docstring(text, indent), f"{indent}..."] if text else [declaration]


def cleaned(signature: str) -> str:
    signature = re.sub(r"plumb\._C\.(\w+)", r"\1", signature)
    signature = re.sub(r"(?:std|plumb|at|c10)::[\w:]+(?:<[^()]*>)?", "Any", signature)  # a C++ type not known to Python
    return re.sub(r"= <[^>]*>", "= ...", signature)


def function(name: str, thing: Any, indent: str, method: bool) -> list[str]:
    """Returns the lines of a function; one that takes anything where its text is no Python."""
    static = method and isinstance(thing, staticmethod)
    inner = thing.__func__ if static else thing
    found = [cleaned(s) for s in signatures(name, getattr(inner, "__doc__", None))]
    documented = explanation(name, getattr(inner, "__doc__", None)) if len(found) == 1 else ""
    lines = []
    for signature in found:
        text = f"def {name}{signature}: ..."
        try:
            ast.parse(text)
        except SyntaxError:
            documented, text = "", f"def {name}({'self, ' if method and not static else ''}*args: Any, **kwargs: Any) -> Any: ..."
        lines += [f"{indent}@typing.overload"] * (len(found) > 1) + [f"{indent}@staticmethod"] * static
        lines += declared(indent + text, documented)
    first = "self, " if method and not static else ""
    return lines or [f"{indent}@staticmethod"] * static + [f"{indent}def {name}({first}*args: Any, **kwargs: Any) -> Any: ..."]


def member(name: str, thing: Any) -> list[str]:
    if isinstance(thing, property):
        answer = re.search(r"-> (.+)$", (thing.fget.__doc__ or "").strip().splitlines()[0] if thing.fget.__doc__ else "")
        kind = cleaned(answer.group(1)) if answer else "Any"
        lines = ["    @property", f"    def {name}(self) -> {kind}: ..."]
        return lines + [f"    @{name}.setter", f"    def {name}(self, value: Any) -> None: ..."] * bool(thing.fset)
    if callable(thing) or isinstance(thing, staticmethod):
        return function(name, thing, "    ", True)
    return [f"    {name}: Any"]


def pybind_class(name: str, cls: type) -> list[str]:
    if not cls.__module__.endswith("_C"):  # Python's own class, registered with the engine
        return [f"from {cls.__module__} import {name} as {name}"]
    base = next((b.__name__ for b in cls.__bases__ if b.__module__.endswith("_C")), "")
    lines = [f"class {name}({base}):" if base else f"class {name}:"]
    entries = getattr(cls, "__members__", {})
    if not entries:  # pybind11's text of an enumeration lists its values again
        lines += docstring(inspect.cleandoc(vars(cls).get("__doc__") or ""), "    ")
    for entry in entries:
        lines.append(f"    {entry}: typing.ClassVar[{name}]")
    for key, thing in vars(cls).items():
        if key == "__init__" and not signatures(key, thing.__doc__):
            continue  # only C++ makes one
        known = key == "__init__" or not key.startswith("_") or key in ("__len__", "__enter__", "__exit__", "__call__")
        if known and key not in entries and not keyword.iskeyword(key):
            lines += member(key, thing)
    return lines if len(lines) > 1 else [lines[0] + " ..."]


def stub(module: Any) -> str:
    parts = [HEAD]
    for name, thing in sorted(vars(module).items()):
        if name.startswith("__") or inspect.ismodule(thing):
            continue
        if isinstance(thing, type):
            parts.append("\n".join(pybind_class(name, thing)))
        elif callable(thing):
            parts.append("\n".join(function(name, thing, "", False)))
        else:
            parts.append(f"{name}: {type(thing).__name__}")
    return "\n".join(parts) + "\n"


def main() -> None:
    package = pathlib.Path(__file__).resolve().parent
    sys.path.insert(0, str(package))
    import plumb

    text = stub(plumb._C)
    ast.parse(text)
    (package / "plumb" / "_C.pyi").write_text(text)


if __name__ == "__main__":
    main()
