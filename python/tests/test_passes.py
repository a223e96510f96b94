"""Passes of the engine's table, run from Python."""

import pytest
import torch
from torch import nn

import plumb
from plumb.transforms import run_passes


class Twice(nn.Module):
    def forward(self, x):
        x.cos()
        return x.exp() + x.exp()


def test_passes_run_in_order_and_say_what_they_did(tmp_path):
    x = torch.randn(3, 4)
    graph = plumb.capture(Twice(), x)
    expected = graph(x)
    done = run_passes(graph, "dead_code", "common_subexpressions,differentiable=true", "dead_code", dump=tmp_path / "steps")
    assert [(r.name, r.changed) for r in done] == [
        ("dead_code", True), ("common_subexpressions", True), ("dead_code", False)
    ]  # fmt: skip
    assert all(r.seconds >= 0 for r in done)
    assert torch.equal(graph(x), expected)
    assert [str(graph.graph).count(name) for name in ("aten::cos", "aten::exp")] == [0, 1]
    dumped = sorted(p.name for p in (tmp_path / "steps").iterdir())
    assert dumped == [
        "00-input.txt", "01-dead_code.txt", "02-common_subexpressions.txt", "03-dead_code.txt"
    ]  # fmt: skip
    assert "aten::cos" in (tmp_path / "steps" / "00-input.txt").read_text()
    assert (tmp_path / "steps" / "03-dead_code.txt").read_text() == graph.graph.to_string()


@pytest.mark.parametrize("wrong, says", [("no_such", "one of: "), ("dead_code,a=1", "no option 'a'"), ("optimise,fuse", "fuse")])
def test_unknown_passes_and_options_are_refused(wrong, says):
    graph = plumb.capture(nn.Linear(4, 4), torch.randn(2, 4))
    before = str(graph.graph)
    with pytest.raises(plumb.Error, match=says):
        run_passes(graph, "dead_code", wrong)
    assert str(graph.graph) == before
