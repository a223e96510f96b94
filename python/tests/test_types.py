"""Type checkers accept what README, tutorials and how-tos write, and know its types."""

import importlib.util
import os
import pathlib
import re
import subprocess
import sys

import pytest
from pages import PAGES, ROOT, TITLE, fences

import plumb

PACKAGE = pathlib.Path(plumb.__file__).resolve().parents[1]
ENVIRONMENT = {**os.environ, "MYPYPATH": str(PACKAGE)}
CHECKERS = {
    "mypy": ["--python-executable", sys.executable, "--no-error-summary", "--cache-dir"],
    "pyright": ["--pythonpath", sys.executable],
}

KNOWN = """
from typing import Any
from typing_extensions import assert_type

import torch
from torch import nn

import plumb
from plumb.pipelining import CutPipe, Schedule1F1B, pipeline
from plumb.pipelining.schedules import ScheduleInterleavedZeroBubble
from plumb.transforms import TrackedModule, fold, simulate_fp8, track_scales, unit_scale, use_fp8


class Net(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


net, x = Net(), torch.zeros(1)
graph = plumb.capture(net, x)
assert_type(graph, plumb.GraphModule)
assert_type(graph.graph, plumb.Graph)
assert_type(graph.graph.nodes[0].target, str)
assert_type(plumb.load_pt2("net.pt2"), plumb.GraphModule)
assert_type(fold(simulate_fp8(use_fp8(unit_scale(net)))), Net)
tracked = simulate_fp8(track_scales(net))
assert_type(tracked, TrackedModule)
assert_type(tracked.scales_graph(), torch.fx.Graph)
assert_type(plumb.report(net), plumb.transforms.Report)
pipe = pipeline(net, (x,))
assert_type(pipe, CutPipe)
stage = pipe.build_stage(0, torch.device("cpu"))
assert_type(stage.submod, nn.Module)
assert_type(stage.is_last, bool)
schedule = Schedule1F1B(stage, 4, nn.functional.mse_loss)
losses: list[torch.Tensor] = []
schedule.step(x, target=x, losses=losses)
assert_type(schedule.seed, int | None)
assert_type(ScheduleInterleavedZeroBubble([stage], 4).measured_bubble(), float)
optimizer = plumb.optim.AdamW(net.parameters(), lr=0.1)
assert_type(optimizer, plumb.optim.AdamW)
base: torch.optim.Optimizer = optimizer
assert_type(plumb.Trainer("net.pt2", "text.bin").run().loss, float)
assert_type(plumb.hf.load("folder"), plumb.GraphModule)
assert_type(plumb.hf.load("folder", stages=2), CutPipe)
"""

WRONG = {
    "optimizer.py": "import torch, plumb\nplumb.optim.AdamW([torch.zeros(1)], rate=1, lr='fast')\n",
    "schedule.py": "from plumb.pipelining import Schedule1F1B\nSchedule1F1B(stages=1, n_microbatches='four')\n",
    "graph.py": "import torch, plumb\nplumb.capture(torch.nn.Linear(1, 1), torch.zeros(1)).graph.node\n",
    "transform.py": "import torch, plumb\nplumb.transforms.simulate_fp8(torch.nn.Linear(1, 1), exclude_all=True)\n",
}


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("mypy")


def check(checker, folder, cache):
    """Exit code and text of a type checker for a folder of programs."""
    if importlib.util.find_spec(checker) is None:
        pytest.skip(f"{checker} is not installed (tools/requirements.txt)")
    options = CHECKERS[checker] + ([str(cache)] if checker == "mypy" else [])
    command = [sys.executable, "-m", checker, *options, "."]
    done = subprocess.run(command, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def programs(folder):
    """Writes the Python of all pages as programs of one folder. A page's file `model.py` becomes PAGE_model.py."""
    for page in [ROOT / "README.md", *PAGES]:
        name = page.stem.lower()
        blocks = [(TITLE.search(info), body) for language, info, body in fences(page.read_text()) if language == "python"]
        titled = {title.group(1): body for title, body in blocks if title}
        together = "\n".join(body for title, body in blocks if not title)
        for file, body in titled.items() | {("page.py", together)} if together else titled.items():
            for other in titled:
                module = other.removesuffix(".py")
                body = re.sub(rf"^(from|import) {module}\b", rf"\1 {name}_{module}", body, flags=re.M)
            (folder / f"{name}_{file}").write_text(body)


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("types") / "pages"
    folder.mkdir()
    programs(folder)
    assert len(list(folder.glob("*.py"))) >= 20
    (folder / "known.py").write_text(KNOWN)
    return folder


@pytest.mark.parametrize("checker", CHECKERS)
def test_the_programs_of_all_pages_pass_type_checkers_which_know_their_types(checker, pages, cache):
    code, text = check(checker, pages, cache)
    assert code == 0, text


@pytest.mark.parametrize("checker", CHECKERS)
def test_type_checkers_refuse_wrong_calls(checker, tmp_path, cache):
    folder = tmp_path / "wrong"
    folder.mkdir()
    for name, text in WRONG.items():
        (folder / name).write_text(text)
    code, text = check(checker, folder, cache)
    assert code == 1
    assert not [name for name in WRONG if name not in text], text
