"""Shared by the tests of cutting: models, and the comparison of a cut model with the whole."""

import copy

import torch
import torch.distributed.pipelining  # noqa: F401  (its mark)
import torch.nn.functional as F
from capture_checks import same, tensors
from plumb.pipelining import SplitPoint, pipe_split, pipeline
from torch import nn

BEGIN, END = SplitPoint.BEGINNING, SplitPoint.END


def equals_whole(model, args, kwargs=None, stages=None, **how):
    """Outputs, gradients of parameters and inputs, buffers and names: as of the undivided model."""
    kwargs = kwargs or {}
    model.zero_grad()
    eager = copy.deepcopy(model)
    names = set(model.state_dict())
    pipe = pipeline(model, args, kwargs, **how)
    assert stages is None or pipe.num_stages == stages
    results = []
    for run in (eager, pipe):
        given = [a.clone().requires_grad_() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args]
        torch.manual_seed(7)
        out = tensors(run(*given, **kwargs))
        torch.manual_seed(8)
        wanted = [y for y in out if y.requires_grad]
        sum((y * torch.randn_like(y)).sum() for y in wanted).backward()
        results.append((out, [a.grad for a in given if isinstance(a, torch.Tensor)]))
    same(results[0][0], results[1][0], "output")
    same(results[0][1], results[1][1], "input gradient")
    grads = merged_grads(pipe)
    for name, parameter in eager.named_parameters():
        if parameter.grad is None:
            assert grads.get(name) is None, name
        else:
            assert torch.equal(parameter.grad, grads[name]), name
    held = set()
    for s in range(pipe.num_stages):
        stage = pipe.get_stage_module(s)
        assert set(stage.state_dict()) <= names
        held |= set(stage.state_dict())
    for name, buffer in eager.named_buffers():
        found = [b for s in range(pipe.num_stages) for n, b in pipe.get_stage_module(s).named_buffers() if n == name]
        assert all(torch.equal(b, buffer) for b in found), name
    return pipe


def merged_grads(pipe):
    """By every name; what several stages use is one tensor."""
    stages = [pipe.get_stage_module(s) for s in range(pipe.num_stages)]
    named = {n: p for stage in stages for n, p in stage.named_parameters(remove_duplicate=False)}
    return {n: p.grad for n, p in named.items() if p.grad is not None}


class MLP(nn.Module):
    def __init__(self, layers=4, d=8):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(d, d) for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


class Shared(nn.Module):
    """A module used in two stages, a parameter nobody uses, a constant, a buffer."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.unused = nn.Parameter(torch.ones(3))
        self.register_buffer("scale", torch.full((8,), 1.5))
        self.register_buffer("hidden", torch.arange(8.0), persistent=False)

    def forward(self, x):
        x = self.a(x) * torch.tensor(0.5)
        pipe_split()
        x = self.b(x).tanh() + self.hidden
        pipe_split()
        return self.a(x) * self.scale


class Outputs(nn.Module):
    """A loss in some structure of outputs."""

    def __init__(self, shape):
        super().__init__()
        self.up, self.down, self.shape = nn.Linear(6, 12), nn.Linear(12, 6), shape

    def forward(self, x, y):
        h = self.up(x).relu()
        pipe_split()
        out = self.down(h) + x
        pipe_split()
        loss = F.mse_loss(out * h.mean(), y)
        return self.shape(loss, out)


LOSSES = {
    "alone": (lambda loss, out: loss, True),
    "tuple": (lambda loss, out: (out, loss), (False, True)),
    "list": (lambda loss, out: [loss, out], [True, False]),
    "dict": (lambda loss, out: {"out": out, "loss": loss}, {"loss": True, "out": False}),
    "auto": (lambda loss, out: {"out": out, "loss": loss}, "auto"),
    "nested": (lambda loss, out: (out, {"a": [out, loss], "b": (out,)}), (False, {"a": [False, True], "b": (False,)})),
}


class Marked(MLP):
    def forward(self, x):
        x = self.layers[0](x)
        torch.ops.pippy._pipe_split()
        return self.layers[1](x).relu()


class Shaped(nn.Module):
    """Its graph holds its input's sizes."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(16, 4)

    def forward(self, x, y=None):
        x = torch.relu(self.up(x))
        pipe_split()
        return self.down((x + y).reshape(x.shape[0] // 2, 16))


def stage_models():
    model = Shared()
    return model, pipeline(model, (torch.randn(4, 8),)), torch.randn(4, 8)
