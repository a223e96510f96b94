"""Tutorials and how-tos run as they stand on their pages; the site is built without a dead link."""

import doctest
import html
import importlib
import inspect
import os
import pathlib
import pkgutil
import re
import shutil
import subprocess
import sys

import pytest
import ranks
import torch.distributed.pipelining.schedules
from pages import DOCUMENTS, PAGES, ROOT, TITLE, fences

import plumb

BUILD = pathlib.Path(os.environ.get("PLUMB_BUILD_DIR", ROOT / "build"))
TORCHS = {"test_split_block_mask", "test_shape_prop_mismatch"}  # tests of torch's that pages name
ENVIRONMENT = {
    **os.environ,
    "PATH": os.pathsep.join([str(BUILD / "bin"), os.path.dirname(sys.executable), os.environ["PATH"]]),
    "OMP_NUM_THREADS": "1",
    "COLUMNS": "120",
    "NO_MKDOCS_2_WARNING": "1",
}


def run(command, folder):
    done = subprocess.run(command, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def outputs(page, folder):
    """(text on the page, text printed) of a page's blocks. Blocks with a title are files; the other Python blocks are one
    program; sh blocks run one after the other. A text block shows what the block before it printed."""
    blocks = fences(page.read_text())
    code = [body for language, info, body in blocks if language == "python" and not TITLE.search(info)]
    for _, info, body in blocks:
        if title := TITLE.search(info):
            (folder / title.group(1)).write_text(body)
    printed = {}
    if code:
        (folder / "page.py").write_text("\nprint('<end of block>', flush=True)\n".join(code))
        printed["python"] = iter(ranks.run_program(folder / "page.py", ENVIRONMENT).split("<end of block>\n"))
    last, found = "", []
    for language, info, body in blocks:
        if language == "python" and not TITLE.search(info):
            last = next(printed["python"])
        elif language == "sh":
            last = run(["bash", "-euo", "pipefail", "-c", body], folder)
        elif language == "cpp" and page.stem == "cpp":
            last = run([str(BUILD / "bin" / "plumb_tutorial")], folder)
        elif language == "text":
            found.append((body, last))
    return found


def test_the_page_about_moving_lists_every_schedule_of_the_engine():
    ours = {f"Schedule{name}" for name in plumb._C.schedule_names()}
    torchs = {name for name in vars(torch.distributed.pipelining.schedules) if name in ours}
    rows = (ROOT / "docs/howto/moving.md").read_text().splitlines()
    listed = [set(re.findall(r"`(Schedule\w+)`", row)) for row in rows if row.count("`Schedule") > 1]
    assert listed == [torchs, ours - torchs]


@pytest.mark.parametrize("page", ["differences.md", "appendix/reference_documents.md"])
def test_tests_that_a_page_names_exist(page):
    text = (ROOT / "docs" / page).read_text()
    python = "\n".join(p.read_text() for p in (ROOT / "python" / "tests").glob("*.py"))
    cpp = "\n".join(p.read_text() for p in (ROOT / "plumb").glob("*/**/*_test.cpp"))
    named = set(re.findall(r"`(test_\w+)`", text)) - TORCHS
    missing = [name for name in named if f"def {name}(" not in python]
    for suite, name in set(re.findall(r"\*(?:\w+/)?([A-Z]\w+)\.([A-Z]\w+)\*", text)):
        if not re.search(rf"TEST\w*\(\s*{suite},\s*{name}\)", cpp):
            missing.append(f"{suite}.{name}")
    assert not missing and len(named) > 20


@pytest.mark.parametrize("page", PAGES, ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_pages_run_and_print_what_they_say(page, tmp_path):
    for said, printed in outputs(page, tmp_path):
        printed = "".join(line.rstrip() + "\n" for line in printed.rstrip().splitlines())
        same = doctest.OutputChecker().check_output(said, printed, doctest.ELLIPSIS)
        assert same, f"{page.name} says\n{said}\nand printed is\n{printed}"


def test_the_cpp_tutorial_is_the_example_that_is_built_and_run():
    page = (ROOT / "docs" / "tutorials" / "cpp.md").read_text()
    programs = [body for language, _, body in fences(page) if language == "cpp"]
    assert programs == [(ROOT / "examples" / "tutorial.cpp").read_text()]


def test_tests_that_pages_name_are_there():
    """*Suite.Name* and `test_name` on a page stand in a test's source."""
    sources = "\n".join(
        p.read_text() for pattern in ("plumb/**/*_test.cpp", "plumb/**/test*.h", "python/tests/*.py") for p in ROOT.glob(pattern)
    )
    cpp = {f"{s}.{n}" for s, n in re.findall(r"^(?:TEST|TEST_F|TEST_P|TYPED_TEST|RC_GTEST_PROP)\(\s*(\w+),\s*(\w+)", sources, re.M)}
    python = set(re.findall(r"def (test_\w+)", sources)) | {p.stem for p in (ROOT / "python" / "tests").glob("test_*.py")}
    python |= TORCHS
    gone = []
    for page in DOCUMENTS:
        text = page.read_text()
        gone += [(page.name, t) for t in re.findall(r"\*(?:\w+/)?([A-Z]\w+\.[A-Z]\w+)\*", text) if t not in cpp]
        gone += [(page.name, t) for t in re.findall(r"[*`](test_\w+)(?:\.py)?(?:\[[^\]]*\])?[*`]", text) if t not in python]
    assert not gone


def test_files_that_pages_name_are_there():
    made_up = {"benchmarks/x.py", "benchmarks/x_bench.cpp", "plumb/ROOM/room.cmake", "plumb/graph/passes/my_pass.cpp"}
    named = {
        (page.name, file)
        for page in DOCUMENTS
        for file in re.findall(r"`((?:plumb|python|tests|tools|examples|benchmarks|docs|cmake)/[\w./-]+\.\w+)`", page.read_text())
    }
    gone = {(page, file) for page, file in named if not (ROOT / file).exists()}
    assert len(named) > 100 and {file for _, file in gone} <= made_up | {"docs/gpu.md"}, gone  # the latter is of a GPU


def test_a_header_becomes_text_and_declarations_without_what_is_private(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import docs_headers

    header = tmp_path / "plumb" / "room" / "x.h"
    header.parent.mkdir(parents=True)
    header.write_text("""// Boxes of a size.
//
//   Box box(3);
#pragma once

#include <vector>

namespace plumb {
namespace room_detail {
int hidden();
}  // namespace room_detail

// Holds box_size things. Throws Error for a size < 1.
class Box {
 public:
  explicit Box(int size) : size_(size) {
    if (size < 1) throw 1;
  }
  int size() const { return size_; }

 private:
  int size_ = 0;
};

// Both return a number.
inline int one() { return 1; }
int two(const Box& box, std::vector<int> v = {1, 2});

}  // namespace plumb
""")
    page = docs_headers.page(header)
    assert page == """## x.h

Boxes of a size.

```cpp
Box box(3);
```

`#include "plumb/room/x.h"`

### `Box`

Holds `box_size` things. Throws Error for a size &lt; 1.

```cpp
class Box {
 public:
  explicit Box(int size);
  int size() const;
};
```

### `one, two`

Both return a number.

```cpp
inline int one();
int two(const Box& box, std::vector<int> v = {1, 2});
```"""


def test_members_of_graphs_on_their_page_are_there():
    page = (ROOT / "docs" / "design" / "graph.md").read_text()
    graph = plumb.parse_graph('graph {\n  %x: f32[2] = placeholder "x"\n  output(%x)\n}\n')
    node = graph.nodes[0]
    for name, thing in (("Graph", graph), ("Node", node), ("Value", node.results[0])):
        row = re.search(rf"^\| `{name}` \| (.*) \|$", page, re.M).group(1)
        listed = set(re.findall(r"`(\w+)(?=[(`])", row)) - {"len", "str"}
        assert listed == {m for m in dir(thing) if not m.startswith("_")}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    run(["mkdocs", "build", "-q", "-d", str(folder)], ROOT)
    return folder


@pytest.mark.skipif(shutil.which("mkdocs", path=ENVIRONMENT["PATH"]) is None, reason="the site's tools are not installed")
def test_the_site_is_built_without_a_dead_link(site, tmp_path):
    for page in site.rglob("*.html"):
        # Nothing is loaded from elsewhere: the site works without a network.
        assert not re.search(r'(?:<script[^>]*src|<link[^>]*rel="stylesheet"[^>]*href|<img[^>]*src)="https?:', page.read_text()), page
    chromium = shutil.which("chromium")
    if chromium is None:
        return
    searched = subprocess.run(
        [chromium, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
         f"--user-data-dir={tmp_path / 'browser'}", "--dump-dom", "--virtual-time-budget=20000", f"{(site / 'index.html').as_uri()}?q=unit"],
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert "matching documents" in searched.stdout, "the search box finds nothing in a page that was opened as a file"


def public_names():
    """(module, name) of all that the package has to offer."""
    found = []
    for info in pkgutil.walk_packages(plumb.__path__, "plumb."):
        if not any(part.startswith("_") for part in info.name.split(".")):
            module = importlib.import_module(info.name)
            assert hasattr(module, "__all__"), f"{info.name} does not say what is public"
            found += [(info.name, name) for name in module.__all__]
    own = [name for name, thing in vars(plumb).items() if not name.startswith("_") and not inspect.ismodule(thing)]
    return found + [("plumb", name) for name in own]


@pytest.mark.skipif(shutil.which("mkdocs", path=ENVIRONMENT["PATH"]) is None, reason="the site's tools are not installed")
def test_the_reference_has_an_entry_for_every_public_name_and_option(site):
    entries = {page.stem: set(re.findall(r'id="([\w.]+)"', page.read_text())) for page in (site / "reference/python").glob("*.html")}
    shown = {
        id(getattr(importlib.import_module(module), name))
        for module, name in public_names()
        if f"{module}.{name}" in entries.get(module, ())
    }
    names = public_names()
    missing = [f"{m}.{n}" for m, n in names if id(getattr(importlib.import_module(m), n)) not in shown]
    missing = [name for name in missing if name.removeprefix("plumb.") != "core.functional"]  # a module with its own page
    assert len(names) > 150 and not missing
    page = html.unescape(re.sub(r"<[^>]*>", "", (site / "reference/command.html").read_text()))
    commands = re.findall(r"^  (\w+)", run(["plumb", "--help"], site).partition("Subcommands:\n")[2].partition("\n\n")[0], re.M)
    assert "train" in commands
    for command in commands:
        assert run(["plumb", command, "--help"], site) in page, command
