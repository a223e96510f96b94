"""plumb.Recorder and plumb.read_history."""

import copy
import html
import math
import pickle

import numpy as np
import pytest
import torch
from torch import nn

import plumb


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        for layer in self.layers:
            x = nn.functional.gelu(layer(x))
        return self.head(x)


def train(model, steps, after, batch=16):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    for i in range(steps):
        generator = torch.Generator().manual_seed(i)
        loss = model(torch.randn(batch, 8, generator=generator)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        losses.append(loss.item())
        after(loss)
        optimizer.step()
    return losses


@pytest.fixture
def model():
    torch.manual_seed(1)
    return Net()


def test_records_every_other_step_and_leaves_the_training_alone(model, tmp_path):
    plain = copy.deepcopy(model)
    recorder = plumb.Recorder(model, 2, tmp_path / "run.history")
    gradients = []

    def after(loss):
        gradients.append(model.layers[1].weight.grad.clone())
        recorder.step(loss=loss, rate=0.1)

    assert train(model, 5, after) == train(plain, 5, lambda _: None)
    history = plumb.read_history(tmp_path / "run.history")
    assert sorted(set(history.columns["step"])) == [1, 3, 5]
    name = [t["name"] for t in history.tensors].index("layers.1.weight")
    assert history.tensors[name]["operator"] == "parameter" and history.tensors[name]["sizes"] == (8, 8)
    rows = (history.columns["tensor"] == name) & history.columns["backward"]
    assert np.allclose(history.columns["std"][rows], [gradients[i].std().item() for i in (0, 2, 4)], rtol=1e-5)
    assert (history.histograms()[rows].sum(axis=1) == 64).all()
    steps, losses = history.scalars()["loss"]
    assert steps.tolist() == [1, 2, 3, 4, 5] and (losses[1:] < losses[0]).all()


def test_dataframe_names_tensors_and_answers_for_any_format(model, tmp_path):
    recorder = plumb.Recorder(model, 1, tmp_path / "run.history")
    train(model, 2, lambda loss: recorder.step())
    frame = plumb.read_history(tmp_path / "run.history").to_dataframe("underflow(e5m2)", "underflow(e2m1fn)")
    gradients = frame[frame.direction == "backward"]
    assert (gradients["underflow(e2m1fn)"] >= gradients["underflow(e5m2)"]).all()
    assert gradients["underflow(e2m1fn)"].max() > 0.5
    assert set(frame[frame.operator == "aten::linear"].module) == {"layers.0", "layers.1", "head"}
    with pytest.raises(plumb.Error, match="underfow"):
        plumb.read_history(tmp_path / "run.history").statistic("underfow(e5m2)")


def record_only(model, statistics, path):
    rules = path / "rules.toml"
    rules.write_text(f"[[rule]]\nevery = 1\nstatistics = {statistics}\n".replace("'", '"'))
    recorder = plumb.Recorder(model, rules, path / "run.history")
    train(model, 2, lambda loss: recorder.step())
    return plumb.read_history(path / "run.history")


def test_a_recorded_histogram_knows_what_every_format_loses(model, tmp_path):
    history = record_only(model, ["histogram"], tmp_path)
    lost = history.statistic("underflow(e2m1fn)")
    assert not np.isnan(lost).any() and lost.max() > 0.5
    assert (history.columns["numel"] == history.histograms().sum(axis=1)).all()
    assert np.isnan(history.columns["std"]).all()


def test_what_was_not_counted_is_missing_and_no_zero(model, tmp_path):
    history = record_only(model, ["std"], tmp_path)
    frame = history.to_dataframe("underflow(e5m2)", "zero_share")
    for count in ("numel", "nan_count", "inf_count", "zero_count"):
        assert np.isnan(history.columns[count]).all()
        assert frame[count].isna().all() and frame[count].dtype == "Int64"
    assert frame["underflow(e5m2)"].isna().all() and frame["zero_share"].isna().all()
    assert (frame["std"] >= 0).all()


def test_a_notebook_shows_what_a_history_holds(model, tmp_path):
    rules = tmp_path / "rules.toml"
    rules.write_text('[[rule]]\nwhen = { statistic = "std", above = 0 }\nevery = 1\nlimit = 1\n')
    recorder = plumb.Recorder(model, rules, tmp_path / "run.history")
    for loss in (2.5, 0.25):
        model(torch.randn(16, 8)).sum().backward()
        recorder.step(**{"<loss>": loss})
    history = plumb.read_history(tmp_path / "run.history")
    shown = history._repr_html_()
    assert f"<b>{html.escape(repr(history)[1:-1])}</b>" in shown
    assert "<td>&lt;loss&gt;</td><td>2</td><td>2.5</td><td>0.25</td>" in shown
    event = history.events[0]
    assert f"<li>step 1: std &gt; 0 in {event['count']} tensors, first {event['first'][0]['tensor']}" in shown
    empty = tmp_path / "empty.history"
    plumb.Recorder(Net(), rules, empty).close()
    assert plumb.read_history(empty)._repr_html_().startswith("<b>History: 0 rows of 0 tensors, no steps</b>")


def test_rules_choose_tensors_and_a_nan_is_caught(model, tmp_path):
    rules = tmp_path / "rules.toml"
    rules.write_text(
        """
[[rule]]
name = "*head*"
operator = "parameter"
direction = "backward"
statistics = ["std"]
every = 2

[[rule]]
when = { statistic = "nan_count", above = 0 }
every = 1
limit = 1
"""
    )
    recorder = plumb.Recorder(model, rules, tmp_path / "run.history")
    model(torch.randn(16, 8)).sum().backward()
    assert recorder.step() == 2
    x = torch.randn(16, 8)
    x[3, 3] = math.nan
    model(x).sum().backward()
    assert recorder.step() > 10
    history = plumb.read_history(tmp_path / "run.history")
    assert [e["condition"] for e in history.events] == ["nan_count > 0"]
    assert history.events[0]["first"][0]["direction"] == "forward"
    assert np.isnan(history.columns["abs_max"][:2]).all() and (history.columns["std"][:2] >= 0).all()
    rules.write_text('[[rule]]\nnames = "a"\n')
    with pytest.raises(plumb.Error, match='rules.toml:2: "names"'):
        plumb.Recorder(Net(), rules, tmp_path / "other.history")


def test_evaluation_is_not_measured_and_other_shapes_are(model, tmp_path):
    recorder = plumb.Recorder(model, 1, tmp_path / "run.history")
    model(torch.randn(16, 8)).sum().backward()
    with torch.no_grad():
        model(torch.full((16, 8), 1e6))
    assert recorder.step() > 0
    model(torch.randn(4, 8)).sum().backward()
    assert recorder.step() > 0
    history = plumb.read_history(tmp_path / "run.history")
    assert history.columns["abs_max"].max() < 1e4
    of_parameters = [i for i, t in enumerate(history.tensors) if t["operator"] == "parameter"]
    assert len(of_parameters) == 6
    for i in of_parameters:
        assert set(history.columns["step"][history.columns["tensor"] == i]) == {1, 2}


def test_records_a_transformed_module_and_gives_its_forward_back(model, tmp_path):
    x = torch.randn(16, 8)
    scaled = plumb.transforms.simulate_fp8(plumb.transforms.unit_scale(model))
    expected = scaled(x)
    before = scaled.forward
    with plumb.Recorder(scaled, 1, tmp_path / "run.history") as recorder:
        assert scaled(x).shape == expected.shape
        copied, pickled = copy.deepcopy(scaled), pickle.loads(pickle.dumps(scaled))
        scaled(x).sum().backward()
        assert recorder.step() > 0
    assert scaled.forward is before
    for other in (copied, pickled):
        assert other(x).shape == expected.shape
    operators = {t["operator"] for t in plumb.read_history(tmp_path / "run.history").tensors}
    assert "plumb::linear" in operators
    with pytest.raises(plumb.Error, match="closed"):
        recorder.step()


def test_appends_and_refuses_to_overwrite(model, tmp_path):
    path = tmp_path / "run.history"
    with plumb.Recorder(model, 1, path) as recorder:
        train(model, 2, lambda loss: recorder.step())
    with pytest.raises(plumb.Error, match="there already"):
        plumb.Recorder(model, 1, path)
    with open(path, "ab") as torn:
        torn.write(b"half a record")
    assert plumb.read_history(path).torn_bytes == 13
    with plumb.Recorder(model, 1, path, append=True) as recorder:
        assert recorder.current_step == 3
        train(model, 1, lambda loss: recorder.step())
    history = plumb.read_history(path)
    assert history.torn_bytes == 0 and set(history.columns["step"]) == {1, 2, 3}
    path.write_bytes(b"something else altogether")
    with pytest.raises(plumb.Error, match="no history"):
        plumb.read_history(path)


def test_microbatches_of_a_step_are_measured_as_one_tensor(model, tmp_path):
    recorder = plumb.Recorder(model, 1, tmp_path / "run.history")
    x = torch.randn(32, 8) + torch.arange(32.0)[:, None]
    for part in x.chunk(4):
        (model(part).square().mean() / 4).backward()
    recorder.step()
    model(x).square().mean().backward()
    recorder.step()
    frame = plumb.read_history(tmp_path / "run.history").to_dataframe()
    of_input = frame[(frame.operator == "input") & (frame.direction == "forward")].set_index("step")
    for name in ("mean_abs", "abs_mean", "std", "abs_max", "abs_min"):
        assert of_input[name][1] == pytest.approx(of_input[name][2], rel=1e-6), name
    assert of_input["numel"].tolist() == [256, 256]
    weight = frame[(frame.name == "head.weight") & (frame.step == 1)].set_index("direction")
    assert weight["numel"]["forward"] == 32 and weight["numel"]["backward"] == 4 * 32


def test_files_of_ranks_are_read_as_one_history(tmp_path):
    torch.manual_seed(0)
    stages = [nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.GELU())]
    rules = tmp_path / "rules.toml"
    rules.write_text('[[rule]]\noperator = "aten::gelu"\nevery = 1\n')
    recorders = [plumb.Recorder(m, rules, tmp_path / "run.history", rank=i, stage=i) for i, m in enumerate(stages)]
    loss = stages[1](stages[0](torch.randn(4, 8))).square().mean()
    loss.backward()
    assert [r.step(loss=loss) for r in recorders] == [0, 2]
    history = plumb.read_history(tmp_path / "run.history")
    assert [(t["operator"], t["stage"], t["rank"]) for t in history.tensors] == [("aten::gelu", 1, 1)]
    assert list(history.scalars()) == ["loss"]
    frame = history.to_dataframe()
    assert frame["rank"].tolist() == [1, 1] and frame["stage"].tolist() == [1, 1]
    alone = plumb.read_history(tmp_path / "run.history.rank1")
    assert alone.tensors[0]["rank"] is None and "rank" not in alone.to_dataframe()
    (tmp_path / "run.history.rank0").unlink()
    with pytest.raises(plumb.Error, match="no file of rank 0"):
        plumb.read_history(tmp_path / "run.history")
    with pytest.raises(plumb.Error, match="rank -1"):
        plumb.Recorder(nn.Linear(2, 2), 1, tmp_path / "other", rank=-1)
