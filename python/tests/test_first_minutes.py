"""The first ten minutes of a user: names that exist, errors in the caller's terms, reprs worth reading."""

import copy
import subprocess
import sys
from typing import NamedTuple

import pytest
import torch
from plumb.pipelining import SplitPoint, pipeline
from plumb.pipelining.schedules import ScheduleInterleaved1F1B
from torch import nn
from transform_models import mlp

import plumb
from plumb.transforms import simulate_fp8, track_scales, unit_scale


def refused(call, *parts, kind=None):
    with pytest.raises(plumb.Error) as caught:
        call()
    text = str(caught.value)
    for part in parts:
        assert part in text, text
    assert "TreeSpec" not in text, text
    assert caught.value.remedy, text
    assert kind is None or caught.value.kind is kind
    return text


def test_importing_plumb_brings_pipelining_and_analysis():
    code = "import plumb; plumb.pipelining.pipeline; plumb.analysis.plot; plumb.pipelining.schedules.Schedule1F1B"
    subprocess.run([sys.executable, "-c", code], check=True)


class Masked(nn.Module):
    def forward(self, x, pair, *, mask=None):
        return x + pair[0] + pair[1] + (0 if mask is None else mask)


def test_wrong_inputs_are_named_and_no_tree_spec_is_shown():
    x = torch.ones(2)
    graph = plumb.capture(Masked(), x, (x, x), mask=x)
    refused(lambda: graph(x, mask=x), "takes 2 positional inputs ('x', 1), got 1")
    refused(lambda: graph(x, (x, x)), "keyword input 'mask' is missing")
    refused(lambda: graph(x, (x, x), mask=x, msk=x), "no keyword input 'msk'")
    refused(lambda: graph(x, [x, x], mask=x), "input 1 should be a tuple of 2, got a list of 2")
    refused(lambda: graph((x,), (x, x), mask=x), "input 'x' should be one tensor or value, got a tuple of 1")
    refused(lambda: graph(x, (x, {"a": x}), mask=x), "input 1[1] should be one tensor or value, got a dict of 'a'")
    pipe = pipeline(mlp(), (torch.ones(2, 8),), split_spec={"2": SplitPoint.BEGINNING})
    refused(lambda: pipe(torch.ones(2, 8), torch.ones(2)), "takes 1 positional input")


def stages_of(model, x):
    pipe = pipeline(model, (x,), split_spec={"2": SplitPoint.BEGINNING})
    return [pipe.build_stage(i, torch.device("cpu")) for i in range(pipe.num_stages)]


def interleaved(loss_fn):
    return ScheduleInterleaved1F1B(stages_of(mlp(), torch.ones(2, 8)), 2, loss_fn=loss_fn)


def test_a_forgotten_target_is_said():
    schedule = interleaved(nn.functional.mse_loss)
    refused(lambda: schedule.step(torch.ones(4, 8)), "step() was given no target", "target=")


def test_a_loss_that_is_no_number_is_said():
    schedule = interleaved(lambda output, target: (output - target).square())
    refused(lambda: schedule.step(torch.ones(4, 8), target=torch.ones(4, 4)), "shape [2, 4], not one number", "mean")


def test_a_training_of_nothing_but_frozen_parameters_is_said():
    graph = plumb.capture(mlp().requires_grad_(False), torch.ones(2, 8))
    trainer = plumb.Trainer(graph, [(torch.ones(2, 8), torch.ones(2, 4))], loss="mse", steps=1)
    refused(trainer.run, "requires no gradient", "parameters that require gradients")


def test_a_loss_without_a_target_stays_possible():
    losses = []
    interleaved(lambda output, target: output.sum()).step(torch.ones(4, 8), losses=losses)
    assert len(losses) == 2


@pytest.mark.parametrize("form", [mlp, lambda: plumb.capture(mlp(), torch.ones(2, 8))])
def test_a_list_of_split_points_is_said(form):
    text = refused(lambda: pipeline(form(), (torch.ones(2, 8),), split_spec=["2"]), "split_spec is a list, not a dict")
    assert "SplitPoint.BEGINNING" in text


@pytest.mark.parametrize("transform", [unit_scale, simulate_fp8, track_scales])
def test_compiled_and_scripted_modules_are_said(transform):
    refused(lambda: transform(torch.compile(mlp())), "a result of torch.compile", "torch.compile(plumb.")
    refused(lambda: transform(torch.jit.script(mlp())), "scripted or traced", "before torch.jit.script")


def test_a_graph_has_a_repr_worth_reading():
    graph = plumb.capture(mlp(), torch.ones(2, 8))
    assert repr(graph.graph) == "<Graph: 3 operators, (input: f32[2, 8]) -> (f32[2, 4]); print() shows it>"
    assert repr(graph) == (
        "GraphModule(3 operators, (input: f32[2, 8]) -> (f32[2, 4]); 4 parameters, made in training mode)"
    )


def test_a_transformed_module_says_what_was_done_to_it():
    module = track_scales(unit_scale(mlp()))
    assert "plumb: unit_scale, track_scales (no graph yet)" in repr(module)
    module(torch.ones(2, 8))
    assert "plumb: unit_scale, track_scales (1 graph)" in repr(module) and "(0): Linear(" in repr(module)
    assert "plumb: unit_scale, track_scales" in repr(copy.deepcopy(module))
    assert "in_features=8" in repr(unit_scale(nn.Linear(8, 4)))


def test_a_history_has_a_repr_worth_reading(tmp_path):
    model = mlp()
    with plumb.Recorder(model, 1, tmp_path / "run.history") as recorder:
        for _ in range(3):
            loss = model(torch.ones(2, 8)).sum()
            loss.backward()
            recorder.step(loss=loss)
    text = repr(plumb.read_history(tmp_path / "run.history"))
    assert text.startswith("<History: ") and "steps 1 to 3" in text and "scalars loss" in text, text


