"""Activation checkpoints in stages whose backward is halved: computed again once, with the bits of backward()."""

import copy
import functools

import pytest
import torch
from pipelines import MSE, Square, batch, grads, same
from plumb.pipelining import PipelineStage
from plumb.pipelining._backward import stage_backward_input, stage_backward_weight
from plumb.pipelining.schedules import get_schedule_class
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

WIDTH = 32
again = functools.partial(checkpoint, use_reentrant=False)


class Layer(nn.Module):
    """Counts its runs."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)
        self.dropout, self.runs = nn.Dropout(dropout), 0

    def forward(self, x):
        self.runs += 1
        return x + self.down(self.dropout(nn.functional.gelu(self.up(self.norm(x)))))


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = Layer()

    def forward(self, x):
        return again(self.layer, x)


class Dropping(Plain):
    def __init__(self):
        super().__init__()
        self.layer = Layer(dropout=0.4)


class Several(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.between, self.second = Layer(), nn.Linear(WIDTH, WIDTH), Layer(0.2)

    def forward(self, x):
        return again(self.second, torch.tanh(self.between(again(self.first, x))))


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.outer, self.inner, self.runs = nn.Linear(WIDTH, WIDTH), Layer(0.2), 0

    def _outer(self, x):
        self.runs += 1
        return again(self.inner, torch.sin(self.outer(x))) * x

    def forward(self, x):
        return again(self._outer, x)


class ToTheEnd(Plain):
    def forward(self, x):
        with set_checkpoint_early_stop(False):
            return super().forward(x)


class Selective(Plain):
    """Products are kept, all else is computed again; torch refuses to do that twice."""

    def forward(self, x):
        def policy(context, operator, *args, **kwargs):
            kept = operator is torch.ops.aten.addmm.default
            return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

        return again(self.layer, x, context_fn=functools.partial(create_selective_checkpoint_contexts, policy))


class OffPath(nn.Module):
    """Inside of the checkpoint a weight meets the input's path only in a sum."""

    def __init__(self):
        super().__init__()
        self.gain, self.linear, self.runs = nn.Parameter(torch.randn(WIDTH)), nn.Linear(WIDTH, WIDTH), 0

    def _inside(self, x):
        self.runs += 1
        return torch.sin(x) + torch.sin(self.gain * self.gain)

    def forward(self, x):
        return self.linear(again(self._inside, x))


class OfWeights(nn.Module):
    """The recomputed tensor is a weight."""

    def __init__(self):
        super().__init__()
        self.root, self.runs = nn.Parameter(torch.randn(WIDTH, WIDTH)), 0

    def _weight(self, root):
        self.runs += 1
        return torch.tanh(root @ root) / WIDTH**0.5

    def forward(self, x):
        return x @ again(self._weight, self.root)


class Custom(nn.Module):
    def __init__(self):
        super().__init__()
        self.w, self.linear, self.runs = nn.Parameter(torch.randn(WIDTH, WIDTH) / 6), nn.Linear(WIDTH, WIDTH), 0

    def _inside(self, x):
        self.runs += 1
        return self.linear(torch.relu(Square.apply(torch.tanh(x), self.w)))

    def forward(self, x):
        return again(self._inside, x)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out, self.runs = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), 0

    def _inside(self, x):
        self.runs += 1
        q, k, v = (z.view(1, -1, 4, 8).transpose(1, 2) for z in self.qkv(x).chunk(3, -1))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).reshape(x.shape))

    def forward(self, x):
        return again(self._inside, x)


class Reentrant(nn.Module):
    """torch gives the weights inside of it their gradients as soon as it is computed again."""

    def __init__(self):
        super().__init__()
        self.first, self.layer = nn.Linear(WIDTH, WIDTH), Layer(0.2)

    def forward(self, x):
        return checkpoint(self.layer, self.first(x), use_reentrant=True)


KINDS = [
    Plain, Dropping, Several, Nested, ToTheEnd, Selective, OffPath, OfWeights, Custom, Attention, Reentrant
]  # fmt: skip


def runs_of(module):
    return [m.runs for m in module.modules() if hasattr(m, "runs")]


def pair(make, seed=0):
    torch.manual_seed(seed)
    module = make()
    return module, copy.deepcopy(module)


@pytest.mark.parametrize("make", KINDS, ids=lambda make: make.__name__)
def test_the_halves_compute_again_once_and_give_backwards_bits(make):
    module, reference = pair(make)
    x = torch.randn(8, WIDTH, requires_grad=True)
    ref_x = x.detach().clone().requires_grad_()
    torch.manual_seed(3)
    (found,), groups = stage_backward_input([module(x).sum()], None, [x], module.parameters())
    early = list(module.layer.parameters()) if make is Reentrant else []
    assert all(p.grad is None for p in module.parameters() if all(p is not e for e in early))
    stage_backward_weight(module.parameters(), groups)
    torch.manual_seed(3)
    reference(ref_x).sum().backward()
    assert torch.equal(found, ref_x.grad) and same(grads([module]), grads([reference]))
    assert runs_of(module) == runs_of(reference) and set(runs_of(module)) == ({2, 3} if make is Nested else {2})


