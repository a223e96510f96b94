"""Schedules at work in one process, bit for bit beside plain accumulation."""

import copy
import enum
import gc
import json
import traceback
import weakref

import pytest
import torch
from pipelines import (
    LOOPED,
    MSE,
    SINGLE,
    Block,
    Nested,
    Scaled,
    V,
    Writes,
    accumulate,
    batch,
    blocks,
    grads,
    same,
    schedule_for,
    stages_of,
)
from plumb.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleTable,
    TensorChunkSpec,
    pipeline,
    search_schedule,
)
from plumb.pipelining._actions import FORWARD
from plumb.pipelining.schedules import _ScheduleForwardOnly, get_schedule_class
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import plumb


@pytest.mark.parametrize("name", SINGLE + LOOPED + V)
def test_gradients_are_those_of_accumulation(name):
    count = 1 if name in SINGLE else 2 if name in V else 3
    modules = blocks(count)
    reference = copy.deepcopy(modules)
    x, target = batch()
    schedule = schedule_for(name, modules, 4)
    expected = None
    for _ in range(2):  # gradients of a step before are added to
        losses = []
        out = schedule.step(x, target=target, losses=losses)
        held, fresh = grads(reference), copy.deepcopy(reference)
        for p in nn.ModuleList(fresh).parameters():
            p.grad = None
        expected, reference_losses = accumulate(fresh, x, target, 4)
        for p, grad, new in zip(nn.ModuleList(reference).parameters(), held, grads(fresh)):
            p.grad = new if grad is None else grad + new
        assert torch.equal(out, expected) and not out.requires_grad
        assert same(losses, reference_losses)
        assert same(grads(modules), grads(reference))


@pytest.mark.parametrize("rows, microbatches", [(7, 3), (12, 1), (5, 5)])
def test_microbatches_of_unequal_size_weigh_by_their_rows(rows, microbatches):
    modules = blocks(2)
    reference = copy.deepcopy(modules)
    x, target = batch(rows)
    schedule_for("ZBVZeroBubble", modules, microbatches).step(x, target=target)
    accumulate(reference, x, target, microbatches)
    assert same(grads(modules), grads(reference))
    whole = copy.deepcopy(reference)
    nn.ModuleList(whole).zero_grad()
    MSE(whole[1](whole[0](x)), target).backward()
    for ours, theirs in zip(grads(modules), grads(whole)):
        torch.testing.assert_close(ours, theirs)


def test_sums_of_losses_are_not_scaled():
    modules, loss_fn = blocks(3), nn.MSELoss(reduction="sum")
    reference = copy.deepcopy(modules)
    x, target = batch(7)
    schedule_for("Interleaved1F1B", modules, 3, loss_fn, scale_grads=False).step(x, target=target)
    accumulate(reference, x, target, 3, loss_fn, scale=False)
    assert same(grads(modules), grads(reference))


def test_batches_may_change_from_step_to_step():
    modules = blocks(3)
    schedule = schedule_for("LoopedBFS", modules, 2)
    for rows in (4, 9, 2):
        reference = copy.deepcopy(modules)
        nn.ModuleList(modules).zero_grad()
        nn.ModuleList(reference).zero_grad()
        x, target = batch(rows)
        assert schedule.step(x, target=target).shape == (rows, 8)
        accumulate(reference, x, target, 2)
        assert same(grads(modules), grads(reference))


def test_eval_between_steps_gives_outputs_and_losses_and_leaves_gradients_alone():
    modules = blocks(3)
    schedule = schedule_for("InterleavedZeroBubble", modules, 4)
    x, target = batch()
    schedule.step(x, target=target)
    before = [g.clone() for g in grads(modules)]
    losses = []
    with torch.no_grad():
        out = schedule.eval(x, target=target, losses=losses)
    assert same(grads(modules), before) and len(losses) == 4 and not out.requires_grad
    assert torch.equal(out, schedule.eval(x))
    assert schedule.step(x, target=target, return_outputs=False) is None
    with torch.no_grad(), pytest.raises(RuntimeError, match="eval"):
        schedule.step(x, target=target)


def test_without_a_loss_only_forwards_run():
    modules = blocks(2)
    x, _ = batch()
    out = schedule_for("ZBVZeroBubble", modules, 4, None).step(x)
    assert torch.equal(out, torch.cat([modules[1](modules[0](part)) for part in x.chunk(4)]))
    assert grads(modules) == [None] * 8
    stage = PipelineStage(modules[0], 0, 1, "cpu")
    assert torch.equal(_ScheduleForwardOnly(stage, 3).step(x), torch.cat([modules[0](part) for part in x.chunk(3)]))
    with pytest.raises(RuntimeError, match="target"):
        _ScheduleForwardOnly(stage, 3).step(x, target=x)


