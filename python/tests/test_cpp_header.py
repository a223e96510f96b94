"""plumb/plumb.h gives a C++ program everything, and the compiler says what a model lacks that plumb::capture cannot take."""

import json
import os
import pathlib
import re
import shlex
import subprocess

import pytest
from pages import fences

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(os.environ.get("PLUMB_BUILD_DIR", ROOT / "build"))
HEADER = (ROOT / "plumb" / "plumb.h").read_text()

BAD = r"""
#include "plumb/capture/capture.h"

struct NoModule {
  at::Tensor forward(at::Tensor x) { return x; }
};
struct NoForward : torch::nn::Module {};
struct TakesNumber : torch::nn::Module {
  at::Tensor forward(const std::string& text) { return {}; }
};
struct TakesTwo : torch::nn::Module {
  at::Tensor forward(at::Tensor x, at::Tensor y) { return x; }
};
struct ReturnsNumber : torch::nn::Module {
  std::string forward(at::Tensor x) { return ""; }
};
struct FineImpl : torch::nn::Module {
  std::vector<at::Tensor> forward(at::Tensor x) { return {x}; }
};
TORCH_MODULE(Fine);

void take(at::Tensor x) {
  MODEL
}
"""


def compiled(text, tmp_path):
    """Returns the compiler's messages, with the flags of the quickstart."""
    commands = json.loads((BUILD / "compile_commands.json").read_text())
    command = next(shlex.split(c["command"]) for c in commands if c["file"].endswith("examples/quickstart.cpp"))
    command = command[: command.index("-o")]
    (tmp_path / "x.cpp").write_text(text)
    done = subprocess.run([*command, "-fsyntax-only", str(tmp_path / "x.cpp")], cwd=BUILD, capture_output=True, text=True)
    return done.returncode, done.stderr


def page_fragments():
    """Returns a function of the C++ of pages that show no whole program."""
    pages = [(ROOT / "docs" / page).read_text() for page in ("howto/pt2.md", "howto/fold.md", "history.md")]
    fragments = [f"{{ {body} }}" for page in pages for language, _, body in fences(page) if language == "cpp"]
    assert len(fragments) == 3
    around = "std::shared_ptr<plumb::GraphModule> module, scaled; at::Tensor x, loss; torch::optim::SGD optimizer({x}, 1.0);"
    return f'#include "plumb/plumb.h"\nvoid page() {{ {around} {" ".join(fragments).replace("(...)", "(;;)")} }}\n'


def test_the_header_has_what_documents_and_examples_include():
    files = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").glob("*.cpp")]
    named = {header for file in files for header in re.findall(r'#include "(plumb/[^"]+)"', file.read_text())}
    assert len(named) > 10
    assert not named - set(re.findall(r'#include "(plumb/[^"]+)"', HEADER)) - {"plumb/plumb.h"}


def test_the_header_declares_what_errors_and_the_examples_of_headers_call():
    files = [f for f in (ROOT / "plumb").rglob("*") if f.suffix in (".cpp", ".h") and "test" not in f.name]
    texts = [text for f in files for text in re.findall(r'"(?:[^"\\\n]|\\.)*"|^//   .*', f.read_text(), re.MULTILINE)]
    named = {name for text in texts for name in re.findall(r"\bplumb::(\w+)(?:<\w+>)?\(", text)}
    named -= {"python_function", "encode", "decode", "tensor_metrics"}  # operators
    reached, waiting = "", ["plumb/plumb.h"]
    seen = set(waiting)
    while waiting:
        text = (ROOT / waiting.pop()).read_text()
        reached += text
        new = set(re.findall(r'#include "(plumb/[^"]+)"', text)) - seen
        seen |= new
        waiting += new
    assert {"apply", "allow_operators", "compile", "unit_scale"} <= named
    declared = set(re.findall(r"^(?!//|#| ).*?[ &*](\w+)\(", reached, re.MULTILINE))
    assert named - declared == set()


@pytest.mark.skipif(not (BUILD / "compile_commands.json").exists(), reason="no build folder")
def test_what_capture_cannot_take_is_refused_by_the_compiler_with_the_reason_and_fragments_of_pages_compile(tmp_path):
    lacks = {
        "NoModule m; plumb::capture(m, x);": "the model's class does not derive from torch::nn::Module",
        "NoForward m; plumb::capture(m, x);": "has no public forward() that takes these inputs",
        "TakesNumber m; plumb::capture(m, x);": "has no public forward() that takes these inputs",
        "TakesTwo m; plumb::capture(m, x);": "has no public forward() that takes these inputs",
        "ReturnsNumber m; plumb::capture(plumb::CaptureOptions(), m, x);": "forward() returns something else than tensors",
        "Fine m; plumb::capture(m, x, std::string());": "an input is no at::Tensor",
    }
    code, said = compiled(BAD.replace("MODEL", "{ " + " } { ".join(lacks) + " }"), tmp_path)
    assert code != 0
    errors = re.findall(r"error: static assertion failed: (.*)", said)
    assert len(errors) == len(lacks) == said.count("error: "), said
    for reason in lacks.values():
        assert any(reason in error and "plumb::capture" in error for error in errors), (reason, errors)
    fine = "Fine m; plumb::capture(m, x); plumb::capture(*m, x); plumb::capture(plumb::CaptureOptions(), m, x); auto p = m.ptr(); plumb::capture(p, x);"
    code, said = compiled(BAD.replace("MODEL", fine) + page_fragments(), tmp_path)  # one compilation: it takes seconds
    assert code == 0, said
