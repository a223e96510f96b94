"""The memory that a .pt2 file takes is bounded by its size, whatever stands in it."""

import os
import subprocess
import sys
import zipfile

import pytest
import torch
from command import COMMAND
from torch import nn

SIZE = 7_900_000

# The most memory that a process of this command has, in MiB, and what it says.
PEAK = """
import resource, subprocess, sys
done = subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss >> 10)
print(done.stderr)
"""


def peak_of(file):
    command = [sys.executable, "-c", PEAK, COMMAND, "show", file]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    peak, _, said = done.stdout.partition("\n")
    assert "bad_alloc" not in said, said
    return int(peak), said


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """An archive's entries, and the memory that reading it takes."""
    path = tmp_path_factory.mktemp("plain") / "plain.pt2"
    torch.export.save(torch.export.export(nn.Linear(4, 4), (torch.zeros(2, 4),)), path)
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}, peak_of(path)[0]


def repeated(part, size):
    return "[" + (part * (size // len(part))).rstrip(",") + "]"


@pytest.mark.parametrize(
    ("filler", "compressed"),
    [
        (repeated("[],", SIZE), False),
        (repeated('"",', SIZE), False),
        (repeated('{"":0},', SIZE), False),
        (repeated("0,", SIZE), False),
        (repeated("[],", SIZE), True),
        (repeated('"aaaaaaaaaaaaaaaa",', 8 * SIZE), True),
        (repeated('"' + 1000 * "a" + '",', 14 * SIZE), True),
        ("[" + 14 * SIZE * " " + "]", True),
        (None, True),
    ],
    ids=[
        "lists",
        "texts",
        "objects",
        "numbers",
        "lists deflated",
        "texts deflated",
        "long texts deflated",
        "spaces deflated",
        "weights deflated",
    ],
)
def test_a_hostile_file_takes_no_more_than_a_fixed_amount_and_16_times_its_size(filler, compressed, plain, tmp_path):
    entries, usual = plain
    (model,) = (name for name in entries if name.endswith("models/model.json"))
    changed = model if filler else next(name for name in entries if name.endswith("weights/weight_0"))
    text = entries[model].decode()
    assert text.startswith("{")
    content = ('{"more": ' + filler + ", " + text[1:]).encode() if filler else bytes(60 * SIZE)
    path = tmp_path / "hostile.pt2"
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in {**entries, changed: content}.items():
            archive.writestr(name, data, zipfile.ZIP_DEFLATED if compressed and name == changed else zipfile.ZIP_STORED)
        missing = SIZE - sum(entry.compress_size for entry in archive.filelist)
        if missing > 0:  # what is not compressed makes the file, and so the bound, larger
            archive.writestr(model.partition("/")[0] + "/noise", os.urandom(missing))
    size = os.path.getsize(path) / 2**20
    peak, said = peak_of(path)
    # The bytes read of the file are in memory, too; 16 MiB are for the measurement.
    assert peak - usual <= 128 + 16 * size + size + 16, (peak, usual, size, said)
    if not said.startswith("plumb: "):
        return  # read within the bound
    assert "bytes of memory that a file of" in said and "try: " in said, said
