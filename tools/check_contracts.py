#!/usr/bin/env python3
"""Checks every `Error(Kind)` that a comment of a header promises against what the code can throw.

    check_contracts.py [ROOT] [--reach NAME]     prints each promise that no function behind it keeps; exits with 1 if there is one

A promise is kept if the function below the comment, or one that it calls, names the kind where an error is made. Calls are
followed by name, number of arguments and includes, so what a call through std::function throws is not seen: those
promises are listed in ELSEWHERE with the reason.
"""

from __future__ import annotations

import argparse
import collections
import functools
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import tree_sitter
import tree_sitter_cpp

PARSER = tree_sitter.Parser(tree_sitter.Language(tree_sitter_cpp.language()))
PROMISE = re.compile(r"Error\((\w+)\)")
FUNCTIONS = ("function_definition", "inline_method_definition")
BINDS = ("declaration", "field_declaration", "template_declaration", "friend_declaration", *FUNCTIONS)
COMPARED = ("binary_expression", "case_statement")

# Promises that are kept by code which a name does not lead to: (header, first function below the comment, kind): why.
ELSEWHERE = {
    ("plumb/pointwise/pointwise.h", "pointwise", "InvalidArgument"): "it calls the operator through torch's dispatcher",
    ("plumb/pipeline/transport/transport.h", "check_values", "Communication"): "DirectMessages::Headers::raise_lost throws it",
}
# Nearly every function calls methods of these and to_string(), with what it has from the graph itself: their errors are
# no part of its promises.
ACCESSORS = ("Node", "Graph", "Printer")


class Use(NamedTuple):
    """A name in a function's body."""

    form: str  # a call: free, scoped, member; made: a class; named: a function or table passed as a value
    name: str
    count: int  # arguments; -1: any
    scope: str = ""


@dataclass
class Function:
    name: str
    file: str
    owner: str = ""  # the class of a method
    most: float = 0  # arguments that it takes
    kinds: set[str] = field(default_factory=set)
    uses: set[Use] = field(default_factory=set)
    anywhere: bool = False  # an override, which a call of the base's method reaches


@dataclass
class Source:
    path: str
    room: str
    includes: set[str]
    functions: list[Function] = field(default_factory=list)
    declared: set[str] = field(default_factory=set)
    methods: set[tuple[str, str]] = field(default_factory=set)  # that are declared: class and name
    classes: set[str] = field(default_factory=set)
    promises: list[tuple[int, str, list[str], str]] = field(default_factory=list)  # line, kind, functions, class


def text(node) -> str:
    return node.text.decode(errors="replace")


def without_templates(name: str) -> str:
    while (shorter := re.sub(r"<[^<>]*>", "", name)) != name:
        name = shorter
    return name


def walk(node):
    stack = [node]
    while stack:
        n = stack.pop()
        yield n
        stack.extend(reversed(n.children))


def declarators(node):
    """Returns the function declarators of a declaration or definition, without those of parameters and bodies."""
    stack, found = [node], []
    while stack:
        n = stack.pop()
        if n.type == "function_declarator":
            found.append(n)
            continue
        if n.type in ("parameter_list", "compound_statement", "field_declaration_list", "argument_list", "initializer_list"):
            continue
        stack.extend(n.children)
    return found


def name_of(declarator) -> tuple[str, str]:
    """Returns (class, name) of what is declared."""
    inner = declarator.child_by_field_name("declarator")
    parts = re.sub(r"<[^<>]*>", "", text(inner)).replace("~", "").split("::") if inner else [""]
    return (parts[-2] if len(parts) > 1 else ""), parts[-1].strip()


def class_around(node) -> str:
    while node := node.parent:
        if node.type in ("class_specifier", "struct_specifier") and (name := node.child_by_field_name("name")):
            return text(name).split("<")[0].split("::")[-1]
    return ""


def kinds_in(node) -> set[str]:
    found = set()
    for n in walk(node):
        if n.type != "qualified_identifier" or not text(n).startswith("ErrorKind::"):
            continue
        if n.parent.type not in COMPARED or text(n.parent.children[1]) not in ("==", "!=") and n.parent.type != "case_statement":
            found.add(text(n).split("::")[-1])
    return found


def uses_in(node) -> set[Use]:
    found = set()
    for n in walk(node):
        if n.type == "call_expression":
            called, given = n.child_by_field_name("function"), n.child_by_field_name("arguments")
            count = sum(c.is_named and c.type != "comment" for c in given.children) if given else 0
            if called.type == "field_expression":
                found.add(Use("member", without_templates(text(called.child_by_field_name("field"))).split("::")[-1], count))
            elif called.type in ("identifier", "template_function", "qualified_identifier"):
                *scope, name = without_templates(text(called)).split("::")
                found.add(Use("scoped" if scope else "free", name, count, scope[-1] if scope else ""))
            else:
                found.add(Use("member", "operator()", count))
        elif n.type == "type_identifier":
            found.add(Use("made", text(n), -1))
        elif n.type == "identifier" and n.parent.type in ("argument_list", "initializer_list", "init_declarator", "pointer_expression",
                                                         "return_statement", "for_range_loop", "field_expression"):
            found.add(Use("named", text(n), -1))
    return found


