"""Models cut into stages: bit for bit the whole, under the original's names."""

import copy
import pickle
import weakref

import pytest
import torch
import torch.distributed as dist
import torch.distributed.pipelining  # noqa: F401  (its mark)
import torch.multiprocessing as mp
import torch.nn.functional as F
import zoo
from plumb.pipelining import (
    Balanced,
    LossWrapper,
    MultiUseParameterConfig,
    Pipe,
    PipeSequential,
    SplitPoint,
    StagePolicy,
    TrivialLossWrapper,
    annotate_split_points,
    deserialize_stage,
    pipe_split,
    pipeline,
    scatter_stages,
    split_into_equal_size,
    split_on_size_threshold,
)
from plumb.pipelining._IR import DetachExecutor, get_submod_name
from torch import nn

import plumb

BEGIN, END = SplitPoint.BEGINNING, SplitPoint.END


def leaves(tree):
    return [x for x in torch.utils._pytree.tree_leaves(tree) if isinstance(x, torch.Tensor)]


def same(a, b, what="value"):
    assert len(a) == len(b), what
    for i, (x, y) in enumerate(zip(a, b)):
        assert (x is None) == (y is None), f"{what} {i}"
        assert x is None or torch.equal(x, y), f"{what} {i} differs"


def equals_whole(model, args, kwargs=None, stages=None, **how):
    """Outputs, gradients of parameters and inputs, buffers and names: as of the undivided model."""
    kwargs = kwargs or {}
    model.zero_grad()
    eager = copy.deepcopy(model)
    names = set(model.state_dict())
    pipe = pipeline(model, args, kwargs, **how)
    assert stages is None or pipe.num_stages == stages
    results = []
    for run in (eager, pipe):
        given = [a.clone().requires_grad_() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args]
        torch.manual_seed(7)
        out = leaves(run(*given, **kwargs))
        torch.manual_seed(8)
        wanted = [y for y in out if y.requires_grad]
        sum((y * torch.randn_like(y)).sum() for y in wanted).backward()
        results.append((out, [a.grad for a in given if isinstance(a, torch.Tensor)]))
    same(results[0][0], results[1][0], "output")
    same(results[0][1], results[1][1], "input gradient")
    grads = merged_grads(pipe)
    for name, parameter in eager.named_parameters():
        if parameter.grad is None:
            assert grads.get(name) is None, name
        else:
            assert torch.equal(parameter.grad, grads[name]), name
    held = set()
    for s in range(pipe.num_stages):
        stage = pipe.get_stage_module(s)
        assert set(stage.state_dict()) <= names
        held |= set(stage.state_dict())
    for name, buffer in eager.named_buffers():
        found = [b for s in range(pipe.num_stages) for n, b in pipe.get_stage_module(s).named_buffers() if n == name]
        assert all(torch.equal(b, buffer) for b in found), name
    return pipe


def merged_grads(pipe):
    """By every name; gradients of copies are summed from the last user to the first, as autograd does."""
    grads = {}
    for s in reversed(range(pipe.num_stages)):
        for name, p in pipe.get_stage_module(s).named_parameters(remove_duplicate=False):
            if p.grad is not None:
                grads[name] = p.grad if name not in grads else grads[name] + p.grad
    return grads


class MLP(nn.Module):
    def __init__(self, layers=4, d=8):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(d, d) for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


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
    pipe = pipeline(model, (x,), split_spec={"layers.1": BEGIN})
    with pytest.raises(ValueError, match="Invalid stage index 2"):
        pipe.get_stage_module(2)
    with pytest.raises(plumb.Error, match="structure"):
        pipe(x, x)
    with pytest.raises(plumb.Error, match="takes 1 values"):
        pipe.get_stage_module(1)(x, x)
    with pytest.raises(RuntimeError, match="invoke the Pipe"):
        pipe.split_gm(x)