def test_stages_hand_on_nested_values_and_integers():
    modules = blocks(3, make=Nested)
    reference = copy.deepcopy(modules)
    x, target = batch()
    loss_fn = lambda out, target: MSE(out["pair"][0], target)  # noqa: E731
    out = schedule_for("InterleavedZeroBubble", modules, 4, loss_fn).step(x, target=target)
    expected = []
    for inputs, targets in zip(x.chunk(4), target.chunk(4)):
        value = inputs
        for module in reference:
            value = module(value)
        loss_fn(value, targets).backward()
        expected.append(value)
    for p in nn.ModuleList(reference).parameters():
        p.grad.div_(4)
    assert same(grads(modules), grads(reference))
    assert torch.equal(out["pair"][1], torch.cat([e["pair"][1] for e in expected]))
    assert out["scale"] == 0.5 and out["none"] is None and out["name"] == "it"


class Returns(nn.Module):
    def __init__(self, value):
        super().__init__()
        self.value = value

    def forward(self, x):
        return x, {"it": self.value}


class Kind(str, enum.Enum):
    ONE = "one"


@pytest.mark.parametrize("value, name", [(object(), "builtins.object"), (Kind.ONE, f"{__name__}.Kind"), ({(1, 2): 3}, "builtins.tuple of")])
def test_what_a_stage_cannot_hand_on_is_named(value, name):
    schedule = schedule_for("Interleaved1F1B", [Returns(value), nn.Linear(8, 8)], 4)
    with pytest.raises(plumb.Error, match=rf"(?s)0F0: a stage returns a {name}.* that it cannot hand on.*try: return tensors"):
        schedule.step(*batch()[:1], target=batch()[1])


def test_keyword_arguments_reach_the_stages_that_take_them():
    modules = [Block(), Scaled(), Scaled()]
    reference = copy.deepcopy(modules)
    x, target = batch()
    gain, shift = torch.randn(12, 8), torch.randn(12, 8)
    schedule = schedule_for(
        "Interleaved1F1B",
        modules,
        3,
        kwargs_chunk_spec={"shift": TensorChunkSpec(0), "gain": TensorChunkSpec(0)},
    )
    out = schedule.step(x, target=target, gain=gain, shift=shift)
    for m, (inputs, targets) in enumerate(zip(x.chunk(3), target.chunk(3))):
        value = reference[0](inputs)
        for module in reference[1:]:
            value = module(value, gain.chunk(3)[m], shift=shift.chunk(3)[m])
        MSE(value, targets).backward()
    for p in nn.ModuleList(reference).parameters():
        p.grad.div_(3)
    assert same(grads(modules), grads(reference)) and out.shape == (12, 8)
    with pytest.raises(plumb.Error, match="'gian'"):
        schedule.step(x, target=target, gian=gain)
    with pytest.raises(plumb.Error, match="unexpected keyword argument 'gian'"):
        schedule_for("Interleaved1F1B", modules, 3).step(x, target=target, gain=gain, gian=gain)


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm, self.drop = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.3)

    def forward(self, x):
        return self.drop(torch.relu_(self.norm(self.linear(x))))


def test_buffers_modes_and_random_draws_are_those_of_accumulation():
    modules = blocks(2, make=Normed)
    reference = copy.deepcopy(modules)
    x, target = batch()
    schedule = schedule_for("ZBVZeroBubble", modules, 1)
    torch.manual_seed(3)
    schedule.step(x, target=target)
    torch.manual_seed(3)
    value = reference[0](x)
    MSE(reference[1](value), target).backward()
    assert same(grads(modules), grads(reference))
    assert same(list(nn.ModuleList(modules).buffers()), list(nn.ModuleList(reference).buffers()))
    nn.ModuleList(modules).eval()
    nn.ModuleList(reference).eval()
    assert torch.equal(schedule.eval(x), reference[1](reference[0](x)))


def test_a_stage_may_begin_with_a_write():
    modules = [nn.Linear(8, 8), Writes(8, 8)]
    reference = copy.deepcopy(modules)
    x, target = batch()
    schedule_for("ZBVZeroBubble", modules, 3).step(x, target=target)
    accumulate(reference, x, target, 3)
    assert same(grads(modules), grads(reference))


def test_dropout_does_not_depend_on_the_schedule_with_a_seed():
    x, target = batch()
    found = []
    for name in ("ZBVZeroBubble", "LoopedBFS", "DualPipeV"):
        modules = blocks(2, make=Normed)
        schedule = schedule_for(name, modules, 4)
        schedule.seed = 5
        schedule.step(x, target=target)
        found.append(grads(modules))
    assert same(found[0], found[1]) and same(found[0], found[2])


