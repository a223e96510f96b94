"""The scales graph as torch.fx: metrics, arguments, pictures, and what is pruned from it."""

import copy
import math
import operator
import pickle
import random

import plumb.functional as U
import pytest
import torch
import torch.nn.functional as F
from capture_checks import needs_positions
from plumb.transforms.utils import apply_transform
from torch import fx, nn

import plumb
from plumb.transforms import (
    Metrics,
    ScaleTrackingAutogradFunction,
    ScaleTrackingBackend,
    prune_non_float_tensors,
    prune_same_scale_tensors,
    prune_selected_nodes,
    track_scales,
    unit_scaling_backend,
)


class Attention(nn.Module):
    """With a mask of -inf, a reshape, an integer tensor and keyword arguments."""

    def __init__(self):
        super().__init__()
        self.table, self.linear = nn.Embedding(16, 8), nn.Linear(8, 8)

    def forward(self, ids):
        x = self.table(ids)
        scores = x @ x.transpose(-2, -1)
        later = torch.ones(4, 4, dtype=torch.bool).triu(1)
        masked = scores.masked_fill(later, float("-inf"))
        flat = masked.reshape(-1, 4)
        both = F.softmax(flat, dim=-1).view_as(masked) @ x + self.linear(x)
        return F.gelu(both, approximate="tanh").sum()


@pytest.fixture
def graph():
    torch.manual_seed(0)
    tracked = track_scales(Attention(), histogram=True)
    tracked(torch.arange(8).reshape(2, 4)).backward()
    return tracked.scales_graph()


def named(graph):
    return {n.name: n for n in graph.nodes}


# --- metrics


def test_metrics_are_made_of_tensors():
    t = torch.tensor([[1.0, -2.0], [0.0, 5.0]])
    metrics = Metrics(fwd_tensor=t)
    assert metrics.bwd is None and metrics.fwd == Metrics.from_tensor(t)
    data = metrics.fwd
    assert (data.mean_abs, data.abs_mean, data.abs_max, data.abs_min, data.numel) == (2.0, 1.0, 5.0, 0.0, 4)
    assert data.std == pytest.approx(t.std().item())
    metrics.set_bwd(-t)
    assert metrics.bwd.abs_max == 5.0
    assert str(metrics) == f"fwd: {metrics.fwd}, bwd: {metrics.bwd}"
    assert "mean_abs=2.0" in str(metrics) and str(Metrics(t)).endswith("bwd: None")
    assert Metrics.names() == ["mean_abs", "abs_mean", "std", "abs_max", "abs_min", "numel"]
    assert Metrics.full_names()[2] == Metrics.get_full_name("std") == "standard deviation"


def test_metrics_are_made_of_integers_and_of_nothing():
    assert Metrics(torch.arange(3)).fwd == Metrics(torch.arange(3.0)).fwd
    nothing = Metrics(torch.ones(0)).fwd
    assert nothing.numel == 0 and math.isnan(nothing.mean_abs) and math.isnan(nothing.abs_max)
    assert Metrics(torch._efficientzerotensor((3,))).fwd == Metrics(torch.zeros(3)).fwd  # without memory, as jacfwd has them
    with pytest.raises(plumb.Error, match="complex"):
        Metrics(torch.ones(2, dtype=torch.cfloat))


def test_infinities_stay_infinities(graph):
    masked = named(graph)["masked"].meta["metrics"].fwd
    assert masked.mean_abs == math.inf and masked.abs_max == math.inf


def test_histograms_are_read_by_exponent(graph):
    metrics = named(graph)["masked"].meta["metrics"]
    assert metrics.fwd.histogram[128] == 12 and sum(metrics.fwd.histogram.values()) == metrics.fwd.numel == 32
    assert sum(metrics.bwd.histogram.values()) == 32
    mantissa, exponent = math.frexp(named(graph)["both"].meta["metrics"].fwd.abs_max)
    assert max(named(graph)["both"].meta["metrics"].fwd.histogram) == exponent - 1
    plain = track_scales(nn.Linear(2, 2))
    plain(torch.ones(1, 2))
    assert all(n.meta["metrics"].fwd.histogram is None for n in plain.scales_graph().nodes if "metrics" in n.meta)


# --- the graph