# --- what crosses ---
class Shared(nn.Module):
    """A module used in two stages, a parameter nobody uses, a constant, a buffer."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.unused = nn.Parameter(torch.ones(3))
        self.register_buffer("scale", torch.full((8,), 1.5))
        self.register_buffer("hidden", torch.arange(8.0), persistent=False)

    def forward(self, x):
        x = self.a(x) * torch.tensor(0.5)
        pipe_split()
        x = self.b(x).tanh() + self.hidden
        pipe_split()
        return self.a(x) * self.scale


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
    assert merged["unused"] is model.unused


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


class Outputs(nn.Module):
    """A loss in some structure of outputs."""

    def __init__(self, shape):
        super().__init__()
        self.up, self.down, self.shape = nn.Linear(6, 12), nn.Linear(12, 6), shape

    def forward(self, x, y):
        h = self.up(x).relu()
        pipe_split()
        out = self.down(h) + x
        pipe_split()
        loss = F.mse_loss(out * h.mean(), y)
        return self.shape(loss, out)


LOSSES = {
    "alone": (lambda loss, out: loss, True),
    "tuple": (lambda loss, out: (out, loss), (False, True)),
    "list": (lambda loss, out: [loss, out], [True, False]),
    "dict": (lambda loss, out: {"out": out, "loss": loss}, {"loss": True, "out": False}),
    "auto": (lambda loss, out: {"out": out, "loss": loss}, "auto"),
    "nested": (lambda loss, out: (out, {"a": [out, loss], "b": (out,)}), (False, {"a": [False, True], "b": (False,)})),
}


@pytest.mark.parametrize("name", list(LOSSES))
def test_loss_specs(name):
    shape, spec = LOSSES[name]
    model, x, y = Outputs(shape), torch.randn(4, 6), torch.randn(4, 6)
    eager = copy.deepcopy(model)
    pipe = pipeline(model, (x, y), output_loss_value_spec=spec)
    assert pipe.has_loss_and_backward and pipe.info().has_loss_and_backward
    outputs = leaves(eager(x, y))
    next(t for t in outputs if t.dim() == 0).backward()
    same(leaves(pipe(x, y)), outputs)
    for n, p in eager.named_parameters():
        assert torch.equal(merged_grads(pipe)[n], p.grad), n
    with torch.no_grad():
        same(leaves(pipe(x, y)), outputs)
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
        eager = leaves(model(x, y))[0]
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
    executor.forward(x.clone().requires_grad_(), y)
    same([executor.backward()[0]], [given.grad])
    with pytest.raises(plumb.Error, match="without a forward"):
        executor.backward()


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
    with pytest.raises(plumb.Error, match="marks there only"):
        pipeline(model, (torch.randn(2, 8),), split_policy=changes)
    with pytest.raises(TypeError, match="GraphModule"):
        pipeline(model, (torch.randn(2, 8),), split_policy=lambda traced: 3)


# --- sources ---
class Marked(MLP):
    def forward(self, x):
        x = self.layers[0](x)
        torch.ops.pippy._pipe_split()
        return self.layers[1](x).relu()


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


# --- stages as modules ---
def stage_models():
    model = Shared()
    return model, pipeline(model, (torch.randn(4, 8),)), torch.randn(4, 8)


def run_stages(stages, table, *inputs):
    made = []
    for s, stage in enumerate(stages):
        args = [inputs[p["index"]] if p["stage"] < 0 else made[p["stage"]][p["index"]] for p in table.inputs(s)]
        out = stage(*args)
        made.append(out if isinstance(out, tuple) else (out,))
    return made[-1]


@pytest.mark.parametrize("how", ["itself", "deepcopy", "pickle", "bytes", "state_dict"])
def test_stages_run_alone(how):
    model, pipe, x = stage_models()
    expected = model(x)
    stages = [pipe.get_stage_module(s) for s in range(3)]
    table = pipe.info().table
    if how == "deepcopy":
        stages = copy.deepcopy(stages)
    elif how == "pickle":
        stages = [pickle.loads(pickle.dumps(s)) for s in stages]
    elif how == "bytes":
        stages = [deserialize_stage(pipe.serialize_stage(s))[0] for s in range(3)]
    elif how == "state_dict":
        other = pipeline(Shared(), (x,))
        for s in range(3):
            assert list(other.get_stage_module(s).state_dict()) == list(stages[s].state_dict())
            other.get_stage_module(s).load_state_dict(stages[s].state_dict(), assign=s == 1)
        stages = [other.get_stage_module(s) for s in range(3)]
    same(run_stages(stages, table, x), [expected])
    assert stages[0].get_submodule("a").weight is stages[0].a.weight
    assert isinstance(stages[0].a.weight, nn.Parameter)
    if how not in ("itself",):
        assert stages[0].a.weight is not model.a.weight
        with torch.no_grad():
            stages[0].a.weight.zero_()
        same([model(x)], [expected])
    else:
        assert stages[0].a.weight is model.a.weight


def test_stages_move_with_their_device_arguments():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
            self.a.register_buffer("shift", torch.ones(4))

        def forward(self, x):
            x = self.a(x) + torch.arange(4, device=x.device) + self.a.shift * torch.tensor([1.0, 2, 3, 4])
            pipe_split()
            return self.b(x) + torch.zeros(4, device=x.device, dtype=x.dtype)

    pipe = pipeline(Net(), (torch.randn(2, 4),))
    stage = pipe.get_stage_module(0).to("meta")
    assert stage.device.type == "meta" and "device(\"cpu\")" not in stage.graph.to_string()
    assert stage(torch.randn(2, 4, device="meta")).is_meta
    assert pipe.get_stage_module(1).b.weight.device.type == "cpu"
    with pytest.raises(plumb.Error, match="cannot be sent"):
        pipe.serialize_stage(0)
    stage.to_empty(device="cpu")
    assert stage(torch.randn(2, 4)).device.type == "cpu"


def test_stages_refuse_the_mode_that_they_were_not_cut_in():
    x = torch.randn(4, 8)
    pipe = pipeline(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8)), (x,), split_spec={"2": BEGIN})
    pipe.eval()
    for call in (pipe, pipe.get_stage_module(0)):
        with pytest.raises(plumb.Error, match="cut in training mode"):
            call(x)
    assert pipe.get_stage_module(1)(x).shape == (4, 8), "nothing in it depends on the mode"
    assert pipe.train()(x)[0].shape == (4, 8)
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)).eval()
    same(pipeline(model, (x,))(x), [model(x)])


def test_pipes_are_copied_and_pickled_with_their_tensors():
    model, x, y = Outputs(LOSSES["alone"][0]), torch.randn(4, 6), torch.randn(4, 6)
    pipe = pipeline(model, (x, y), output_loss_value_spec=True)
    with torch.no_grad():
        model.up.bias.add_(1)
    for other in (copy.deepcopy(pipe), pickle.loads(pickle.dumps(pipe))):
        same(other(x, y), pipe(x, y))
        assert other.num_stages == 3 and other.has_loss_and_backward
        stage = other.get_stage_module(0)
        assert stage.up.weight is not model.up.weight and stage.up.weight.grad is not None


def test_the_picture_keeps_no_stage_alive():
    _, pipe, x = stage_models()
    info = pipe.info()
    stage = weakref.ref(pipe.get_stage_module(0))
    text = str(info.graph)
    del pipe
    import gc

    gc.collect()
    assert stage() is None
    assert info.num_stages == 3 and str(info.graph) == text
    other = pickle.loads(pickle.dumps(info))
    assert other.table.to_json() == info.table.to_json()


def test_what_is_printed_shows_graph_ports_and_stages(capsys):
    model, x = Outputs(LOSSES["alone"][0]), torch.randn(4, 6)
    pipe = pipeline(model, (x, x), output_loss_value_spec=True)
    pipe.print_readable()
    text = capsys.readouterr().out
    assert "pipe of 3 stages" in text and "stage_backward" in text and 'get_attr "down.weight"' in text
    assert all(get_submod_name(s) in str(pipe) for s in range(3))


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
    with torch.no_grad():
        pipe.get_stage_module(2).get_parameter("embed.weight").add_(1)
    with pytest.raises(plumb.Error, match="copies of 'embed.weight'.*differ"):
        pipe.merge_state_dict()
    states = [copy.deepcopy(pipe.get_stage_module(s).state_dict()) for s in range(3)]
    states[0]["embed.weight"].copy_(states[2]["embed.weight"])
    same([pipe.merge_state_dict(states)["head.weight"]], [states[2]["embed.weight"]])


def _receive(rank, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    torch.manual_seed(rank)  # weights must come from rank 0
    pipe = stage_models()[1] if rank == 0 else None
    stages, info = scatter_stages(pipe)
    assert sorted(stages) == ([0, 2] if rank == 0 else [1]) and info.num_stages == 3
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(3))
    y = torch.empty(4, 8)
    if rank == 0:
        first = stages[0](x).detach()
        dist.send(first, 1)
        dist.recv(y, 1)
        same([stages[2](y)], list(pipe(x)))
    else:
        dist.recv(y, 0)
        dist.send(stages[1](y).detach(), 0)
    dist.destroy_process_group()


def test_stages_are_sent_to_their_ranks(tmp_path):
    mp.spawn(_receive, (str(tmp_path / "store"),), nprocs=2)


def test_tracing_under_torchs_names():
    model, x = Marked(2), torch.randn(3, 8)

    pipe = Pipe.from_tracing(model, (x,))
    traced = Pipe._from_traced(model, torch.export.export(model, (x,)))
    for p in (pipe, traced):
        assert p.num_stages == 2
        same(p(x), [model(x)])


class Shaped(nn.Module):
    """Its graph holds its input's sizes."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(16, 4)

    def forward(self, x, y=None):
        x = torch.relu(self.up(x))
        pipe_split()
        return self.down((x + y).reshape(x.shape[0] // 2, 16))


def test_a_pipe_of_a_live_model_takes_other_sizes_with_the_stages_tensors():
    torch.manual_seed(0)
    model = Shaped()
    pipe = pipeline(model, (torch.randn(2, 8),), {"y": torch.randn(2, 8)})
    pipe.get_stage_module(1).down.weight = nn.Parameter(torch.ones(4, 16))  # what a stage became, not what it was
    changed = copy.deepcopy(model)
    changed.down.weight = nn.Parameter(torch.ones(4, 16))
    for rows in (6, 2, 4, 6):
        x, y = torch.randn(rows, 8), torch.randn(rows, 8)
        (out,), expected = pipe(x, y), changed(x, y)
        assert torch.equal(out, expected)
        out.sum().backward()
        expected.sum().backward()
    for s, layer in enumerate(("up", "down")):
        stage = getattr(pipe.get_stage_module(s), layer)
        assert torch.equal(stage.weight.grad, getattr(changed, layer).weight.grad)
    assert torch.equal(model.down.weight, changed.down.weight) is False
    del model
    with pytest.raises(plumb.Error, match=r"should be f32\[2, 8\]"):
        pipe(torch.randn(8, 8), torch.randn(8, 8))
    assert pipe(torch.randn(6, 8), torch.randn(6, 8))[0].shape == (3, 4)  # as before


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
