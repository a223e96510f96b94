"""A process that may open no more files: every call ends in its result, or in an error that says so and what to do."""

import subprocess
import sys

import pytest

PREPARE = """
import os, resource, sys
import torch
from torch import nn
import plumb
from plumb.pipelining import SplitPoint, pipeline

folder = sys.argv[1]
x = torch.ones(2, 4)
net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
captured = plumb.capture(net, x)
plumb.save_pt2(captured, folder + "/net.pt2")
CALLS = {
    "capture": lambda: plumb.capture(net, torch.ones(3, 4)),
    "save": lambda: plumb.save_pt2(captured, folder + f"/{spare}.pt2"),
    "load": lambda: plumb.load_pt2(folder + "/net.pt2"),
    "transform": lambda: plumb.transforms.unit_scale(nn.Linear(4, 4))(x),
    "cut": lambda: pipeline(net, (x,), split_spec={"1": SplitPoint.BEGINNING}).serialize_stage(0),
    "record": lambda: plumb.Recorder(nn.Linear(4, 4), 1, folder + f"/{spare}.history"),
}
call = CALLS[sys.argv[2]]

fillers = [os.open("/dev/null", os.O_RDONLY) for _ in range(100)]  # so that no numbers are free below
limit = resource.getrlimit(resource.RLIMIT_NOFILE)
said = []
for spare in range(8):
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(fillers) + 1 + spare, limit[1]))
    try:
        call()
    except plumb.Error as error:
        said.append(str(error))
resource.setrlimit(resource.RLIMIT_NOFILE, limit)
for text in said:
    assert "Too many open files" in text and "ulimit -n" in text, text
left = [name for name in os.listdir(folder) if name.endswith(".part")]
assert not left, left
spare = "more"
call()
print(len(said), "errors")
"""


@pytest.mark.parametrize("call", ["capture", "save", "load", "transform", "cut", "record"])
def test_a_call_without_descriptors_ends_in_its_result_or_a_named_error(call, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", PREPARE, str(tmp_path), call], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    if call in ("save", "load", "record"):
        assert "0 errors" not in done.stdout
