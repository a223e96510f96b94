"""Runs that die in one layout and go on in another: pairs of tools/layouts_table.py."""

import os
import warnings

import layout_runs
import pytest
import ranks
import torch
from torch import nn

import plumb


@pytest.mark.parametrize(
    ("model", "first", "second"),
    [
        ("gpt", "2 x 2, Interleaved1F1B", "1 x 1"),
        ("gpt", "1 x 2, GPipe", "2 x 1, ZBVZeroBubble"),
        ("convnet", "3 x 1, GPipe", "2 x 2, 1F1B"),
        ("fp8", "2 x 1, ZBVZeroBubble", "1 x 2, GPipe"),
    ],
)
def test_a_run_goes_on_in_another_layout_with_the_bits_of_one_that_nobody_killed(tmp_path, monkeypatch, model, first, second):
    monkeypatch.setattr(layout_runs, "STEPS", 8)
    run = layout_runs.Run(tmp_path, layout_runs.MODELS[model](tmp_path))
    losses, wanted = run.train("1 x 1", "whole"), run.last("whole")
    assert len(losses) == wanted[0] == 8
    before = run.train(first, "killed", kill_at=5)
    assert layout_runs.go_on(run, before, losses, wanted, second, "killed") == (0, 0, 0)
    other = {name: value + 1 for name, value in wanted[1].items()}
    assert layout_runs.differing_bits(other, wanted[1]) > 0 and layout_runs.differing_bits({}, losses) >= 8


def write_net(net, given, rows, folder):
    """Writes net.pt2, and what it is trained on: x.pt and y.pt."""
    plumb.save_pt2(plumb.capture(net, given), folder / "net.pt2")
    for name in ("x.pt", "y.pt"):
        torch.save(rows(), folder / name)


def audits(folder, *options):
    """Returns what an audit of every step of two stages finds."""
    words = "train net.pt2 --data x.pt --targets y.pt --loss mse --threads 1 --steps 8 --microbatches 2 --json --stages 2"
    told = layout_runs.run([*words.split(), *options, "--audit", "--audit-every", "1", "--max-restarts", "8"], folder)
    return [event for event in told if "audit" in event]


def test_weights_that_a_forward_writes_are_the_same_in_every_layout(tmp_path):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(16, 8, max_norm=0.5), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 16))
    write_net(net, torch.zeros(4, 3, dtype=torch.long), lambda: torch.randint(16, (64, 3)), tmp_path)
    layouts = {
        "one": ["--microbatches", "4"],
        "replicas": ["--microbatches", "2", "--data-parallel", "2"],
        "audited": ["--microbatches", "4", "--stages", "2", "--audit", "--audit-every", "1", "--max-restarts", "1"],
        "evaluated": ["--microbatches", "4", "--eval-data", "x.pt", "--eval-targets", "y.pt", "--eval-every", "1"],
    }
    common = "train net.pt2 --data x.pt --targets y.pt --threads 1 --lr 0.1 --steps 5 --gradient-groups 2 --json".split()
    weights = {}
    for name, layout in layouts.items():
        layout_runs.run([*common, *layout, "--save", name + ".pt2"], tmp_path)
        weights[name] = plumb.load_pt2(tmp_path / (name + ".pt2")).state_dict()
        assert plumb.diff(weights["one"], weights[name]).equal, name


