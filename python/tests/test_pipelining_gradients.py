"""Which parameters and inputs have gradients after a step in one process, bit for bit beside plain accumulation."""

import copy
import re

import pytest
import torch
from pipelines import MSE, accumulate, batch, blocks, grads, same, schedule_for
from plumb.pipelining import PipelineStage, ScheduleLoopedBFS, SplitPoint, pipeline
from plumb.pipelining.schedules import get_schedule_class
from torch import nn

import plumb


def test_inputs_of_the_model_get_their_gradients():
    for name in ("GPipe", "ZBVZeroBubble"):
        modules = blocks(1 if name == "GPipe" else 2)
        x, target = batch()
        x.requires_grad_()
        schedule_for(name, modules, 4).step(x, target=target)
        ours, x.grad = x.grad, None
        accumulate(modules, x, target, 4, scale=False)
        assert torch.equal(ours, x.grad)


@pytest.mark.parametrize("cut", [True, False])
@pytest.mark.parametrize("name", ["GPipe", "ZBVZeroBubble"])
def test_inputs_and_what_made_them_get_their_gradients(name, cut):
    modules, before = blocks(2), nn.Linear(8, 8)
    x, target = batch()
    x.requires_grad_()
    if name == "GPipe":
        modules = [nn.Sequential(*modules)]
    if cut:
        pipe = pipeline(nn.Sequential(*modules), (x[:3],), num_stages=len(modules), split_policy="balanced")
        stages = [pipe.build_stage(s, "cpu") for s in range(pipe.num_stages)]
        schedule = get_schedule_class(name)(stages[0] if name == "GPipe" else stages, 4, MSE)
    else:
        schedule = schedule_for(name, modules, 4)
    for _ in range(2):
        schedule.step(before(x), target=target)
        ours = [t.grad for t in (x, *before.parameters())]
        x.grad = None
        before.zero_grad()
        accumulate([before, *modules], x, target, 4, scale=False)
        expected = [t.grad for t in (x, *before.parameters())]
        assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-7) for a, b in zip(ours, expected))
        leaf = before(x).detach().requires_grad_()
        schedule.step(leaf, target=target)
        ours, leaf.grad = leaf.grad, None
        accumulate(modules, leaf, target, 4, scale=False)
        assert torch.equal(ours, leaf.grad)
        x.grad = None
        before.zero_grad()


def test_a_stage_may_begin_in_place_on_an_input_that_requires_a_gradient():
    before, modules = nn.Linear(8, 8), [nn.Sequential(nn.ReLU(inplace=True), *blocks(1))]
    x, target = batch()
    schedule_for("GPipe", modules, 4).step(before(x), target=target)
    ours, before.weight.grad = before.weight.grad, None
    MSE(modules[0](before(x)), target).backward()
    assert torch.allclose(ours, 4 * before.weight.grad, rtol=1e-4)


def test_tied_weights_are_summed_over_stages():
    modules = blocks(3)
    modules[2].up.weight = modules[0].up.weight
    reference = copy.deepcopy(modules)
    x, target = batch()
    schedule_for("InterleavedZeroBubble", modules, 1).step(x, target=target)
    accumulate(reference, x, target, 1)
    assert same(grads(modules), grads(reference))
    with pytest.raises(ValueError, match="no parameter"):
        PipelineStage(modules[0], 0, 3, "cpu", tied={"weight": "w"})


def test_frozen_weights_and_stages_stay_without_gradients():
    modules = blocks(3)
    modules[1].requires_grad_(False)
    modules[2].up.weight.requires_grad_(False)
    reference = copy.deepcopy(modules)
    x, target = batch()
    schedule_for("InterleavedZeroBubble", modules, 4).step(x, target=target)
    accumulate(reference, x, target, 4)
    assert same(grads(modules), grads(reference)) and modules[1].up.weight.grad is None


def test_parameters_may_be_replaced_between_steps():
    x, target = batch()
    modules, reference = blocks(4), blocks(4)
    schedule = schedule_for("InterleavedZeroBubble", modules, 4)

    def replace(modules):
        modules[0].load_state_dict({name: value / 2 for name, value in modules[0].state_dict().items()}, assign=True)
        modules[1].down = blocks(1, seed=5)[0].down
        modules[2].extra = blocks(1, seed=6)[0]  # it takes no part

    for change in (lambda _: None, replace, lambda modules: modules[3].up.weight.requires_grad_(False)):
        for some in (modules, reference):
            change(some)
            nn.ModuleList(some).zero_grad()
        outputs, losses = accumulate(reference, x, target, 4)
        found = []
        assert torch.equal(schedule.step(x, target=target, losses=found), outputs) and same(found, losses)
        assert same(grads(modules), grads(reference))


@pytest.mark.parametrize("other", [0, 2])
def test_parameters_that_stages_share_are_not_replaced_between_steps(other):
    x, target = batch()
    modules = blocks(3)
    modules[2].up = modules[0].up
    schedule = schedule_for("Interleaved1F1B", modules, 4)
    schedule.step(x, target=target)
    modules[0].up = modules[2].up = blocks(1, seed=5)[0].up
    schedule.step(x, target=target)
    modules[other].up = blocks(1, seed=6)[0].up
    with pytest.raises(plumb.Error, match=r"stage 2 has other parameters .*stage 0: up.bias.*\n  try: make a new schedule"):
        schedule.step(x, target=target)


def test_a_loss_that_requires_no_gradient_is_refused():
    x, target = batch()

    def without_padding(output, target):
        return MSE(output, target) if target.any() else torch.zeros(())

    target[3:6] = 0
    schedule = schedule_for("Interleaved1F1B", blocks(2), 4, without_padding)
    with pytest.raises(plumb.Error, match=r"the loss of microbatch 1 requires no gradient\n.*output.sum\(\) \* 0"):
        schedule.step(x, target=target)
    schedule.eval(x, target=target)


class Detached(nn.Linear):
    def __init__(self):
        super().__init__(8, 8)

    def forward(self, x):
        return super().forward(x.detach())


def test_what_a_later_stage_does_not_use_has_no_gradient():
    x, target = batch()
    modules = [nn.Linear(8, 8), Detached()]
    schedule_for("Interleaved1F1B", modules, 4).step(x, target=target)
    assert modules[0].weight.grad is None and modules[1].weight.grad is not None


class Decaying(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x):
        self.scale.mul_(0.5)
        return self.second(self.first(x) * self.scale)


def test_a_buffer_that_another_microbatch_writes_before_the_backward_is_named_with_a_remedy():
    pipe = pipeline(Decaying(), (torch.randn(2, 4),), split_spec={"second": SplitPoint.BEGINNING})
    stages = [pipe.build_stage(i, torch.device("cpu")) for i in range(2)]
    schedule = ScheduleLoopedBFS(stages, 2, lambda y, target: (y - target).square().mean())
    x = torch.randn(4, 4)
    with pytest.raises(plumb.Error, match=r"rank 0 at 0B0(?s:.*)try: let the forward compute with a clone\(\) of a buffer") as raised:
        schedule.step(x, target=x)
    line = Decaying.forward.__code__.co_firstlineno + 1
    assert re.search(rf"Written in place: scale by node %mul_ .* at .*{__file__}:{line}", str(raised.value))