def test_a_recorder_opened_twice_says_close(tmp_path):
    recorder = plumb.Recorder(mlp(), 1, tmp_path / "run.history")
    refused(lambda: plumb.Recorder(mlp(), 1, tmp_path / "run.history"), "another recorder has the history", "close()")
    refused(lambda: plumb.Recorder(mlp(), 1, "/dev/null"), 'the history "/dev/null": it is no regular file', "room")
    recorder.close()
    plumb.Recorder(mlp(), 1, tmp_path / "run.history").close()


class Point(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


class Points(nn.Module):
    def forward(self, x):
        return Point(x + 1, x * 2)


def test_a_named_tuple_goes_through_a_file(tmp_path):
    x = torch.ones(2)
    plumb.save_pt2(plumb.capture(Points(), x), tmp_path / "points.pt2")
    again = plumb.load_pt2(tmp_path / "points.pt2")(x)
    assert type(again) is Point and torch.equal(again.y, x * 2)
    opened = torch.export.load(tmp_path / "points.pt2").module()(x)
    assert type(opened) is Point
    code = f"import plumb; plumb.load_pt2({str(tmp_path / 'points.pt2')!r})"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert other.returncode != 0 and f"try: import {__name__}" in other.stderr, other.stderr


def test_a_named_tuple_that_no_process_can_find_is_said_to_become_a_tuple(tmp_path):
    class Local(NamedTuple):
        x: torch.Tensor

    class Returns(nn.Module):
        def forward(self, x):
            return Local(x + 1)

    graph = plumb.capture(Returns(), torch.ones(2))
    assert type(graph(torch.ones(2))) is Local
    with pytest.warns(UserWarning, match="outputs hold a class that a file cannot name"):
        plumb.save_pt2(graph, tmp_path / "local.pt2")
    assert type(plumb.load_pt2(tmp_path / "local.pt2")(torch.ones(2))) is tuple


@torch.jit.script
def scripted_gelu(x):
    return x * torch.sigmoid(1.702 * x)


class HoldsAScript(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.act, self.acts = nn.Linear(4, 4), scripted_gelu, [scripted_gelu]

    def forward(self, x):
        return self.act(self.fc(x)) + self.acts[0](x)


def test_a_module_that_holds_a_scripted_function_is_transformed():
    torch.manual_seed(0)
    model, x = HoldsAScript(), torch.randn(3, 4)
    assert torch.equal(track_scales(model)(x), model(x))
    assert unit_scale(model)(x).shape == (3, 4)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(20, 16), nn.BatchNorm1d(16), nn.Linear(16, 5)
        self.attn = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, ids):
        x = self.embed(ids)
        x = x + self.attn(x, x, x, need_weights=False)[0]
        return self.head(self.norm(x.transpose(1, 2)).mean(2))


def test_a_graph_with_dynamic_shapes_takes_the_last_partial_batch(tmp_path):
    torch.manual_seed(0)
    model = Net()
    graph = plumb.capture(model, torch.randint(20, (8, 6)), dynamic_shapes=({0: torch.export.Dim("batch", min=2)},))
    assert graph.head.weight is model.head.weight and "batch" not in model.state_dict()
    for rows in (8, 3, 13):
        ids = torch.randint(20, (rows, 6))
        eager = copy.deepcopy(model)
        want = eager(ids)
        want.square().sum().backward()
        model.zero_grad()
        got = graph(ids)
        got.square().sum().backward()
        assert torch.equal(got, want)
        for a, b in zip(model.parameters(), eager.parameters()):
            assert torch.equal(a.grad, b.grad)
        assert torch.equal(model.norm.running_mean, eager.norm.running_mean)
    refused(lambda: graph(torch.randint(20, (8, 7))), "should be i64[")
    plumb.save_pt2(graph, tmp_path / "dynamic.pt2")
    assert plumb.load_pt2(tmp_path / "dynamic.pt2")(torch.randint(20, (5, 6))).shape == (5, 5)
    graph.eval()
    refused(lambda: graph(torch.randint(20, (8, 6))), "cannot change to evaluation mode")
    refused(lambda: plumb.capture(model, torch.randint(20, (8, 6)), dynamic_shapes=({7: torch.export.Dim("no")},)),
            "torch.export", kind=plumb.ErrorKind.Capture)  # fmt: skip
    refused(lambda: plumb.capture(unit_scale(mlp()), torch.randn(2, 8), dynamic_shapes=({0: torch.export.Dim("n")},)),
            "a graph for each size", "run_passes", kind=plumb.ErrorKind.Unsupported)  # fmt: skip


def test_two_transformed_modules_under_torch_compile_take_turns():
    torch.manual_seed(0)
    modules = [unit_scale(mlp()) for _ in range(3)]
    compiled = [torch.compile(m, backend="eager") for m in modules]
    for _ in range(3):
        x = torch.randn(2, 8)
        for module, fast in zip(modules, compiled):
            assert torch.equal(fast(x), module(x))


class RotatesComplex(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        z = torch.complex(self.fc(x), x)
        z = z * 1
        z[:, :2] = z[:, 2:] * 1j
        return torch.view_as_real(z).sum(-1)


def test_writes_into_slices_of_complex_values_go_through_the_transforms():
    torch.manual_seed(0)
    model, x = RotatesComplex(), torch.randn(3, 4)
    scaled = unit_scale(model)
    scaled(x).sum().backward()
    assert torch.equal(track_scales(model)(x), model(x))
    assert scaled.fc.weight.grad is not None
