"""Helpers on torch.fx graphs of stages, beside torch's on the same graphs."""

import operator
import pickle

import pytest
import torch
from plumb.pipelining import _IR, TrivialLossWrapper
from plumb.pipelining._backward import _null_coalesce_accumulate, stage_backward
from torch import fx, nn
from torch.distributed.pipelining import _IR as torchs
from torch_names import _IR as private


def graph_of(text):
    """A graph of placeholders, calls of modules and parts of their outputs: "x, y; a = 0(x); b = 1(a.0, a.1); (b, x)"."""
    graph, env = fx.Graph(), {}
    inputs, *calls, output = (part.strip() for part in text.split(";"))
    for name in inputs.split(", "):
        env[name] = graph.placeholder(name)

    def value(name):
        if name not in env:
            source, index = name.split(".")
            env[name] = graph.call_function(operator.getitem, (env[source], int(index)))
        return env[name]

    for call in calls:
        name, rest = call.split(" = ")
        module, args = rest.rstrip(")").split("(")
        env[name] = graph.call_module(f"submod_pp_{module}", tuple(value(arg) for arg in args.split(", ")))
    names = output.strip("()").split(", ")
    node = graph.output(tuple(value(name) for name in names) if len(names) > 1 else value(names[0]))
    return graph, env, node


def calls_of(graph, stage_backward_of, accumulate_of):
    """Every stage_backward call with all that goes into it, written out, with one name for plumb's and torch's functions."""
    names = {stage_backward_of: "stage_backward", accumulate_of: "accumulate", operator.getitem: "getitem"}

    def written(value):
        if isinstance(value, fx.Node):
            return (names.get(value.target, value.target), written(value.args), written(value.kwargs))
        if isinstance(value, (tuple, list)):
            return tuple(written(v) for v in value)
        return {k: written(v) for k, v in sorted(value.items())} if isinstance(value, dict) else value

    return sorted(repr(written(n)) for n in graph.nodes if n.target is stage_backward_of)


