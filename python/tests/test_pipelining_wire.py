"""Formats on the way between stages: one process rounds as several do, and codes travel."""

import copy

import pytest
import ranks
import torch
from pipelines import LOOPED, SINGLE, V
from plumb.pipelining import PipelineStage, SplitPoint, pipeline
from plumb.pipelining._IR import DetachExecutor
from plumb.pipelining.schedules import get_schedule_class
from torch import nn
from wire_runs import WIRE, batch, cut, gpt, reference, train_by_each

import plumb


@pytest.mark.parametrize("size", [2, 4])
def test_processes_have_the_losses_of_one_with_the_same_rounding(size):
    names = SINGLE + LOOPED + V
    ends = ranks.run(train_by_each, size, names)
    expected = {(num, wire): reference(wire, num) for num in (size, 2 * size) for wire in (WIRE, None)}
    for name in names:
        num = size if name in SINGLE else 2 * size
        assert expected[num, WIRE] != expected[num, None], "the rounding is seen"
        sent = {}
        for wire in (WIRE, None):
            assert [e[name, wire][0] for e in ends if e[name, wire][0]] == [expected[num, wire]], (name, wire)
            sent[wire] = sum(e[name, wire][1] for e in ends)
        # Messages this small are a tenth headers.
        assert 0 < sent[WIRE] <= 0.35 * sent[None], (name, sent)


