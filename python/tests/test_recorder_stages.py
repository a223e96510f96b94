"""One recorder for several stages of a pipeline: what it measures is what one process measures, and what differs is named
with its stage and rank."""

import copy

import numpy as np
import pytest
import ranks
import torch
import torch.distributed as dist
from pipelines import Block
from plumb.pipelining import PipelineStage
from plumb.pipelining.schedules import get_schedule_class
from torch import nn

import plumb

STATISTICS = ("mean_abs", "abs_mean", "std", "abs_max", "abs_min", "numel", "nan_count", "zero_count")


def made(count):
    torch.manual_seed(0)
    return [Block() for _ in range(count)], torch.randn(12, 8), torch.randn(12, 8)


def train(schedule, recorder, x, target, steps=2):
    for _ in range(steps):
        schedule.step(x, target=target)
        recorder.step()


def alone(modules, path, x, target, microbatches, steps=2):
    """One process that adds microbatch after microbatch."""
    with plumb.Recorder(dict(enumerate(modules)), 1, path) as recorder:
        for _ in range(steps):
            for inputs, targets in zip(x.chunk(microbatches), target.chunk(microbatches)):
                for module in modules:
                    inputs = module(inputs)
                nn.functional.mse_loss(inputs, targets).backward()
            recorder.step()


def rows(path):
    """(stage, name, operator, step, of the gradient) -> statistics, exponents counted among them."""
    history = plumb.read_history(path)
    tensors = [(t["stage"], t["name"], t["operator"]) for t in history.tensors]
    assert len(set(tensors)) == len(tensors)
    places = zip(history.columns["tensor"], history.columns["step"], history.columns["backward"])
    keys = [(*tensors[tensor], int(step), bool(backward)) for tensor, step, backward in places]
    values = np.stack([history.columns[s].astype(float) for s in STATISTICS], 1)
    return dict(zip(keys, np.concatenate([values, history.histograms()], 1)))


def equal(ours, theirs):
    assert ours.keys() == theirs.keys() and ours
    for key, value in theirs.items():
        np.testing.assert_allclose(ours[key], value, rtol=1e-6, err_msg=str(key))


# With weight halves of backwards later than the input halves, and several microbatches under way.
@pytest.mark.parametrize("name, count", [("InterleavedZeroBubble", 3), ("ZBVZeroBubble", 2), ("DualPipeV", 2)])
@pytest.mark.parametrize("recompute", ["cheap", "none"])
def test_microbatches_under_way_count_once(name, count, recompute, tmp_path):
    modules, x, target = made(count)
    reference = copy.deepcopy(modules)
    stages = [PipelineStage(m, i, count, "cpu", recompute=recompute) for i, m in enumerate(modules)]
    schedule = get_schedule_class(name)(stages, 4, nn.MSELoss(), scale_grads=False)
    with plumb.Recorder(dict(enumerate(modules)), 1, tmp_path / "pipeline") as recorder:
        train(schedule, recorder, x, target)
    alone(reference, tmp_path / "alone", x, target, 4)
    found = rows(tmp_path / "pipeline")
    equal(found, rows(tmp_path / "alone"))
    values = found[0, "x", "input", 1, False]
    assert values[STATISTICS.index("numel")] == x.numel()
    assert values[STATISTICS.index("std")] == pytest.approx(x.std().item(), rel=1e-6)
    assert "forward" not in modules[0].__dict__


def _rank(rank, size, path):
    modules, x, target = made(2 * size)
    mine = [0, 3] if rank == 0 else [1, 2]  # a V
    stages = [PipelineStage(modules[i], i, 2 * size, "cpu") for i in mine]
    schedule = get_schedule_class("ZBVZeroBubble")(stages, 4, nn.MSELoss(), scale_grads=False)
    with plumb.Recorder({i: modules[i] for i in mine}, 1, path, rank=rank) as recorder:
        for _ in range(2):
            schedule.step(*([x] if rank == 0 else []), **({"target": target} if 3 in mine else {}))
            recorder.step()


