"""Models cut into stages: bit for bit the whole, under the original's names."""

import copy
import operator

import pytest
import torch
import torch.distributed.pipelining  # noqa: F401  (its mark)
import torch.nn.functional as F
import zoo
from capture_checks import same, tensors
from plumb.pipelining import (
    LossWrapper,
    MultiUseParameterConfig,
    Pipe,
    PipeSequential,
    TrivialLossWrapper,
    pipe_split,
    pipeline,
)
from plumb.pipelining._IR import DetachExecutor, _insert_stage_symbolic_backward, _null_coalesce_accumulate
from plumb.pipelining.schedules import ScheduleInterleaved1F1B
from split_models import BEGIN, LOSSES, MLP, Outputs, Shared, equals_whole, merged_grads
from torch import fx, nn

import plumb


# --- what crosses ---
@pytest.mark.parametrize("config", list(MultiUseParameterConfig))
def test_a_module_used_in_two_stages(config):
    pipe = equals_whole(Shared(), (torch.randn(4, 8),), stages=3, multi_use_param_spec=config)
    if config is MultiUseParameterConfig.REPLICATE:
        assert {frozenset(p.items()) for p in pipe.replicated_params} == {
            frozenset({("submod_pp_0", n), ("submod_pp_2", n)}) for n in ("a.weight", "a.bias")
        }
    else:
        assert pipe.replicated_params == []
        assert set(pipe.get_stage_module(2).state_dict()) == {"scale"}


def test_a_parameter_may_be_transmitted_and_another_replicated():
    by_name = {"a.weight": MultiUseParameterConfig.TRANSMIT, "a.bias": MultiUseParameterConfig.REPLICATE}
    pipe = equals_whole(Shared(), (torch.randn(4, 8),), multi_use_param_spec=by_name)
    assert [set(p.values()) for p in pipe.replicated_params] == [{"a.bias"}]
    assert "a.weight" not in pipe.get_stage_module(2).state_dict()
    with pytest.raises(plumb.Error, match="nobody"):
        pipeline(Shared(), (torch.randn(4, 8),), multi_use_param_spec={"nobody": MultiUseParameterConfig.TRANSMIT})


def test_unused_parameters_and_buffers_stay_with_the_whole():
    model = Shared()
    pipe = pipeline(model, (torch.randn(4, 8),))
    assert all("unused" not in pipe.get_stage_module(s).state_dict() for s in range(3))
    assert dict(pipe.get_stage_module(1).named_buffers()).keys() == {"hidden"}
    assert "hidden" not in pipe.get_stage_module(1).state_dict()
    merged = pipe.merge_state_dict()
    assert list(merged) == list(model.state_dict()) or set(merged) == set(model.state_dict())
    assert merged["unused"].data_ptr() == model.unused.data_ptr()


def test_skip_connections_over_several_stages():
    class Net(MLP):
        def forward(self, x):
            first = self.layers[0](x)
            pipe_split()
            y = self.layers[1](first)
            pipe_split()
            y = self.layers[2](y) + x
            pipe_split()
            return self.layers[3](y * first) + first, first

    pipe = equals_whole(Net(), (torch.randn(3, 8),), stages=4)
    table = pipe.info().table
    assert (0, 0) in [(p["stage"], p["index"]) for p in table.inputs(3)]


def test_views_in_place_operators_and_strides_at_a_boundary():
    class Net(MLP):
        def forward(self, x):
            y = self.layers[0](x).t()
            pipe_split()
            z = self.layers[1](y.t()).view(2, 2, 8).transpose(0, 1)[:, :, 1:]
            pipe_split()
            z = z.mul_(2).add_(1)
            w, v = z.chunk(2, 0)
            pipe_split()
            return (w + v).sum(-1), z.permute(2, 0, 1)

    equals_whole(Net(), (torch.randn(4, 8),))


def test_batch_norm_buffers_are_written_in_their_stage():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4))
    pipe = equals_whole(model, (torch.randn(2, 3, 8, 8),), stages=2, split_spec={"3": BEGIN})
    assert {n for n, _ in pipe.get_stage_module(1).named_buffers()} == {
        "4.running_mean", "4.running_var", "4.num_batches_tracked"
    }  # fmt: skip