class Skip(nn.Module):
    """A value that two later stages use, an integer and a mask that cross."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x):
        y = torch.tanh(self.a(x))
        index = (y > 0).long()
        mask = torch.full((16, 16), -1e4).triu(1)
        plumb.pipelining.pipe_split()
        z = torch.tanh(self.b(y)) + (y * index)
        plumb.pipelining.pipe_split()
        return self.c(z * y + index) + (z @ mask.exp())


def test_a_value_of_two_users_has_the_gradients_of_one_process():
    torch.manual_seed(1)
    model, x = Skip(), torch.randn(8, 16)
    pipe = pipeline(model, (x[:2],), wire=WIRE)
    text = str(pipe.wire_report())
    assert "e4m3fn-RN forward, e5m2-RN backward" in text and "its type is i64" in text
    for part in x.chunk(4):
        pipe(part)[0].square().mean().backward()
    expected = {n: p.grad.clone() / 4 for n, p in model.named_parameters()}
    model.zero_grad()
    stages = [pipe.build_stage(i, torch.device("cpu")) for i in range(pipe.num_stages)]
    schedule = get_schedule_class("Interleaved1F1B")(stages, n_microbatches=4, loss_fn=lambda y, t: y.square().mean())
    schedule.step(x, target=x)
    assert all(torch.equal(expected[n], p.grad) for n, p in model.named_parameters())


def test_a_loss_in_the_pipe_has_the_same_gradients():
    model, ids, targets = gpt(), *batch(0, 2)
    spec = {"blocks.4": SplitPoint.BEGINNING}
    pipe = pipeline(model, (ids, targets), split_spec=spec, output_loss_value_spec=(False, True), wire=WIRE)
    pipe(ids, targets)
    own = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    with torch.enable_grad():
        plain = pipeline(model, (ids, targets), split_spec=spec, wire=WIRE)
        plain(ids, targets)[1].backward()
    assert all(torch.equal(own[n], p.grad) for n, p in model.named_parameters())


def test_excluded_values_and_directions_travel_as_they_are():
    model, pipe = cut(2, wire=WIRE)
    entries = pipe.wire_report()[0]["entries"]
    names = [e["node"] for e in entries if e["kind"] == "quantised"]
    assert len(names) == 1 and "bytes" in entries[0]["reason"]
    _, without = cut(2, wire=WIRE, wire_exclude=[names[0]])
    assert f"excluded by '{names[0]}'" in str(without.wire_report())
    _, plain = cut(2)
    ids = batch(0, 2)[0]
    assert torch.equal(without(ids)[0], plain(ids)[0])
    _, forward_only = cut(2, wire=("none", "e5m2"))
    assert torch.equal(forward_only(ids)[0], plain(ids)[0])
    assert not torch.equal(pipe(ids)[0], plain(ids)[0])


def module_stages(rank, size, wire):
    torch.manual_seed(2)
    modules = [nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(2)]
    stages = [PipelineStage(modules[s], s, 2, torch.device("cpu"), wire=wire) for s in range(2) if s % size == rank]
    if size > 1:
        schedule = get_schedule_class("1F1B")(stages[0], n_microbatches=4, loss_fn=nn.functional.mse_loss)
    else:
        schedule = get_schedule_class("Interleaved1F1B")(stages, n_microbatches=4, loss_fn=nn.functional.mse_loss)
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(3))
    losses: list = []
    schedule.step(*([x] if rank == 0 else []), target=x, losses=losses)
    grads = {s.stage_index: [p.grad for p in s.submod.parameters()] for s in stages}
    return losses, grads


def test_stages_made_of_modules_round_what_they_hand_on():
    losses, grads = module_stages(0, 1, WIRE)
    ends = ranks.run(module_stages, 2, WIRE)
    assert all(torch.equal(a, b) for a, b in zip(losses, ends[1][0]))
    for s in range(2):
        assert all(torch.equal(a, b) for a, b in zip(grads[s], ends[s][1][s]))
    plain, _ = module_stages(0, 1, None)
    assert not all(torch.equal(a, b) for a, b in zip(losses, plain))


class SignOfZero(nn.Module):
    """Tells -0 from 0."""

    def forward(self, x):
        return x + torch.copysign(torch.ones_like(x), x)


def tiny_stages(rank, size):
    torch.manual_seed(0)
    small = nn.Linear(16, 16)
    with torch.no_grad():
        small.weight.mul_(1e-6), small.bias.zero_()
    pipe = pipeline(nn.Sequential(small, SignOfZero()), (torch.randn(2, 16),), split_spec={"1": SplitPoint.BEGINNING},
                    wire=("E4M3-RN", "E5M2-RN"))  # fmt: skip
    stages = [pipe.build_stage(s, torch.device("cpu")) for s in range(2) if s % size == rank]
    schedule = get_schedule_class("1F1B" if size == 2 else "Interleaved1F1B")(
        stages[0] if size == 2 else stages, n_microbatches=4, loss_fn=nn.functional.mse_loss
    )
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(3))
    losses: list = []
    schedule.step(*([x] if rank == 0 else []), target=x, losses=losses)
    whole = [nn.functional.mse_loss(pipe(part)[0], part).detach() for part in x.chunk(4)]
    return [loss.detach() for loss in losses], whole


def test_zeros_have_the_sign_that_travels():
    losses, whole = tiny_stages(0, 1)
    ends = ranks.run(tiny_stages, 2)
    assert torch.equal(torch.stack(losses), torch.stack(ends[1][0]))
    assert torch.equal(torch.stack(whole), torch.stack(losses))


def different_wires(rank, size):
    return module_stages(rank, size, WIRE if rank == 0 else ("e5m2", "e5m2"))


def test_ranks_that_disagree_about_the_wire_say_so():
    for end in ranks.finish(ranks.start(different_wires, 2)):
        assert "different layouts" in end.text


@pytest.mark.parametrize(
    "wire, message",
    [
        (("mxfp8", "e5m2"), "no codes of one byte"),
        (("e4m3fn", "bf16"), "no codes of one byte"),
        (("e4m3fn-SR", "e5m2"), "rounds by chance"),
        (("float8", "e5m2"), "float8"),
        (("e4m3fn",), "wire is"),
        ("e4m3fn", "wire is"),
    ],
)
def test_refuses_formats_that_cannot_travel(wire, message):
    with pytest.raises(plumb.Error, match=message):
        cut(2, wire=wire)
    with pytest.raises(plumb.Error, match=message):
        PipelineStage(nn.Linear(4, 4), 0, 2, torch.device("cpu"), wire=wire)


def test_a_pattern_that_names_nothing_is_refused():
    with pytest.raises(plumb.Error, match="no value that crosses"):
        cut(2, wire=WIRE, wire_exclude=["nothing.like.this"])


def test_the_executor_which_rounds_nothing_refuses_a_pipe_that_does():
    _, pipe = cut(2, wire=WIRE)
    with pytest.raises(plumb.Error, match="rounded between these stages"):
        DetachExecutor(pipe).run(batch(0, 2)[0])
    _, pipe = cut(2)
    assert torch.equal(DetachExecutor(pipe).run(batch(0, 2)[0])[0], pipe(batch(0, 2)[0])[0])


def test_a_copy_and_a_sent_stage_keep_the_wire():
    _, pipe = cut(2, wire=WIRE)
    again = copy.deepcopy(pipe)
    ids = batch(0, 2)[0]
    assert torch.equal(again(ids)[0], pipe(ids)[0])
    _, info = plumb.pipelining.deserialize_stage(pipe.serialize_stage(1))
    assert "as e4m3fn-RN, its gradient as e5m2-RN" in str(info.table)
