"""Steps of stages with methods of their own, which are hooks of the engine's step: no bit changes, nor what is said."""

import copy

import pytest
import ranks
import torch
from pipelines import LOOPED, MSE, SINGLE, Block, V, accumulate, batch, blocks, cross_entropy, grads, same, stages_of
from plumb.pipelining import PipelineStage, pipe_split, pipeline
from plumb.pipelining.schedules import REDUCE_GRAD, get_schedule_class
from torch import nn

import plumb

MICROBATCHES = 4
PLAIN, OWN = False, True


class OwnMethods:
    """Has methods in the place of all actions that compute."""

    def forward_one_chunk(self, *args, **kwargs):
        return super().forward_one_chunk(*args, **kwargs)

    def backward_one_chunk(self, *args, **kwargs):
        super().backward_one_chunk(*args, **kwargs)

    def backward_weight_one_chunk(self, *args, **kwargs):
        super().backward_weight_one_chunk(*args, **kwargs)


def schedule_of(name, stages, own, microbatches=MICROBATCHES, **settings):
    for stage in stages if own else []:
        stage.__class__ = type("Own", (OwnMethods, type(stage)), {})
    schedule = get_schedule_class(name)(stages[0] if name in SINGLE else stages, microbatches, MSE)
    for key, value in settings.items():
        setattr(schedule, key, value)
    return schedule


def count_for(name):
    return 1 if name in SINGLE else 2 if name in V else 3


@pytest.mark.parametrize("name", SINGLE + LOOPED + V)
def test_gradients_add_up_the_same(name):
    found = []
    for own in (PLAIN, OWN):
        modules = blocks(count_for(name))
        schedule = schedule_of(name, stages_of(modules), own)
        for seed in range(2):  # gradients from before a step are added to
            losses = []
            x, target = batch(seed=seed)
            out = schedule.step(x, target=target, losses=losses)
        found.append((grads(modules), losses, [out]))
    for plain, own in zip(*found):
        assert same(plain, own)


class Rows(nn.Module):
    """A block whose weight may be another's."""

    def __init__(self):
        super().__init__()
        self.linear, self.own = nn.Linear(8, 8, bias=False), nn.Linear(8, 8)

    def forward(self, x):
        return torch.tanh(self.own(self.linear(x)))


def tied_modules(how, count):
    modules = blocks(count, make=Rows)
    if how == "one tensor":
        modules[-1].linear.weight = modules[0].linear.weight
    else:
        modules[-1].linear.weight.data.copy_(modules[0].linear.weight.data)
    return modules