def test_a_dw_builder_does_its_work_where_the_weight_half_is():
    log = []

    class Own(nn.Linear):
        def builder(self):
            log.append("I")
            return lambda: log.append("W")

    modules = [Own(8, 8), nn.Linear(8, 8)]
    x, target = batch()
    stages = [
        PipelineStage(modules[0], 0, 2, "cpu", dw_builder=modules[0].builder),
        PipelineStage(modules[1], 1, 2, "cpu"),
    ]
    get_schedule_class("InterleavedZeroBubble")(stages, 2, MSE).step(x, target=target)
    assert sorted(log) == ["I", "I", "W", "W"] and log[0] == "I"
    reference = copy.deepcopy(modules)
    nn.ModuleList(reference).zero_grad()
    accumulate(reference, x, target, 2)
    assert same(grads(modules), grads(reference))


def test_any_table_runs():
    x, target = batch()
    modules = blocks(1)
    reference = copy.deepcopy(modules)
    accumulate(reference, x, target, 4)
    found = search_schedule(1, 4, {"forward": 1, "input": 1, "weight": 1})
    for table in (found, "zbh1", {rank: row for rank, row in enumerate([])} or "GPipe"):
        nn.ModuleList(modules).zero_grad()
        ScheduleTable(stages_of(modules), 4, MSE, table=table).step(x, target=target)
        assert same(grads(modules), grads(reference))


class Fails(nn.Module):
    def __init__(self, at):
        super().__init__()
        self.linear, self.at = nn.Linear(8, 8), at

    def forward(self, x):
        self.at -= 1
        if self.at < 0:
            raise KeyError("the stage's own words")
        return self.linear(x)


def test_what_a_stage_raises_names_the_action_and_is_the_cause():
    modules = [nn.Linear(8, 8), Fails(2)]
    x, target = batch()
    schedule = schedule_for("ZBVZeroBubble", modules, 4)
    with pytest.raises(plumb.Error, match="1F2.*KeyError.*own words") as caught:
        schedule.step(x, target=target)
    assert isinstance(caught.value.__cause__, KeyError)
    assert 'raise KeyError("the stage' in "".join(traceback.format_exception(caught.value.__cause__))
    modules[1].at = 100  # a process alone may go on
    nn.ModuleList(modules).zero_grad()
    schedule.step(x, target=target)
    reference = copy.deepcopy(modules)
    nn.ModuleList(reference).zero_grad()
    accumulate(reference, x, target, 4)
    assert same(grads(modules), grads(reference))


class FailsBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ValueError("the backward's own words")


def test_what_a_backward_raises_is_the_cause_of_the_error():
    class Whole(nn.Linear):
        def forward(self, x):
            return FailsBackward.apply(super().forward(x))

    x, target = batch()
    for name in ("1F1B", "ZBVZeroBubble"):
        modules = [nn.Linear(8, 8), Whole(8, 8)][-1 if name == "1F1B" else 0 :]
        with pytest.raises(plumb.Error, match="backward failed: the backward's own words") as caught:
            schedule_for(name, modules, 4).step(x, target=target)
        cause = caught.value.__cause__
        assert isinstance(cause, ValueError) and "in backward" in "".join(traceback.format_exception(cause))


def interrupted(*_, **__):
    raise KeyboardInterrupt


class OneRow(nn.Linear):
    def forward(self, x):
        return super().forward(x) if len(x) == 1 else interrupted()


def test_an_interrupt_stays_one():
    x, target = batch()
    for where in ("forward", "loss", "hook", "construction", "capture"):
        model = nn.Linear(8, 8)
        stage = PipelineStage(model, 0, 1, "cpu")
        schedule = ScheduleGPipe(stage, 4, interrupted if where == "loss" else MSE)
        if where == "forward":
            model.forward = interrupted
        elif where == "hook":
            schedule.register_custom_function(FORWARD, interrupted)
        elif where == "construction":
            stage.summed_parameters = interrupted
        elif where == "capture":  # capture of a stage's graph for other sizes
            model = OneRow(8, 8)
            stage = pipeline(model, (x[:1],)).build_stage(0, torch.device("cpu"))
            schedule = ScheduleGPipe(stage, 4, MSE)
        with pytest.raises(KeyboardInterrupt):
            schedule.step(x, target=target)
        with pytest.raises(plumb.Error):  # what comes after it is itself
            plumb.load_pt2("nowhere.pt2")