def test_nodes_keep_arguments_and_keyword_arguments(graph):
    nodes = named(graph)
    assert nodes["flat"].args == (nodes["masked"], [-1, 4])
    assert nodes["masked"].args == (nodes["scores"], nodes["later"], -math.inf)
    assert nodes["softmax"].args == (nodes["flat"], -1)
    assert nodes["gelu"].args == (nodes["both"],) and nodes["gelu"].kwargs == {"approximate": "tanh"}
    assert nodes["later"].args[1:] == (1,) and nodes["sum_1"].args == (nodes["gelu"],)


def test_a_scales_graph_is_a_picture_of_its_time():
    tracked = track_scales(nn.Linear(4, 4))
    loss = tracked(torch.randn(2, 4)).sum()
    before = named(tracked.scales_graph())["linear"].meta["metrics"]
    loss.backward()
    assert before.bwd is None and named(tracked.scales_graph())["linear"].meta["metrics"].bwd is not None


def test_a_notebook_shows_the_graph_as_a_table(graph):
    for shown in (graph, prune_non_float_tensors(graph)):
        text = shown._repr_html_()
        assert text.count("<tr>") == len(shown.nodes) + 1
        assert "<th>metrics</th>" in text and "mean_abs=" in text and "&lt;" in text


# --- pruning


def test_what_is_no_float_goes_and_is_logged(graph, caplog):
    with caplog.at_level("INFO", logger="plumb.transforms"):
        pruned = prune_non_float_tensors(graph)
    gone = [n for n in named(graph) if n not in named(pruned)]
    assert gone == ["ids", "ones", "later"]
    assert [r.getMessage() for r in caplog.records] == [f"pruning non-float node: {n}" for n in gone]
    masked = named(pruned)["masked"]
    assert masked.args == (named(pruned)["scores"], None, -math.inf)


def test_equal_scales_are_pruned_with_infinities_too_and_logged(graph, caplog):
    with caplog.at_level("INFO", logger="plumb.transforms"):
        pruned = prune_same_scale_tensors(prune_non_float_tensors(graph))
    told = [r.getMessage() for r in caplog.records if "same-scale" in r.getMessage()]
    gone = [n for n in named(prune_non_float_tensors(graph)) if n not in named(pruned)]
    assert "flat" in gone and "masked" not in gone and told == [f"pruning same-scale node: {n}" for n in gone]
    assert named(pruned)["softmax"].args == (named(pruned)["masked"], -1)


@needs_positions
def test_users_take_all_inputs_of_a_selected_node(graph, caplog):
    with caplog.at_level("INFO", logger="plumb.transforms"):
        pruned = prune_selected_nodes(graph, [operator.add, F.gelu])
    nodes = named(pruned)
    assert "both" not in nodes and "gelu" not in nodes and "both" in named(graph)
    assert nodes["sum_1"].args == tuple(named(pruned)[n.name] for n in named(graph)["both"].args)
    assert [r.getMessage() for r in caplog.records] == ["pruning node: both", "pruning node: gelu"]
    pruned.lint()


def test_targets_are_what_the_user_knows_an_operator_by(caplog):
    def gone(graph, target):
        left = named(prune_selected_nodes(graph, [target]))
        return [n.name for n in graph.nodes if n.name not in left]

    class Norm(nn.Sequential):
        pass

    model = Norm(nn.LayerNorm(4), nn.Linear(4, 4))
    plain, scaled = (track_scales(m) for m in (model, plumb.transforms.unit_scale(model)))
    for tracked in (plain, scaled):
        tracked(torch.randn(2, 4)).sum().backward()
    plain, scaled = plain.scales_graph(), scaled.scales_graph()
    for target in (F.layer_norm, nn.LayerNorm, "layer_norm"):
        assert gone(plain, target) == gone(scaled, target) == ["layer_norm"], target
    aten, plumbs = torch.ops.aten.layer_norm, torch.ops.plumb.layer_norm
    for target in (aten, aten.default, "aten::layer_norm"):
        assert gone(plain, target) == ["layer_norm"], target
    for target in (U.layer_norm, plumbs, plumbs.default, "plumb::layer_norm"):
        assert gone(scaled, target) == ["layer_norm"], target
    assert gone(plain, Norm) == ["layer_norm", "linear"] and gone(plain, "0.weight") == ["_0_weight"]
    assert not caplog.records
    for graph, target, name in ((plain, U.gelu, "plumb.functional.gelu"), (scaled, "aten::gelu", "aten::gelu"), (plain, nn.GELU, "GELU")):
        assert gone(graph, target) == []
        text = caplog.records[-1].getMessage()
        assert caplog.records[-1].levelname == "WARNING" and "nothing to prune: " in text and name in text and "layer_norm" in text