def made_of(node, name: str, file: str, owner: str) -> Function:
    made = Function(name, file, owner, float("inf"), kinds_in(node), uses_in(node))
    for declarator in declarators(node)[:1]:
        parameters = declarator.child_by_field_name("parameters")
        entries = [c for c in parameters.children if c.is_named and c.type != "comment"] if parameters else []
        variadic = any(c.type in ("variadic_parameter_declaration", "variadic_parameter") for c in entries) or "..." in text(declarator)
        made.most = float("inf") if variadic else len(entries)
        made.anywhere = "override" in text(declarator).split()
    return made


@functools.cache  # a test reads all of it again with one file changed
def read(path: str, content: str) -> Source:
    source = Source(path, path.split("/")[1], set(re.findall(r'^\s*#\s*include "([^"]+)"', content, re.M)))
    tree = PARSER.parse(content.encode())
    comments: list = []
    for node in walk(tree.root_node):
        if node.type == "comment":
            comments.append(node)
        elif node.type in ("class_specifier", "struct_specifier") and (name := node.child_by_field_name("name")):
            source.classes.add(without_templates(text(name)).split("::")[-1])
        elif node.type in FUNCTIONS:
            for declarator in declarators(node)[:1]:
                owner, name = name_of(declarator)
                source.functions.append(made_of(node, name, path, owner or class_around(node)))
                source.declared.add(name)
        elif node.type in ("declaration", "field_declaration"):
            named = [name_of(d) for d in declarators(node)]
            for owner, name in named:
                source.declared.add(name)
                source.methods.add((owner or class_around(node), name))
                if kinds := kinds_in(node):  # error kinds in a default argument
                    source.functions.append(Function(name, path, owner or class_around(node), float("inf"), kinds))
            if not named and node.parent.type in ("declaration_list", "translation_unit"):
                for n in walk(node):  # a table of functions
                    if n.type == "init_declarator":
                        inner = n.child_by_field_name("declarator")
                        name = re.sub(r"\W.*", "", text(inner).lstrip("*& "), flags=re.S)
                        source.functions.append(made_of(n, name, path, ""))
                        source.declared.add(name)
        elif node.type in ("preproc_function_def", "preproc_def"):
            name, value = node.child_by_field_name("name"), node.child_by_field_name("value")
            body = text(value) if value else ""
            made = Function(text(name), path, "", float("inf"), set(re.findall(r"ErrorKind::(\w+)", body)))
            made.uses = {Use("free", word, -1) for word in re.findall(r"(\w+)\(", body)}
            source.functions.append(made)
            source.declared.add(made.name)
    if path.endswith(".h"):
        find_promises(source, comments, content)
    return source


def find_promises(source: Source, comments: list, content: str) -> None:
    blocks: list[list] = []
    for c in comments:
        last = blocks[-1][-1] if blocks else None
        own_line = not content.splitlines()[c.start_point[0]][: c.start_point[1]].strip()
        if last is not None and own_line and c.start_point[0] == last.end_point[0] + 1 and c.start_point[1] == last.start_point[1]:
            blocks[-1].append(c)
        else:
            blocks.append([c])
    for block in blocks:
        words = re.sub(r"\s*\n?\s*//\s?", " ", " ".join(text(c) for c in block))
        kinds = PROMISE.findall(words)
        if not kinds:
            continue
        functions, owner = below(block)
        for kind in kinds:
            source.promises.append((block[0].start_point[0] + 1, kind, functions, owner))


def below(block: list) -> tuple[list[str], str]:
    """Returns the names of the functions that a comment is about, and the class if it stands in or before one.
    No name: all of the class, or of the file."""
    owner = class_around(block[0])
    if block[0].start_point[0] == 0:
        return [], ""
    before = block[0].prev_named_sibling
    if before is not None and before.end_point[0] == block[0].start_point[0] and before.type in BINDS:
        return [name_of(d)[1] for d in declarators(before)], owner
    names: list[str] = []
    node, line = block[-1].next_named_sibling, block[-1].end_point[0]
    while node is not None and node.start_point[0] <= line + 1 and (node.type != "comment" or names):
        if node.type == "comment" and node.start_point[0] != line:
            break
        inner = next((n for n in walk(node) if n.type in ("class_specifier", "struct_specifier") and n.child_by_field_name("body")), None)
        if inner is not None and not names:
            return [], text(inner.child_by_field_name("name")).split("<")[0]
        names += [name_of(d)[1] for d in declarators(node)] if node.type in BINDS else []
        line, node = node.end_point[0], node.next_named_sibling
    return names, owner