class Counting(nn.Module):
    """Its forward changes what the next one computes."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("gain", torch.ones(4))

    def forward(self, x):
        y = self.linear(x) * self.gain.clone()
        self.gain.mul_(1.1)
        return y


def test_an_evaluation_of_a_model_that_counts_its_forwards_is_the_same_in_every_layout(tmp_path):
    torch.manual_seed(0)
    write_net(Counting(), torch.randn(2, 4), lambda: torch.randn(16, 4), tmp_path)
    words = "train net.pt2 --data x.pt --targets y.pt --eval-data x.pt --eval-targets y.pt --loss mse --threads 1 --steps 3 --json"
    found = []
    for layout in (["--microbatches", "4"], ["--microbatches", "2", "--data-parallel", "2"]):
        told = layout_runs.run([*words.split(), "--gradient-groups", "2", *layout], tmp_path)
        found.append([event["eval_loss"] for event in told if "eval_loss" in event])
    assert found[0] == found[1] and len(found[0]) == 1


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4, dtype=torch.cfloat) for _ in range(4))

    def forward(self, x):
        z = torch.complex(x, x.flip(-1))
        for layer in self.layers:
            z = layer(z)
            z = z * torch.sigmoid(z.abs())
        return z.real + z.imag


def test_an_audit_finds_nothing_in_a_sound_run_whose_stages_hand_on_complex_values(tmp_path):
    torch.manual_seed(0)
    write_net(Complex(), torch.randn(4, 4), lambda: torch.randn(16, 4), tmp_path)
    assert not audits(tmp_path)


def test_an_audit_finds_nothing_in_a_sound_run_whose_weights_lie_in_columns(tmp_path):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 5))
    for layer in net[::2]:
        layer.weight = nn.Parameter(layer.weight.detach().t().contiguous().t())
    write_net(net, torch.randn(4, 5), lambda: torch.randn(16, 5), tmp_path)
    assert not audits(tmp_path)


class Tempered(nn.Module):
    """A later stage has a parameter of the name that torch.export gives the value it gets."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.mul = nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        return self.second(self.first(x) * 2.0) * self.mul


def test_an_audit_tells_a_parameter_from_a_value_of_its_name(tmp_path):
    torch.manual_seed(0)
    given = torch.randn(4, 4)
    write_net(Tempered(), given, lambda: torch.randn(16, 4), tmp_path)
    torch.export.save(torch.export.export(Tempered(), (given,)), tmp_path / "net.pt2")
    assert not audits(tmp_path, "--at", "second")


def train_two_stages(rank, size, folder, port, batches, options=({}, {})):
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    x, y = torch.load(folder / "x.pt"), torch.load(folder / "y.pt")
    data = [(x[rows : rows + 4], y[rows : rows + 4]) for rows in batches[rank]]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nothing keeps the weights
        try:
            return plumb.Trainer(folder / "net.pt2", data, loss="mse", steps=2, stages=size, microbatches=2, **options[rank]).run().loss
        except plumb.Error as error:
            return str(error)


def test_ranks_with_other_options_are_refused(tmp_path):
    write_net(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)), torch.randn(2, 4), lambda: torch.randn(16, 4), tmp_path)
    batches = [(0, 4), (0, 4)]
    for told in ranks.run(train_two_stages, 2, tmp_path, ranks.free_port(), batches, ({"lr": 0.1}, {"lr": 0.2})):
        assert "rank 1 was given 'lr = 0.2', and rank 0 'lr = 0.1'" in told
    for told in ranks.run(train_two_stages, 2, tmp_path, ranks.free_port(), batches, ({"checkpoints": tmp_path / "run"}, {})):
        assert "rank 1 was given 'checkpoints = \"\"', and rank 0 'checkpoints = \"given\"'" in told
    own = ({"csv": tmp_path / "run.csv", "threads": 1}, {"threads": 2, "quiet": True})
    assert min(ranks.run(train_two_stages, 2, tmp_path, ranks.free_port(), batches, own)) > 0


def test_ranks_with_other_batches_are_refused(tmp_path):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    write_net(net, torch.randn(2, 4), lambda: torch.randn(16, 4), tmp_path)
    first, second = ranks.run(train_two_stages, 2, tmp_path, ranks.free_port(), [(0, 4), (0, 4)])
    assert first == second > 0
    for step, batches in ((1, [(0, 8), (4, 8)]), (2, [(0, 4), (0, 8)])):
        for told in ranks.run(train_two_stages, 2, tmp_path, ranks.free_port(), batches):
            assert f"the batch of rank 1 for step {step} is another than that of rank 0" in told and "DistributedSampler" in told