def test_module_classes_are_known_in_torchs_own_graphs():
    model, x = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4)), torch.randn(2, 4)
    for graph in (fx.symbolic_trace(model).graph, torch.export.export(model, (x,)).graph):
        left = prune_selected_nodes(graph, [nn.LayerNorm])
        assert len(left.nodes) == len(graph.nodes) - 1 and not {"_0", "layer_norm"} & set(named(left))


@needs_positions
def test_graphs_are_copied_and_pickled(graph):
    for again in (pickle.loads(pickle.dumps(graph)), copy.deepcopy(graph)):
        assert str(again) == str(graph) and again._repr_html_().count("<tr>") == len(graph.nodes) + 1
        metrics = [(n.name, str(n.meta.get("metrics"))) for n in again.nodes]
        assert metrics == [(n.name, str(n.meta.get("metrics"))) for n in graph.nodes]


def random_graph(rng):
    """Returns a graph of nodes with one or two inputs, by position and by name, a quarter of them no floats; scales of
    a few sizes."""
    graph, nodes = fx.Graph(), []
    for i in range(rng.randint(2, 14)):
        inputs = rng.sample(nodes, min(len(nodes), rng.choice([1, 1, 1, 2])))
        if i < 2:
            node = graph.placeholder(f"x{i}")
        elif rng.random() < 0.8:
            node = graph.call_function(torch.relu, (*inputs, 3))
        else:
            node = graph.call_function(torch.add, tuple(inputs[:1]), {"other": inputs[-1]})
        node.meta["outputs_float_tensor"] = rng.random() < 0.75
        if node.meta["outputs_float_tensor"]:
            node.meta["metrics"] = Metrics(*(Metrics.Data(v, v, v, v, v, 5) for v in rng.choices([1, 1, 1.4, 1.9, math.inf], k=2)))
        nodes.append(node)
    outputs = rng.sample(nodes, 2)
    graph.output(tuple(outputs) if rng.random() < 0.5 else outputs[0])
    return graph


def pruned_one_by_one(graph, goes):
    """Prunes by definition: in order, a node that `goes` leaves its place to its only float input, or to None."""
    graph = copy.deepcopy(graph)
    for node in graph.nodes:
        floats = [a for a in (*node.args, *node.kwargs.values()) if getattr(a, "meta", {}).get("outputs_float_tensor")]
        instead = floats[0] if len(floats) == 1 else None
        if node.op == "output" or not goes(node, instead):
            continue
        for user in list(node.users):
            user.args, user.kwargs = fx.node.map_arg((user.args, user.kwargs), lambda a: instead if a is node else a)
        graph.erase_node(node)
    return graph


@pytest.mark.parametrize("rtol", [2**-16, 0.5])
def test_random_graphs_are_pruned_as_the_definition_says(rtol):
    def close(a, b):
        return math.isclose(a.mean_abs, b.mean_abs, rel_tol=rtol)

    def same_scale(node, instead):
        if instead is None or "metrics" not in node.meta:
            return False
        a, b = node.meta["metrics"], instead.meta["metrics"]
        return close(a.fwd, b.fwd) and close(a.bwd, b.bwd)

    rng = random.Random(0)
    for _ in range(150):
        graph = random_graph(rng)
        no_float = pruned_one_by_one(graph, lambda node, instead: not node.meta["outputs_float_tensor"])
        assert str(prune_non_float_tensors(graph)) == str(no_float)
        assert str(prune_same_scale_tensors(graph, rtol)) == str(pruned_one_by_one(graph, same_scale))


