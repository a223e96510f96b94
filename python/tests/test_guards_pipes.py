"""Pipes and stages of a live model follow what its forward reads, modes, autocast and dtypes, or refuse it by name."""

import copy
import pickle

import pytest
import torch
from plumb.pipelining import (
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    SplitPoint,
    deserialize_stage,
    pipe_split,
    pipeline,
    split_on_size_threshold,
)
from torch import nn

import plumb
from plumb.transforms import track_scales

FACTOR = 2.0


class Config:
    scale = 2.0

    def __init__(self):
        self.shift = 0.5


class Part(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.linear, self.norm, self.dropout = nn.Linear(8, 8), nn.LayerNorm(8), nn.Dropout(0.0)
        self.factor, self.config = 1.0, config

    def forward(self, x):
        x = self.dropout(self.norm(self.linear(x)))
        if self.training:
            x = x + 1
        return x * self.factor + self.config.shift


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.config = Config()
        self.parts = nn.ModuleList(Part(self.config) for _ in range(3))
        self.order, self.kept = [0, 1, 2], torch.ones(8)

    def forward(self, x):
        for i in self.order:
            x = self.parts[i](x)
        return x * FACTOR * self.kept


def set_global(model):
    globals()["FACTOR"] = 3.0


CHANGES = {
    "a_number": lambda m: setattr(m.parts[1], "factor", 7.0),
    "a_setting": lambda m: setattr(m.config, "shift", 3.0),
    "the_probability_of_dropout": lambda m: setattr(m.parts[0].dropout, "p", 1.0),
    "the_epsilon_of_a_norm": lambda m: setattr(m.parts[2].norm, "eps", 10.0),
    "a_tensor": lambda m: setattr(m, "kept", torch.full((8,), 2.0)),
    "a_hook": lambda m: m.parts[0].linear.register_forward_hook(lambda mod, args, out: out * 2),
    "another_module": lambda m: setattr(m.parts[1], "dropout", nn.Tanh()),
    "a_forward_of_a_part": lambda m: setattr(m.parts[1].norm, "forward", lambda x: x - 1),
    "a_global": set_global,
    "the_mode_of_the_model": lambda m: m.eval(),
    "the_mode_of_a_part": lambda m: m.parts[1].eval(),
}
OTHER_PARAMETERS = {
    "a_parameter": lambda m: setattr(m.parts[1].linear, "weight", nn.Parameter(torch.ones(8, 8))),
    "a_parameter_that_is_gone": lambda m: setattr(m.parts[1].linear, "bias", None),
    "a_tied_parameter": lambda m: setattr(m.parts[1].linear, "weight", m.parts[0].linear.weight),
    "another_part": lambda m: m.parts.__setitem__(1, Part(m.config)),
    "parts_in_another_order": lambda m: m.parts.insert(0, m.parts.pop(2)),
}
X, SMALL = torch.linspace(-2, 2, 32).view(4, 8), torch.linspace(-1, 1, 24).view(3, 8)


@pytest.fixture
def model():
    torch.manual_seed(0)
    globals()["FACTOR"] = 2.0
    yield Model()
    globals()["FACTOR"] = 2.0


def cut(model, example=X):
    return pipeline(model, (example,), split_spec={f"parts.{i}": SplitPoint.BEGINNING for i in (1, 2)})


def by_hand(pipe, x):
    for s in range(pipe.num_stages):
        x = pipe.get_stage_module(s)(x)
    return x


def before_the_first(operator):
    def mark(graph):
        node = next(n for n in graph.graph.nodes if n.op == "call_function" and operator in str(n.target))
        with graph.graph.inserting_before(node):
            graph.graph.call_function(pipe_split)

    return mark


def in_schedule(pipe, x):
    stages = [pipe.build_stage(s, torch.device("cpu")) for s in range(pipe.num_stages)]
    schedule = ScheduleInterleaved1F1B(stages, 1, loss_fn=lambda out, target: out.float().sum())
    return schedule.step(x, target=x)


def everywhere(pipe, x):
    return {"pipe": pipe(x)[0], "stages": by_hand(pipe, x), "schedule": in_schedule(pipe, x)}


def assert_like(pipe, model, inputs=(X, SMALL)):
    for x in inputs:
        expected = model(x)
        for how, out in everywhere(pipe, x).items():
            assert torch.equal(out, expected) and out.dtype == expected.dtype, how


@pytest.mark.parametrize("change", CHANGES)
def test_a_pipe_and_its_stages_follow(change, model):
    pipe = cut(model)
    assert_like(pipe, model)
    before = model(X)
    CHANGES[change](model)
    assert not torch.equal(model(X), before)
    assert_like(pipe, model)


@pytest.mark.parametrize("change", OTHER_PARAMETERS)
def test_a_pipe_refuses_a_model_whose_parameters_are_not_those_of_its_stages(change, model):
    pipe = cut(model)
    assert_like(pipe, model)
    OTHER_PARAMETERS[change](model)
    for x in (X, SMALL):
        for call in (lambda x: pipe(x), lambda x: by_hand(pipe, x), lambda x: in_schedule(pipe, x)):
            with pytest.raises(plumb.Error, match="is not the parameter that it was"):
                call(x)


def test_a_pipe_that_was_cut_in_training_evaluates(model):
    pipe, reference = cut(model), copy.deepcopy(model)
    for training in (False, True, False):
        pipe.train(training)
        assert_like(pipe, reference.train(training))
    for s in range(3):
        pipe.get_stage_module(s).train()
    assert_like(pipe, reference.train())


def test_a_schedule_evaluates_stages_that_were_set_to_evaluation(model):
    pipe = pipeline(model, (X,))
    stage = pipe.build_stage(0, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, 1, loss_fn=lambda out, target: out.sum())
    assert torch.equal(schedule.step(X, target=X), model(X))
    stage.submod.eval()
    assert torch.equal(schedule.eval(X, target=X), copy.deepcopy(model).eval()(X))
    stage.submod.train()
    assert torch.equal(schedule.step(X, target=X), model(X))


def test_stages_of_other_modes_than_their_pipe_are_named(model):
    pipe = cut(model)
    pipe.get_stage_module(1).eval()
    with pytest.raises(plumb.Error, match="the stages are not alike"):
        pipe(X)


def test_autocast_around_a_call_is_followed(model):
    pipe = cut(model)
    assert_like(pipe, model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_like(pipe, model)
    assert_like(pipe, model)


@pytest.mark.parametrize("policy", ["estimated", "equal_size", split_on_size_threshold(300), before_the_first("layer_norm")])
@pytest.mark.parametrize("under", [False, True])
def test_a_cut_that_a_policy_chose_stays_where_it_is_under_autocast(policy, under, model):
    def operators(pipe):
        graphs = [pipe.get_stage_module(s).graph_for({}).graph for s in range(pipe.num_stages)]
        calls = [[n for n in graph.nodes if n.op == "call_function" and n.target != "aten::to.dtype"] for graph in graphs]
        return [[(n.module_path, n.target) for n in stage] for stage in calls]

    stages = 3 if isinstance(policy, str) else None
    with torch.autocast("cpu", dtype=torch.float16, enabled=under):
        pipe = pipeline(model, (X,), split_policy=policy, num_stages=stages)
    assert pipe.num_stages > 1
    cut_at = operators(pipe)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_like(pipe, model)
        assert operators(pipe) == cut_at and len(pipe._variants._known) == 2
    with torch.autocast("cpu", dtype=torch.float16, enabled=under):
        assert_like(pipe, model)
    reference = copy.deepcopy(model).eval()
    pipe.eval()  # the forward has an operator less
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_like(pipe, reference)


def test_a_stage_begins_at_its_next_operator_where_the_first_one_is_not_called(model):
    pipe = pipeline(model, (X,), split_policy=before_the_first("add"))
    assert_like(pipe, model)
    reference = copy.deepcopy(model).eval()
    pipe.eval()
    assert_like(pipe, reference)


def test_a_stage_that_another_mode_leaves_without_operators_is_named():
    class Adds(nn.Linear):
        def forward(self, x):
            x = super().forward(x)
            return x + 1 if self.training else x

    model = Adds(8, 8)
    pipe = pipeline(model, (X,), split_policy=before_the_first("add"))
    assert_like(pipe, model)
    with pytest.raises(plumb.Error, match="none of the operators of stage 1 are called now"):
        pipe.eval()(X)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_pipe_is_converted_after_the_cut(dtype, model):
    pipe, reference = cut(model), copy.deepcopy(model).to(dtype)
    reference.kept = reference.kept.clone()  # a plain tensor, which no module converts
    pipe.to(dtype)
    assert_like(pipe, reference, (X.to(dtype), SMALL.to(dtype)))
    pipe.float()
    assert_like(pipe, copy.deepcopy(reference).float() if dtype == torch.float64 else reference.float())


def test_the_gradients_of_a_variant_are_those_of_the_stages(model):
    pipe, reference = cut(model), copy.deepcopy(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        in_schedule(pipe, X)
        reference(X).float().sum().backward()
    own = {n: p for s in range(3) for n, p in pipe.get_stage_module(s).named_parameters()}
    assert all(torch.equal(p.grad, own[n].grad) for n, p in reference.named_parameters())


def test_a_variant_is_made_once_and_kept(model):
    pipe = cut(model)
    for _ in range(2):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            everywhere(pipe, X)
        model.parts[1].factor = 3.0
        everywhere(pipe, X)
        model.parts[1].factor = 1.0
        everywhere(pipe, X)
    assert sum(map(len, pipe._variants._known.values())) == 3


def test_a_variant_may_be_met_first_at_other_sizes(model):
    pipe = cut(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for x in (SMALL, X, SMALL):
            assert torch.equal(pipe(x)[0], model(x))


def test_a_transformed_stage_follows_the_model(model):
    pipe = cut(model)
    stages = [track_scales(pipe.get_stage_module(s)) for s in range(3)]

    def run(x):
        for stage in stages:
            x = stage(x)
        return x

    assert torch.equal(run(X), model(X))
    model.parts[1].factor = 5.0
    assert torch.equal(run(X), model(X))


def test_copies_follow_and_what_is_pickled_stays_as_it_was_cut(model):
    pipe = cut(model)
    sent = [pickle.loads(pickle.dumps(pipe.get_stage_module(s))) for s in range(3)]
    copied, before = copy.deepcopy(pipe), model(X)
    model.parts[1].factor = 5.0
    assert_like(copied, model)
    x = X
    for stage in sent:
        x = stage(x)
    assert torch.equal(x, before)
    with pytest.raises(plumb.Error, match="cannot change to evaluation mode"):
        sent[0].eval()(X)
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(plumb.Error, match="stage 1 was cut without autocast"):
        sent[1](X)


@pytest.mark.parametrize("training", [True, False])
def test_the_bytes_of_a_stage_know_that_the_forward_reads_the_mode(training, model):
    pipe = cut(model.train(training))
    for s in range(3):
        stage, _ = deserialize_stage(pipe.serialize_stage(s))
        x = torch.ones_like(X)
        assert stage.training == training and torch.equal(stage(x), pipe.get_stage_module(s)(x))
        with pytest.raises(plumb.Error, match="cannot change to") as caught:
            stage.train(not training)(x)
        assert "test_guards_pipes.py" in caught.value.where


def test_a_pipe_whose_model_is_gone_says_so(model):
    small = Model()
    pipe = cut(small)
    del small
    assert pipe(X)[0].shape == X.shape
    with pytest.raises(plumb.Error, match="cannot change to evaluation mode"):
        pipe.eval()(X)
    pipe.train()
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(plumb.Error, match="autocast is not as it was .* no longer exists"):
        pipe(X)


def test_a_stage_that_would_need_another_parameter_is_named():
    class Optional(Model):
        more = False

        def __init__(self):
            super().__init__()
            self.extra = nn.Linear(8, 8)

        def forward(self, x):
            x = super().forward(x)
            return self.extra(x) if self.more else x

    model = Optional()
    pipe = cut(model)
    pipe(X)
    model.more = True
    for call in (lambda: pipe(X), lambda: by_hand(pipe, X)):
        with pytest.raises(plumb.Error, match="extra.weight"):
            call()


def test_a_pipe_of_a_captured_graph_refuses_autocast(model):
    pipe = pipeline(plumb.capture(model, X), (X,), split_spec={"parts.1": SplitPoint.BEGINNING})
    pipe(X)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for call in (lambda: pipe(X), lambda: pipe.get_stage_module(0)(X)):
            with pytest.raises(plumb.Error, match="cut without autocast"):
                call()


class AsksForStrides(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x, **more):
        for part in self.parts:
            x = part(x + sum((i + 1) * y for i, y in enumerate(more.values())))
        return x * (2 if x.is_contiguous() else 3) if not more else x


@pytest.mark.parametrize("run", [lambda pipe, x: pipe(x), lambda pipe, x: in_schedule(pipe, x)])
def test_a_pipe_refuses_another_layout_if_the_forward_asks_for_one(run):
    model, x = AsksForStrides(), torch.randn(4, 4)
    pipe = cut(model, x)
    run(pipe, x.clone())
    with pytest.raises(plumb.Error, match="'x' is a tensor of strides .* when the model was cut: the forward asks for the layout"):
        run(pipe, x.t())


def test_a_pipe_refuses_keywords_in_another_order_where_the_forward_hears_it():
    model, (x, a, b) = AsksForStrides(), torch.randn(3, 4, 4)
    pipe = pipeline(model, (x,), {"a": a, "b": b}, split_spec={"parts.1": SplitPoint.BEGINNING})
    assert torch.equal(pipe(x, a=b, b=a)[0], model(x, a=b, b=a))
    with pytest.raises(plumb.Error, match="come in another order"):
        pipe(x, b=b, a=a)
