"""The command on a device that is not the CPU: run with PLUMB_TEST_DEVICE, by `make test` with the test device."""

import json
import os
import subprocess

import device
import pytest
import torch
from torch import nn

pytestmark = pytest.mark.skipif(device.NAME != "testdevice", reason="asks the test device")


class Words(nn.Module):
    def __init__(self, tied):
        super().__init__()
        self.table, self.up, self.head = nn.Embedding(32, 8), nn.Linear(8, 8), nn.Linear(8, 32)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, ids):
        return self.head(torch.relu(self.up(self.table(ids))))


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    folder = tmp_path_factory.mktemp("words")
    torch.manual_seed(0)
    with torch.device("cpu"):
        for name, tied in (("words", False), ("tied", True)):
            torch.export.save(torch.export.export(Words(tied), (torch.arange(16).view(2, 8),)), folder / f"{name}.pt2")
    (folder / "tokens.bin").write_bytes(bytes((i * i + i // 7) % 32 for i in range(400)))
    return folder


def train(folder, name, *options, steps=4, backend="", program="words.pt2"):
    build = os.environ.get("PLUMB_BUILD_DIR", "build")
    preload = os.path.join(os.path.abspath(build), "libplumb_test_device.so")
    command = [os.path.join(build, "bin", "plumb"), "train", program, "--data", "tokens.bin", "--json"]
    command += ["--threads", "1", "--microbatches", "2", "--steps", str(steps), "--save", f"{name}.pt2", *options]
    env = {**os.environ, "LD_PRELOAD": preload, "PLUMB_TEST_BACKEND": backend}
    ended = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=600)
    told = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{")]
    return [event["loss"] for event in told if "step" in event and "loss" in event], ended


@pytest.mark.parametrize("backend", ["", "strict"])
@pytest.mark.parametrize("program", ["words.pt2", "tied.pt2"])
@pytest.mark.parametrize("layout", ["--stages 2 --at head", "--data-parallel 2"])
def test_the_command_trains_stages_on_the_device(words, backend, layout, program):
    layout, name = layout.split(), f"there{backend}{len(layout)}{program}"
    expected, ended = train(words, "cpu", *layout, program=program)
    assert len(expected) == 4, ended.stderr
    losses, ended = train(words, name, *layout, "--device", "testdevice", backend=backend, program=program)
    assert losses == expected, ended.stderr
    states = [torch.export.load(words / f"{file}.pt2").state_dict for file in ("cpu", name)]
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])


def test_the_command_goes_on_from_a_checkpoint_on_the_device(words):
    options = ["--device", "testdevice", "--checkpoints", "kept", "--checkpoint-every", "2", "--clip", "0.5"]
    expected, ended = train(words, "whole", *options[:2], *options[-2:])
    assert len(expected) == 4, ended.stderr
    first, ended = train(words, "half", *options, steps=2)
    rest, ended = train(words, "rest", *options)
    assert first + rest == expected, ended.stderr


@pytest.mark.parametrize("backend", ["", "strict"])
@pytest.mark.parametrize("fault", ["kill rank 1 at 1F1 of step 2", "kill rank 0 at 0B0 of step 3"])
def test_the_command_replaces_a_rank_that_is_lost_on_the_device(words, backend, fault):
    layout = ["--stages", "2", "--at", "head", "--device", "testdevice", "--checkpoints", f"lost {fault} {backend}"]
    expected, ended = train(words, "whole", *layout[:4], steps=5)
    assert len(expected) == 5, ended.stderr
    name = f"lost{fault[10]}{backend}"
    losses, ended = train(
        words, name, *layout, "--checkpoint-every", "100", "--max-restarts", "1", "--inject", fault, steps=5, backend=backend
    )
    assert ended.returncode == 0, ended.stderr
    assert losses[-2:] == expected[-2:] and set(losses) == set(expected), ended.stderr
    states = [torch.export.load(words / f"{file}.pt2").state_dict for file in ("whole", name)]
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])


def test_the_command_tells_the_devices_memory(words):
    weights = sum(t.nbytes for t in torch.export.load(words / "words.pt2").state_dict.values())

    def memory(where):
        losses, ended = train(words, "memory", "--device", where, steps=2)
        assert len(losses) == 2, ended.stderr
        return [event["memory"] for event in map(json.loads, ended.stdout.splitlines()) if "memory" in event]

    there, here = memory("testdevice"), memory("cpu")
    assert all(2 * weights < there_now < here_now / 4 for there_now, here_now in zip(there, here, strict=True))


def test_the_command_names_a_device_that_is_not_there(words):
    for name in ("nowhere", "meta", "testdevice:7", "cuda"):
        losses, ended = train(words, "none", "--device", name)
        assert ended.returncode == 2 and f"--device {name}: " in ended.stderr and not losses, ended.stderr
