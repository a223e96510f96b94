"""Shared by the tests of pages: where they are, and their fenced blocks."""

import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "HACKING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES = sorted(p for folder in ("tutorials", "howto") for p in (ROOT / "docs" / folder).glob("*.md") if p.stem != "extend")
TITLE = re.compile(r'title="([\w.]+)"')


def fences(text):
    """(language, the rest of its line, body) of every fenced block."""
    return re.findall(r"^```(\w*)([^\n]*)\n(.*?)^```$", text, re.M | re.S)
