"""The values that a Recorder writes to TensorBoard and Weights & Biases, read back."""

import struct
import sys
import types

import numpy as np
import pytest
import torch
from torch import nn

import plumb


def train(writers, path, steps=3, every=2):
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 4))
    with plumb.Recorder(net, every, path, writers=writers) as recorder:
        for _ in range(steps):
            loss = net(torch.randn(4, 8)).square().mean()
            loss.backward()
            recorder.step(loss=loss)
    return plumb.read_history(path)


def crc32c(data):
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def fields(data):
    """(field, value) of a message of protocol buffers: integers, doubles, floats, or the bytes of what is inside."""
    found, at = [], 0

    def varint():
        nonlocal at
        value = shift = 0
        while True:
            value |= (data[at] & 127) << shift
            at += 1
            shift += 7
            if data[at - 1] < 128:
                return value

    while at < len(data):
        key = varint()
        if key & 7 == 0:
            value = varint()
        else:
            size = {1: 8, 5: 4}[key & 7] if key & 7 != 2 else varint()
            value, at = data[at : at + size], at + size
            if key & 7 != 2:
                value = struct.unpack("<d" if size == 8 else "<f", value)[0]
        found.append((key >> 3, value))
    return found


def events(folder):
    (file,) = folder.iterdir()
    data, found = file.read_bytes(), []
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        assert struct.unpack("<I", data[8:12])[0] == crc32c(data[:8])
        body = data[12 : 12 + length]
        assert struct.unpack("<I", data[12 + length : 16 + length])[0] == crc32c(body)
        found.append(dict(fields(body)))
        data = data[16 + length :]
    return found


def values(event):
    """Numbers and histograms of a step by their tags."""
    numbers, histograms = {}, {}
    for number, value in fields(event[5]):
        assert number == 1
        inside = dict(fields(value))
        if 2 in inside:
            numbers[inside[1].decode()] = inside[2]
        else:
            histograms[inside[1].decode()] = dict(fields(inside[5]))
    return numbers, histograms


def test_checksums_are_those_of_the_standard():
    crc = 0xE3069283  # CRC-32C (RFC 3720) of the digits 1 to 9
    assert crc32c(b"123456789") == ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def test_tensorboard_reads_every_step(tmp_path):
    history = train([plumb.TensorBoardWriter(tmp_path / "runs")], tmp_path / "run.history")
    first, *steps = events(tmp_path / "runs")
    assert first[3] == b"brain.Event:2" and first[1] > 1e9
    assert [e[2] for e in steps] == [1, 2, 3]
    losses = history.scalars()["loss"][1]
    for event, loss in zip(steps, losses):
        assert values(event)[0]["loss"] == np.float32(loss)
    assert set(values(steps[1])[0]) == {"loss"}  # no rule asked for more
    numbers, histograms = values(steps[2])
    frame = history.to_dataframe()
    row = frame[(frame.step == 3) & (frame.name == "0.weight") & (frame.direction == "backward")].iloc[0]
    assert numbers["gradients.std/0.weight"] == np.float32(row["std"])
    assert numbers["values.abs_max/2.bias"] > 0
    counts = np.frombuffer(histograms["values.log2/0.weight"][7], "<f8")
    edges = np.frombuffer(histograms["values.log2/0.weight"][6], "<f8")
    assert counts.sum() == histograms["values.log2/0.weight"][3] == 64 and len(edges) == len(counts)
    # Half of the 64 weights of U(-1/sqrt(8), 1/sqrt(8)) lie in [2^-2.5, 2^-1.5): the last bin ends at 2^-1.
    assert edges[-1] == -1 and np.argmax(counts) >= len(counts) - 2


def test_a_run_of_wandb_is_told_every_step(tmp_path, monkeypatch):
    logged = []
    run = types.SimpleNamespace(log=lambda numbers, step: logged.append((step, numbers)))
    wandb = types.ModuleType("wandb")
    wandb.Histogram = lambda np_histogram: np_histogram
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    history = train([plumb.WandbWriter(run, statistics=["std"], histograms=True)], tmp_path / "run.history")
    assert [step for step, _ in logged] == [1, 2, 3] and set(logged[1][1]) == {"loss"}
    assert logged[2][1]["loss"] == history.scalars()["loss"][1][2]
    counts, edges = logged[2][1]["gradients.log2/0.weight"]
    assert counts.sum() <= 64 and len(edges) == len(counts) + 1
    assert not any("abs_max" in tag for tag in logged[2][1])


def test_writers_say_what_they_need(tmp_path):
    with pytest.raises(plumb.Error, match="log"):
        plumb.WandbWriter(None)
    with pytest.raises(TypeError, match="write"):
        plumb.Recorder(nn.Linear(2, 2), 1, tmp_path / "a.history", writers=[print])
    (tmp_path / "file").write_text("")
    with pytest.raises(plumb.Error, match="events cannot be written"):
        plumb.TensorBoardWriter(tmp_path / "file")
    closed = plumb.TensorBoardWriter(tmp_path / "runs")
    closed.close()
    with pytest.raises(plumb.Error, match="closed"):
        closed.write(1, {"loss": 1.0}, None)
