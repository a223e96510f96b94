"""Hooks for what mkdocs.yml cannot express: pages that stand elsewhere or are generated, and docstrings as Markdown.

README.md is the site's front page, HACKING.md and CHANGELOG.md are pages; the C++ reference comes from the headers, the Python
reference from the docstrings. Links to files outside of docs/ that are no pages become their names."""

import pathlib
import posixpath
import re
import shutil
import subprocess
import sys

import griffe
from mkdocs.structure.files import File

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))

import docs_headers  # noqa: E402
import draw_house  # noqa: E402

# Files of the repository that are pages of the site.
OUTSIDE = {"README.md": "index.md", "HACKING.md": "hacking.md", "CHANGELOG.md": "changelog.md"}

def _modules() -> list[str]:
    """Public modules of the package that have more in them than other modules."""
    package = ROOT / "python"
    found = []
    for file in sorted((package / "plumb").rglob("*.py")):
        path = file.relative_to(package).with_suffix("").parts
        path = path[:-1] if path[-1] == "__init__" else path
        if not any(part.startswith("_") for part in path) and path != ("plumb", "core"):
            found.append(".".join(path))
    return sorted(found)


MODULES = _modules()
# The names that `plumb` itself imports; layers have their own page.
_TOP = re.findall(r"^from \.\w[\w.]* import \w+ as (\w+)", (ROOT / "python/plumb/__init__.py").read_text(), re.M)
_MEMBERS = {
    "plumb": [name for name in _TOP if name != "__version__"],
    # Convolutions and pools are imported; its __all__ is made when it runs.
    "plumb.functional": re.findall(
        r"^(?:from \._windows import \w+ as|def) ([a-z]\w*)", (ROOT / "python/plumb/functional/__init__.py").read_text(), re.M
    ),
}
_EVERY_SCHEDULE = """
## Every schedule

::: plumb.pipelining._schedule_base._PipelineSchedule
    options:
      show_root_heading: false
      heading_level: 3
"""


def _rooms() -> list[str]:
    return draw_house.listed_rooms(ROOT)


def _reference() -> dict[str, str]:
    pages = {}
    python, cpp = [], []
    for module in MODULES:
        uri = f"reference/python/{module}.md"
        python.append(f"- [{module}](python/{module}.md)")
        options = "    options:\n      show_root_heading: false\n      heading_level: 2\n"
        options += f"      members: {_MEMBERS[module]}\n" if module in _MEMBERS else ""
        more = _EVERY_SCHEDULE if module == "plumb.pipelining.schedules" else ""
        pages[uri] = f"# {module}\n\n::: {module}\n{options}{more}"
    pages["reference/command.md"] = _command_page()
    for room in _rooms():
        about = (ROOT / "plumb" / room / "README.md").read_text()
        about = re.sub(r"^#.*\n+", "", about)
        pages[f"reference/cpp/{room}.md"] = docs_headers.room_page(ROOT, room, _links(about, f"plumb/{room}/README.md"))
        cpp.append(f"- [plumb/{room}](cpp/{room}.md)")
    pages["reference/index.md"] = (
        "# Reference\n\nThe Python pages come from the docstrings, the C++ pages from the comments of the headers, the command's page "
        "from its help.\n\n## Command\n\n[plumb](command.md): every command and option.\n\n"
        "## Python\n\n" + "\n".join(python) + "\n\n## C++\n\nA page for each room, from the ground up.\n\n" + "\n".join(cpp) + "\n"
    )
    return pages


def _command_page() -> str:
    """Returns every command's own --help."""
    command = shutil.which("plumb") or str(ROOT / "build" / "bin" / "plumb")
    if not pathlib.Path(command).exists():
        raise SystemExit("docs: the page of the command is made by the command, which is not built: make")

    def help_of(*name: str) -> str:
        return subprocess.run([command, *name, "--help"], capture_output=True, text=True, check=True).stdout

    names = re.findall(r"^  (\w+)", help_of().partition("Subcommands:\n")[2].partition("\n\n")[0], re.M)
    parts = [f"## plumb {name}\n\n```text\n{help_of(name)}```\n" for name in names]
    return "\n".join(["# The command\n", f"```text\n{help_of()}```\n", *parts])


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
    reference = [{"Overview": "reference/index.md"}, {"Command": "reference/command.md"}]
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
