"""Stages of a live model at other sizes than it was cut for, beside the whole model at those sizes."""

import copy
import gc
import pickle
import sys

import pytest
import ranks
import torch
from pipelines import LOOPED, SINGLE, V, cross_entropy
from plumb.pipelining import ScheduleTable, SplitPoint, _sources, build_stage, deserialize_stage, pipeline
from plumb.pipelining.schedules import get_schedule_class
from size_models import MODELS, WORDS, batch, cut, make
from torch import nn
from torch.nn import functional as F
from transform_models import rounded

import plumb
from plumb.transforms import unit_scale

MICROBATCHES = 3
# Rows and length of every step: as cut, a batch that does not divide, others, as cut again.
BATCHES = [(6, 5), (7, 5), (11, 3), (3, 9), (6, 5)]


def stages_here(name, rank, size):
    if name in SINGLE:
        return [rank], size
    return ([rank, 2 * size - 1 - rank] if name in V else [rank, rank + size]), 2 * size


class ByItself:
    """A stage whose steps run in Python, action by action."""

    def forward_one_chunk(self, *args, **kwargs):
        return super().forward_one_chunk(*args, **kwargs)


def work(rank, size, cases, given_everywhere):
    found = {}
    for model_name, name, microbatches, *in_python in cases:
        here, count = stages_here(name, rank, size)
        model = make(model_name, 4)
        pipe = cut(model, count)
        stages = [pipe.build_stage(i, torch.device("cpu")) for i in here]
        for stage in stages if in_python else []:
            stage.__class__ = type("Own", (ByItself, type(stage)), {})
        if name == "DualPipeV":
            schedule = ScheduleTable(stages, microbatches, cross_entropy, table=name)
        else:
            schedule = get_schedule_class(name)(stages[0] if name in SINGLE else stages, microbatches, cross_entropy)
        steps = []
        for sizes in BATCHES:
            x, labels = batch(*sizes)
            given = [x] if 0 in here or given_everywhere else []
            evaluated = schedule.eval(*[v[:, :-1] for v in given])
            losses = []
            out = schedule.step(*given, target=labels if count - 1 in here else None, losses=losses)
            grads = {}
            for stage in stages:
                for n, p in stage.submod.named_parameters():
                    grads[n], p.grad = p.grad, None
            steps.append((out, evaluated, losses, grads))
        found[(model_name, name, microbatches, *in_python)] = steps
    return found


def reference(model_name, microbatches):
    model, steps = make(model_name, 4), []
    for sizes in BATCHES:
        x, labels = batch(*sizes)
        outs, losses = [], []
        for inputs, targets in zip(x.tensor_split(microbatches), labels.tensor_split(microbatches)):
            outs.append(model(inputs))
            losses.append(cross_entropy(outs[-1], targets))
            losses[-1].backward(torch.full_like(losses[-1], len(targets) * microbatches / len(labels)))
        with torch.no_grad():
            evaluated = torch.cat([model(v) for v in x[:, :-1].tensor_split(microbatches)])
        grads = {n: None if p.grad is None else p.grad / microbatches for n, p in model.named_parameters()}
        model.zero_grad()
        steps.append((torch.cat(outs), evaluated, losses, grads))
    return steps


def check(results, case):
    for step, (outs, evaluated, losses, grads) in enumerate(reference(case[0], case[2])):
        seen = set()
        for found in results:
            out, own_evaluated, own_losses, own = found[case][step]
            assert out is None or torch.equal(out, outs), (case, step)
            assert own_evaluated is None or torch.equal(own_evaluated, evaluated), (case, step)
            assert all(torch.equal(a, b) for a, b in zip(own_losses, losses)), (case, step)
            for n, grad in own.items():
                seen.add(n)
                assert (grad is None) == (grads[n] is None), (case, step, n)
                assert grad is None or torch.equal(grad, grads[n]), (case, step, n)
        assert seen == {n for n in grads if case[0] != "pooled" or not n.startswith("place")}


TWO = [("tokens", name, MICROBATCHES) for name in SINGLE + LOOPED + V]
TWO += [(model, name, MICROBATCHES) for model in ("flat", "pooled") for name in ("1F1B", "ZBVZeroBubble")]
TWO += [("tokens", "1F1B", 1)]
TWO += [(model, name, MICROBATCHES, "in Python") for model in MODELS for name in ("1F1B", "Interleaved1F1B")]
FOUR = [(model, name, MICROBATCHES) for model in MODELS for name in ("GPipe", "1F1B", "ZBH2")]


