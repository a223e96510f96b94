"""Transforms and pipelines together: a transformed model is cut, and stages are transformed, with the bits of one process."""

import copy

import pytest
import ranks
import torch
import zoo
from pipelines import cross_entropy
from plumb.pipelining import PipelineStage, SplitPoint, build_stage, pipeline
from plumb.pipelining.schedules import get_schedule_class
from torch import nn
from transform_models import rounded
from zoo import GPT, Block

import plumb
from plumb.transforms import simulate_format, track_scales, unit_scale

TRANSFORMS = {
    "unit_scale": unit_scale,
    "simulate_format": rounded,
    "simulate_format of unit_scale": lambda m: rounded(unit_scale(m)),
    "track_scales of unit_scale": lambda m: track_scales(unit_scale(m)),
}
SPEC = {"blocks.2": SplitPoint.BEGINNING}


def model():
    torch.manual_seed(0)
    return GPT(vocab=32, layers=4, h=2, context=16)


def data():
    torch.manual_seed(1)
    return torch.randint(0, 32, (8, 8)), torch.randint(0, 32, (8, 8))


def alone(transform, microbatches=4):
    """Gradients by name, and losses, of one process."""
    whole, losses = transform(model()), []
    for ids, target in zip(*(t.chunk(microbatches) for t in data())):
        loss = cross_entropy(whole(ids), target)
        loss.backward()
        losses.append(loss.detach())
    return {name: p.grad / microbatches for name, p in whole.named_parameters()}, losses


def work(rank, size):
    ids, target = data()
    found = {}
    for name, transform in TRANSFORMS.items():
        pipe = pipeline(transform(model()), (ids[:2],), split_spec=SPEC)
        stage = pipe.build_stage(rank, torch.get_default_device())
        losses = []
        schedule = get_schedule_class("1F1B")(stage, 4, cross_entropy)
        schedule.step(*([ids] if rank == 0 else []), target=target if rank else None, losses=losses if rank else None)
        found[name] = ({n: p.grad for n, p in stage.submod.named_parameters()}, losses)
    return found


def test_transformed_models_train_over_processes_bit_for_bit():
    ends = ranks.run(work, 2)
    for name, transform in TRANSFORMS.items():
        gradients, losses = alone(transform)
        found = ends[0][name][0] | ends[1][name][0]
        assert found.keys() == gradients.keys()
        assert [n for n in gradients if not torch.equal(found[n], gradients[n])] == [], name
        assert all(map(torch.equal, ends[1][name][1], losses))


@pytest.mark.parametrize("called", [False, True], ids=["before its first call", "after a call"])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_transformed_model_is_cut_at_its_modules(name, called):
    whole, ids = TRANSFORMS[name](model()), data()[0][:2]
    if called:
        whole(ids)
    pipe = pipeline(whole, (ids,), split_spec=SPEC)
    assert pipe.num_stages == 2
    weights = [{n for n, _ in pipe.get_stage_module(s).named_parameters()} for s in range(2)]
    assert "blocks.1.mlp.2.weight" in weights[0] and "blocks.2.ln1.weight" in weights[1] and not weights[0] & weights[1]
    for _ in range(2):  # nothing in the stages changes the weights
        kept = {n: p.detach().clone() for n, p in whole.named_parameters()}
        assert torch.equal(pipe(ids)[0], whole(ids))
        assert all(torch.equal(p, kept[n]) for n, p in whole.named_parameters())
    targets = {str(n.target) for s in range(2) for n in pipe.get_stage_module(s).graph.nodes if n.op == "call_function"}
    assert not any("clone" in t or "mul_" in t for t in targets)


class Outer(nn.Module):
    """A model that holds a transformed one."""

    def __init__(self, inner):
        super().__init__()
        self.first, self.inner, self.last = nn.Embedding(32, 16), inner, nn.Linear(16, 8)

    def forward(self, ids):
        return self.last(self.inner(self.first(ids)))


def test_a_transformed_part_of_a_model_is_captured_and_cut_with_its_modules():
    torch.manual_seed(0)
    ids = data()[0][:2]
    whole = Outer(unit_scale(nn.Sequential(Block(16, 2), Block(16, 2))))
    twin = copy.deepcopy(whole)
    captured = plumb.capture(whole, ids)
    expected = twin(ids)
    assert torch.equal(captured(ids), expected) and torch.equal(whole(ids), expected)
    paths = {n.module_path for n in captured.graph.nodes if n.target == "plumb::linear"}
    assert {"inner.0.qkv", "inner.1.mlp.2"} <= paths
    pipe = pipeline(whole, (ids,), split_spec={"inner.1": SplitPoint.BEGINNING})
    assert pipe.num_stages == 2 and torch.equal(pipe(ids)[0], expected)
    assert "inner.1.qkv.weight" in dict(pipe.get_stage_module(1).named_parameters())