def test_wrong_arguments_of_prune_functions_are_named(graph):
    for rtol in (-1, math.nan):
        with pytest.raises(plumb.Error, match=f"rtol is {rtol}"):
            prune_same_scale_tensors(graph, rtol)
    for prune in (prune_non_float_tensors, prune_same_scale_tensors, lambda g: prune_selected_nodes(g, [])):
        with pytest.raises(TypeError, match=r"graph is a Linear.*scales_graph\(\)"):
            prune(nn.Linear(2, 2))
    with pytest.raises(TypeError, match="targets is <function gelu|targets is <built-in function gelu"):
        prune_selected_nodes(graph, F.gelu)


def test_graphs_that_were_not_tracked_can_be_pruned():
    def forward(x, table):
        picked = torch.index_select(x, 0, table)
        return (torch.add(x, picked), [F.relu(picked) + torch.relu(x)])

    traced = fx.symbolic_trace(forward).graph
    before = str(traced)
    pruned = prune_selected_nodes(traced, [torch.add, F.relu])
    assert str(traced) == before
    x, table, picked = list(pruned.nodes)[:3]
    output = list(pruned.nodes)[-1]
    assert output.args[0][:2] == (x, picked) and picked.args == (x, 0, table)
    (total,) = output.args[0][2]
    assert total.args == (picked, next(n for n in pruned.nodes if n.target is torch.relu))
    assert str(prune_same_scale_tensors(traced)) == before
    with pytest.raises(plumb.Error, match="nothing is known of the dtypes"):
        prune_non_float_tensors(traced)
    program = torch.export.export(nn.Embedding(4, 2), (torch.tensor([1]),))
    assert [n.name for n in prune_non_float_tensors(program.graph).nodes] == ["p_weight", "embedding", "output"]


# --- as backends


def test_a_functions_gradient_is_written_into_a_nodes_meta():
    meta = {}
    x = torch.randn(5, requires_grad=True)
    y = ScaleTrackingAutogradFunction.apply(x, meta)
    assert torch.equal(y, x) and meta["metrics"].fwd == Metrics.from_tensor(x) and meta["metrics"].bwd is None
    (3 * y).sum().backward()
    assert torch.equal(x.grad, torch.full((5,), 3.0)) and meta["metrics"].bwd.mean_abs == 3.0
    for x in (torch.ones(3), torch.ones(3, requires_grad=True)):  # the result may be written
        assert torch.equal(ScaleTrackingAutogradFunction.apply(x, {}).mul_(2), 2 * x) and torch.equal(x, torch.ones(3))


@needs_positions
def test_tracking_is_a_backend():
    torch.manual_seed(0)
    torch._dynamo.reset()
    model, x = nn.Sequential(nn.Linear(4, 4), nn.GELU()), torch.randn(3, 4)
    backend = ScaleTrackingBackend()
    assert len(backend.graph.nodes) == 0
    tracked = apply_transform(model, backend)
    tracked(x).sum().backward()
    expected = track_scales(model)
    expected(x).sum().backward()
    rows = [(n.name, n.target, n.meta.get("metrics") and str(n.meta["metrics"])) for n in backend.graph.nodes]
    assert rows == [(n.name, n.target, n.meta.get("metrics") and str(n.meta["metrics"])) for n in expected.scales_graph().nodes]
    compiled = torch.compile(model, backend=backend)
    assert torch.equal(compiled(x), model(x))
    assert {F.gelu} <= {n.target for n in backend.graph.nodes}


def test_unit_scaling_is_a_backend_that_leaves_weights_alone():
    torch.manual_seed(0)
    torch._dynamo.reset()
    model, x = nn.Sequential(nn.Linear(4, 4), nn.GELU()), torch.randn(3, 4)
    before = copy.deepcopy(model.state_dict())
    for backend, last in ((unit_scaling_backend(), U.gelu), (unit_scaling_backend({F.gelu: F.silu}), U.silu)):
        scaled = apply_transform(model, backend)
        expected = last(U.linear(x, model[0].weight, model[0].bias, constraint=None), constraint=None)
        assert torch.equal(scaled(x), expected) and torch.equal(torch.compile(model, backend=backend)(x), expected)
        for state in (scaled.state_dict(), model.state_dict()):
            assert all(torch.equal(state[k], before[k]) for k in before)
        assert not any(hasattr(p, "mup_type") for p in scaled.parameters())


