"""Tables of pages, as Markdown."""

import re


def table(head, rows):
    """Returns a table. The cells of a column whose head ends in ":" are numbers, which stand to the right."""
    lines = [[name.rstrip(":") for name in head], *rows]
    text = ["| " + " | ".join(map(str, line)) + " |" for line in lines]
    text.insert(1, "|" + "|".join("---:" if name.endswith(":") else "---" for name in head) + "|")
    return "\n".join(text)


def put(text, name, section):
    """Returns the page with a section between the marks `<!-- NAME -->` and `<!-- end of NAME -->` replaced."""
    marks = rf"(<!-- {re.escape(name)} -->\n).*?(<!-- end of {re.escape(name)} -->)"
    return re.sub(marks, lambda m: f"{m[1]}\n{section.strip()}\n\n{m[2]}", text, flags=re.S)