@pytest.mark.parametrize("size, cases, given_everywhere", [(2, TWO, False), (4, FOUR, False), (2, TWO[:2], True)])
def test_processes_equal_the_whole_model_at_every_size(size, cases, given_everywhere):
    results = ranks.run(work, size, cases, given_everywhere)
    for case in cases:
        check(results, case)


# --- in one process ---
@pytest.mark.parametrize("model_name", MODELS)
def test_stages_called_by_hand_follow_the_sizes(model_name):
    model = make(model_name, 2)
    pipe = cut(model, 2)
    reference = copy.deepcopy(model)
    for sizes in BATCHES:
        x, labels = batch(*sizes)
        value = x
        for s in range(2):
            value = pipe.get_stage_module(s)(value)
        expected = reference(x)
        assert torch.equal(value, expected)
        cross_entropy(value, labels).backward()
        cross_entropy(expected, labels).backward()
    for (n, p), q in zip(model.named_parameters(), reference.parameters()):
        assert (p.grad is None) == (q.grad is None) and (p.grad is None or torch.equal(p.grad, q.grad)), n


class Tail(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 8)

    def forward(self, h, scale, y):
        return self.linear(h + F.pad(y, (0, 8))) * y.shape[0] * scale[:, None]


class Two(nn.Module):
    """An input for the first stage, one for the second, and one for both."""

    def __init__(self):
        super().__init__()
        self.up, self.tail = nn.Linear(8, 16), Tail()

    def forward(self, x, scale, y):
        return self.tail(torch.relu(self.up(x)) * scale[:, None], scale, y)


def test_inputs_of_later_stages_count_where_they_are_known():
    torch.manual_seed(0)
    model = Two()
    args = (torch.randn(4, 8), torch.rand(4), torch.randn(4, 8))
    pipe = pipeline(model, args, split_spec={"tail": SplitPoint.BEGINNING})
    stages = [pipe.build_stage(i, torch.device("cpu")) for i in range(2)]
    schedule = ScheduleTable(stages, 2, table="LoopedBFS")
    for rows in (7, 8, 3):
        x, scale, y = torch.randn(rows, 8), torch.rand(rows), torch.randn(rows, 8)
        expected = torch.cat([model(*parts) for parts in zip(*(v.tensor_split(2) for v in (x, scale, y)))])
        assert torch.equal(schedule.eval(x, scale, y), expected)
    first = pipe.get_stage_module(0)  # which sees nothing of y
    x, scale, y = torch.randn(5, 8), torch.rand(5), torch.randn(5, 8)
    value = first(x=x, scale=scale)
    value = value if isinstance(value, tuple) else (value,)
    assert torch.equal(pipe.get_stage_module(1)(*value, scale=scale, y=y), model(x, scale, y))


def test_a_stage_keeps_following_with_other_tensors_and_in_copies():
    model = make("tokens", 2)
    pipe = cut(model, 2)
    x, _ = batch(5, 4)
    whole = make("tokens", 2)
    with torch.no_grad():
        for p in whole.parameters():
            p.mul_(1.5)
    first, second = (copy.deepcopy(pipe.get_stage_module(s)) for s in range(2))
    for stage in (first, second):  # a graph for these sizes is there before the tensors change
        stage(x if stage is first else first(x))
        own = {n: v for n, v in whole.state_dict().items() if n in stage.state_dict()}
        stage.load_state_dict(own, assign=stage is first)
    assert torch.equal(second(first(x)), whole(x))
    assert torch.equal(pipe.get_stage_module(1)(pipe.get_stage_module(0)(x)), model(x))
    again = copy.deepcopy(pipe)
    assert torch.equal(again.get_stage_module(1)(again.get_stage_module(0)(x)), model(x))


