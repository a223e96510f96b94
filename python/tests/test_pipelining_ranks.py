"""Schedules over real processes, bit for bit beside one process."""

import copy
import os
import pathlib
import re
import subprocess
import sys

import pytest
import ranks
import torch
from pipelines import (
    LOOPED,
    MSE,
    SINGLE,
    Block,
    Nested,
    Scaled,
    V,
    Writes,
    accumulate,
    accumulate_parts,
    batch,
    blocks,
    same,
)
from plumb.pipelining import PipelineStage, ScheduleTable, TensorChunkSpec, build_stage
from plumb.pipelining._utils import PipeInfo
from plumb.pipelining.schedules import get_schedule_class
from torch import fx, nn

import plumb

STEPS = 2


class Half(nn.Linear):
    def forward(self, x):
        return torch.tanh(super().forward(x.float())).bfloat16()


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)

    def forward(self, x):
        return torch.relu(self.norm(self.linear(x)))


def nested_loss(out, target):
    return MSE(out["pair"][0], target)


def half_loss(out, target):
    return MSE(out.float(), target)


MODELS = {
    "blocks": (Block, MSE),
    "nested": (Nested, nested_loss),
    "half": (lambda: Half(8, 8), half_loss),
    "norm": (Normed, MSE),
    "writes": (lambda: Writes(8, 8), MSE),
    "frozen": (Block, MSE),
    "ragged": (Block, MSE),
    "one": (Block, MSE),
}
MICROBATCHES = {"one": 1, "ragged": 5}
CASES = [(name, "blocks") for name in SINGLE + LOOPED + V + ["DualPipe"]]
CASES += [(name, model) for name in ("1F1B", "ZBVZeroBubble") for model in MODELS if model != "blocks"]


def make(model, count):
    modules = blocks(count, make=MODELS[model][0])
    if model == "writes":
        modules[0] = nn.Linear(8, 8)
    if model == "frozen":
        modules[1].requires_grad_(False)
        modules[-1].down.requires_grad_(False)
    return modules


def rows_of(model, step):
    return 7 + 4 * step if model == "ragged" else 12


def stages_here(name, rank, size):
    if name == "DualPipe":
        return sorted([rank, size - 1 - rank]), size
    if name in SINGLE:
        return [rank], size
    return ([rank, 2 * size - 1 - rank] if name in V else [rank, rank + size]), 2 * size


def work(rank, size, cases):
    """Returns every case: gradients by stage and name, losses and outputs of every step, buffers."""
    found = {}
    for name, model in cases:
        here, count = stages_here(name, rank, size)
        modules, loss_fn = make(model, count), MODELS[model][1]
        stages = [PipelineStage(modules[i], i, count, "cpu") for i in here]
        count_of = MICROBATCHES.get(model, 4)
        if name == "DualPipeV":  # its class wants as many microbatches as stages, the table does not
            schedule = ScheduleTable(stages, count_of, loss_fn, table=name)
        else:
            schedule = get_schedule_class(name)(stages[0] if name in SINGLE else stages, count_of, loss_fn)
        result = {"steps": []}
        for step in range(STEPS):
            for module in modules:
                module.zero_grad()
            x, target = batch(rows_of(model, step), seed=step)
            losses = []
            both = name == "DualPipe"
            out = schedule.step(
                *([x] if 0 in here or both else []),
                target=target if count - 1 in here or both else None,
                losses=losses,
            )
            if step == 0 and not both:
                value = schedule.eval(*([x] if 0 in here else []))
                assert (value is None) == (count - 1 not in here)
            grads = {(i, n): p.grad for i in here for n, p in modules[i].named_parameters()}
            result["steps"].append((losses, out, copy.deepcopy(grads)))
        result["buffers"] = {(i, n): b for i in here for n, b in modules[i].named_buffers()}
        found[name, model] = result
    return found


def reference(name, model, size):
    _, count = stages_here(name, 0, size)
    modules, loss_fn = make(model, count), MODELS[model][1]
    steps = []
    for step in range(STEPS):
        nn.ModuleList(modules).zero_grad()
        x, target = batch(rows_of(model, step), seed=step)
        n = MICROBATCHES.get(model, 4)
        outs, losses = accumulate_parts(modules, x, target, n, loss_fn)
        if step == 0 and name != "DualPipe":  # the evaluation between steps
            with torch.no_grad():
                for inputs in x.tensor_split(n):
                    for module in modules:
                        inputs = module(inputs)
        grads = {(i, k): p.grad for i, m in enumerate(modules) for k, p in m.named_parameters()}
        steps.append((losses, outs, copy.deepcopy(grads)))
    return steps, {(i, n): b for i, m in enumerate(modules) for n, b in m.named_buffers()}


