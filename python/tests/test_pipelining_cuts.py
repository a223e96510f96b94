"""Cuts of a model: the places, the ways to choose them, and the kinds of model that can be cut."""

import copy
import pickle

import pytest
import torch
import torch.distributed.pipelining as torchs
import torch.nn.functional as F
from capture_checks import same
from plumb.pipelining import (
    Balanced,
    Pipe,
    ScheduleInterleaved1F1B,
    StagePolicy,
    annotate_split_points,
    pipe_split,
    pipeline,
    split_into_equal_size,
    split_on_size_threshold,
)
from plumb.pipelining._IR import aten_pipe_split_alias
from split_models import BEGIN, END, MLP, Marked, Shaped, equals_whole
from torch import nn

import plumb


# --- where cuts are ---
@pytest.mark.parametrize(
    "spec, stages",
    [
        ({"layers.0": BEGIN}, 1),
        ({"layers.3": END}, 2),
        ({"layers.1": BEGIN, "layers.2": BEGIN}, 3),
        ({"layers.1": END, "layers.2": BEGIN}, 3),
        ({"layers.0": BEGIN, "layers.2": BEGIN, "layers.3": END}, 3),
        ({f"layers.{i}": BEGIN for i in range(4)}, 4),
        ({}, 1),
    ],
)
def test_cuts_before_first_after_last_and_between(spec, stages):
    equals_whole(MLP(), (torch.randn(3, 8),), stages=stages, split_spec=spec)


def test_marks_next_to_each_other_make_no_empty_stage():
    class Net(MLP):
        def forward(self, x):
            pipe_split()
            x = self.layers[0](x)
            pipe_split()
            pipe_split()
            x = self.layers[1](x).relu()
            pipe_split()
            return x

    equals_whole(Net(), (torch.randn(2, 8),), stages=2)


def test_marks_around_a_module_without_operators():
    model = nn.Sequential(nn.Linear(4, 4), nn.Identity(), nn.Linear(4, 4))
    equals_whole(model, (torch.randn(2, 4),), stages=2, split_spec={"1": BEGIN})


def test_split_spec_leaves_the_model_as_it_was_and_works_twice():
    model = MLP()
    model.layers[1].forward = lambda x, own=model.layers[1]: F.linear(x, own.weight, own.bias) * 2
    own = model.layers[1].forward
    before = {k: set(m.__dict__) for k, m in model.named_modules()}
    for _ in range(2):
        assert pipeline(model, (torch.randn(2, 8),), split_spec={"layers.1": BEGIN, "layers.2": END}).num_stages == 3
        assert {k: set(m.__dict__) for k, m in model.named_modules()} == before
        assert model.layers[1].forward is own
    with pytest.raises(RuntimeError, match="shapes"):
        pipeline(model, (torch.randn(2, 9),), split_spec={"layers.1": BEGIN})
    assert {k: set(m.__dict__) for k, m in model.named_modules()} == before


def test_a_model_that_torchs_pipeline_has_cut_is_cut_and_left_as_it_was():
    model, x = MLP(), torch.randn(2, 8)
    expected = model(x)
    torchs.pipeline(model, (x,), split_spec={"layers.1": torchs.SplitPoint.BEGINNING})
    before = {k: dict(m.__dict__) for k, m in model.named_modules()}
    for spec, stages in (({"layers.1": BEGIN}, 2), ({"layers.2": BEGIN}, 3)):  # its marks are still on the model
        pipe = pipeline(model, (x,), split_spec=spec)
        assert pipe.num_stages == stages and torch.equal(pipe(x)[0], expected) and torch.equal(model(x), expected)
        assert {k: m.__dict__ for k, m in model.named_modules()} == before
    marks = annotate_split_points(model, {"layers.2": BEGIN})
    torchs.pipeline(model, (x,), split_spec={"layers.2": torchs.SplitPoint.END})
    marks.remove()
    assert torch.equal(model(x), expected), "somebody else's forward is around the marked one"


def test_attributes_of_the_users_stay():
    model = MLP()
    model.layers[1]._orig_forward = "mine"
    pipeline(model, (torch.randn(2, 8),), split_spec={"layers.1": BEGIN})
    assert model.layers[1]._orig_forward == "mine"