def test_stages_that_were_moved_leave_the_model_fit_to_be_captured():
    model = make("tokens", 2)
    pipe = cut(model, 2)
    expected = copy.deepcopy(model)
    first, second = (pipe.get_stage_module(s) for s in range(2))
    first.embed.weight.data = first.embed.weight.data.double()  # and the model's with it
    model.layers[1].to("meta")
    first.embed.weight = nn.Parameter(first.embed.weight.data.float())
    for rows in (5, 3):
        x, _ = batch(rows, 4)
        assert torch.equal(second(first(x)), expected(x))
        assert model.layers[1].out.weight.is_meta and model.embed.weight.dtype == torch.float64
        model.to("meta")  # the stages keep their tensors


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.norm, self.drop, self.down = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 8)

    def forward(self, x):
        return self.down(self.drop(self.norm(self.up(x))))


def test_a_capture_for_other_sizes_leaves_no_trace():
    torch.manual_seed(0)
    model = Normed()
    reference = copy.deepcopy(model)
    pipe = pipeline(model, (torch.randn(4, 8),), split_spec={"down": SplitPoint.BEGINNING})
    model.down.weight.grad = torch.ones(8, 8)
    x = torch.randn(6, 8)
    for training in (True, False):  # the stages follow the model
        model.train(training)
        reference.train(training)
        torch.manual_seed(5)
        value = pipe.get_stage_module(1)(pipe.get_stage_module(0)(x))
        after = torch.rand(3)
        torch.manual_seed(5)
        assert torch.equal(value, reference(x)) and torch.equal(after, torch.rand(3))
        assert all(torch.equal(a, b) for a, b in zip(model.buffers(), reference.buffers()))
        assert all(m.training == training for m in model.modules())
    assert torch.equal(model.down.weight.grad, torch.ones(8, 8)) and model.up.weight.grad is None


def test_sizes_that_come_again_are_not_captured_again():
    model = make("tokens", 4)
    pipe = cut(model, 4)
    stages = [pipe.get_stage_module(s) for s in range(4)]
    for sizes in [(6, 5), (2, 5), (6, 5), (3, 4), (3, 4)]:
        value = batch(*sizes)[0]
        for stage in stages:
            value = stage(value)
    assert pipe._variants.base.specializer.captures == 2


def test_a_pipe_runs_the_graphs_that_its_stages_have_for_a_size(monkeypatch):
    pipe = cut(model := make("tokens", 2), 2)
    captured, capture = [], _sources.capture_engine
    monkeypatch.setattr(_sources, "capture_engine", lambda *args: captured.append(args) or capture(*args))
    for sizes in [(6, 5), (3, 4), (6, 5)]:
        x = batch(*sizes)[0]
        assert torch.equal(pipe(x)[0], model(x)) and torch.equal(both(pipe, x), model(x))
    assert len(captured) == 2


def test_a_stage_called_by_hand_goes_into_the_engine_twice():
    pipe = cut(model := make("tokens", 2), 2)
    first, calls = pipe.get_stage_module(0), []

    def note(frame, event, function):
        if event == "c_call" and getattr(function, "__module__", None) == "plumb._C":
            calls.append(function.__name__)

    for sizes in [(2, 5), (3, 4)]:
        x = batch(*sizes)[0]
        first(x)
        calls.clear()
        sys.setprofile(note)
        try:
            first(x)
        finally:
            sys.setprofile(None)
        methods = ["run_by_hand"] if sys.version_info >= (3, 11) else []  # Python 3.10 tells a profile of functions alone
        assert calls == ["unchanged", *methods] and model is not None


def test_autocast_around_the_cut_is_in_graphs_for_other_sizes():
    model = make("tokens", 2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        pipe = cut(model, 2)
    x, _ = batch(5, 4)
    value = pipe.get_stage_module(1)(pipe.get_stage_module(0)(x))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(value, model(x)) and value.dtype == torch.bfloat16


def both(pipe, x):
    return pipe.get_stage_module(1)(pipe.get_stage_module(0)(x))


def test_sizes_first_met_in_inference_mode_are_trained_with_later():
    model = make("tokens", 2)
    pipe = cut(model, 2)
    reference = copy.deepcopy(model)
    x, labels = batch(5, 4)
    with torch.inference_mode():
        assert torch.equal(both(pipe, x), reference(x))
    cross_entropy(both(pipe, x), labels).backward()
    cross_entropy(reference(x), labels).backward()
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), reference.parameters()))


