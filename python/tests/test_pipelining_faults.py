"""Errors on the other ranks when one of them fails, and how soon they come."""

import os
import signal

import pytest
import ranks
import torch
from pipelines import MSE, batch, blocks
from plumb.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B, SplitPoint, pipeline
from plumb.pipelining.schedules import get_schedule_class
from torch import nn

TIMEOUT = 10.0  # seconds until a stopped rank counts as lost: nothing but the time tells
SOON = 300.0  # before the group's time-out of 600 seconds: a rank that has not ended then is killed, and says nothing


class Fault(nn.Module):
    """Works twice, then fails in the given way."""

    def __init__(self, how):
        super().__init__()
        self.linear, self.how, self.calls = nn.Linear(8, 8), how, 0

    def forward(self, x):
        self.calls += 1
        if self.calls == 3:
            if self.how == "raises":
                raise ValueError("the stage's own words")
            if self.how == "exits":
                os._exit(3)
            os.kill(os.getpid(), signal.SIGKILL if self.how == "killed" else signal.SIGSTOP)
        return self.linear(x)


def faulty(rank, size, how, at):
    module = Fault(how) if rank == at else blocks(1)[0]
    schedule = Schedule1F1B(PipelineStage(module, rank, size, "cpu"), 4, MSE)
    if how == "stopped":
        schedule.timeout = TIMEOUT
    x, target = batch()
    schedule.step(*([x] if rank == 0 else []), target=target if rank == size - 1 else None)


@pytest.mark.parametrize(
    "how, at", [("raises", 0), ("raises", 1), ("raises", 2), ("exits", 1), ("killed", 0), ("killed", 2), ("stopped", 2)]
)
def test_every_other_rank_names_the_one_at_fault_within_the_time_out(how, at):
    started = ranks.start(faulty, 3, how, at)
    try:
        # A connection closes, or the rank says so itself.
        ends = ranks.finish([s for rank, s in enumerate(started) if rank != at], SOON)
    finally:
        if how == "stopped":
            started[at][0].kill()
    own = ranks.finish([started[at]])[0]
    for rank, ended in zip([r for r in range(3) if r != at], ends):
        assert ended.error == "Error" and f"rank {at}" in ended.text.splitlines()[0], (rank, ended)
        assert f"rank {rank}" in ended.text.splitlines()[0] and ended.exit_code == 1
        if how == "raises":
            assert "the stage's own words" in ended.text and f"{at}F2" in ended.text
    if how == "raises":
        assert own.error == "Error" and f"rank {at} at {at}F2: ValueError: the stage's own words" in own.text
        assert "ValueError: the stage's own words\n\nThe above exception was the direct cause" in own.text
    else:
        assert own.exit_code == {"exits": 3, "killed": -signal.SIGKILL, "stopped": -signal.SIGKILL}[how]


def disagreeing(rank, size, what):
    count = 2 * size if what == "stages" else size
    x, target = batch()
    if what == "schedule":
        cls = Schedule1F1B if rank == 0 else ScheduleGPipe
        schedule = cls(PipelineStage(blocks(1)[0], rank, count, "cpu"), 4, MSE)
    elif what == "microbatches":
        schedule = Schedule1F1B(PipelineStage(blocks(1)[0], rank, count, "cpu"), 4 + 4 * rank, MSE)
    elif what == "stages":  # the other way round than the schedule has them
        stages = [PipelineStage(blocks(1)[0], i, count, "cpu") for i in (1 - rank, 3 - rank)]
        schedule = ScheduleInterleaved1F1B(stages, 4, MSE)
    elif what == "tied":
        module = blocks(1, seed=rank)[0]
        stage = PipelineStage(module, rank, count, "cpu", tied={"up.weight": "w"})
        schedule = Schedule1F1B(stage, 4, MSE)
    elif what == "cuts":  # one rank's stages end in layer 1, the other's begin in layer 2
        pipe = pipeline(nn.Sequential(*blocks(3)), (x[:3],), split_spec={str(1 + rank): SplitPoint.BEGINNING})
        schedule = Schedule1F1B(pipe.build_stage(rank, torch.device("cpu")), 4, MSE)
    else:  # the second stage takes other sizes than the first gives
        stage = PipelineStage(nn.Linear(8, 8) if rank == 0 else nn.Linear(5, 8), rank, count, "cpu")
        schedule = Schedule1F1B(stage, 4, MSE)
    schedule.step(*([x] if rank == 0 else []), target=target if rank == size - 1 else None)


