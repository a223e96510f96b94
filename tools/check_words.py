#!/usr/bin/env python3
"""Counts phrases in comments and docstrings that a reader cannot understand alone, in C++ and in Python.

    check_words.py [ROOT] [--list NAME]     prints the table, or each place that a row counts; exits with 1 beyond a bar
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tokenize
from pathlib import Path
from typing import NamedTuple

FOLDERS = ("plumb", "python", "tests", "tools", "examples", "benchmarks")
CPP = (".h", ".cpp", ".cu", ".cuh", ".cc")
WIDTH = 120  # columns that the formatters allow
TOKEN = re.compile(r'R"(\w*)\(.*?\)\1"|"(?:\\.|[^"\\\n])*"|(?<!\w)\'(?:\\.|[^\'\\\n])+\'|//[^\n]*|/\*.*?\*/', re.DOTALL)


class Comment(NamedTuple):
    path: str
    line: int
    lines: list[str]  # without the marks, indentation kept
    column: int  # column where the text begins

    @property
    def text(self) -> str:
        return " ".join(line.strip() for line in self.lines)


def pieces_of_cpp(code: str):
    """Yields (line, column, text) of each comment, a block comment as one piece."""
    for match in TOKEN.finditer(code):
        if match[0].startswith("/"):
            start = match.start()
            column = start - code.rfind("\n", 0, start) - 1
            yield code.count("\n", 0, start) + 1, column, match[0]


def pieces_of_python(code: str):
    for token in tokenize.generate_tokens(io.StringIO(code).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.start[1], token.string
    for node in ast.walk(ast.parse(code)):  # docstrings, those of attributes too
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.col_offset, '"""' + node.value.value


def comments_of(path: str, code: str) -> list[Comment]:
    """Returns the comments of a file. Lines of `//` or `#` that stand in the same column below each other are one comment."""
    found: list[Comment] = []
    code_lines = code.split("\n")
    for line, column, piece in (pieces_of_python if path.endswith(".py") else pieces_of_cpp)(code):
        if piece.startswith(("/*", '"""')):
            mark = 3 if piece.startswith('"') else 2
            found.append(Comment(path, line, piece[mark:].removesuffix("*/").split("\n"), column + 1 + mark))
            continue
        content = re.sub(r"^(///?<?|#+!?) ?", "", piece)
        last = found[-1] if found else None
        alone = not code_lines[line - 1][:column].strip()
        if last and alone and last.line + len(last.lines) == line and last.column == column and content:
            last.lines.append(content)
        else:
            found.append(Comment(path, line, [content], column))
    return found


def broken_line(comment: Comment) -> bool:
    """Returns whether a full line is followed by an orphan of few words after which the sentence goes on (clang-format)."""
    if comment.path.endswith(".py"):
        return False
    for before, orphan, after in zip(comment.lines, comment.lines[1:], comment.lines[2:]):
        word = (orphan.split() or [""])[0]
        full = comment.column + 3 + len(before) + 1 + len(word) > WIDTH - 5
        ended = before[-1:] + orphan[-1:]
        if full and len(orphan.split()) <= 3 and not set(ended) & set(".:;") and re.match(r" *[a-z(]", after):
            return True
    return False


def words(pattern: str, cpp: bool = True, python: bool = True):
    expression = re.compile(pattern)

    def count(comment: Comment) -> int:
        if not (python if comment.path.endswith(".py") else cpp):
            return 0
        return len(expression.findall(comment.text))

    return count


SENTENCE = r"(?:^|(?<=[.:;!?] ))"
UNCLEAR = (
    r"(?i)\b(?:as (?:it is )?(?:said|told)|said (?:above|below)|in vain|who(?:m)?ever|what (?:comes|came|becomes|became) of"
    r"|come[s]? to nothing|came to nothing|hand(?:s|ed)? on)\b"
)
BRITISH = r"(?i)\w*(?:(?:col|neighb|behavi|hon|fav)our|centred|cancelled|labelled|licence|(?:normal|initial|vector|recogn)is[ei])\w*"
# Name: (bar, number before comments were rewritten, count in one comment).
ROWS = {
    "begins with Of": (5, 346, words(r"^\s*of\b|" + SENTENCE + r"\s*Of\b")),
    "answer for return": (5, 129, words(r"(?i)\banswer(?:s|ed|ing)?\b")),
    "raises in C++": (0, 96, words(r"\bRaises\b|\braise[sd]? (?:an? |its |the |as )?(?:[Ee]rror|exception)", python=False)),
    "throws in Python": (0, 0, words(r"\bThrows\b|\bthrow[sn]? (?:an? |its |the |as )?(?:`?plumb\.)?(?:[Ee]rror|exception)", cpp=False)),
    "unclear phrase": (0, 52, words(UNCLEAR)),
    "begins with What, Where, Who": (5, 191, words(r"^\s*(?:What|Where|Whom?)\b(?![^.]*\?)")),
    "British spelling": (0, 4, words(BRITISH)),
    "broken by the formatter": (0, 4, broken_line),
}


def all_comments(root: Path) -> list[Comment]:
    """Returns the comments of every source file."""
    comments = []
    for folder in FOLDERS:
        for file in sorted((root / folder).rglob("*")):
            path = file.relative_to(root).as_posix()
            if file.suffix in (*CPP, ".py") and "/build/" not in path:
                comments += comments_of(path, file.read_text())
    return comments


def table(comments: list[Comment]) -> tuple[list[str], list[str]]:
    """Returns the lines of the table and the names of the rows beyond their bars."""
    lines, over = [f"{'comments':32} {'before':>6} {'now':>5} {'bar':>4}"], []
    for name, (bar, before, count) in ROWS.items():
        now = sum(map(count, comments))
        lines.append(f"{name:32} {before:>6} {now:>5} {bar:>4}{'  beyond' if now > bar else ''}")
        if now > bar:
            over.append(name)
    return lines, over


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("root", nargs="?", default=Path(__file__).resolve().parents[1], type=Path)
    parser.add_argument("--list", choices=ROWS, help="prints the places that this row counts")
    arguments = parser.parse_args()

    comments = all_comments(arguments.root)
    if arguments.list:
        for c in comments:
            if ROWS[arguments.list][2](c):
                print(f"{c.path}:{c.line}: {' '.join(c.text.split())[:150]}")
        return 0
    lines, over = table(comments)
    print("\n".join(lines))
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