@pytest.mark.parametrize("model_name", ["tokens", "pooled"])
def test_compiled_stages_run_uncompiled_at_other_sizes(model_name):
    torch._dynamo.reset()
    model = make(model_name, 2)
    pipe = cut(model, 2)
    compiled = [torch.compile(pipe.get_stage_module(s), backend="eager", fullgraph=True) for s in range(2)]
    x, _ = batch(2, 5)
    assert torch.equal(compiled[1](compiled[0](x)), model(x))
    compiled = [torch.compile(pipe.get_stage_module(s), backend="eager") for s in range(2)]
    for sizes in [(2, 5), (3, 4), (2, 7)]:
        x, _ = batch(*sizes)
        assert torch.equal(compiled[1](compiled[0](x)), model(x))
    stages = [build_stage(stage, s, pipe.info(), torch.device("cpu")) for s, stage in enumerate(compiled)]
    schedule = ScheduleTable(stages, 2, table="LoopedBFS")
    for sizes in [(4, 5), (5, 5), (4, 7)]:
        x, _ = batch(*sizes)
        assert torch.equal(schedule.eval(x), torch.cat([model(v) for v in x.tensor_split(2)]))


def test_a_stage_within_a_module_follows_the_sizes_and_within_a_function_says_why_not():
    class Within(nn.Module):
        def __init__(self, stage):
            super().__init__()
            self.stage = stage

        def forward(self, *values):
            return self.stage(*values)

    model = make("pooled", 2)
    pipe = cut(model, 2)

    def schedule_of(around):
        stages = [
            build_stage(around(pipe.get_stage_module(s)), s, pipe.info(), torch.device("cpu")) for s in range(2)
        ]
        return ScheduleTable(stages, 1, table="LoopedBFS")

    for sizes in [(2, 5), (2, 4), (3, 5)]:
        x, _ = batch(*sizes)
        assert torch.equal(schedule_of(Within).eval(x), model(x))
    as_function = schedule_of(lambda stage: lambda *values: stage(*values))
    x, _ = batch(2, 5)
    assert torch.equal(as_function.eval(x), model(x))
    with pytest.raises(plumb.Error, match="stage 0 is a function, and cannot be told"):
        as_function.eval(batch(2, 4)[0])


# --- with transforms ---
def test_a_transformed_model_is_cut_for_every_size():
    model = rounded(unit_scale(make("tokens", 2)))
    pipe = cut(model, 2)
    for sizes in BATCHES:
        x, _ = batch(*sizes)
        assert torch.equal(both(pipe, x), model(x))


@pytest.mark.parametrize("model_name", MODELS)
def test_transformed_stages_follow_the_sizes_in_a_schedule(model_name):
    model = make(model_name, 2)

    def schedule_of(pipe):
        stages = [build_stage(rounded(pipe.get_stage_module(i)), i, pipe.info(), torch.device("cpu")) for i in range(2)]
        return ScheduleTable(stages, 1, table="LoopedBFS")

    kept = copy.deepcopy(model)
    schedule = schedule_of(cut(kept, 2))
    for sizes in BATCHES:
        x, _ = batch(*sizes)
        points = {"layers.1": SplitPoint.BEGINNING}
        for_these = schedule_of(pipeline(copy.deepcopy(model), (x,), split_spec=points))
        assert torch.equal(schedule.eval(x), for_these.eval(x))


def test_a_transformed_stage_called_by_hand_would_not_tell_the_next_one():
    model = make("pooled", 2)
    first = rounded(cut(model, 2).get_stage_module(0))
    first(batch(2, 5)[0])
    with pytest.raises(plumb.Error, match="the next stage would not know"):
        first(batch(2, 4)[0])


# --- what cannot be done is refused ---
def test_a_model_that_is_gone_is_named():
    model = make("tokens", 2)
    pipe = cut(model, 2)
    x, _ = batch(5, 4)
    del model
    gc.collect()
    with pytest.raises(plumb.Error, match=r"\[5, 4\].*no longer exists\n  try: keep the model"):
        both(pipe, x)
    assert both(pipe, batch(2, 5)[0]).shape == (2, 5, WORDS)