@pytest.mark.parametrize(
    "what, says",
    [
        ("schedule", "different layouts or schedules"),
        ("microbatches", "different layouts or schedules"),
        ("cuts", 'is measured ("balanced") is another on each'),
        ("stages", "runs stage"),
        ("tied", "copies of one parameter hold different values"),
        ("sizes", "cannot be multiplied"),
    ],
)
def test_ranks_that_do_not_fit_together_say_so_and_do_not_hang(what, says):
    ends = ranks.finish(ranks.start(disagreeing, 2, what), SOON)
    for ended in ends:
        assert ended.error == "Error" and says in ended.text, ended


def backward_on_one_rank(rank, size, how):
    loss_fn = None if how == "no loss function" and rank == 0 else MSE
    schedule = ScheduleGPipe(PipelineStage(blocks(1)[0], rank, size, "cpu"), 4, loss_fn)
    x, target = batch()
    run = schedule.eval if how == "eval" and rank == 1 else schedule.step
    run(*([x] if rank == 0 else []), target=target if rank == size - 1 else None)


@pytest.mark.parametrize(
    "how, says",
    [
        ("no loss function", "it is of a step without a backward, and this rank's has one"),
        ("eval", "it is of a step with a backward, and this rank's has none"),
    ],
)
def test_a_backward_on_one_rank_alone_is_refused(how, says):
    first, second = ranks.finish(ranks.start(backward_on_one_rank, 2, how), SOON)
    assert second.error == "Error" and f"from rank 0: {says}" in second.text, second
    assert how != "eval" or (first.error == "Error" and "rank 1" in first.text.splitlines()[0]), first


def leaves(rank, size):
    schedule = Schedule1F1B(PipelineStage(blocks(1)[0], rank, size, "cpu"), 4, MSE)
    x, target = batch()
    for step in range(3):
        if rank == 1 and step == 2:
            return "left"
        schedule.step(*([x] if rank == 0 else []), target=target if rank == 1 else None)


def test_a_rank_that_goes_home_early_is_named():
    stays, left = ranks.finish(ranks.start(leaves, 2), SOON)
    assert left.result == "left" and stays.error == "Error" and "rank 1" in stays.text.splitlines()[0]


def after_a_fault(rank, size):
    module = Fault("raises") if rank == 1 else blocks(1)[0]
    schedule = Schedule1F1B(PipelineStage(module, rank, size, "cpu"), 4, MSE)
    x, target = batch()
    texts = []
    for _ in range(2):
        try:
            schedule.step(*([x] if rank == 0 else []), target=target if rank == 1 else None)
        except RuntimeError as error:
            texts.append(str(error))
    return texts


def test_a_group_that_failed_takes_no_more_steps():
    for first, second in ranks.run(after_a_fault, 2):
        assert "own words" in first and "cannot go on" in second


def several(rank, size):
    """Schedules side by side and one after another on one group, let go at different times."""
    x, target = batch()
    kept, found = [], []
    for i, name in enumerate(["1F1B", "GPipe", "ZBH1", "1F1B"]):
        module = blocks(2)[rank]
        schedule = get_schedule_class(name)(PipelineStage(module, rank, size, "cpu"), 4, MSE)
        if rank == i % 2:
            kept.append(schedule)
        schedule.step(*([x] if rank == 0 else []), target=target if rank == 1 else None)
        found.append(module.up.weight.grad.clone())
        del schedule
    return found


def test_schedules_share_a_group():
    for found in ranks.run(several, 2):
        assert all(torch.equal(found[0], other) for other in found)
