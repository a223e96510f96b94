"""Shared by the tests of pipelining: names of schedules, small stages, and accumulation in one process to compare with."""

import torch
from plumb.pipelining import PipelineStage
from plumb.pipelining.schedules import get_schedule_class
from torch import nn

SINGLE = ["GPipe", "1F1B", "ZBH1", "ZBH2"]
LOOPED = ["Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble"]
V = ["ZBVZeroBubble", "DualPipeV", "VHalf", "VMin"]
MSE = nn.MSELoss()


class Block(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


def blocks(count, seed=0, make=Block):
    torch.manual_seed(seed)
    return [make() for _ in range(count)]


def batch(rows=12, width=8, seed=7):
    torch.manual_seed(seed)
    return torch.randn(rows, width), torch.randn(rows, width)


def cross_entropy(logits, targets):
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def accumulate_parts(modules, x, target, microbatches, loss_fn=MSE, scale=True):
    """Trains as a process alone does: microbatch after microbatch, gradients of the mean over the batch.

    Returns the output and the loss of each."""
    outputs, losses = [], []
    for inputs, targets in zip(x.tensor_split(microbatches), target.tensor_split(microbatches)):
        for module in modules:
            inputs = module(inputs)
        loss = loss_fn(inputs, targets)
        weight = len(targets) * microbatches / len(target) if scale else 1
        loss.backward(torch.full_like(loss, weight))
        outputs.append(inputs)
        losses.append(loss.detach())
    if scale:
        for p in nn.ModuleList(modules).parameters():
            if p.grad is not None:
                p.grad.div_(microbatches)
    return outputs, losses


def accumulate(*args, **kwargs):
    """Returns what `accumulate_parts` does, the outputs as one tensor."""
    outputs, losses = accumulate_parts(*args, **kwargs)
    return torch.cat(outputs).detach(), losses


def stages_of(modules, **kwargs):
    return [PipelineStage(m, i, len(modules), "cpu", **kwargs) for i, m in enumerate(modules)]


def grads(modules):
    return [p.grad for p in nn.ModuleList(modules).parameters()]


def same(ours, theirs):
    return len(ours) == len(theirs) and all(
        (a is None and b is None) or torch.equal(a, b) for a, b in zip(ours, theirs)
    )


def schedule_for(name, modules, microbatches, loss_fn=MSE, **kwargs):
    cls = get_schedule_class(name)
    stages = stages_of(modules)
    return cls(stages[0] if name in SINGLE else stages, microbatches, loss_fn, **kwargs)


class Nested(nn.Module):
    """Hands a dict with all kinds of things on."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        if isinstance(x, dict):
            assert x["name"] == "it" and x["none"] is None and x["pair"][1].dtype == torch.int64
            x = x["pair"][0] * x["scale"] + x["pair"][1]
        y = torch.tanh(self.linear(x))
        return {"pair": (y, (y > 0).long()), "scale": 0.5, "none": None, "name": "it"}


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x, gain, *, shift=None):
        x = self.linear(x) * gain
        return x if shift is None else x + shift


class Writes(nn.Linear):
    def forward(self, x):
        return super().forward(x.mul_(1.5).relu_())


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return (x @ w) ** 2

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        inner = grad * 2 * (x @ w)
        return inner @ w.t(), x.t() @ inner
