"""Steps of a schedule: which rows they weigh, what they refuse, and one at a time."""

import threading

import pytest
import torch
from plumb.pipelining import SplitPoint, TensorChunkSpec, pipeline
from plumb.pipelining.microbatch import _Replicate
from plumb.pipelining.schedules import ScheduleInterleaved1F1B
from torch import nn

import plumb

ROWS, REPLICATED = TensorChunkSpec(0), _Replicate()


def make_stages():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 3))
    pipe = pipeline(net, (torch.randn(2, 4),), split_spec={"2": SplitPoint.BEGINNING})
    return [pipe.build_stage(i, "cpu") for i in range(2)]


class WithTable(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, table, x):
        return self.b(torch.tanh(self.a(x) + table.sum(0)))


@pytest.mark.parametrize("how", ["replicated", "keywords", "cut before"])
def test_microbatches_weigh_by_the_rows_that_were_cut(how):
    def loss(out, _):
        return out.square().mean()

    x, table = torch.randn(5, 4), torch.randn(7, 6)
    plain, net = WithTable(), WithTable()
    loss(plain(table, x), None).backward()
    by_name = {"table": table, "x": x[:3]}
    args, kwargs = ((), by_name) if how != "replicated" else ((table, x[:3]), {})
    pipe = pipeline(net, args, kwargs, split_spec={"b": SplitPoint.BEGINNING})
    specs = {"args_chunk_spec": (REPLICATED, ROWS)} if args else {"kwargs_chunk_spec": {"table": REPLICATED, "x": ROWS}}
    schedule = ScheduleInterleaved1F1B([pipe.build_stage(i, "cpu") for i in range(2)], 2, loss, **specs)
    if how == "cut before":
        schedule.step(kwarg_mbs=[{"x": x[:3], "table": table}, {"x": x[3:], "table": table}])
    else:
        schedule.step(*((table, x) if args else ()), **({} if args else {"table": table, "x": x}))
    torch.testing.assert_close(net.b.bias.grad, plain.b.bias.grad)


def test_rows_that_do_not_lie_in_the_same_microbatches_are_refused():
    schedule = ScheduleInterleaved1F1B(make_stages(), 4, nn.functional.mse_loss)
    with pytest.raises(plumb.Error, match="the target of 6 rows is not cut into 4 microbatches beside an input of 8 rows"):
        schedule.step(torch.randn(8, 4), target=torch.randn(6, 3))
    losses = []
    schedule.step(torch.randn(8, 4), target=torch.randn(8, 3), losses=losses)
    assert len(losses) == 4


def test_a_stage_is_in_one_step_at_a_time():
    stages, x = make_stages(), torch.randn(8, 4)
    others = [ScheduleInterleaved1F1B(stages, 4, None)]
    found = []

    def loss(out, target):
        for other in (schedule, *others):
            with pytest.raises(plumb.Error, match="stage 0 runs in a step already") as caught:
                other.eval(x)
            found.append(caught.value.remedy)
        return nn.functional.mse_loss(out, target)

    schedule = ScheduleInterleaved1F1B(stages, 4, loss)
    wanted = ScheduleInterleaved1F1B(make_stages(), 4, nn.functional.mse_loss)
    target, losses, expected = torch.randn(8, 3), [], []
    schedule.step(x, target=target, losses=losses)
    wanted.step(x, target=target, losses=expected)
    assert len(found) == 8 and all(map(torch.equal, losses, expected))


def test_threads_that_share_stages_get_their_results_or_an_error():
    stages, x = make_stages(), torch.randn(8, 4)
    schedules = [ScheduleInterleaved1F1B(stages, 4, None) for _ in range(2)]
    want, seen = schedules[0].eval(x), set()

    def work(schedule):
        for _ in range(40):
            try:
                seen.add(torch.equal(schedule.eval(x), want))
            except plumb.Error as error:
                seen.add(error.message)

    threads = [threading.Thread(target=work, args=(schedules[i % 2],)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert True in seen and seen <= {True, "stage 0 runs in a step already"}


@pytest.mark.parametrize(("name", "value"), [("seed", 3), ("check_numerics", True), ("gradient_groups", 2)])
def test_options_that_are_set_after_the_first_step_are_refused(name, value):
    schedule, x = ScheduleInterleaved1F1B(make_stages(), 4, None), torch.randn(8, 4)
    schedule.eval(x)
    setattr(schedule, name, value)
    with pytest.raises(plumb.Error, match=f"{name} is {value} by now.*\\n.*before the first step"):
        schedule.eval(x)


def test_states_are_merged_for_every_stage_or_not_at_all():
    net = nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 3))
    pipe = pipeline(net, (torch.randn(2, 4),), split_spec={"2": SplitPoint.BEGINNING})
    states = [pipe.get_stage_module(i).state_dict() for i in range(2)]
    assert list(pipe.merge_state_dict(states)) == list(net.state_dict())
    for wrong, says in (([], "0 states"), (states[:1], "1 states are given for 2 stages"), ("ab", "a state is a str")):
        with pytest.raises(plumb.Error, match=says):
            pipe.merge_state_dict(wrong)


def test_a_device_that_is_not_here_is_refused_by_its_name():
    pipe = pipeline(nn.Linear(4, 4), (torch.randn(2, 4),))
    with pytest.raises(plumb.Error, match="there is no device 'cpx' here"):
        pipe.build_stage(0, "cpx")


@pytest.mark.parametrize(
    "wrong",
    [{"ranks": 2**70}, {"microbatches": 0}, {"stages_per_rank": "12"}, {"stages_per_rank": 2}, {"schedules": "1F1B"}]
    + [{"schedules": 1}, {"loss": 3}, {"link": (0, 0)}],
)
def test_plans_refuse_what_they_cannot_take_with_what_to_give(wrong):
    with pytest.raises(plumb.Error) as caught:
        plumb.pipelining.plan(nn.Linear(4, 4), (torch.randn(2, 4),), **{"ranks": 2, "estimate": True, "loss": "none", **wrong})
    assert caught.value.remedy


def test_outputs_of_other_structures_are_not_merged():
    with pytest.raises(plumb.Error, match="microbatch 1 have another structure"):
        plumb.pipelining.microbatch.merge_chunks([{"a": torch.ones(1)}, {"b": torch.ones(1)}], None)