def test_annotations_last_until_they_are_removed():
    model, x = MLP(), torch.randn(2, 8)
    marks = annotate_split_points(model, {"layers.1": BEGIN, "layers.2": END})
    again = annotate_split_points(model, {"layers.1": BEGIN})
    assert pipeline(model, (x,)).num_stages == 3
    assert pipeline(copy.deepcopy(model), (x,)).num_stages == 3
    again.remove()
    assert pipeline(model, (x,)).num_stages == 3
    marks.remove()
    assert pipeline(model, (x,)).num_stages == 1
    assert "forward" not in model.layers[1].__dict__
    with annotate_split_points(model, {"layers.1": BEGIN}):
        assert pipeline(model, (x,)).num_stages == 2
    assert pipeline(model, (x,)).num_stages == 1


def test_wrong_arguments_are_named():
    model, x = MLP(), torch.randn(2, 8)
    with pytest.raises(AttributeError, match="nonexistent module layers.7"):
        pipeline(model, (x,), split_spec={"layers.1": BEGIN, "layers.7": BEGIN})
    assert "forward" not in model.layers[1].__dict__
    with pytest.raises(ValueError, match="both `split_spec` and `split_policy`"):
        pipeline(model, (x,), split_spec={"layers.1": BEGIN}, split_policy="balanced")
    with pytest.raises(ValueError, match="Unknown split point"):
        pipeline(model, (x,), split_spec={"layers.1": "begin"})
    with pytest.raises(ValueError, match="num_stages"):
        pipeline(model, (x,), split_policy="balanced")
    with pytest.raises(ValueError, match="gives? 1 stages"):
        pipeline(model, (x,), num_stages=2)
    with pytest.raises(TypeError, match="cannot be cut"):
        pipeline(lambda x: x, (x,))
    for args in (None, {"x": x}):
        with pytest.raises(TypeError, match="mb_args is a"):
            pipeline(model, args)
    for kwargs in ([x], {1: x}):
        with pytest.raises(TypeError, match="mb_kwargs is no dict"):
            pipeline(model, (x,), kwargs)
    pipe = pipeline(model, (x,), split_spec={"layers.1": BEGIN})
    with pytest.raises(ValueError, match="Invalid stage index 2"):
        pipe.get_stage_module(2)
    with pytest.raises(plumb.Error, match="takes 1 positional input"):
        pipe(x, x)
    with pytest.raises(plumb.Error, match="takes 1 values"):
        pipe.get_stage_module(1)(x, x)
    with pytest.raises(RuntimeError, match="invoke the Pipe"):
        pipe.split_gm(x)


# --- policies ---
def test_balanced_cuts_by_measured_and_estimated_costs():
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(8)])
    x = (torch.randn(256, 64),)
    assert equals_whole(model, x, split_policy="balanced", num_stages=2).num_stages == 2
    for policy in ("estimated", Balanced(4, measure=False)):
        pipe = equals_whole(model, x, split_policy=policy, num_stages=4)
        assert [len(pipe.get_stage_module(s).state_dict()) for s in range(4)] == [4, 4, 4, 4]
    assert len(policy.rows) == 4 and "slowest stage" in policy.report
    limited = Balanced(2, measure=False, memory_limits=[10**9, 60 * 64 * 64 * 4])
    assert pipeline(model, x, split_policy=limited).num_stages == 2
    with pytest.raises(plumb.Error):
        pipeline(model, x, split_policy=Balanced(2, measure=False, memory_limits=1000))


def test_measured_costs_know_what_is_cut_off_from_its_gradient():
    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.layer = nn.Embedding(10, 8, max_norm=1.0), nn.Linear(8, 8)  # renorm has no derivative

        def forward(self, x):
            return self.layer(self.table(x))

    x = torch.arange(6)
    model, twin = Words(), Words()
    twin.load_state_dict(model.state_dict())
    pipe = pipeline(model, (x,), split_policy="balanced", num_stages=2)
    assert torch.equal(pipe(x)[0], twin(x))


