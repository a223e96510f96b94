"""The newer parts of ``torch.distributed.pipelining`` (torch 2.15), with every torch: batches that are cut already, contexts
around forwards, lives of activations, waits in tables."""

import contextlib

import pytest
import torch
import torch.distributed.pipelining
from pipelines import MSE, batch, same
from plumb.pipelining import (
    PipelineStage,
    PipelineStageInfo,
    SplitPoint,
    analyze_pipeline_activation_liveness,
    pipeline,
)
from plumb.pipelining.schedules import WAIT_SEND_F, _Action, get_schedule_class
from torch import nn

import plumb

FOUR = 4  # microbatches


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))


def by_hand(net, *_):
    return [PipelineStage(part, i, 2, "cpu") for i, part in enumerate((net[:2], net[2:]))]


def cut(net, x):
    pipe = pipeline(net, (x[: len(x) // FOUR],), split_spec={"2": SplitPoint.BEGINNING})
    return [pipe.build_stage(i, "cpu") for i in range(2)]


def trained(net, runner, *args, **kwargs):
    """Returns the output, losses and gradients of a step."""
    losses = []
    output = runner.step(*args, losses=losses, **kwargs)
    grads = [p.grad for p in net.parameters()]
    net.zero_grad()
    return [output, *losses, *grads]


@pytest.mark.parametrize("make", [by_hand, cut])
@pytest.mark.parametrize("name", ["Interleaved1F1B", "LoopedBFS", "ZBVZeroBubble"])
def test_a_batch_that_is_cut_already_gives_the_bits_of_the_whole(make, name):
    x, target = batch(16)
    net = model()
    runner = get_schedule_class(name)(make(net, x), FOUR, MSE)
    whole = trained(net, runner, x, target=target)
    microbatches = {"arg_mbs": [(part,) for part in x.chunk(FOUR)], "target_mbs": list(target.chunk(FOUR))}
    assert same(trained(net, runner, **microbatches), whole)
    losses = []
    assert torch.equal(runner.eval(losses=losses, **microbatches), whole[0]) and same(losses, whole[1:5])


@pytest.mark.parametrize(
    "given, error, text",
    [
        ({"arg_mbs": [(torch.ones(4, 8),)] * 3}, ValueError, "Expecting 4 arg_mbs"),
        ({"arg_mbs": [torch.ones(4, 8)] * 4}, TypeError, r"arg_mbs\[0\]"),
        ({"kwarg_mbs": [()] * 4}, TypeError, r"kwarg_mbs\[0\]"),
        ({"arg_mbs": [(torch.ones(4, 8),)] * 4, "target": torch.ones(16, 8)}, ValueError, "and target for the whole"),
        ({"arg_mbs": [(torch.ones(4, 8),)] * 4, "mask": torch.ones(16)}, ValueError, "and 'mask' for the whole"),
    ],
)
def test_microbatches_that_make_no_batch_are_named(given, error, text):
    runner = get_schedule_class("Interleaved1F1B")(by_hand(model()), FOUR, MSE)
    with pytest.raises(error, match=text):
        runner.step(**given)


@pytest.mark.parametrize("make", [by_hand, cut])
def test_a_context_is_around_every_forward_of_a_stage(make):
    x, target = batch(16)
    net = model()
    stages = make(net, x)
    runner = get_schedule_class("Interleaved1F1B")(stages, FOUR, MSE)
    expected = trained(net, runner, x, target=target)
    entered, left = [], []

    @contextlib.contextmanager
    def context(info):
        entered.append(info)
        yield
        left.append(info)

    handle = stages[1].register_forward_context(context)
    with pytest.raises(RuntimeError, match="has a forward context already"):
        stages[1].register_forward_context(context)
    assert same(trained(net, runner, x, target=target), expected)
    assert entered == left == [PipelineStageInfo(stage_index=1, microbatch_index=m) for m in range(FOUR)]
    handle.remove()
    assert same(trained(net, runner, x, target=target), expected) and len(entered) == FOUR


def test_a_context_that_suppresses_an_exception_is_named():
    stages = by_hand(model())
    stages[0].register_forward_context(lambda info: contextlib.suppress(Exception))
    runner = get_schedule_class("Interleaved1F1B")(stages, FOUR, MSE)
    with pytest.raises(plumb.Error, match="forward context of stage 0 suppressed an exception"):
        runner.step(torch.ones(16, 5), target=torch.ones(16, 8))


NAMES = ["Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"]


class Row(plumb.pipelining.PipelineScheduleMulti):
    """A schedule of which only the table is asked."""

    def __init__(self, order, microbatches):
        self.pipeline_order, self._n_microbatches = order, microbatches


@pytest.mark.parametrize("name", NAMES)
def test_slots_are_as_many_as_activations_that_live_at_once(name):
    table = plumb._C.make_schedule(name, 2, 8, 2)
    schedule = Row(plumb.pipelining._actions._table(table), 8)
    for rank in range(2):
        stages = [s for s, at in enumerate(table.ranks) if at == rank]
        for granularity, keys in (("stage_microbatch", [(s, m) for s in stages for m in range(8)]), ("microbatch", range(8))):
            found = analyze_pipeline_activation_liveness(
                schedule, pp_rank=rank, stage_indices=stages, granularity=granularity
            )
            lives = {(s, m): found.get_activation_lifetime(s, m) for s in stages for m in range(8)}
            slots = {(s, m): found.slot_for(s, m) for s in stages for m in range(8)}
            if granularity == "microbatch":
                assert all(lives[s, m] == lives[stages[0], m] and slots[s, m] == slots[stages[0], m] for s, m in lives)
                lives, slots = ({m: of[stages[0], m] for m in keys} for of in (lives, slots))
            for one in keys:
                for other in keys:
                    together = lives[one][0] <= lives[other][1] and lives[other][0] <= lives[one][1]
                    assert one == other or not together or slots[one] != slots[other]
            last = max(end for _, end in lives.values())
            at_once = max(sum(begin <= i <= end for begin, end in lives.values()) for i in range(last + 1))
            assert found.num_slots == at_once == len(set(slots.values()))


@pytest.mark.parametrize(
    "given, text",
    [
        ({"pp_rank": 2}, "no rank 2"),
        ({"stage_indices": []}, "at least one"),
        ({"stage_indices": [0, 0]}, "given once"),
        ({"stage_indices": [1]}, "stage 1 is not run on rank 0"),
        ({"granularity": "layer"}, "granularity"),
    ],
)
def test_lives_of_what_the_schedule_does_not_have_are_refused(given, text):
    schedule = Row(plumb.pipelining._actions._table(plumb._C.make_schedule("Interleaved1F1B", 2, 4, 2)), 4)
    with pytest.raises(ValueError, match=text):
        analyze_pipeline_activation_liveness(
            schedule, **{"pp_rank": 0, "stage_indices": [0, 2], "granularity": "microbatch"} | given
        )


@pytest.mark.skipif(not hasattr(torch.distributed.pipelining, "PipelineStageInfo"), reason="torch before 2.15 has no such analysis")
@pytest.mark.parametrize("granularity", ["microbatch", "stage_microbatch"])
@pytest.mark.parametrize("name", NAMES)
def test_slots_are_torchs(name, granularity):
    from torch.distributed.pipelining import analyze_pipeline_activation_liveness as of_torch
    from torch.distributed.pipelining import schedules as torchs

    table = plumb._C.make_schedule(name, 2, 8, 2)
    order = plumb.pipelining._actions._table(table)
    theirs = torchs.PipelineScheduleMulti.__new__(torchs.PipelineScheduleMulti)
    theirs.pipeline_order = {r: [a and torchs._Action.from_str(str(a)) for a in row] for r, row in order.items()}
    theirs._n_microbatches = 8
    for rank in range(2):
        asked = {"pp_rank": rank, "granularity": granularity}
        asked["stage_indices"] = [s for s, at in enumerate(table.ranks) if at == rank]
        ours, expected = analyze_pipeline_activation_liveness(Row(order, 8), **asked), of_torch(theirs, **asked)
        assert ours.num_slots == expected.num_slots
        assert ours.slot_by_stage_and_microbatch == expected.slot_by_stage_and_microbatch
        lives = "_activation_lifetime_by_stage_and_microbatch"
        assert getattr(ours, lives) == getattr(expected, lives)


def test_a_table_with_waits_is_read_and_trains(tmp_path):
    assert _Action.from_str("1WAIT_SEND_F2") == _Action(1, WAIT_SEND_F, 2)
    assert str(_Action.from_str("3WAIT_REDUCE_GRAD")) == "3WAIT_REDUCE_GRAD"
    file = tmp_path / "table.csv"
    file.write_text("0F0,0F1,1F0,0WAIT_SEND_F0,1F1,1B0,1B1,1REDUCE_GRAD,0B0,1WAIT_SEND_B0,0B1,0REDUCE_GRAD,1WAIT_REDUCE_GRAD\n")
    x, target = batch(16)
    net = model()
    expected = trained(net, get_schedule_class("Interleaved1F1B")(by_hand(net), 2, MSE), x, target=target)
    runner = plumb.pipelining.PipelineScheduleMulti(by_hand(net), 2, MSE)
    runner._load_csv(str(file), format="compute_comms")
    assert same(trained(net, runner, x, target=target), expected)


def test_options_of_torch_are_taken():
    x, target = batch(16)
    net = model()
    schedule = get_schedule_class("InterleavedZeroBubble")
    expected = trained(net, schedule(by_hand(net), FOUR, MSE), x, target=target)
    options = {"unshard_lookahead": "auto", "defer_reduce_grad_wait": True, "max_outstanding_sends": 2}
    assert same(trained(net, schedule(by_hand(net), FOUR, MSE, max_active_stages=1, **options), x, target=target), expected)
    assert schedule(by_hand(net), FOUR, MSE, defer_pp_recv=True)._defer_pp_recv
    with pytest.raises(ValueError, match="max_active_stages"):
        schedule(by_hand(net), FOUR, MSE, max_active_stages=0)