def test_tied_weights_and_dict_inputs_and_outputs():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.body, self.head = nn.Embedding(9, 8), nn.Linear(8, 8), nn.Linear(8, 9, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, batch, scale=None, *, shift=0):
            x = self.embed(batch["ids"]) * scale
            pipe_split()
            x = self.body(x) + shift
            pipe_split()
            return {"logits": self.head(x), "aux": [x, None, 3]}

    model = Net()
    batch = {"ids": torch.randint(9, (2, 5))}
    pipe = equals_whole(model, (batch,), {"scale": torch.tensor(2.0), "shift": 1}, stages=3)
    assert pipe.replicated_params == [{"submod_pp_0": "embed.weight", "submod_pp_2": "embed.weight"}]
    out = pipe(batch, torch.tensor(2.0), shift=1)
    assert out[2:] == (None, 3)
    tree = pipe.unflatten(out)
    assert list(tree) == ["logits", "aux"] and tree["aux"][1:] == [None, 3]
    with pytest.raises(plumb.Error, match="cut with 1 where 2"):
        pipe(batch, torch.tensor(2.0), shift=2)
    stage = pipe.get_stage_module(0)
    same([stage(batch, scale=torch.tensor(2.0))], [stage(batch["ids"], torch.tensor(2.0))])
    with pytest.raises(plumb.Error, match="no argument 'nope'"):
        stage(nope=1)


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("name", ["GPT-2", "Llama"])
def test_transformers_models(name, stages):
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    if name == "GPT-2":
        config = GPT2Config(n_layer=4, n_head=2, n_embd=16, vocab_size=50, n_positions=32, use_cache=False)
        model, layers = GPT2LMHeadModel(config), "transformer.h"
    else:
        config = LlamaConfig(
            num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, hidden_size=16, intermediate_size=32,
            vocab_size=50, use_cache=False,
        )  # fmt: skip
        model, layers = LlamaForCausalLM(config), "model.layers"
    inputs = {"input_ids": zoo.ids(2, 8), "labels": zoo.ids(2, 8)}
    spec = {f"{layers}.{i}": BEGIN for i in range(4 // stages, 4, 4 // stages)}
    pipe = pipeline(model, (), inputs, split_spec=spec, output_loss_value_spec="auto")
    assert pipe.num_stages == stages and pipe.has_loss_and_backward
    eager = copy.deepcopy(model)
    torch.manual_seed(3)
    expected = eager(**inputs)
    torch.manual_seed(3)
    out = pipe(**inputs)
    same([expected.loss, expected.logits], list(out[:2]), "output")
    expected.loss.backward()
    held = set()
    for s in range(stages):
        for n, p in pipe.get_stage_module(s).named_parameters(remove_duplicate=False):
            assert torch.equal(p.grad, eager.get_parameter(n).grad), n
            held.add(n)
    assert held == {n for n, _ in eager.named_parameters()}
    assert type(pipe.unflatten(out)) is type(expected)


# --- wrappers, losses, backward ---
def test_sequences_mark_themselves():
    plain = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    marked = PipeSequential.from_sequential(plain)
    assert marked[0].weight is plain[0].weight and list(marked.state_dict()) == list(plain.state_dict())
    assert pipeline(marked, (torch.randn(2, 4),)).num_stages == 3
    same([marked(torch.ones(1, 4))], [plain(torch.ones(1, 4))])


@pytest.mark.parametrize("name", list(LOSSES))
def test_loss_specs(name):
    shape, spec = LOSSES[name]
    model, x, y = Outputs(shape), torch.randn(4, 6), torch.randn(4, 6)
    eager = copy.deepcopy(model)
    pipe = pipeline(model, (x, y), output_loss_value_spec=spec)
    assert pipe.has_loss_and_backward and pipe.info().has_loss_and_backward
    outputs = tensors(eager(x, y))
    next(t for t in outputs if t.dim() == 0).backward()
    same(tensors(pipe(x, y)), outputs)
    for n, p in eager.named_parameters():
        assert torch.equal(merged_grads(pipe)[n], p.grad), n
    with torch.no_grad():
        same(tensors(pipe(x, y)), outputs)
    assert [n.target.__name__ for n in pipe.info().graph.nodes if "backward" in str(n.target)] == ["stage_backward"] * 3


def test_loss_specs_that_do_not_fit_are_refused():
    x = torch.randn(4, 6)
    for shape, wrong in [
        (LOSSES["tuple"][0], (False, False)),
        (LOSSES["tuple"][0], (True, True)),
        (LOSSES["tuple"][0], True),
        (LOSSES["tuple"][0], (True,)),
        (LOSSES["dict"][0], {"lost": True, "out": False}),
        (LOSSES["alone"][0], "auto"),
        (LOSSES["tuple"][0], ("yes", False)),
    ]:
        with pytest.raises(RuntimeError, match="loss"):
            pipeline(Outputs(shape), (x, x), output_loss_value_spec=wrong)
    assert not pipeline(Outputs(LOSSES["alone"][0]), (x, x)).has_loss_and_backward


def test_loss_wrappers():
    class Mine(LossWrapper):
        def forward(self, x, targets):
            return {"loss": self.loss_fn(self.module(x), targets)}

    x, y = torch.randn(4, 8), torch.randn(4, 8)
    for wrapper in (TrivialLossWrapper, Mine):
        model = wrapper(MLP(), nn.MSELoss())
        pipe = pipeline(model, (x, y), split_spec={"module.layers.2": BEGIN}, output_loss_value_spec="auto")
        eager = tensors(model(x, y))[0]
        same([pipe(x, y)[0]], [eager])
        assert pipe.get_stage_module(1).get_parameter("module.layers.3.weight").grad is not None
    with pytest.raises(NotImplementedError):
        LossWrapper(MLP(), nn.MSELoss())(x)


def test_the_graph_runs_node_by_node_and_the_executor_bit_for_bit():
    model, x, y = Outputs(LOSSES["alone"][0]), torch.randn(4, 6), torch.randn(4, 6)
    pipe = pipeline(model, (x, y), output_loss_value_spec=True)
    given = x.clone().requires_grad_()
    model(given, y).backward()
    expected = {n: p.grad.clone() for n, p in model.named_parameters()}
    for executor in (DetachExecutor(pipe), DetachExecutor(pipe.split_gm), pipe.executor):
        model.zero_grad()
        executor.run(x, y)
        for n, g in expected.items():
            assert torch.equal(merged_grads(pipe)[n], g), n
    model.zero_grad()
    executor.run(x.clone().requires_grad_(), y)
    # The input goes to several stages: its gradient is the sum over them, in a node of its own.
    found = [executor.env[n] for n in pipe.split_gm.graph.nodes if n.target is _null_coalesce_accumulate]
    assert any(g is not None and torch.equal(g, given.grad) for g in found)


class Stray(nn.Module):
    """Two cuts. Values cross them that the loss does not depend on; `early`: the loss is the first stage's."""

    def __init__(self, early):
        super().__init__()
        self.a, self.b, self.c, self.early = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4), early

    def forward(self, x):
        y, q = self.a(x), self.b(x)
        loss = y.sum()
        pipe_split()
        z, count = self.c(y), q.sum()
        pipe_split()
        return q * count, loss if self.early else z.sum()


@pytest.mark.parametrize("early", [True, False])
def test_the_executor_goes_back_from_the_loss_alone(early):
    torch.manual_seed(0)
    model, x = Stray(early), torch.randn(2, 4)
    model(x)[1].backward()
    expected = [p.grad for p in model.parameters()]
    pipe = pipeline(model, (x,), output_loss_value_spec=(False, True))
    assert pipe.num_stages == 3
    for run in (pipe, DetachExecutor(pipe).run):
        model.zero_grad()
        run(x)
        same([p.grad for p in model.parameters()], expected)


def test_the_executor_starts_from_values_that_are_given():
    model, x = MLP(), torch.randn(4, 8)
    pipe = pipeline(model, (x,), split_spec={"layers.2": BEGIN})
    calls = [n for n in pipe.split_gm.graph.nodes if n.op == "call_module"]
    hidden = pipe.get_stage_module(0)(x)
    (out,) = DetachExecutor(pipe.split_gm).run(x, initial_env={calls[0]: 2 * hidden})
    same([out], [pipe.get_stage_module(1)(2 * hidden)])


def by_hand(loss=False):
    """Stages named as torch 2.4 names them, in a graph of torch's own tools."""
    torch.manual_seed(0)
    root = nn.Module()
    root.submod_0, root.submod_1 = nn.Sequential(nn.Linear(8, 8), nn.ReLU()), nn.Linear(8, 8)
    graph = fx.Graph()
    x = graph.placeholder("x")
    y = graph.call_module("submod_1", (graph.call_module("submod_0", (x,)),))
    node = graph.output(y)
    if loss:
        _insert_stage_symbolic_backward(graph, y, node)
    return fx.GraphModule(root, graph)


def test_a_pipe_is_made_of_stages_by_hand():
    split = by_hand()
    pipe = Pipe(split, 2, False, None)
    x = torch.randn(4, 8)
    expected = split.submod_1(split.submod_0(x))
    same([pipe(x), pipe(x=x), pipe.executor.run(x)], [expected] * 3)
    assert pipe.get_stage_module(1) is split.submod_1 and pipe.info().num_stages == 2
    with pytest.raises(plumb.Error, match="invoke the Pipe object"):
        split(x)
    stages = [pipe.build_stage(i, torch.device("cpu")) for i in range(2)]
    target, losses = torch.randn(4, 8), []
    schedule = ScheduleInterleaved1F1B(stages, 2, nn.functional.mse_loss)
    by_microbatch = [split.submod_1(split.submod_0(part)) for part in x.chunk(2)]
    same([schedule.step(x, target=target, losses=losses)], [torch.cat(by_microbatch)])
    assert split.submod_0[0].weight.grad is not None


def test_a_pipe_by_hand_runs_its_backward_and_leaves_shared_parameters_one():
    split = by_hand(loss=True)
    split.submod_1.weight = split.submod_0[0].weight
    pipe = Pipe(split, 2, True, True)
    assert pipe.replicated_params == [{"submod_0": "0.weight", "submod_1": "weight"}]
    assert split.submod_1.weight is split.submod_0[0].weight
    x = torch.randn(1, 8)
    whole = copy.deepcopy(nn.Sequential(split.submod_0, split.submod_1, nn.Flatten(0)))
    split.submod_1.register_forward_hook(lambda module, args, out: out.sum())
    pipe(x)
    whole(x).sum().backward()
    for stage, reference in ((split.submod_0, whole[0]), (split.submod_1, whole[1])):
        same([p.grad for p in stage.parameters()], [p.grad for p in reference.parameters()])


def test_a_stage_by_hand_may_return_one_tensor_twice():
    class Twice(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            return y, y

    torch.manual_seed(0)
    root = nn.Module()
    root.submod_0, root.submod_1 = Twice(4, 4), nn.Bilinear(4, 4, 1)
    graph = fx.Graph()
    made = graph.call_module("submod_0", (graph.placeholder("x"),))
    loss = graph.call_module("submod_1", tuple(graph.call_function(operator.getitem, (made, i)) for i in range(2)))
    _insert_stage_symbolic_backward(graph, loss, graph.output(loss))
    pipe = Pipe(fx.GraphModule(root, graph), 2, True, True)
    x, whole = torch.randn(1, 4), copy.deepcopy(root)
    pipe(x)
    whole.submod_1(*whole.submod_0(x)).backward()
    same([p.grad for p in pipe.parameters()], [p.grad for p in whole.parameters()])


def test_a_graph_that_is_none_of_stages_makes_no_pipe():
    split = by_hand()
    with pytest.raises(plumb.Error, match="calls 2 stages, not 3"):
        Pipe(split, 3, False, None)
    with split.graph.inserting_before(list(split.graph.nodes)[-1]):
        split.graph.call_function(torch.relu, (list(split.graph.nodes)[0],))
    with pytest.raises(AssertionError, match="relu.*stands between the stages"):
        Pipe(split, 2, False, None)
    skips = by_hand()
    first, second = (n for n in skips.graph.nodes if n.op == "call_module")
    second.args = (first, first.args[0])
    with pytest.raises(plumb.Error, match="'submod_1' takes other values"):
        Pipe(skips, 2, False, None).build_stage(1, torch.device("cpu"))


def test_trace_with_export_says_what_could_not_be_captured():
    class Branches(nn.Module):
        def forward(self, x):
            return x if x.sum() > 0 else -x

    x = torch.randn(2, 2)
    with pytest.raises(plumb.Error, match="cannot capture your model as a full graph"):
        Pipe._trace_with_export(Branches(), (x,))
    program = Pipe._trace_with_export(nn.Linear(2, 2), (x,))
    assert isinstance(program, torch.export.ExportedProgram) and Pipe._from_traced(None, program).num_stages == 1


def test_cutting_is_logged(caplog):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head, self.unused = nn.Embedding(9, 8), nn.Linear(8, 9, bias=False), nn.Linear(2, 2)
            self.head.weight = self.embed.weight

        def forward(self, ids):
            return self.head(self.embed(ids)) + torch.ones(9, device=ids.device)

    def mark(gm):
        node = next(n for n in gm.graph.nodes if n.target is torch.ops.aten.linear.default)
        with gm.graph.inserting_before(node):
            gm.graph.call_function(pipe_split, ())
        return gm

    with caplog.at_level("DEBUG", logger="plumb.pipelining"):
        pipe = pipeline(Tied(), (torch.tensor([1]),), split_policy=mark)
        pipe.build_stage(1, torch.device("meta"))
    told = [record.getMessage() for record in caplog.records]
    for text in (
        "Tracing model ...",
        "Auto-splitting model",
        "Parameter embed.weight used in multiple stages: submod_pp_0, submod_pp_1.",
        "Moved parameter embed.weight to submod_pp_0",
        "Deleted unused.weight: no stage uses it",
        "Pipeline is in inference mode, backward pass not generated",
        "Full pipe model:\n" + str(pipe),
        "Changing device of Node ones to meta",
    ):
        assert text in told, text


# --- the whole again ---
def test_training_and_merging_equals_training_the_whole(tmp_path):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.body, self.head = nn.Embedding(9, 8), MLP(2), nn.Linear(8, 9, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids, targets):
            logits = self.head(self.body(self.embed(ids)))
            return F.cross_entropy(logits.flatten(0, 1), targets.flatten()), logits

    torch.manual_seed(0)
    model = Tied()
    eager = copy.deepcopy(model)
    ids, targets = torch.randint(9, (4, 5)), torch.randint(9, (4, 5))
    spec = {"body.layers.0": BEGIN, "head": BEGIN}
    pipe = pipeline(model, (ids, targets), split_spec=spec, output_loss_value_spec=(True, False))
    ours, theirs = torch.optim.AdamW(pipe.parameters(), 0.1), torch.optim.AdamW(eager.parameters(), 0.1)
    for _ in range(3):
        ours.zero_grad(), theirs.zero_grad()
        loss, _ = pipe(ids, targets)
        expected, _ = eager(ids, targets)
        expected.backward()
        same([loss], [expected])
        ours.step(), theirs.step()
    state = pipe.merge_state_dict()
    assert list(state) == list(eager.state_dict())
    same(list(state.values()), list(eager.state_dict().values()))
    assert state["head.weight"] is state["embed.weight"]
    merged = pipe.merge()
    same(merged(ids, targets), eager(ids, targets))
    assert merged.head.weight is merged.embed.weight
    pipe.save_pt2(tmp_path / "trained.pt2")
    same(torch.export.load(tmp_path / "trained.pt2").module()(ids, targets), eager(ids, targets))
    states = [copy.deepcopy(pipe.get_stage_module(s).state_dict()) for s in range(3)]
    states[2]["embed.weight"].add_(1)
    with pytest.raises(plumb.Error, match="copies of 'embed.weight'.*differ"):
        pipe.merge_state_dict(states)
    states[0]["embed.weight"].copy_(states[2]["embed.weight"])
    same([pipe.merge_state_dict(states)["head.weight"]], [states[2]["embed.weight"]])