def test_ranks_with_two_stages_each_record_what_one_process_records(tmp_path):
    ranks.run(_rank, 2, tmp_path / "pipeline")
    modules, x, target = made(4)
    alone(modules, tmp_path / "alone", x, target, 4)
    equal(rows(tmp_path / "pipeline"), rows(tmp_path / "alone"))
    by_rank = {(t["rank"], t["stage"]) for t in plumb.read_history(tmp_path / "pipeline").tensors}
    assert by_rank == {(0, 0), (0, 3), (1, 1), (1, 2)}


def hashed(modules, stages, name, path, x, target, flip=lambda step: None, rank=None):
    """Two steps whose tensors and state are hashed; `flip` is called before each."""
    rules = path.with_name(f"{path.name}.toml{rank}")
    rules.write_text('[[rule]]\nevery = 1\nstatistics = ["hash"]\n')
    schedule = get_schedule_class(name)(stages if len(stages) > 1 else stages[0], 4, nn.MSELoss())
    optimizer = torch.optim.AdamW([p for m in modules.values() for p in m.parameters()], lr=1e-2)
    first, last = stages[0].is_first, stages[-1].is_last
    with plumb.Recorder(modules, rules, path, rank=rank) as recorder:
        for step in (1, 2):
            flip(step)
            optimizer.zero_grad()
            schedule.step(*([x] if first else []), **({"target": target} if last else {}))
            optimizer.step()
            recorder.hash_state(optimizer)
            recorder.step()


def test_a_difference_is_named_with_its_stage_where_stages_have_equal_names(tmp_path):
    def run(path, stage=None):
        modules, x, target = made(3)
        stages = [PipelineStage(m, i, 3, "cpu") for i, m in enumerate(modules)]

        def flip(step):
            if step == 2 and stage is not None:
                modules[stage].up.weight.data[1, 3] += 1

        hashed(dict(enumerate(modules)), stages, "Interleaved1F1B", path, x, target, flip)
        return str(path)

    calm = run(tmp_path / "a")
    assert plumb.diff(calm, run(tmp_path / "b")).equal
    for stage in range(3):
        found = plumb.diff(calm, run(tmp_path / f"spoiled{stage}", stage))
        first = found.first
        assert (first["step"], first["tensor"], first["stage"]) == (2, "up.weight", stage), found
        assert found.following == found.differing - 1, found


def _replica(rank, size, folder):
    replica, index = divmod(rank, 2)
    pipes = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    alike = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    for name in ("a", "b", "input", "bias"):
        modules, x, target = made(2)
        whole = nn.parallel.DistributedDataParallel(modules[index], process_group=alike[index])
        stages = [PipelineStage(whole, index, 2, "cpu", group=pipes[replica])]
        x, target = x.chunk(2)[replica].clone(), target.chunk(2)[replica]

        def flip(step, name=name, x=x, bias=modules[index].down.bias):
            if (step, name, rank) == (2, "input", 2):
                x[4, 2] += 1  # the third of its four microbatches, the seventh of all
            if (step, name, rank) == (2, "bias", 3):
                bias.data[1] += 1

        hashed({index: modules[index]}, stages, "1F1B", folder / name, x, target, flip, rank)


def test_a_difference_is_named_with_its_rank_where_replicas_have_other_rows(tmp_path):
    ranks.run(_replica, 4, tmp_path)
    assert plumb.diff(tmp_path / "a", tmp_path / "b").equal
    for name, where in (("input", ["x", 0, 2, 6]), ("bias", ["down.bias", 1, 3, -1])):
        found = plumb.diff(tmp_path / "a", tmp_path / name)
        assert found.first["step"] == 2, found
        assert [found.first[key] for key in ("tensor", "stage", "rank", "microbatch")] == where, found


def test_what_is_no_dict_of_stages_is_refused(tmp_path):
    layer = nn.Linear(2, 2)
    for wrong, text in (({}, "at least one module"), ({0: layer, 1: layer}, "each once"), ({-1: layer}, "no stage -1")):
        with pytest.raises(plumb.Error, match=text):
            plumb.Recorder(wrong, 1, tmp_path / "h")
    with pytest.raises(plumb.Error, match="leave out stage="):
        plumb.Recorder({0: layer}, 1, tmp_path / "h", stage=0)
    with pytest.raises(TypeError, match="by stage, got list"):
        plumb.Recorder([layer], 1, tmp_path / "h")
    assert not (tmp_path / "h").exists()
