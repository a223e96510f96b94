"""Reference pages of the C++ headers: a room's page has each of its installed headers, with its comments as text."""

import pathlib
import re

_SKIP = re.compile(r"test|_internal\.h$|^kernel_")
_LIST = re.compile(r"(\d+\.|-) ")


def _escaped(text: str) -> str:
    """Returns names as code; characters that mean something in Markdown as themselves."""
    parts = re.split(r"(`[^`]*`)", text)
    for i in range(0, len(parts), 2):
        words = re.split(r"((?<![\w.])~?[A-Za-z]\w*(?:::~?\w+(?:\.\w+)?)*(?:\(\))?)", parts[i])
        for j, word in enumerate(words):
            if j % 2 and ("_" in word or "::" in word or word.endswith("()")):
                words[j] = f"`{word}`"
            else:
                words[j] = re.sub(r"([*\[\]_\\])", r"\\\1", word).replace("<", "&lt;")  # no backslash stands for "<"
        parts[i] = "".join(words)
    return "".join(parts)


def prose(comment: list[str]) -> str:
    """Returns a comment's lines as Markdown: indented paragraphs are code, lists are lists, all else is text."""
    blocks: list[str] = []
    for paragraph in "\n".join(comment).split("\n\n"):
        lines = [line for line in paragraph.split("\n") if line.strip()]
        if lines and all(line.startswith("  ") for line in lines) and not _LIST.match(lines[0].strip()):
            blocks.append("```cpp\n" + "\n".join(line[2:] for line in lines) + "\n```")
            continue
        items = [""]
        for line in (line.strip() for line in lines):
            if _LIST.match(line):
                items.append(line)
            else:
                items[-1] += ("\n    " if len(items) > 1 else "\n") + line
        blocks.append("\n\n".join(filter(None, [_escaped(items[0].strip()), "\n".join(map(_escaped, items[1:]))])))
    return "\n\n".join(blocks)


def _mask(code: str) -> str:
    """Returns the code with comments and literals blanked out, so that braces can be counted."""
    blank = lambda m: re.sub(r"[^\n]", " ", m.group())  # noqa: E731
    return re.sub(r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])+'", blank, code, flags=re.S)


def _closing(mask: str, opening: int) -> int:
    depth = 0
    for i in range(opening, len(mask)):
        depth += {"{": 1, "}": -1}.get(mask[i], 0)
        if depth == 0:
            return i
    raise ValueError("a brace is not closed")


def _without_bodies(code: str) -> str:
    """Functions that are defined in the header show their signature."""
    out, at, mask = "", 0, _mask(code)
    for found in re.finditer(r"\)[\w\s]*?(:\s[^;{}]*?[)}]\s*)?\{", mask):
        if found.start() < at:
            continue
        head = mask[mask.rfind("\n", 0, found.start()) + 1 : found.start()]
        if re.match(r"\s*(if|for|while|switch)\b", head):
            continue
        out += code[at : found.start()] + re.sub(r":\s.*|\{$", "", found.group(), flags=re.S).rstrip() + ";"
        at = _closing(mask, found.end() - 1) + 1
    return out + code[at:]


def _without_private(code: str) -> str:
    """Classes without their private members."""
    kept: list[str] = []
    hidden = None  # the indentation of the `private:` that hides the line
    for line in code.split("\n"):
        indent = len(line) - len(line.lstrip())
        access = re.match(r"\s*(public|protected|private):", line)
        if hidden is not None and ((access and indent <= hidden) or (line.strip().startswith("}") and indent < hidden)):
            hidden = None
            while kept and not kept[-1].strip():
                kept.pop()
        if access and access.group(1) == "private" and hidden is None:
            hidden = indent
        if hidden is None:
            kept.append(line)
    return "\n".join(kept)


