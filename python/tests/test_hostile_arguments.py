"""No operator of plumb crashes or hangs, whatever it is called with."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import plumb  # noqa: F401  (its operators)


def test_meta_refuses_the_shapes_that_a_device_refuses():
    ops = torch.ops.plumb
    x = {device: torch.ones(4, 6, device=device) for device in ("cpu", "meta")}

    def ones(device, *sizes):
        return torch.ones(sizes, device=device)

    calls = [
        lambda d: ops.layer_norm(x[d], [5]),
        lambda d: ops.layer_norm(x[d], [4, 5]),
        lambda d: ops.layer_norm(x[d], [6], ones(d, 5)),
        lambda d: ops.layer_norm(x[d], [6], ones(d, 6), ones(d, 4)),
        lambda d: ops.layer_norm(x[d], [6], ones(d, 1, 6)),
        lambda d: ops.rms_norm(x[d], [5]),
        lambda d: ops.rms_norm(x[d], [6], ones(d, 3)),
        lambda d: ops.softmax(x[d], 2),
        lambda d: ops.softmax(x[d], -3),
        lambda d: ops.softmax(ones(d), 1),
    ]
    for call in calls:
        for device in ("cpu", "meta"):
            with pytest.raises((RuntimeError, IndexError)):
                call(device)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_loss_refuses_a_reduction_that_nobody_knows(device):
    ops, x, target = torch.ops.plumb, torch.ones(4, 6, device=device), torch.zeros(4, dtype=torch.int64, device=device)
    for reduction in (-1, 3, 300, 2**62):
        for loss in (lambda r: ops.mse_loss(x, x, r), lambda r: ops.cross_entropy(x, target, None, r)):
            with pytest.raises(RuntimeError, match=f"(?s){reduction} is no reduction.*0 .none., 1 .mean. or 2 .sum."):
                loss(reduction)


def test_operators_take_hostile_arguments():
    fuzzer = Path(__file__).with_name("hostile_arguments.py")
    calls = "40" if os.environ.get("PLUMB_LONG_TESTS") else "5"
    done = subprocess.run([sys.executable, fuzzer, calls], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert "all well" in done.stdout