def test_sizes_that_the_model_does_not_take_are_refused_with_its_own_words():
    pipe = cut(model := make("tokens", 2), 2)
    with pytest.raises(plumb.Error, match=r"needs a graph for 'x' i64\[2, 20\].*index out of range"):
        both(pipe, batch(2, 20)[0])
    with pytest.raises(plumb.Error, match="number of dimensions may not change"):
        both(pipe, batch(2, 20)[0].flatten())
    assert torch.equal(both(pipe, batch(3, 7)[0]), model(batch(3, 7)[0]))


def test_values_that_do_not_say_where_they_come_from_are_refused():
    model = make("tokens", 2)
    pipe = cut(model, 2)
    value = pipe.get_stage_module(0)(batch(3, 7)[0])
    with pytest.raises(plumb.Error, match="cannot be told from that\n  try: hand on what the stage before returned"):
        pipe.get_stage_module(1)(value.detach())


def test_what_holds_one_graph_alone_says_what_to_do():
    model, x = make("tokens", 2), batch(2, 5)[0]
    points = {"layers.1": SplitPoint.BEGINNING}
    program = torch.export.export(model, (x,))
    y, _ = batch(5, 4)
    for source, remedy in ((program, "export the program with dynamic shapes"), (plumb.capture(model, x), "cut the module")):
        with pytest.raises(plumb.Error, match=rf"'x' was \[2, 5\] and is \[5, 4\]\n  try: {remedy}"):
            both(pipeline(source, (x,), split_spec=points), y)
    pipe = cut(model, 2)
    sent = pickle.loads(pickle.dumps(pipe.get_stage_module(0)))
    read, _ = deserialize_stage(pipe.serialize_stage(0))
    for stage in (sent, read):
        assert torch.equal(stage(x), pipe.get_stage_module(0)(x))
        with pytest.raises(plumb.Error, match="came without its model"):
            stage(y)


def test_a_program_with_dynamic_shapes_follows_them_by_itself():
    model, x = make("tokens", 2), batch(3, 5)[0]
    rows, length = torch.export.Dim("rows", min=2, max=64), torch.export.Dim("length", min=2, max=16)
    program = torch.export.export(model, (x,), dynamic_shapes=({0: rows, 1: length},))
    pipe = pipeline(program, (x,), split_spec={"layers.1": SplitPoint.BEGINNING})
    y, labels = batch(7, 4)
    stages = [pipe.build_stage(i, torch.device("cpu")) for i in range(2)]
    assert torch.equal(ScheduleTable(stages, 2, table="LoopedBFS").eval(y), torch.cat([model(v) for v in y.tensor_split(2)]))
    value = pipe.get_stage_module(0)(y)
    assert torch.equal(pipe.get_stage_module(1)(*(value if isinstance(value, tuple) else (value,))), model(y))


class Grows(nn.Module):
    """Other operators for other sizes, and another parameter."""

    def __init__(self):
        super().__init__()
        self.up, self.extra, self.down = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        h = torch.relu(self.up(x))
        h = self.down(h)
        return self.extra(h) if x.shape[0] > 4 else h


def test_a_model_that_becomes_another_one_is_refused():
    torch.manual_seed(0)
    model = Grows()
    pipe = pipeline(model, (torch.randn(4, 8),), split_spec={"down": SplitPoint.BEGINNING})
    x = torch.randn(3, 8)
    assert torch.equal(both(pipe, x), model(x))
    with pytest.raises(plumb.Error, match="uses 'extra.(weight|bias)', which it did not use"):
        both(pipe, torch.randn(6, 8))


def test_cuts_at_places_of_the_graph_find_the_same_values_or_are_refused():
    torch.manual_seed(0)
    model, x = make("tokens", 4), batch(2, 5)[0]
    y, _ = batch(5, 4)
    for policy in ("equal_size", "estimated"):
        assert torch.equal(both(pipeline(model, (x,), split_policy=policy, num_stages=2), y), model(y))

    class Earlier(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            h = self.up(torch.relu(x) if x.shape[0] > 4 else x)
            return self.down(torch.tanh(torch.sin(h)))

    model = Earlier()
    pipe = pipeline(model, (torch.randn(4, 8),), split_policy="equal_size", num_stages=2)
    x = torch.randn(6, 8)
    try:
        assert torch.equal(both(pipe, x), model(x))
    except plumb.Error as error:
        assert "is cut otherwise" in str(error)
