#!/usr/bin/env python3
"""Counts how large the house is: product and test lines, characters a line, rooms, folders, nouns of docs/design.md, and
includes from room to room.

    house_figures.py [COMMIT ...]       a row of Markdown for each; by default HEAD

Product lines are those of `plumb/**/*.{h,cpp}` but `*_test.cpp`, of `python/plumb/**/*.py` and of `python/bindings`. Headers that only
tests include (`*_testing.h`) are among them, and counted apart too.
"""

import re
import subprocess
import sys

import tables

HEAD = ["commit", "product lines", "of them for tests", "characters a line", "test lines", "rooms", "folders", "nouns", "includes", "pairs"]
PRODUCT = re.compile(r"plumb/.*(?<!_test)\.cpp|plumb/.*\.h|python/plumb/.*\.py|python/bindings/.*\.(h|cpp)")
TESTS = re.compile(r"plumb/.*_test\.cpp|(python/)?tests/.*\.(py|cpp|h|sh)")


def figures(commit: str) -> list[str]:
    names = subprocess.run(["git", "ls-tree", "-r", "--name-only", commit], capture_output=True, text=True, check=True).stdout.split("\n")
    wanted = [n for n in names if PRODUCT.fullmatch(n) or TESTS.fullmatch(n) or n in ("CMakeLists.txt", "docs/design.md")]
    asked = "".join(f"{commit}:{n}\n" for n in wanted).encode()
    data = subprocess.run(["git", "cat-file", "--batch"], input=asked, capture_output=True, check=True).stdout
    texts, at = {}, 0
    for name in wanted:
        end = data.index(b"\n", at)
        size = int(data[at:end].split()[2])
        texts[name] = data[end + 1 : end + 1 + size].decode(errors="replace")
        at = end + size + 2
    product = {n: t for n, t in texts.items() if PRODUCT.fullmatch(n)}
    lines = sum(t.count("\n") for t in product.values())
    helpers = sum(t.count("\n") for n, t in product.items() if re.search(r"(_testing|_for_test|/testing|/test_models|processes_test)\.h$", n))
    tests = sum(t.count("\n") for n, t in texts.items() if TESTS.fullmatch(n))
    rooms = re.findall(r"^plumb_room\((\w+)", texts["CMakeLists.txt"], re.M)
    folders = {n.rpartition("/")[0] for n in names if n.startswith("plumb/") and n.endswith((".h", ".cpp"))}
    nouns = re.split(r"^## ", texts["docs/design.md"], flags=re.M)[-2]  # the section before the decisions
    count = len(re.findall(r"^\| (?!noun|---)", nouns, re.M)) + len(re.findall(r"^\*\*\w", nouns, re.M))
    between = [
        (n.split("/")[1], target)
        for n, t in product.items()
        if n.startswith("plumb/") and "_testing." not in n
        for target in re.findall(r'^#include "plumb/(\w+)/', t, re.M)
        if target != n.split("/")[1]
    ]
    a_line = sum(map(len, product.values())) / lines
    return [commit, f"{lines:,}", f"{helpers:,}", f"{a_line:.1f}", f"{tests:,}", *map(str, (len(rooms), len(folders), count, len(between), len(set(between))))]


if __name__ == "__main__":
    if {"-h", "--help"} & set(sys.argv[1:]):
        sys.exit(print(__doc__))
    print(tables.table(HEAD, [figures(commit) for commit in sys.argv[1:] or ["HEAD"]]))