@pytest.fixture(scope="module")
def two():
    return ranks.run(work, 2, CASES)


@pytest.fixture(scope="module")
def four():
    return ranks.run(work, 4, [case for case in CASES if case[1] in ("blocks", "nested")])


def check(results, name, model, size):
    steps, buffers = reference(name, model, size)
    for step in range(STEPS):
        losses, outs, expected = steps[step]
        seen = set()
        for found in results:
            own_losses, out, grads = found[name, model]["steps"][step]
            for key, grad in grads.items():
                seen.add(key)
                if name == "DualPipe":
                    torch.testing.assert_close(grad, expected[key])
                else:
                    assert same([grad], [expected[key]]), (key, step)
            if own_losses and name != "DualPipe":
                assert same(own_losses, losses)
                leaf = out["pair"][0] if isinstance(out, dict) else out
                assert torch.equal(leaf, torch.cat([o["pair"][0] if isinstance(o, dict) else o for o in outs]))
        assert seen == expected.keys()
    for found in results:
        for key, buffer in found[name, model]["buffers"].items():
            assert torch.equal(buffer, buffers[key])


@pytest.mark.parametrize("name, model", CASES)
def test_two_processes_equal_one(two, name, model):
    check(two, name, model, 2)


@pytest.mark.parametrize("name, model", [case for case in CASES if case[1] in ("blocks", "nested")])
def test_four_processes_equal_one(four, name, model):
    check(four, name, model, 4)


class First(nn.Linear):
    def forward(self, x):
        h = super().forward(x)
        return torch.tanh(h), torch.sin(h), (h > 0).long()


class Middle(nn.Linear):
    def forward(self, h):
        return torch.tanh(super().forward(h))


class Joins(nn.Linear):
    def forward(self, h, skip, mask, gain=1.0):
        return super().forward(h + skip * skip) * mask + torch.cos(skip) * gain


# Two values of the first stage go to the third and the fourth, an input of the model to the fourth alone.
SKIPS = PipeInfo(
    graph=fx.Graph(),
    num_stages=4,
    has_loss_and_backward=False,
    input_names=[("x", 0), ("gain", 0)],
    table=plumb._C.PipeTable(
        [([(-1, 0)], 3), ([(0, 0)], 1), ([(1, 0), (0, 1), (0, 2)], 1), ([(2, 0), (0, 1), (0, 2), (-1, 1)], 1)], 2
    ),
)


class Part(nn.Module):
    """A part of a model: its parameters have the model's names, by which copies are recognized."""

    def __init__(self, index, layer):
        super().__init__()
        self.layers = nn.ModuleDict({str(index): layer})

    def forward(self, *args):
        return next(iter(self.layers.values()))(*args)


def skip_modules():
    torch.manual_seed(0)
    return [Part(i, layer(8, 8)) for i, layer in enumerate([First, Middle, Joins, Joins])]


def skip_work(rank, size, names):
    x, target = batch()
    gain = torch.linspace(0, 1, 12)[:, None]
    found = {}
    for name in names:
        modules = skip_modules()
        here, _ = stages_here(name, rank, size)
        stages = [build_stage(modules[i], i, SKIPS, "cpu") for i in here]
        schedule = get_schedule_class(name)(stages[0] if name in SINGLE else stages, 4, MSE)
        out = schedule.step(
            *([x] if 0 in here else []),
            target=target if 3 in here else None,
            **({"gain": gain} if 3 in here else {}),
        )
        grads = {(i, n): p.grad for i in here for n, p in modules[i].named_parameters()}
        found[name] = grads, out
    return found


@pytest.mark.parametrize("size, names", [(2, LOOPED + V), (4, SINGLE)])
def test_skip_connections_go_over_any_number_of_stages(size, names):
    modules = skip_modules()
    x, target = batch()
    gain = torch.linspace(0, 1, 12)[:, None]
    outs = []
    for m in range(4):
        h, skip, mask = modules[0](x.chunk(4)[m])
        h = modules[2](modules[1](h), skip, mask)
        outs.append(modules[3](h, skip, mask, gain.chunk(4)[m]))
        MSE(outs[-1], target.chunk(4)[m]).backward()
    for found in ranks.run(skip_work, size, names):
        for name in names:
            grads, out = found[name]
            assert out is None or torch.equal(out, torch.cat(outs))
            for (i, n), grad in grads.items():
                assert torch.equal(grad, modules[i].get_parameter(n).grad / 4), (name, i, n)