def test_policies_by_size_and_by_operator():
    model = nn.Sequential(*[nn.Linear(8, 8, bias=False) for _ in range(6)])
    x = (torch.randn(2, 8),)

    def shares(policy):
        pipe = equals_whole(model, x, split_policy=policy)
        return [len(pipe.get_stage_module(s).state_dict()) for s in range(pipe.num_stages)]

    assert shares(split_into_equal_size(3)) == [2, 2, 2]
    assert shares(split_into_equal_size(1)) == [6]
    assert shares(split_on_size_threshold(4 * 8 * 8 * 4)) == [4, 2]
    assert shares(split_on_size_threshold(1)) == [1] * 6
    assert shares(StagePolicy(lambda node: int(node.module_path) // 4)) == [4, 2]
    with pytest.raises(plumb.Error, match="before stage"):
        pipeline(model, x, split_policy=StagePolicy(lambda node: 5 - int(node.module_path)))


def test_functions_that_mark_the_fx_graph():
    def before_every_second_linear(traced):
        linears = [n for n in traced.graph.nodes if n.target is torch.ops.aten.linear.default]
        assert all(n.args[1].op == "get_attr" and n.meta["val"].shape == (2, 8) for n in linears)
        for node in linears[2::2]:
            with traced.graph.inserting_before(node):
                traced.graph.call_function(pipe_split, ())
        traced.recompile()
        return traced

    def changes(traced):
        node = next(n for n in traced.graph.nodes if n.op == "call_function")
        with traced.graph.inserting_after(node):
            traced.graph.call_function(torch.relu, (node,))
        return traced

    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(6)])
    equals_whole(model, (torch.randn(2, 8),), stages=3, split_policy=before_every_second_linear)
    pipe = pipeline(model, (torch.randn(2, 8),), split_policy=before_every_second_linear)
    held = [sorted({name[0] for name in pipe.get_stage_module(s).state_dict()}) for s in range(3)]
    assert held == [["0", "1"], ["2", "3"], ["4", "5"]]
    with pytest.raises(plumb.Error, match="marks there only"):
        pipeline(model, (torch.randn(2, 8),), split_policy=changes)
    with pytest.raises(TypeError, match="GraphModule"):
        pipeline(model, (torch.randn(2, 8),), split_policy=lambda traced: 3)


MARKS = [pipe_split, aten_pipe_split_alias, torch.ops.pippy._pipe_split, torch.ops.pippy._pipe_split.default]


@pytest.mark.parametrize("mark", MARKS, ids=["function", "alias", "torchs", "torchs overload"])
def test_a_function_adds_to_the_models_own_marks(mark):
    """Whatever torch.fx holds as a mark counts, and a function that changes nothing leaves the cuts as they are."""

    def before_relu(traced):
        for node in traced.graph.nodes:
            if node.target is torch.ops.aten.relu.default:
                with traced.graph.inserting_before(node):
                    traced.graph.call_function(mark, ())
        return traced

    class Net(MLP):
        def forward(self, x):
            x = self.layers[0](x)
            pipe_split()
            return self.layers[2](self.layers[1](x).relu())

    equals_whole(Net(), (torch.randn(2, 8),), stages=2, split_policy=lambda traced: traced)
    equals_whole(Net(), (torch.randn(2, 8),), stages=3, split_policy=before_relu)


# --- sources ---
def test_captured_modules_programs_and_files(tmp_path):

    model, x = Marked(2), torch.randn(3, 8)
    expected = model(x)
    program = torch.export.export(model, (x,))
    path = tmp_path / "marked.pt2"
    torch.export.save(program, path)
    for source in (plumb.capture(model, x), program, path, str(path)):
        pipe = pipeline(source)
        assert pipe.num_stages == 2
        same(pipe(x), [expected])
        assert set(pipe.get_stage_module(1).state_dict()) == {"layers.1.weight", "layers.1.bias"}
    plain = MLP(4)
    torch.export.save(torch.export.export(plain, (x,)), path)
    for source in (plumb.capture(plain, x), path):
        pipe = pipeline(source, (x,), split_spec={"layers.1": BEGIN, "layers.2": END})
        assert pipe.num_stages == 3
        same(pipe(x), [plain(x)])
        assert pipeline(source, split_policy="estimated", num_stages=2).num_stages == 2
    assert pipeline(path, split_policy="balanced", num_stages=2).num_stages == 2


def test_a_file_with_dynamic_sizes_is_cut_and_written_again(tmp_path):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

        def forward(self, x, y=None):
            h = self.up(x)
            pipe_split()
            return self.down(h).view(x.shape[0] * 4) + y

    model = Net()
    args, kwargs = (torch.randn(3, 4),), {"y": torch.randn(1)}
    batch = torch.export.Dim("batch", min=2, max=64)
    program = torch.export.export(model, args, kwargs, dynamic_shapes={"x": {0: batch}, "y": None})
    path, out = tmp_path / "in.pt2", tmp_path / "out.pt2"
    torch.export.save(program, path)
    pipe = pipeline(path)
    assert pipe.num_stages == 2
    for rows in (2, 7):
        x = torch.randn(rows, 4)
        same(pipe(x, y=kwargs["y"]), [model(x, **kwargs)])
    stages = [pipe.get_stage_module(s) for s in range(2)]
    values = stages[0](x)
    values = values if isinstance(values, tuple) else (values,)
    assert all(isinstance(v, torch.Tensor) for v in values), "sizes leave as tensors"
    with torch.no_grad():
        pipe.get_stage_module(0).get_parameter("up.bias").add_(1)
        model.up.bias.add_(1)
    pipe.save_pt2(out)
    again = torch.export.load(out).module()
    same([again(x, y=kwargs["y"])], [model(x, **kwargs)])


