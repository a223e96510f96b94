"""plumb.diff: histories, state dicts, modules and files."""

import copy

import pytest
import torch
from torch import nn

import plumb

RULES = '[[rule]]\nevery = 1\nstatistics = ["hash", "std"]\n'


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))


def record(folder, name, spoil=None):
    """Three steps of two microbatches; `spoil` is called with the model before the third."""
    (folder / "rules.toml").write_text(RULES)
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(1)
    with plumb.Recorder(model, folder / "rules.toml", folder / name) as recorder:
        for step in range(3):
            if spoil and step == 2:
                spoil(model, optimizer)
            optimizer.zero_grad()
            for _ in range(2):
                model(torch.randn(6, 8, generator=generator)).square().mean().backward()
            optimizer.step()
            recorder.hash_state(optimizer)
            recorder.step()
    return str(folder / name)


def test_equal_runs_are_equal(tmp_path):
    found = plumb.diff(record(tmp_path, "a"), record(tmp_path, "b"))
    assert found.equal and found.first == {} and found.compared > 50, found
    assert "every bit should be equal" in found.statement


def test_a_flipped_weight_is_named_with_its_step(tmp_path):
    def flip(model, optimizer):
        model[2].weight.data.view(torch.int32)[1, 3] ^= 1 << 12

    found = plumb.diff(record(tmp_path, "a"), record(tmp_path, "b", flip))
    assert (found.first["tensor"], found.first["kind"], found.first["step"]) == ("2.weight", "value", 3), found
    assert found.following == found.differing - 1
    found.page(str(tmp_path / "diff.html"))
    assert "The first difference" in (tmp_path / "diff.html").read_text()


def test_a_flipped_state_of_the_optimizer_shows_after_the_step(tmp_path):
    def flip(model, optimizer):
        optimizer.state[model[0].weight]["exp_avg"].view(torch.int32)[0, 0] ^= 1 << 22

    found = plumb.diff(record(tmp_path, "a"), record(tmp_path, "b", flip))
    assert found.first["tensor"] == "0.weight" and found.first["kind"] == "after_step", found


def test_state_dicts_and_modules_are_compared(tmp_path):
    a, x = net(), torch.randn(6, 8)
    b = copy.deepcopy(a)
    assert plumb.diff(a.state_dict(), b.state_dict()).equal and plumb.diff(a, b, x).equal
    with torch.no_grad():
        b[0].bias[3] = torch.nextafter(b[0].bias[3], torch.tensor(9.0))
    by_name, by_graph = plumb.diff(a.state_dict(), b.state_dict()), plumb.diff(a, b, (x,))
    for found in (by_name, by_graph):
        assert (found.first["tensor"], found.first["ulps"], found.first["differing_elements"]) == ("0.bias", 1, 1), found
    assert by_graph.first["relative"] > 0 and all(p.grad is None for p in a.parameters())
    plumb.save_pt2(plumb.capture(a, x), tmp_path / "a.pt2")
    assert plumb.diff(str(tmp_path / "a.pt2"), a, x).equal


def test_a_gradient_that_differs_alone_is_found():
    a, x = net(), torch.randn(6, 8)
    found = plumb.diff(a, plumb.transforms.simulate_format(a, "none", "e5m2"), x)
    assert found.first["kind"] == "gradient", found


def test_what_cannot_be_compared_is_refused(tmp_path):
    with pytest.raises(plumb.Error, match="compared with a module"):
        plumb.diff(net(), str(tmp_path / "a.history"))
    with pytest.raises(plumb.Error, match="compared on inputs"):
        plumb.diff(net(), net())