def tied_work(rank, size, tables):
    modules = blocks(2)
    modules[1].up.weight.data.copy_(modules[0].up.weight.data)
    found = []
    for name in tables:
        modules[rank].zero_grad()
        stage = PipelineStage(modules[rank], rank, 2, "cpu", tied={"up.weight": "shared"})
        x, target = batch()
        schedule = get_schedule_class(name)(stage, 1, MSE)
        schedule.step(*([x] if rank == 0 else []), target=target if rank == 1 else None)
        found.append(copy.deepcopy(modules[rank].up.weight.grad))
    return found


def test_weights_tied_over_ranks_get_one_gradient():
    modules = blocks(2)
    modules[1].up.weight = modules[0].up.weight
    accumulate(modules, *batch(), 1)
    for found in ranks.run(tied_work, 2, ["GPipe", "1F1B"]):
        assert same(found, [modules[0].up.weight.grad] * 2)


def first_of(out, target):
    return MSE(out[0], target)


def keyword_work(rank, size):
    torch.manual_seed(0)
    modules = [Block(), Scaled()]
    stage = PipelineStage(modules[rank], rank, 2, "cpu")
    schedule = get_schedule_class("1F1B")(stage, 3, first_of, kwargs_chunk_spec={"gain": TensorChunkSpec(1)})
    x, target = batch()
    if rank == 0:
        schedule.step(x)
    else:
        schedule.step(target=target, gain=torch.arange(96.0).reshape(1, 12, 8) / 96)
    return [p.grad for p in modules[rank].parameters()]


def test_keyword_arguments_belong_to_the_rank_that_gives_them():
    torch.manual_seed(0)
    modules = [Block(), Scaled()]
    x, target = batch()
    gain = torch.arange(96.0).reshape(1, 12, 8) / 96
    for m in range(3):
        first_of(modules[1](modules[0](x.chunk(3)[m]), gain.chunk(3, 1)[m]), target.chunk(3)[m]).backward()
    for found, module in zip(ranks.run(keyword_work, 2), modules):
        assert same(found, [p.grad / 3 for p in module.parameters()])


def test_data_parallel_and_pipeline_go_together():
    found = ranks.run(data_parallel_work, 4)
    x, target = batch(16)
    halves = [blocks(2), blocks(2)]
    for modules, inputs, targets in zip(halves, x.chunk(2), target.chunk(2)):
        accumulate(modules, inputs, targets, 2)
    for rank, grads in enumerate(found):
        for ours, p, q in zip(grads, halves[0][rank % 2].parameters(), halves[1][rank % 2].parameters()):
            assert torch.equal(ours, (p.grad + q.grad) / 2)
    assert same(found[0], found[2]) and same(found[1], found[3])


def data_parallel_work(rank, size):
    import torch.distributed as dist

    pipes = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    replicas = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    replica, index = divmod(rank, 2)
    module = nn.parallel.DistributedDataParallel(blocks(2)[index], process_group=replicas[index])
    stage = PipelineStage(module, index, 2, "cpu", group=pipes[replica])
    x, target = batch(16)
    schedule = get_schedule_class("1F1B")(stage, 2, MSE)
    half = slice(8 * replica, 8 * replica + 8)
    schedule.step(*([x[half]] if index == 0 else []), target=target[half] if index == 1 else None)
    return [p.grad for p in module.parameters()]


def test_the_example_trains_as_one_process_does(tmp_path):
    script = pathlib.Path(__file__).resolve().parents[2] / "examples" / "pipeline.py"
    env = {k: v for k, v in os.environ.items() if k != "RANK"}
    done = subprocess.run([sys.executable, script], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert "the very same losses" in done.stdout and (tmp_path / "timeline.svg").stat().st_size
    first, last = map(float, re.search(r"loss ([0-9.]+) -> ([0-9.]+)", done.stdout).groups())
    assert last < first / 10
    assert "trained.pt is the very same model" in done.stdout


def test_the_example_names_a_device_that_is_not_there(tmp_path):
    script = pathlib.Path(__file__).resolve().parents[2] / "examples" / "pipeline.py"
    env = {k: v for k, v in os.environ.items() if k != "RANK"}
    for name in ("nowhere", *(["cuda"] if not torch.cuda.is_available() else [])):
        command = [sys.executable, script, "--device", name]
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=600)
        assert done.returncode == 1 and done.stderr.startswith(f"--device {name}: "), done.stderr
        assert len(done.stderr.splitlines()) == 1