def test_tracing_under_torchs_names():
    model, x = Marked(2), torch.randn(3, 8)

    pipe = Pipe.from_tracing(model, (x,))
    traced = Pipe._from_traced(model, torch.export.export(model, (x,)))
    for p in (pipe, traced):
        assert p.num_stages == 2
        same(p(x), [model(x)])


def test_calls_that_fit_no_signature_are_named():
    pipe = pipeline(Shaped(), (torch.randn(2, 8),), {"y": torch.randn(2, 8)})
    x = torch.randn(2, 8)
    with pytest.raises(TypeError, match="multiple values for argument 'x'"):
        pipe(x, x=x, y=x)
    with pytest.raises(TypeError, match="unexpected keyword argument 'z'"):
        pipe(x, y=x, z=x)
    with pytest.raises(RuntimeError, match="invoke the Pipe object directly"):
        pipe.split_gm(x, x)
    for spec, text in ((3, "enum or dict, not 3"), ({"up.weight": 3}, "value 3 specified for up.weight")):
        with pytest.raises(ValueError, match=text):
            pipeline(Shaped(), (x,), {"y": x}, multi_use_param_spec=spec)


def test_what_load_pt2_gives_is_cut_and_saved_with_what_the_file_knew(tmp_path):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), torch.randn(4, 8)
    program = torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim("rows", min=2, max=64)},))
    torch.export.save(program, tmp_path / "model.pt2")
    loaded = plumb.load_pt2(tmp_path / "model.pt2")
    pipe = pipeline(loaded, split_spec={"2": BEGIN})
    assert pipe.num_stages == 2
    for again in (pipe, pickle.loads(pickle.dumps(pipe))):
        again.save_pt2(tmp_path / "cut.pt2")
        whole = plumb.load_pt2(tmp_path / "cut.pt2")
        for n in (4, 10):
            x = torch.randn(n, 8)
            assert torch.equal(whole(x), model(x)) and torch.equal(again(x)[0], model(x))
        with pytest.raises(plumb.Error, match="64"):
            whole(torch.randn(65, 8))
    assert torch.equal(torch.export.load(tmp_path / "cut.pt2").module()(x), model(x))


def test_a_sparse_embedding_is_balanced():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(100, 16, sparse=True), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))
    x = torch.randint(0, 100, (4, 8))
    eager = copy.deepcopy(model)
    pipe = pipeline(model, (x,), num_stages=2, split_policy="balanced")
    stages = [pipe.build_stage(i, torch.device("cpu")) for i in range(2)]
    target = torch.randn(4, 8, 16)
    schedule = ScheduleInterleaved1F1B(stages, 1, loss_fn=lambda out, y: (out * y).sum(), scale_grads=False)
    schedule.step(x, target=target)
    (eager(x) * target).sum().backward()
    for (name, p), q in zip(model.named_parameters(), eager.parameters(), strict=True):
        assert p.grad.is_sparse == q.grad.is_sparse and torch.equal(p.grad.to_dense(), q.grad.to_dense()), name


class Masks(nn.Module):
    """Draws a mask by an operator without a derivative, which no gradient reaches, as SpeechT5 does."""

    def __init__(self, marked):
        super().__init__()
        self.layers, self.marked = nn.ModuleList(nn.Linear(8, 8) for _ in range(4)), marked

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
            mask = torch.bernoulli(x, p=0.5)
            if self.marked and layer is self.layers[1]:
                pipe_split()
            x = torch.where(mask == 1, x, 0)
        return x


@pytest.mark.parametrize("how", [{"split_policy": "balanced", "num_stages": 2}, {}], ids=["measured", "marked"])
def test_a_model_with_an_operator_without_a_derivative_is_cut(how):
    torch.manual_seed(0)
    model, x = Masks(not how), torch.randn(4, 8)
    eager = copy.deepcopy(model)
    pipe = pipeline(model, (x,), **how)
    assert pipe.num_stages == 2
    stages = [pipe.build_stage(i, torch.device("cpu")) for i in range(2)]
    torch.manual_seed(1)
    ScheduleInterleaved1F1B(stages, 1, loss_fn=F.mse_loss).step(x, target=x)
    torch.manual_seed(1)
    F.mse_loss(eager(x), x).backward()
    for p, q in zip(model.parameters(), eager.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)