def means(use: Use, f: Function, owner: str) -> bool:
    makes = f.name == f.owner
    if f.file.startswith("plumb/core/error.") or use.form == "promise":
        return use.form == "promise"
    if use.form == "member":
        return bool(f.owner) and not makes
    if use.form == "free":
        return f.owner in ("", owner) or makes
    if use.form == "scoped":
        return f.owner in ("", use.scope) or makes
    return makes if use.form == "made" else not f.owner


class Code:
    def __init__(self, root: Path, replaced: dict[str, str] | None = None):
        files = sorted(p for end in ("h", "cpp") for p in (root / "plumb").rglob(f"*.{end}"))
        tests = re.compile(r"_test(ing)?\.(h|cpp)$")
        paths = [str(p.relative_to(root)) for p in files if not tests.search(p.name)]
        self.sources = {p: read(p, (replaced or {}).get(p) or (root / p).read_text()) for p in paths}
        self.named: dict[str, list[Function]] = collections.defaultdict(list)
        classes = set().union(*(source.classes for source in self.sources.values()))
        for source in self.sources.values():
            for function in source.functions:
                function.owner = function.owner if function.owner in classes else ""  # a namespace is no owner
                self.named[function.name].append(function)
        self._seen: dict[str, set[str]] = {}
        self._found: dict[tuple, list[Function]] = {}

    def includes(self, path: str) -> set[str]:
        """Returns the files that a file includes, and those that they include, and itself."""
        if path not in self._seen:
            seen, stack = {path}, [path]
            while stack:
                for other in self.sources[stack.pop()].includes:
                    if other in self.sources and other not in seen:
                        seen.add(other)
                        stack.append(other)
            self._seen[path] = seen
        return self._seen[path]

    def found(self, use: Use, path: str, owner: str) -> list[Function]:
        """Returns the functions that a name means in a method of `owner` (or a free function) in this file."""
        key = (use, path, owner)
        if key not in self._found:
            here = self.includes(path)
            known = [h for h in here if use.name in self.sources[h].declared]
            self._found[key] = [
                f
                for f in self.named.get(use.name, [])
                if use.count <= f.most
                and means(use, f, owner)
                and (
                    f.file in here
                    or use.form == "promise" and f.anywhere
                    or any((f.owner, f.name) in self.sources[h].methods and h in self.includes(f.file) for h in known)
                )
            ]
        return self._found[key]

    def reach(self, start: list[Function]) -> dict[str, Function]:
        """Returns the kinds that these functions can throw, each with a function that names it."""
        seen, stack, kinds = {id(f) for f in start}, list(start), {}
        while stack:
            f = stack.pop()
            for kind in f.kinds:
                kinds.setdefault(kind, f)
            for use in f.uses:
                for other in self.found(use, f.file, f.owner):
                    if id(other) not in seen and other.owner not in ACCESSORS and other.name != "to_string":
                        seen.add(id(other))
                        stack.append(other)
        return kinds

    def behind(self, header: str, names: list[str], owner: str) -> list[Function]:
        """Returns the functions that a comment is about."""
        whole = names or sorted(self.sources[header].declared)
        found = [f for n in whole for f in self.found(Use("promise", n, -1), header, owner)]
        own = [f for f in found if not owner or f.owner == owner]
        return own or [f for f in found if f.anywhere or not names]  # overrides; a struct of options: all of the file


def broken(code: Code) -> list[str]:
    """Returns a line for each promise that is not kept."""
    lines = []
    for path, source in code.sources.items():
        for line, kind, names, owner in source.promises:
            if (path, names[0] if names else "", kind) in ELSEWHERE:
                continue
            about = names[0] if len(names) == 1 else " or ".join(names) or owner or "the file"
            kinds = code.reach(code.behind(path, names, owner))
            if kind not in kinds:
                lines.append(f"{path}:{line}: {about}: Error({kind}) is promised, thrown are: {', '.join(sorted(kinds)) or 'none'}")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("root", nargs="?", type=Path, default=Path(__file__).resolve().parent.parent)
    parser.add_argument("--reach", metavar="NAME", help="print what functions of this name can throw, and where it is made")
    args = parser.parse_args()
    code = Code(args.root)
    if args.reach:
        for f in code.named[args.reach]:
            print(f.file, f.owner, {k: f"{g.file}: {g.name}" for k, g in code.reach([f]).items()})
        return 0
    lines = broken(code)
    print("\n".join(lines) if lines else f"contracts: {sum(len(s.promises) for s in code.sources.values())} promises are kept")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
