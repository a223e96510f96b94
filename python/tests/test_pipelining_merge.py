"""Weights that several stages use, and the whole model after a training over ranks."""

import copy

import pytest
import ranks
import torch
from pipelines import cross_entropy
from plumb.pipelining import PipelineStage, SplitPoint, pipe_split, pipeline
from plumb.pipelining.schedules import ScheduleGPipe, get_schedule_class
from torch import nn

import plumb

CPU = torch.device("cpu")


class Tied(nn.Module):
    """The embedding is the head, too, and knows its part in u-μP."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.embed.weight = plumb.Parameter(self.embed.weight.data, mup_type="weight")
        self.body = nn.Linear(8, 8)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        pipe_split()
        return self.head(torch.tanh(self.body(x)))


def tied():
    torch.manual_seed(0)
    return Tied()


def batch(seed):
    ids = torch.randint(16, (8, 5), generator=torch.Generator().manual_seed(seed))
    return ids, ids.roll(1, 1)


def reference(steps=3):
    model = tied()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for seed in range(steps):
        optimizer.zero_grad()
        ids, target = batch(seed)
        cross_entropy(model(ids), target).backward()
        optimizer.step()
    return model.state_dict()


def close(state, expected):
    assert list(state) == list(expected)
    for name in expected:
        torch.testing.assert_close(state[name], expected[name], rtol=1e-4, atol=1e-5)


def same(state, other):
    return list(state) == list(other) and all(torch.equal(state[n], other[n]) for n in state)


@pytest.mark.parametrize("name", ["LoopedBFS", "InterleavedZeroBubble"])
def test_the_optimizer_of_the_model_steps_tied_weights_in_every_stage(name):
    model = tied()
    pipe = pipeline(model, (batch(0)[0][:4],))
    stages = [pipe.build_stage(i, CPU) for i in range(2)]
    schedule = get_schedule_class(name)(stages, 2, cross_entropy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for seed in range(3):
        optimizer.zero_grad()
        ids, target = batch(seed)
        schedule.step(ids, target=target)
        optimizer.step()
    close(pipe.merge_state_dict(), reference())
    assert stages[1].submod.get_parameter("embed.weight") is model.embed.weight
    assert model.embed.weight.mup_type == "weight"
    close(copy.deepcopy(pipe).merge_state_dict(), reference())


def test_tied_weights_get_every_gradient_once():
    class WithLoss(Tied):
        def forward(self, ids, target):
            return cross_entropy(super().forward(ids), target)

    torch.manual_seed(0)
    model = WithLoss()
    ids, target = batch(0)
    loss = copy.deepcopy(model)
    loss(ids, target).backward()
    pipe = pipeline(model, (ids, target), output_loss_value_spec=True)
    for run in (pipe, pipe.executor.run):
        model.zero_grad()
        run(ids, target)
        assert torch.equal(model.embed.weight.grad, loss.embed.weight.grad)


def test_states_of_ranks_that_differ_in_a_tied_weight_are_refused():
    pipe = pipeline(tied(), (batch(0)[0],))
    states = [copy.deepcopy(pipe.get_stage_module(s).state_dict()) for s in range(2)]
    states[1]["embed.weight"].add_(1)
    with pytest.raises(plumb.Error, match="copies of 'embed.weight' in stage 0 and of 'embed.weight' in stage 1 differ"):
        pipe.merge_state_dict(states)
    states[0]["embed.weight"].add_(1)
    merged = pipe.merge_state_dict(states)
    assert merged["head.weight"] is merged["embed.weight"]
    assert pipe.get_stage_module(1).get_parameter("embed.weight") is pipe.get_stage_module(0).get_parameter("embed.weight")


# --- over ranks ---
def train_tied(rank, size, name):
    model = tied()
    pipe = pipeline(model, (batch(0)[0][:4],))
    stage = pipe.build_stage(rank, CPU)
    schedule = get_schedule_class(name)(stage, 2, cross_entropy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for seed in range(3):
        optimizer.zero_grad()
        ids, target = batch(seed)
        schedule.step(*([ids] if rank == 0 else []), target=target if rank else None)
        optimizer.step()
    for merge in (pipe.merge_state_dict, pipe.merge, lambda: pipe.save_pt2("never.pt2")):
        with pytest.raises(plumb.Error, match=rf"stages \[{1 - rank}\] run on other ranks") as error:
            merge()
        assert "gather_stage_states() on every rank" in error.value.remedy
    states = schedule.gather_stage_states()
    state = pipe.merge_state_dict(states)
    assert same(pipe.merge(states).state_dict(), state)
    return dict(state), model.embed.weight.detach()


@pytest.mark.parametrize("name", ["1F1B", "GPipe"])
def test_a_rank_with_a_part_of_the_stages_does_not_merge_half_a_model(name):
    (first, own), (second, other) = ranks.run(train_tied, 2, name)
    assert same(first, second) and torch.equal(own, first["embed.weight"]) and torch.equal(other, own)
    close(first, reference())


def gather_plain(rank, size):
    torch.manual_seed(rank)
    module = nn.Linear(4, 4)
    schedule = ScheduleGPipe(PipelineStage(module, rank, size, "cpu"), 1)
    return schedule.gather_stage_states(), module.state_dict()


def test_states_of_stages_without_a_pipe_are_gathered_too():
    found = ranks.run(gather_plain, 2)
    for states, _ in found:
        assert all(same(state, own) for state, (_, own) in zip(states, found))


def train_normed(rank, size):
    torch.manual_seed(0)
    bare = [nn.BatchNorm1d(4, affine=False), nn.BatchNorm1d(4, affine=False)]  # stages of buffers alone
    net = nn.Sequential(nn.Linear(4, 4), *bare, nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4)))
    x = torch.randn(8, 4)
    pipe = pipeline(net, (x[:2],), split_spec={str(i): SplitPoint.BEGINNING for i in (1, 2, 3)})
    here = range(4) if size == 1 else sorted([rank, 3 - rank])
    stages = [pipe.build_stage(i, CPU) for i in here]
    schedule = get_schedule_class("LoopedBFS" if size == 1 else "DualPipe")(stages, 4, nn.functional.mse_loss)
    schedule.gradient_groups = 2 if size == 1 else 0
    for _ in range(2):
        schedule.step(x, target=x)
    return {name: value for stage in stages for name, value in stage.submod.named_buffers()}


def test_buffers_of_a_stage_on_two_ranks_are_the_mean_of_two_groups_on_both():
    whole = train_normed(0, 1)
    for part in ranks.run(train_normed, 4):
        for name, value in part.items():
            assert torch.equal(value, whole[name]), name