GRAPHS = {
    "chain": ("x; a = 0(x); b = 1(a); b", "b"),
    "skip": ("x; a = 0(x); b = 1(a); c = 2(b, a); c", "c"),
    "parts": ("x, y; a = 0(x); b = 1(a.0, y); c = 2(b, a.1, x); (c, b)", "c"),
    "beside": ("x; a = 0(x); b = 1(a); c = 2(a); (b, c)", "b"),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_the_backward_is_written_as_torch_writes_it(name):
    text, loss = GRAPHS[name]
    graph, env, output = graph_of(text)
    assert _IR._insert_stage_symbolic_backward(graph, env[loss], output) is graph
    graph.lint()
    other, env, output = graph_of(text)
    torchs._insert_stage_symbolic_backward(other, env[loss], output)
    ours = calls_of(graph, stage_backward, _null_coalesce_accumulate)
    assert ours == calls_of(other, torchs.stage_backward, torchs._null_coalesce_accumulate)
    assert len(ours) == {"chain": 2, "skip": 3, "parts": 3, "beside": 2}[name]


def test_only_calls_and_parts_may_stand_in_a_graph_of_stages():
    graph, env, output = graph_of("x; a = 0(x); a")
    with graph.inserting_before(output):
        graph.call_function(torch.relu, (env["a"],))
    with pytest.raises(AssertionError, match="relu"):
        _IR._insert_stage_symbolic_backward(graph, env["a"], output)


def test_the_loss_is_found_where_the_spec_says():
    graph, env, _ = graph_of("x; a = 0(x); b = 1(a); (a, b)")
    a, b = env["a"], env["b"]
    find = private._find_loss_from_output_and_spec
    assert find(a, True) is a and find(a, False) is None
    assert find((a, [b]), (False, [True])) is b and find({"l": a, "o": b}, {"o": False, "l": True}) is a
    for value, spec, text in (
        (3, True, "dynamic value"),
        (a, (True,), "match type"),
        ((a, b), (True,), "match length"),
        ({"a": a}, {"b": True}, "match keys"),
        ((a, b), (False, False), "Did not find"),
        (a, "loss", "Unsupported type"),
    ):
        for module in (private, torchs):
            with pytest.raises(RuntimeError, match=text):
                module._find_loss_from_output_and_spec(value, spec)


def test_the_loss_of_wrappers_and_dicts_needs_no_spec():
    graph, env, output = graph_of("x; a = 0(x); a")
    wrapper = TrivialLossWrapper(nn.Identity(), nn.MSELoss())
    assert private._find_loss_output(wrapper, graph, None) == (env["a"], output, True)
    assert private._find_loss_output(nn.Identity(), graph, None) == (None, output, None)
    assert private._find_loss_output(nn.Identity(), graph, True) == (env["a"], output, True)
    output.args = ({"loss": env["a"], "x": env["x"]},)
    assert private._find_loss_output(nn.Identity(), graph, None) == (env["a"], output, {"loss": True, "x": False})
    graph.erase_node(output)
    with pytest.raises(AssertionError, match="one output"):
        private._find_loss_output(nn.Identity(), graph, None)


def test_stages_are_counted():
    graph, _, _ = graph_of("x; a = 0(x); b = 1(a); b")
    root = nn.Module()
    root.submod_pp_0, root.submod_pp_1 = nn.Identity(), nn.Identity()
    gm = fx.GraphModule(root, graph)
    assert _IR.Pipe._number_and_count_forward_stages(gm) == 2
    assert [n.meta["stage_idx"] for n in gm.graph.nodes if n.op == "call_module"] == [0, 1]


def test_devices_in_graphs_change_inside_of_graphs_too(caplog):
    def making(root):
        graph = fx.Graph()
        x = graph.placeholder("x")
        made = graph.call_function(torch.ones, (2,), {"device": torch.device("cpu")})
        called = graph.call_module("inner", (x,)) if hasattr(root, "inner") else graph.call_function(torch.relu, (x,))
        graph.output(graph.call_function(torch.add, (called, made)))
        return fx.GraphModule(root, graph)

    root = nn.Module()
    root.inner = making(nn.Module())
    gm = making(root)
    _IR._modify_graph_op_device(gm, torch.device("meta"))
    assert gm(torch.ones(2, device="meta")).is_meta
    assert all("meta" in code and "cpu" not in code for code in (gm.code, gm.inner.code))
    before = gm.code
    _IR._modify_graph_op_device(gm, torch.device("meta"))
    assert gm.code == before
    root.inner = nn.ReLU()
    with caplog.at_level("DEBUG", logger="plumb.pipelining"):
        _IR._modify_graph_op_device(making(root), torch.device("meta"))
    told = [r.getMessage() for r in caplog.records]
    assert told[0] == "Changing device of Node ones from cpu to meta"
    assert told[1].startswith("Skipping device modification for submodule inner because it is a") and len(told) == 2


def test_graph_modules_travel_without_code():
    gm = fx.symbolic_trace(nn.Sequential(nn.Linear(3, 4), nn.ReLU()))
    for node in gm.graph.nodes:
        node.meta["mine"] = node.name
    make, (body, nodes) = private._direct_serialization_reduce(gm)
    again = make(body, pickle.loads(pickle.dumps(nodes)))
    x = torch.randn(2, 3)
    assert torch.equal(again(x), gm(x)) and again.state_dict().keys() == gm.state_dict().keys()
    assert [n.meta["mine"] for n in again.graph.nodes] == [n.name for n in gm.graph.nodes]


def test_forwards_get_a_mark_before_or_after():
    order = []

    class Noted(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            order.append(str(func))
            return func(*args, **(kwargs or {}))

    module = nn.ReLU()
    module._orig_forward = module.forward
    for forward, place in ((private._split_before_forward, 0), (private._split_after_forward, 1)):
        order.clear()
        with Noted():
            forward(module, torch.ones(2))
        assert ["pipe_split" in name for name in order if "pipe_split" in name or "relu" in name][place]
