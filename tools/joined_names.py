"""Finds names that two files of a room give to different things of their own. The files of a room are compiled as one
by default (PLUMB_JOINED), so what a file keeps to itself - in an unnamed namespace, or static - needs a name of its own
in the room. Functions may share a name if their parameters differ. Reads what clang-format writes: declarations of a
namespace start in the first column."""

import collections
import itertools
import pathlib
import re


def _stripped(text: str) -> str:
    """Returns the text without raw strings and comments, line for line; the comments that close namespaces stay."""
    text = re.sub(r'R"(\w*)\((.*?)\)\1"', lambda m: '""' + "\n" * m.group(2).count("\n"), text, flags=re.S)
    return re.sub(r"//(?! namespace)[^\n]*", "", text)


def _parameter_types(text: str) -> set[tuple[str, ...]]:
    """Returns the types of a declaration's parameters from its opening parenthesis on, without namespaces and names:
    all of them, and those without a default. A call may give either."""
    types, required, depth, start = [], None, 0, 1
    for i, c in enumerate(text):
        depth += (c in "(<{[") - (c in ")>}]")
        if depth == 0 or (depth == 1 and c == ","):
            declared, default, _ = text[start:i].partition("=")
            if default and required is None:
                required = tuple(types)
            types.append(re.sub(r"\w+::|(?<=[\s&*])\w+$", "", declared.strip()).strip())
            start = i + 1
        if depth == 0:
            break
    return {tuple(types), tuple(types) if required is None else required}


def local_names(text: str) -> list[tuple[str, int, object]]:
    """(name, line, kind) of what only this file sees. Things of one name and one kind clash: a function's kind is its
    parameters' types, an alias's what it stands for (equal ones do not clash), anything else's None."""
    found, spaces = [], []
    lines = _stripped(text).splitlines()
    for number, line in enumerate(lines, 1):
        if opened := re.match(r"(?:inline )?namespace( [\w:]+)? \{", line):
            spaces.append(opened.group(1))
        elif line.startswith("}  // namespace"):
            del spaces[-1:]
        if not (None in spaces or line.startswith("static ")) or not re.match(r"[A-Za-z_]", line):
            continue
        if re.match(r"template|(inline )?namespace|using namespace|using [\w:]+;|[A-Z][A-Z_]+\(|\w+:$", line):
            continue
        space = "".join(s or "" for s in spaces)
        if alias := re.match(r"using (\w+) = (.*)", line):
            found.append((space, alias.group(1), number, "= " + alias.group(2)))
            continue
        own_type = re.match(r"(?:struct|class|enum class|enum|union) (\w+)( final)?( : .*| \{.*|;)$", line)
        if own_type:
            if own_type.group(3) != ";":
                found.append((space, own_type.group(1), number, None))
            continue
        flat = line
        while re.search(r"<[^<>]*>", flat):
            flat = re.sub(r"<[^<>]*>", "", flat)
        declared = re.match(r"[^=({;\[]*?(?<![\w:])([A-Za-z_]\w*)\s*([=({;\[])", flat)
        if not declared or "operator" in flat:
            continue
        name = declared.group(1)
        if declared.group(2) == "(" and not re.match(r"(static )?(const|constexpr) [A-Z]\w+ \w+\(", flat):
            rest = " ".join(lines[number - 1 : number + 9])
            opening = re.search(rf"\b{name}\(", rest).end() - 1
            found.append((space, name, number, frozenset(_parameter_types(rest[opening:]))))
            continue
        found.append((space, name, number, None))
        found += [(space, more, number, None) for more in re.findall(r", (k[A-Z]\w*) =", flat)]
    return found


def _clash(kinds: list[object]) -> bool:
    if all(isinstance(k, frozenset) for k in kinds):
        return any(a & b for a, b in itertools.combinations(kinds, 2))
    return len(set(kinds)) > 1 or None in kinds


def clashes(root: pathlib.Path) -> list[str]:
    """Returns one line a name, of rooms, their tests, the command, the extension module and the demo."""
    joined = collections.defaultdict(list)
    for file in sorted((root / "plumb").rglob("*.cpp")):
        joined[file.relative_to(root).parts[1], file.name.endswith("_test.cpp")].append(file)
    joined["bindings", False] = sorted((root / "python" / "bindings").glob("*.cpp"))
    joined["demo", False] = sorted((root / "examples").glob("demo*.cpp"))
    found = []
    for files in joined.values():
        names = collections.defaultdict(dict)
        for file in files:
            for space, name, number, kind in local_names(file.read_text()):
                names[space, name].setdefault(file, []).append((number, kind))
        for (_, name), places in names.items():
            # Within one file the compiler looks.
            if len(places) > 1 and _clash([k for uses in places.values() for k in {kind for _, kind in uses}]):
                at = ", ".join(f"{file.relative_to(root)}:{uses[0][0]}" for file, uses in places.items())
                found.append(
                    f"{at}: '{name}' is two things of one room, whose files are compiled as one: give one of them "
                    "another name, or share it in a header."
                )
    return found
