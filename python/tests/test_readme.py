"""README.md says what is: its code runs, its links lead somewhere."""

import re
import subprocess
import sys

import pytest
from pages import DOCUMENTS, ROOT, fences

import plumb

README = (ROOT / "README.md").read_text()
def blocks(language):
    return [body for found, _, body in fences(README) if found == language]


def test_cpp_block_is_the_quickstart_that_is_built_and_run():
    assert blocks("cpp") == [(ROOT / "examples" / "quickstart.cpp").read_text()]


def test_python_blocks_run(tmp_path):
    code = "\n".join(blocks("python"))
    script = tmp_path / "quickstart.py"
    script.write_text(code)
    done = subprocess.run([sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert 'get_attr "0.weight"' in done.stdout and "aten::linear -> plumb::linear" in done.stdout
    assert (tmp_path / "net.pt2").stat().st_size and (tmp_path / "trained.pt").stat().st_size


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda d: d.name)
def test_links_lead_to_files(document):
    text = re.sub(r"^```.*?^```", "", document.read_text(), flags=re.M | re.S)  # a lambda of C++ is no link
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        if "://" not in target:
            assert (document.parent / target).exists(), f"{document.name} links to {target}"


@pytest.mark.parametrize("document", [ROOT / "README.md", ROOT / "docs" / "design" / "graph.md"], ids=lambda d: d.name)
def test_graphs_in_the_text_are_graphs(document):
    graphs = re.findall(r"^```\n(graph \{\n.*?)^```$", document.read_text(), re.M | re.S)
    assert graphs
    for text in graphs:
        assert plumb.parse_graph(text).to_string() == text