def test_a_graph_is_captured_again_with_its_modules_and_lines(tmp_path):
    """So that transforms of graphs, and of models that hold one, leave out what they are asked to."""
    net, x = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), torch.randn(4, 8)
    first = plumb.capture(net, x)
    plumb.save_pt2(first, tmp_path / "m.pt2")
    for graph in (first, plumb.load_pt2(tmp_path / "m.pt2")):
        again = plumb.capture(nn.Sequential(graph), x)
        linears = [[n for n in g.graph.nodes if n.target == "aten::linear"] for g in (first, again)]
        assert [n.module_path for n in linears[1]] == ["0.0", "0.1"]
        assert [n.source for n in linears[1]] == [n.source for n in linears[0]]
        rounded_last = simulate_format(graph, "e4m3fn-RN", "e5m2-RN", exclude=["0"])
        assert torch.equal(rounded_last(x), simulate_format(net, "e4m3fn-RN", "e5m2-RN", exclude=["0"])(x))
        assert [e["kind"] for e in plumb.report(rounded_last)[0]["entries"]] == ["left_alone", "quantised"]


@pytest.mark.parametrize("transform", [rounded, track_scales], ids=["simulate_format", "track_scales"])
def test_a_transformed_graph_is_cut_and_compared_as_it_runs_and_what_takes_a_graph_refuses_it(transform, tmp_path):
    net, x = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), torch.randn(4, 8)
    module = transform(plumb.capture(net, x))
    pipe = pipeline(module, (x,), split_spec={"1": SplitPoint.BEGINNING})
    assert pipe.num_stages == 2 and torch.equal(pipe(x)[0], module(x))
    assert all("plumb::" in str(pipe.get_stage_module(s).graph) for s in range(2))
    assert str(plumb.diff(module, transform(net), x)).startswith("Equal.")
    for use in (
        lambda: plumb.save_pt2(module, tmp_path / "m.pt2"),
        lambda: plumb.transforms.run_passes(module, "dead_code"),
        lambda: unit_scale(module, preserve=True),
        lambda: plumb.Trainer(module, [x]),
        module.to_fx,
    ):
        with pytest.raises(plumb.Error, match=r"by a transform(?s:.*)plumb.capture\(module, \*inputs\)"):
            use()
    again = plumb.capture(module, x)
    plumb.save_pt2(again, tmp_path / "m.pt2")
    assert torch.equal(plumb.load_pt2(tmp_path / "m.pt2")(x), module(x))


def test_a_cut_at_a_module_that_is_not_called_is_an_error():
    class Skips(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return self.a(x)

    with pytest.raises(plumb.Error, match="'b'"):
        pipeline(Skips(), (torch.ones(2, 4),), split_spec={"b": SplitPoint.BEGINNING})
    with pytest.raises(plumb.Error, match="'b'"):
        pipeline(unit_scale(Skips()), (torch.ones(2, 4),), split_spec={"b": SplitPoint.BEGINNING})


@pytest.mark.parametrize("name", TRANSFORMS)
def test_stages_are_transformed_one_by_one(name):
    transform = TRANSFORMS[name]
    torch.manual_seed(0)
    parts = [nn.Sequential(Block(16, 2), Block(16, 2)) for _ in range(2)]
    twins = [transform(copy.deepcopy(part)) for part in parts]
    mine = [transform(part) for part in parts]
    x, target = torch.randn(8, 6, 16), torch.randn(8, 6, 16)
    stages = [PipelineStage(module, i, 2, "cpu") for i, module in enumerate(mine)]
    get_schedule_class("InterleavedZeroBubble")(stages, 4, nn.functional.mse_loss).step(x, target=target)
    for inputs, targets in zip(x.chunk(4), target.chunk(4)):
        nn.functional.mse_loss(twins[1](twins[0](inputs)), targets).backward()
    for twin, module in zip(twins, mine):
        assert all(torch.equal(p.grad / 4, q.grad) for p, q in zip(twin.parameters(), module.parameters()))


def test_stage_modules_of_a_pipe_are_transformed():
    ids, target = data()
    pipe = pipeline(model(), (ids[:2],), split_spec=SPEC)
    modules = [track_scales(rounded(pipe.get_stage_module(s))) for s in range(2)]
    stages = [build_stage(m, s, pipe.info(), torch.get_default_device()) for s, m in enumerate(modules)]
    get_schedule_class("Interleaved1F1B")(stages, 4, cross_entropy).step(ids, target=target)
    gradients, _ = alone(rounded)
    found = {n: p.grad for m in modules for n, p in m.named_parameters()}
    assert found.keys() == gradients.keys()
    assert all(torch.equal(found[n], gradients[n]) for n in gradients)
    assert all(len(m.scales_graph().nodes) > 20 for m in modules)


def test_the_stages_parameters_have_the_tags_that_the_optimizer_reads():
    torch.manual_seed(0)
    tied, (ids, targets), _ = zoo.MODELS["GPT tied"]()
    scaled = unit_scale(tied)
    pipe = pipeline(scaled, (ids, targets), split_spec={"blocks.1": SplitPoint.BEGINNING})
    assert pipe.replicated_params, "the tied weight is in both stages"
    for s in range(2):
        stage = pipe.get_stage_module(s)
        of_whole = dict(scaled.named_parameters(remove_duplicate=False))
        for name, parameter in stage.named_parameters():
            assert parameter.mup_type == of_whole[name].mup_type, name
        plumb.optim.AdamW(stage.parameters(), lr=0.1)