@pytest.mark.parametrize("how", ["one tensor", "by name"])
@pytest.mark.parametrize("name", ["Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "DualPipeV"])
def test_copies_of_a_weight_are_summed_the_same(name, how):
    found = []
    for own in (PLAIN, OWN):
        modules = tied_modules(how, count_for(name))
        names = {"tied": {"linear.weight": "w"}}
        stages = [
            PipelineStage(m, i, len(modules), "cpu", **(names if how == "by name" and i in (0, len(modules) - 1) else {}))
            for i, m in enumerate(modules)
        ]
        schedule = schedule_of(name, stages, own)
        for seed in range(2):
            x, target = batch(seed=seed)
            schedule.step(x, target=target)
        assert torch.equal(modules[0].linear.weight.grad, modules[-1].linear.weight.grad)
        found.append([m.get_parameter(n).grad for m in modules for n, _ in m.named_parameters()])
    assert same(*found)


def test_copies_that_differ_are_refused():
    modules = blocks(2, make=Rows)
    stages = stages_of(modules, tied={"linear.weight": "w"})
    schedule = schedule_of("LoopedBFS", stages, OWN)
    x, target = batch()
    with pytest.raises(plumb.Error, match="different values: 'w' of stage 0 .* and 'w' of stage 1"):
        schedule.step(x, target=target)
    assert modules[0].own.weight.grad is None


class Tied(nn.Module):
    """The embedding is the head, too; one bias does not get a gradient in every stage."""

    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(16, 8)
        self.layers = nn.ModuleList(Block() for _ in range(3))

    def forward(self, ids):
        x = self.wte(ids)
        for layer in self.layers:
            pipe_split()
            x = layer(x)
        return x @ self.wte.weight.t()


def over_ranks(rank, size, cases):
    """Gradients, losses and outputs of every case, of plain stages and of stages with methods of their own."""
    found = []
    for name, what in cases:
        both = []
        for own in (PLAIN, OWN):
            torch.manual_seed(1)
            two_way = name == "DualPipe"
            count = size if two_way or name in SINGLE else 2 * size
            here = sorted([rank, size - 1 - rank]) if two_way else list(range(rank, count, size))
            if what == "cut":
                ids = torch.randint(16, (8, 5))
                x, target, loss = ids, ids.roll(1, 1), cross_entropy
                pipe = pipeline(Tied(), (ids[:2],))
                stages = [pipe.build_stage(i, torch.get_default_device()) for i in here]
            else:
                modules = tied_modules("by name", count)
                if what == "dropout":
                    modules = [nn.Sequential(m, nn.Dropout(0.5)) for m in modules]
                name_of = "0.linear.weight" if what == "dropout" else "linear.weight"
                ends = {name_of: "w"} if what == "tied" else {}
                stages = [
                    PipelineStage(modules[i], i, count, "cpu", tied=ends if i in (0, count - 1) else None) for i in here
                ]
                (x, target), loss = batch(8), MSE
            schedule = schedule_of(name, stages, own, seed=3 if what == "dropout" else None)
            schedule._loss_fn = loss
            if what == "plain" and own:
                run = lambda action, context, schedule=schedule: schedule._run.perform(action)  # noqa: E731
                schedule.register_custom_function(REDUCE_GRAD, run)
            steps = []
            for _ in range(2):
                losses = []
                first, last = two_way or 0 in here, two_way or count - 1 in here
                out = schedule.step(*([x] if first else []), target=target if last else None, losses=losses)
                steps += [losses, [] if out is None else [out]]
            grads = [p.grad for s in stages for _, p in s.named_parameters()]
            both.append([*steps, copy.deepcopy(grads)])
        found.append(both)
    return found


@pytest.mark.parametrize(
    "size, cases",
    [
        (2, [("1F1B", "tied"), ("InterleavedZeroBubble", "tied"), ("DualPipe", "tied"), ("DualPipe", "dropout"), ("DualPipe", "plain")]),
        (4, [("1F1B", "cut"), ("ZBH1", "cut"), ("DualPipe", "cut"), ("DualPipe", "tied"), ("1F1B", "dropout")]),
    ],
)  # fmt: skip
def test_ranks_get_the_same(size, cases):
    for rank, results in enumerate(ranks.run(over_ranks, size, cases)):
        for case, (plain, own) in zip(cases, results):
            assert len(plain) == len(own) == 5
            for a, b in zip(plain, own):
                assert same(a, b), (rank, case)
            assert any(g is not None for g in own[-1])


def test_dropout_is_drawn_the_same_when_seeded():
    found = []
    for own in (PLAIN, OWN):
        modules = [nn.Sequential(m, nn.Dropout(0.5)) for m in blocks(2)]
        schedule = schedule_of("ZBVZeroBubble", stages_of(modules), own, seed=11)
        torch.manual_seed(5)
        x, target = batch()
        before = torch.get_rng_state()
        outs = [schedule.step(x, target=target) for _ in range(2)]
        assert torch.equal(torch.get_rng_state(), before)
        assert not torch.equal(*outs)
        found.append((outs, grads(modules)))
    for plain, own in zip(*found):
        assert same(plain, own)


@pytest.mark.parametrize("groups", [3, 4])
@pytest.mark.parametrize("name", ["GPipe", "ZBVZeroBubble", "LoopedBFS"])
def test_groups_of_microbatches_are_summed_in_a_tree(name, groups):
    count = 2 * groups
    modules = blocks(count_for(name))
    reference, (x, target) = copy.deepcopy(modules), batch(count)
    schedule = schedule_of(name, stages_of(modules), PLAIN, count, gradient_groups=groups)
    schedule.step(x, target=target)
    sums = []
    for own in zip(x.chunk(groups), target.chunk(groups)):
        accumulate(reference, *own, 2, scale=False)
        sums.append(grads(reference))
        nn.ModuleList(reference).zero_grad()
    expected = [((a + b) + (c + rest[0] if rest else c)) / count for a, b, c, *rest in zip(*sums)]
    assert same(grads(modules), expected)
    schedule = schedule_of(name, stages_of(modules), PLAIN, count, gradient_groups=5)
    with pytest.raises(plumb.Error, match=f"gradient_groups is 5, but each replica has {count} microbatches"):
        schedule.step(x, target=target)


def test_a_run_that_is_resumed_draws_what_it_would_have_drawn():
    modules = [nn.Sequential(m, nn.Dropout(0.5)) for m in blocks(2)]
    x, target = batch()
    whole = schedule_of("ZBVZeroBubble", stages_of(modules), PLAIN, seed=11)
    outs = [whole.step(x, target=target) for _ in range(3)]
    rest = schedule_of("ZBVZeroBubble", stages_of(modules), PLAIN, seed=11, first_step=2)
    assert torch.equal(rest.step(x, target=target), outs[2])
    assert not torch.equal(outs[1], outs[2])


class Bad(nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        return torch.where(torch.arange(8) == 3, float("nan"), y) if self.calls.pop() else y


class BadGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad / 0


@pytest.mark.parametrize("own", [PLAIN, OWN])
def test_the_first_value_that_is_not_finite_is_named(own):
    modules = [Bad(8, 8), nn.Linear(8, 8)]
    modules[0].calls = [False, True, False, False, False]
    x, target = batch(8)
    schedule = schedule_of("LoopedBFS", stages_of(modules), own, check_numerics=True)
    with pytest.raises(plumb.Error, match=r"rank 0 at (0F3|the end of the step): output 0 of stage 0, microbatch 3: entry \[0, 3\] is -?nan"):
        schedule.step(x, target=target)
    modules = [nn.Linear(8, 8), nn.Linear(8, 8)]
    modules[1].register_forward_pre_hook(lambda module, args: BadGradient.apply(*args))
    schedule = schedule_of("LoopedBFS", stages_of(modules), own, check_numerics=True)
    with pytest.raises(plumb.Error, match=r"rank 0 at (1B\d|the end of the step): the gradient of input 0 of stage 1, microbatch \d: entry"):
        schedule.step(x, target=target)
    schedule = schedule_of("LoopedBFS", stages_of(modules), own)
    schedule.step(x, target=target)
    assert not modules[0].weight.grad.isfinite().all()


@pytest.mark.parametrize("name", ["1F1B", "InterleavedZeroBubble", "DualPipeV"])
def test_a_time_line_has_every_action_in_order(name, tmp_path):
    lines = []
    for own in (PLAIN, OWN):
        modules = blocks(count_for(name))
        schedule = schedule_of(name, stages_of(modules), own, record_timeline=True)
        x, target = batch()
        schedule.step(x, target=target)
        events = schedule.timeline()
        assert all(waiting <= start <= end for _, _, waiting, start, end in events)
        assert all(a[4] <= b[2] for a, b in zip(events, events[1:])) and events[0][2] == 0
        busy = sum(end - start for *_, start, end in events)
        whole = max(e[4] for e in events) - min(e[3] for e in events)
        assert schedule.measured_bubble() == pytest.approx(1 - busy / whole, abs=1e-3)
        picture = tmp_path / f"{own}.svg"
        schedule.draw_timeline(str(picture))
        assert "<svg" in picture.read_text()
        lines.append([(rank, action) for rank, action, *_ in events])
    assert lines[0] == lines[1]


def timeline_over_ranks(rank, size):
    modules = blocks(2)
    schedule = schedule_of("1F1B", [PipelineStage(modules[rank], rank, 2, "cpu")], OWN, record_timeline=True)
    x, target = batch(8)
    schedule.step(*([x] if rank == 0 else []), target=target if rank else None)
    return [event[:2] for event in schedule.timeline()]


def test_the_time_line_of_all_ranks_is_gathered():
    one, two = ranks.run(timeline_over_ranks, 2)
    expected = [(0, a) for a in "0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3".split()]
    expected += [(1, f"1{kind}{m}") for m in range(4) for kind in "FB"]
    assert one == two == expected


def test_a_failed_step_leaves_gradients_as_they_were():
    modules = blocks(2)
    x, target = batch(8)
    schedule = schedule_of("LoopedBFS", stages_of(modules), OWN)
    schedule.step(x, target=target)
    before = [g.clone() for g in grads(modules)]
    schedule._loss_fn = lambda out, t: 1 / 0
    with pytest.raises(plumb.Error, match="ZeroDivisionError"):
        schedule.step(x, target=target)
    assert same(grads(modules), before)


def replicated_work(rank, size, names):
    """Two pipelines of two ranks: gradients, and what each rank did in which order, without and with methods of their own."""
    import torch.distributed as dist

    pipes = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    replicas = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    replica, index = divmod(rank, 2)
    x, target = batch(16)
    half = slice(8 * replica, 8 * replica + 8)
    found = []
    for name in names:
        both = []
        for own in (PLAIN, OWN):
            modules = blocks(4 if name not in SINGLE else 2)
            count = len(modules)
            here = [index, 3 - index] if name in V else list(range(index, count, 2))
            own = {s: nn.parallel.DistributedDataParallel(modules[s], process_group=replicas[index]) for s in here}
            stages = [PipelineStage(own[s], s, count, "cpu", group=pipes[replica]) for s in here]
            schedule = schedule_of(name, stages, own, record_timeline=True)
            for _ in range(2):
                schedule.step(*([x[half]] if 0 in here else []), target=target[half] if count - 1 in here else None)
            events = [e for e in schedule.timeline() if e[0] == index]
            both.append(([p.grad for m in own.values() for p in m.parameters()], beside(events)))
        found.append(both)
    return found


def beside(events):
    """By stage: whether its reduction began right after its last gradient, and how many actions came later."""
    result = {}
    for _, text, began, *_ in events:
        if not text.endswith("REDUCE_GRAD"):
            continue
        stage = text[0]
        computes = [e for e in events if not e[1].endswith("REDUCE_GRAD")]
        last = max(e[4] for e in computes if e[1][0] == stage and e[1][1] in "BW")
        between = [e[1] for e in computes if e[2] >= last and e[2] < began]
        result[stage] = (last <= began and not between, sum(e[2] >= began for e in computes))
    return result


def test_means_over_replicas_begin_while_other_stages_go_on():
    names = ["1F1B", "LoopedBFS", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble"]
    for rank, results in enumerate(ranks.run(replicated_work, 4, names)):
        for name, ((grads_of_plain, plain), (grads_of_own, own)) in zip(names, results):
            assert same(grads_of_plain, grads_of_own), (rank, name)
            assert len(plain) == (1 if name in SINGLE else 2)
            assert plain == own, (rank, name)
            assert all(in_time for in_time, _ in plain.values())
            later = sorted(count for _, count in plain.values())
            assert later[0] == 0 and all(count > 0 for count in later[1:])


def losing_work(rank, size, how, own):
    import os
    import signal

    import torch.distributed as dist

    pipes = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    replicas = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    replica, index = divmod(rank, 2)
    modules = blocks(2)
    module = nn.parallel.DistributedDataParallel(modules[index], process_group=replicas[index])
    stage = PipelineStage(module, index, 2, "cpu", group=pipes[replica])
    schedule = schedule_of("1F1B", [stage], own, timeout=10.0 if how == "stopped" else None)
    x, target = batch(8)
    give = lambda: schedule.step(*([x] if index == 0 else []), target=target if index else None)  # noqa: E731
    give()
    if rank == 2:  # the last gradient of its pipeline's step is its own
        seen = []

        def leave(grad):
            seen.append(1)
            if len(seen) == MICROBATCHES:
                os._exit(3) if how == "exit" else os.kill(os.getpid(), signal.SIGSTOP)

        modules[0].up.weight.register_hook(leave)
    give()


@pytest.mark.parametrize("how, own", [("exit", PLAIN), ("stopped", PLAIN), ("exit", OWN)])
def test_a_replica_that_is_lost_during_the_mean_is_named(how, own):
    started = ranks.start(losing_work, 4, how, own)
    (first,) = ranks.finish(started[:1], 300)
    for process, _ in started[1:]:
        process.kill()
    assert first.error == "Error" and "rank 2" in first.text, first