def names(code: str) -> list[str]:
    """Those that a group of declarations declares."""
    found = []
    mask = _mask(code)
    while "{" in mask:
        opening = mask.index("{")
        mask = mask[:opening] + ";" + mask[_closing(mask, opening) + 1 :]
    for part in mask.split(";"):
        part = re.sub(r"template\s*<[^()]*?>\s*(?=\w)|requires\s*\(.*?\)\s*(?=[\w:]+[\s<])|\[\[.*?\]\]", "", part, flags=re.S).strip()
        patterns = (r"(?:class|struct|enum class|enum)\s+(\w+)", r"using\s+(\w+)\s*=", r"#define\s+(\w+)")
        declared = next((m for p in patterns if (m := re.match(p, part))), None)
        declared = declared or re.search(r"(operator\s*\S+?|~?\w+)\s*\(", part) or re.search(r"(\w+)\s*(?:=|$|\[)", part)
        if declared and declared.group(1) not in found:
            found.append(declared.group(1))
    return found


def _declaration_end(mask: str, at: int) -> int:
    """Past the `;` or the closing brace of the declaration that begins at `at`."""
    depth = 0
    i = at
    while i < len(mask):
        depth += {"(": 1, ")": -1}.get(mask[i], 0)
        if depth == 0 and mask[i] == ";":
            return i + 1
        if depth == 0 and mask[i] == "{":
            i = _closing(mask, i)
            # A type or an initializer goes on to its semicolon, a function's body does not.
            if not re.match(r"\s*[;,]", mask[i + 1 :]):
                return i + 1
        i += 1
    return len(mask)


def _groups(body: str):
    """(comment, code) of each group of declarations in the namespaces. A group ends at a blank line or at a comment."""
    mask = _mask(body)
    comment: list[str] = []
    code: list[str] = []
    at = 0
    while at < len(body):
        line = body[at : body.find("\n", at) + 1 or len(body)]
        opened = re.match(r"\s*(?:inline )?namespace\s*([\w:]*)\s*\{", mask[at:])
        is_comment = re.match(r"\s*//", line)
        if (not line.strip() or is_comment or opened) and (code or (comment and not is_comment)):
            yield comment, "\n".join(code)
            comment, code = [], []
        if opened:
            hidden = opened.group(1).endswith("detail") or not opened.group(1)
            at += opened.end()
            if hidden:
                at = body.find("\n", _closing(mask, at - 1))
        elif is_comment:
            comment.append(re.sub(r"^\s*// ?", "", line).rstrip("\n"))
            at += len(line)
        elif not line.strip():
            at += len(line)
        elif line.startswith("}"):
            at += len(line)
        else:
            end = _declaration_end(mask, at)
            rest = body.find("\n", end)
            end = rest if rest >= 0 and not mask[end:rest].strip() else end
            code.append(body[at:end])
            at = end + 1
    if code:
        yield comment, "\n".join(code)


def page(header: pathlib.Path) -> str:
    """Returns a header's section of its room's page."""
    text = header.read_text()
    top, _, body = text.partition("#pragma once")
    about = [re.sub(r"^// ?", "", line) for line in top.strip().split("\n")]
    parts = [f"## {header.name}", prose(about), f"`#include \"{'/'.join(header.parts[header.parts.index('plumb') :])}\"`"]
    body = re.sub(r"^\s*#(?:[^\n]*\\\n)*[^\n]*\n", "\n", body, flags=re.M)
    for comment, code in _groups(body):
        if not code:
            parts.append(prose(comment))
            continue
        shown = _without_bodies(_without_private(code))
        title = ", ".join(names(code))
        parts += [f"### `{title}`" if title else "", prose(comment), f"```cpp\n{shown}\n```"]
    return "\n\n".join(p for p in parts if p)


def room_page(root: pathlib.Path, room: str, about: str) -> str:
    headers = sorted(h for h in (root / "plumb" / room).rglob("*.h") if not _SKIP.search(h.name) and h.parent.name != "gloo_seam")
    return f"# plumb/{room}\n\n{about}\n\n" + "\n\n".join(page(h) for h in headers) + "\n"