def test_a_backends_answer_has_the_transformed_graph():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 4), nn.GELU()), torch.randn(3, 4)
    run = unit_scaling_backend()(fx.symbolic_trace(model), [x])
    before = str(run.graph)
    assert {torch.ops.plumb.linear.default, torch.ops.plumb.gelu.default} <= {n.target for n in run.graph.nodes}
    assert torch.equal(run(x), apply_transform(model, unit_scaling_backend())(x)) and str(run.graph) == before

    def backend(gm, inputs):
        made.append(unit_scaling_backend()(gm, inputs))
        with pytest.raises(plumb.Error, match="after its first run"):
            made[-1].graph  # noqa: B018
        return made[-1]

    made = []
    apply_transform(model, backend)(x)
    assert torch.ops.plumb.gelu.default in {n.target for n in made[-1].graph.nodes}


def test_a_backend_that_finds_nothing_says_so(caplog):
    def backend(gm, inputs):
        assert not [n for n in gm.graph.nodes if n.target is F.linear]
        return gm

    for ends in (lambda gm: gm, lambda gm: fx.GraphModule(gm, gm.graph), copy.deepcopy):
        caplog.clear()
        model = apply_transform(nn.Linear(4, 4), lambda gm, inputs: ends(backend(gm, inputs)))
        model(torch.randn(2, 4))
        (entry,) = plumb.report(model)[0]["entries"]
        assert "lambda" in entry["node"] and "changed nothing" in entry["reason"]
        assert "aten.linear.default" in caplog.records[-1].getMessage() and caplog.records[-1].levelname == "WARNING"


def test_functions_that_should_stay_nodes_are_refused():
    with pytest.raises(plumb.Error, match="non_recurse_functions: calls of gelu") as caught:
        apply_transform(nn.GELU(), unit_scaling_backend(), non_recurse_functions=[F.gelu])
    assert "custom_op" in caught.value.remedy
    apply_transform(nn.GELU(), unit_scaling_backend(), non_recurse_functions=[])


# --- what is logged


def test_unit_scale_logs_what_it_does(caplog):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.own = nn.Linear(4, 4), nn.Parameter(torch.randn(4, 4))

        def forward(self, x):
            x = x + self.linear(x)
            return F.relu(F.linear(x, self.own))

    with caplog.at_level("INFO", logger="plumb.transforms"):
        model = plumb.transforms.unit_scale(plumb.transforms.simulate_fp8(Model()), replace={F.relu: U.gelu})
        model = track_scales(model)
        model(torch.randn(2, 4))
        first = [r.getMessage() for r in caplog.records]
        model(torch.randn(3, 4))
    told = [r.getMessage() for r in caplog.records]
    for text in (
        "moving unit scaling backend to precede quantisation backend",
        "running unit scaling backend",
        "unit scaling weight: linear.weight",
        "setting bias to zero: linear.bias",
        "unit scaling weight: own",
        "unit scaling function: x_1 (residual-add, tau=0.5)",
        "unit scaling function: linear",
        "replacing function: gelu with gelu",
        "adding tracking to node: linear",
    ):
        assert text in first, text
    parameters = [t for t in told if t.startswith(("unit scaling weight:", "setting bias"))]
    assert parameters == [t for t in first if t in parameters] and len(parameters) == 3, "each is named once"
    assert any(t.startswith("unconstraining node: gelu") for t in first)


class Experts(nn.Module):
    """Products of an input and weights of several experts, singular values of another input."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(3, 5, 8)), nn.Parameter(torch.randn(3, 8, 3))

    def forward(self, x, y):
        return (torch.tanh(x @ self.up) @ self.down).mean(0) * torch.linalg.svdvals(y)[:3]


def test_tracking_changes_no_bit_where_torch_multiplies_otherwise_if_an_input_requires_a_gradient():
    torch.manual_seed(0)
    model, x, y = Experts(), torch.randn(4, 5), torch.randn(4, 6)
    tracked = track_scales(model)
    for given in ((x, y), (x.clone().requires_grad_(), y)):
        results = []
        for module in (model, tracked):
            module.zero_grad()
            out = module(*given)
            (out - 0.5).pow(2).mean().backward()
            results.append([out, *[p.grad for p in module.parameters()]])
        assert all(map(torch.equal, *results))
    measured = {n.name: n.meta["metrics"] for n in tracked.scales_graph().nodes if n.meta.get("metrics")}
    assert measured["x"].bwd is not None and measured["y"].bwd is None