@pytest.mark.parametrize("how", ["cheap", "none", "in python"])
@pytest.mark.parametrize("make", KINDS, ids=lambda make: make.__name__)
def test_schedules_with_halves_compute_again_once_a_microbatch(make, how):
    torch.manual_seed(0)
    modules = [make() for _ in range(2)]
    x, target = batch(12, WIDTH)
    found = []
    for name in ("Interleaved1F1B", "InterleavedZeroBubble"):
        own = copy.deepcopy(modules)
        recompute = "none" if how == "in python" else how
        stages = [PipelineStage(m, i, 2, torch.device("cpu"), recompute=recompute) for i, m in enumerate(own)]
        for stage in stages:
            stage._runtime_validate = how == "in python"
        schedule = get_schedule_class(name)(stages, 3, MSE)
        schedule.seed = 5
        schedule.step(x, target=target)
        found.append((grads(own), [runs_of(m) for m in own]))
    (whole, whole_runs), (halves, halves_runs) = found
    assert same(whole, halves)
    assert whole_runs == halves_runs
    assert {n for runs in halves_runs for n in runs} == ({6, 9} if make is Nested else {6})


class Noting(nn.Module):
    """Notes the memory of what it computes."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.seen = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH), []

    def _inside(self, x):
        wide = self.up(x)
        narrow = nn.functional.gelu(wide)
        self.seen = [StorageWeakRef(wide.untyped_storage()), StorageWeakRef(narrow.untyped_storage())]
        return self.down(narrow)

    def forward(self, x):
        return again(self._inside, x)


@pytest.mark.parametrize("keep", [False, True])
def test_only_what_weights_need_is_kept_and_only_until_then(keep):
    module, reference = pair(Noting)
    x = torch.randn(8, WIDTH, requires_grad=True)
    out = module(x).sum()
    assert all(memory.expired() for memory in module.seen)
    _, groups = stage_backward_input([out], None, [x], module.parameters())
    assert [memory.expired() for memory in module.seen] == [True, False]
    if keep:
        stage_backward_weight(module.parameters(), groups, retain_graph=True)
        assert not module.seen[1].expired()
    stage_backward_weight(module.parameters(), groups)
    assert all(memory.expired() for memory in module.seen)
    for _ in range(1 + keep):
        reference(x.detach()).sum().backward()
    assert same(grads([module]), grads([reference]))


def test_integer_inputs_leave_the_checkpoint_to_the_weight_half():
    class Tokens(Plain):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(10, WIDTH)

        def forward(self, ids):
            return super().forward(self.embedding(ids))

    module, reference = pair(Tokens)
    ids = torch.tensor([1, 2, 2, 5])
    _, groups = stage_backward_input([module(ids).sum()], None, [ids], module.parameters())
    assert module.layer.runs == 1
    stage_backward_weight(module.parameters(), groups)
    reference(ids).sum().backward()
    assert module.layer.runs == 2 and same(grads([module]), grads([reference]))


def test_an_error_while_computing_again_leaves_nothing_behind():
    module, reference = pair(Plain)
    x = torch.randn(8, WIDTH, requires_grad=True)
    out = module(x)
    up = module.layer.up.forward
    module.layer.up.forward = lambda x: 1 / 0
    with pytest.raises(Exception, match="division by zero"):
        stage_backward_input([out.sum()], None, [x], module.parameters())
    module.layer.up.forward = up
    out = module(x)
    _, groups = stage_backward_input([out.sum()], None, [x], module.parameters())
    stage_backward_weight(module.parameters(), groups)
    reference(x.detach()).sum().backward()
    assert same(grads([module]), grads([reference]))


def test_other_hooks_on_saved_tensors_unpack_in_each_half():
    """Hooks that bring tensors back from elsewhere keep nothing between the halves."""
    module, reference = pair(Layer)
    x = torch.randn(8, WIDTH, requires_grad=True)
    unpacked = []

    def unpack(t):
        unpacked.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpack):
        out = module(x).sum()
    _, groups = stage_backward_input([out], None, [x], module.parameters())
    first = len(unpacked)
    stage_backward_weight(module.parameters(), groups)
    assert len(unpacked) > first
    reference(x.detach()).sum().backward()
    assert same(grads([module]), grads([reference]))
