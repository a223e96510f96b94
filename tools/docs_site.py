"""What mkdocs.yml cannot say: pages that stand elsewhere or are generated, and docstrings as Markdown.

README.md is the site's front page, HACKING.md and CHANGELOG.md are pages; the C++ reference comes from the headers, the Python
reference from the docstrings. Links to files outside of docs/ that are no pages become their names."""

import pathlib
import posixpath
import re
import sys

import griffe
from mkdocs.structure.files import File

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))

import docs_headers  # noqa: E402
import draw_house  # noqa: E402

# Files of the repository that are pages of the site.
OUTSIDE = {"README.md": "index.md", "HACKING.md": "hacking.md", "CHANGELOG.md": "changelog.md"}

# Modules of the Python reference, and what a page shows where that is not all.
MODULES = {
    "plumb": ["capture", "GraphModule", "report", "load_pt2", "save_pt2", "Recorder", "History", "read_history",
              "Trainer", "TrainResult"],
    "plumb.transforms": [],
    "plumb.functional": [],
    "plumb.nn": [],
    "plumb.optim": [],
    "plumb.formats": [],
    "plumb.constraints": [],
    "plumb.scale": [],
    "plumb.parameter": [],
    "plumb.core.functional": [],
    "plumb.analysis": [],
    "plumb.utils": [],
    "plumb.pipelining": [],
    "plumb.pipelining.schedules": [],
    "plumb.pipelining.stage": [],
    "plumb.pipelining.microbatch": [],
}


_SCHEDULES = (
    "Every row of [the list of schedules](../../pipeline.md#schedules) is a class `ScheduleNAME`. A schedule with one stage a rank is a "
    "`PipelineScheduleSingle`, any other a `PipelineScheduleMulti`: see "
    "[plumb.pipelining.schedules](plumb.pipelining.schedules.md).\n\n"
)
# Classes of the extension module, and those that are made at import, have no docstrings in a file.
_NATIVE = {
    "plumb.pipelining": _SCHEDULES,
    "plumb.pipelining.schedules": _SCHEDULES,
    "plumb": "`plumb.Graph`, its nodes and values are described in [Graph](../../design/graph.md#in-python). `plumb.Error` is the "
    "exception of everything here: a `RuntimeError` with `kind`, `where` and `remedy`.\n\n",
}


def _rooms() -> list[str]:
    return draw_house.listed_rooms(ROOT)


def _reference() -> dict[str, str]:
    pages = {}
    python, cpp = [], []
    for module, members in MODULES.items():
        uri = f"reference/python/{module}.md"
        python.append(f"- [{module}](python/{module}.md)")
        options = "    options:\n      show_root_heading: false\n      heading_level: 2\n"
        options += f"      members: {members}\n" if members else ""
        pages[uri] = f"# {module}\n\n{_NATIVE.get(module, '')}::: {module}\n{options}"
    for room in _rooms():
        about = (ROOT / "plumb" / room / "README.md").read_text()
        about = re.sub(r"^#.*\n+", "", about)
        pages[f"reference/cpp/{room}.md"] = docs_headers.room_page(ROOT, room, _links(about, f"plumb/{room}/README.md"))
        cpp.append(f"- [plumb/{room}](cpp/{room}.md)")
    pages["reference/index.md"] = (
        "# Reference\n\nThe Python pages come from the docstrings, the C++ pages from the comments of the headers.\n\n"
        "## Python\n\n" + "\n".join(python) + "\n\n## C++\n\nA page for each room, from the ground up.\n\n" + "\n".join(cpp) + "\n"
    )
    return pages


def _links(text: str, source: str) -> str:
    """Links of a page that stands at `source` of the repository, as the site has them: to pages, or to nothing."""
    page = OUTSIDE.get(source, source.removeprefix("docs/"))

    def mend(found: re.Match) -> str:
        bang, words, target = found.groups()
        path, _, anchor = target.partition("#")
        if "://" in target or not path:
            return found.group()
        full = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        there = OUTSIDE.get(full) or (full.removeprefix("docs/") if full.startswith("docs/") and full != "docs/README.md" else None)
        if there is None:
            named = words.strip("`")
            return words if named == full or posixpath.basename(full) == named else f"{words} (`{full}`)"
        relative = posixpath.relpath(there, posixpath.dirname(page) or ".")
        return f"{bang}[{words}]({relative}{'#' + anchor if anchor else ''})"

    fence = re.compile(r"(^```.*?^```$|`[^`\n]+`(?!\]))", re.M | re.S)
    parts = fence.split(text)
    return "".join(p if i % 2 else re.sub(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)", mend, p) for i, p in enumerate(parts))


def on_config(config):
    reference = [{"Overview": "reference/index.md"}]
    reference += [{"Python": [{m: f"reference/python/{m}.md"} for m in MODULES]}]
    reference += [{"C++": [{f"plumb/{r}": f"reference/cpp/{r}.md"} for r in _rooms()]}]
    for entry in config.nav:
        if "Reference" in entry:
            entry["Reference"] = reference
    if (ROOT / "CHANGELOG.md").exists():
        config.nav[0] = {"Home": ["index.md", {"Changelog": "changelog.md"}]}
    return config


def on_files(files, config):
    for source, page in OUTSIDE.items():
        if (ROOT / source).exists():
            files.append(File.generated(config, page, content=_links((ROOT / source).read_text(), source)))
    for uri, text in _reference().items():
        files.append(File.generated(config, uri, content=text))
    return files


def on_page_markdown(markdown, page, config, files):
    if page.file.generated_by:
        return markdown
    return _links(markdown, f"docs/{page.file.src_uri}")


class Docstrings(griffe.Extension):
    """The docstrings' few roles and literal blocks of reStructuredText, as Markdown."""

    def on_object(self, *, obj, **kwargs):
        if obj.is_alias or obj.docstring is None:
            return
        text = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", obj.docstring.value)
        obj.docstring.value = re.sub(r"(^|\s)::[ ]*\n\n", lambda m: (":" if m.group(1) == "" else m.group(1)) + "\n\n", text)