def test_wrong_arguments_are_refused():
    x, target = batch()
    stage = PipelineStage(nn.Linear(8, 8), 0, 1, "cpu")
    schedule = Schedule1F1B(stage, 4, MSE)
    with pytest.raises(TypeError, match="losses"):
        schedule.step(x, target=target, losses=())
    with pytest.raises(ValueError, match="Expecting 4 arg_mbs"):
        schedule.step(x[:3], target=target)
    with pytest.raises(ValueError, match="no stage 1"):
        PipelineStage(nn.Linear(1, 1), 1, 1, "cpu")
    with pytest.raises(plumb.Error, match="not one number"):
        Schedule1F1B(stage, 4, lambda out, target: out - target).step(x, target=target)
    with pytest.raises(plumb.Error, match="complex64 tensor of shape .*, not one number"):
        Schedule1F1B(stage, 4, lambda out, target: (out - target).sum() * 1j).step(x, target=target)
    with pytest.raises(plumb.Error, match="no gradient"):
        Schedule1F1B(stage, 4, lambda out, target: out.detach().sum()).step(x, target=target)
    with pytest.raises(plumb.Error, match="same index"):
        get_schedule_class("ZBVZeroBubble")([PipelineStage(nn.Identity(), 0, 2, "cpu")] * 2, 4).step(x)
    with pytest.warns(UserWarning, match="stage 0: the inputs"):
        Schedule1F1B(PipelineStage(nn.Linear(8, 8), 0, 1, "cpu", input_args=x), 4).step(x)


def test_the_first_bad_value_is_named_on_request():
    x, target = batch()
    x[7, 2] = float("inf")
    schedule = schedule_for("ZBVZeroBubble", blocks(2), 4)
    schedule.check_numerics = True
    with pytest.raises(plumb.Error, match="stage 0, microbatch 2"):
        schedule.step(x, target=target)


def test_time_lines_are_recorded_and_drawn(tmp_path):
    schedule = schedule_for("LoopedBFS", blocks(2), 3)
    schedule.record_timeline = True
    x, target = batch()
    schedule.step(x, target=target)
    events = schedule.timeline()
    assert [e[1] for e in events][:3] == ["0F0", "0F1", "0F2"] and len(events) == 12
    busy = sum(end - start for *_, start, end in events)
    whole = max(e[4] for e in events) - min(e[3] for e in events)
    assert schedule.measured_bubble() == pytest.approx(1 - busy / whole, abs=1e-3)
    schedule.draw_timeline(str(tmp_path / "t.json"))
    traced = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    ran = [e for e in traced if e.get("cat") == "compute" and e["pid"] > 1]
    assert [e["name"] for e in ran] == [e[1] for e in events] and ran[0]["dur"] > 0
    processes = [e["args"]["name"] for e in traced if e["name"] == "process_name"]
    assert processes == ["steps", "rank 0, stages 0, 1"]
    schedule.draw_timeline(str(tmp_path / "t.svg"))
    assert "measured" in (tmp_path / "t.svg").read_text() and "simulated" not in (tmp_path / "t.svg").read_text()
    schedule.draw_timeline(str(tmp_path / "t.svg"), {"forward": 1e-4, "input": 1e-4, "weight": [1e-4, 2e-4]})
    assert "simulated" in (tmp_path / "t.svg").read_text()
    with pytest.raises(plumb.Error, match="record_timeline"):
        schedule_for("LoopedBFS", blocks(2), 3).draw_timeline(None)


def test_nothing_is_kept_after_a_step():
    modules = blocks(3)
    schedule = schedule_for("InterleavedZeroBubble", modules, 4)
    x, target = batch()
    kept = []
    modules[1].register_forward_hook(lambda module, args, out: kept.append(weakref.ref(out)))
    schedule.step(x, target=target)
    assert len(kept) == 4 and not any(ref() is not None for ref in kept)
    gone = weakref.ref(schedule)
    del schedule
    gc.collect()
    assert gone() is None


def test_compiled_stages_run_with_whole_backwards_only():
    compiled = torch.compile(nn.Linear(8, 8), backend="eager")
    x, target = batch()
    stages = [PipelineStage(compiled, 0, 2, "cpu"), PipelineStage(nn.Linear(8, 8), 1, 2, "cpu")]
    with pytest.raises(plumb.Error, match="stage 0 is compiled"):
        get_schedule_class("ZBVZeroBubble")(stages, 4, MSE)
    get_schedule_class("LoopedBFS")(stages, 4, MSE).step(x, target=target)
    assert compiled.weight.grad is not None


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return torch.cond(x.sum() > 0, torch.sin, torch.cos, (self.linear(x),))


class Checkpointed(Branches):
    def forward(self, x):
        return checkpoint(lambda y: functional.dropout(self.linear(y).tanh()), x, use_reentrant=False)


@pytest.mark.parametrize("make", [Branches, lambda: torch.compile(Checkpointed(), backend="aot_eager")], ids=["cond", "checkpoint"])
def test_a_stage_runs_torchs_operators_on_functions(make):
    torch.manual_seed(0)
    modules, (x, target) = [make()], batch()
    reference = copy.deepcopy(modules)
    torch.manual_seed(1)
    expected, _ = accumulate(reference, x, target, 4)
    torch.manual_seed(1)
    same(schedule_for("GPipe", modules, 4).step(x, target=target), expected)
    same(grads(modules), grads(reference))
