"""Shared by the tests of capture: a capture held against eager bit for bit, its refusals, models of one function."""

import copy
import sys

import pytest
import torch
from torch import nn

import plumb

needs_positions = pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10's bytecode does not say what a call's text is")


def tensors(tree):
    return [x for x in torch.utils._pytree.tree_leaves(tree) if isinstance(x, torch.Tensor)]


def run(model, args, kwargs, params):
    args = [a.clone().requires_grad_() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args]
    for p in params:
        p.grad = None
    torch.manual_seed(7)
    out = tensors(model(*args, **kwargs))
    torch.manual_seed(8)
    loss = sum((y * torch.randn_like(y)).sum() for y in out if y.requires_grad and y.is_floating_point())
    loss.backward()
    grads = [None if p.grad is None else p.grad.clone() for p in params]
    return out, [a.grad for a in args if isinstance(a, torch.Tensor)], grads


def same(a, b, what="value"):
    assert len(a) == len(b), what
    for i, (x, y) in enumerate(zip(a, b)):
        assert (x is None) == (y is None), f"{what} {i}"
        if x is not None:
            assert torch.equal(x, y), f"{what} {i} differs by {(x - y).abs().max()}"


def check(model, *args, **kwargs):
    before = {k: v.clone() for k, v in model.state_dict().items()}
    rng = torch.get_rng_state()
    captured = plumb.capture(model, *args, plumb_verify=True, **kwargs)
    assert torch.equal(rng, torch.get_rng_state())
    for k, v in model.state_dict().items():
        assert torch.equal(v, before[k]), f"{k} changed"
    assert all(p.grad is None for p in model.parameters())
    assert list(captured.state_dict()) and set(captured.state_dict()) == set(model.state_dict())
    assert {n for n, _ in captured.named_parameters(remove_duplicate=False)} == {
        n for n, _ in model.named_parameters(remove_duplicate=False)
    }
    params = list(model.parameters())
    buffers = [b for _, b in model.named_buffers()]

    def restore():
        with torch.no_grad():
            for k, v in model.state_dict().items():
                v.copy_(before[k])

    eager_model = copy.deepcopy(model)
    eager = run(eager_model, args, kwargs, list(eager_model.parameters()))
    eager_buffers = [b.clone() for _, b in eager_model.named_buffers()]
    replay = run(captured, args, kwargs, params)
    replay_buffers = [b.clone() for b in buffers]
    restore()
    for a, b, what in zip(eager, replay, ["output", "input gradient", "gradient"]):
        same(a, b, what)
    same(eager_buffers, replay_buffers, "buffer")
    text = captured.graph.to_string()
    # A copy is made from the text. (parse_graph() is for files and refuses Python functions.)
    assert copy.deepcopy(captured).graph.to_string() == text
    return captured


class Fn(nn.Module):
    def __init__(self, f):
        super().__init__()
        self.f = f

    def forward(self, *args):
        return self.f(*args)


def entries(model, kind):
    """Returns the entries of a kind in a transformed model's report."""
    return [e for part in plumb.report(model) for e in part["entries"] if e["kind"] == kind]


def refusal(f, *args, verify=False):
    with pytest.raises(plumb.Error) as info:
        plumb.capture(Fn(f), *(args or (torch.randn(4, 4),)), plumb_verify=verify)
    return str(info.value)


class Net(nn.Module):
    """A linear layer, and a function of it and the inputs."""

    def __init__(self, f, **more):
        super().__init__()
        self.f = f
        self.layer = nn.Linear(4, 4)
        for name, value in more.items():
            setattr(self, name, value)

    def forward(self, *args):
        return self.f(self, *args)
