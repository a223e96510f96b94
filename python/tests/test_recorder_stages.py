"""One recorder for several stages of a pipeline: what it measures is what one process measures."""

import copy

import numpy as np
import pytest
import ranks
import torch
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
