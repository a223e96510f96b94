"""Only a process that asks for it changes how the C library's heap keeps memory."""

import ctypes
import pathlib
import subprocess
import sys

import pytest

SCRIPT = """
import ctypes
import torch
import plumb

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]

class Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in "arena ordblks smblks hblks hblkhd more1 more2 more3 more4 more5".split()]

libc.mallinfo2.restype = Info

def maps_large_blocks():
    before = libc.mallinfo2().hblks
    block = libc.malloc(31 << 20)
    mapped = libc.mallinfo2().hblks > before
    if not mapped:  # freed, a mapped one would change the setting
        libc.free(block)
    return mapped

model = torch.nn.Linear(4, 4)
x = torch.ones(2, 4)
graph = plumb.capture(model, x)
graph(x).sum().backward()
assert maps_large_blocks(), "importing plumb or running a graph changed a setting of malloc"
plumb.keep_freed_memory()
assert not maps_large_blocks(), "keep_freed_memory() changed nothing"
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="no glibc")
def test_importing_and_running_changes_no_setting_of_malloc():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


STEPS = """
import pathlib
import sys

import plumb
import torch
from plumb import transforms as T
from zoo import GPT


def resident():
    line = next(x for x in pathlib.Path("/proc/self/status").read_text().splitlines() if x.startswith("RssAnon:"))
    return int(line.split()[1]) / 1024


torch.set_num_threads(1)
torch.manual_seed(0)
transform = {"eager": lambda m: m, "unit_scale": T.unit_scale, "fp8": T.simulate_fp8, "track": T.track_scales}[sys.argv[1]]
model = GPT(vocab=512, context=128, d=256, layers=4, h=4)
ids, targets = torch.randint(512, (2, 8, 128))
before = resident()
model = transform(model)
for _ in range(3):
    model(ids, targets)[1].backward()
    model.zero_grad(set_to_none=True)
held = resident()
plumb.release_freed_memory()
print(held - before, resident() - before)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="no glibc")
def test_what_stays_after_training_steps_is_free_and_can_be_given_back():
    """Little memory stays after a transformed model's steps beyond that of eager's: free memory of the heap, and
    buffers of MKL, which keeps more of them for some shapes than for others."""
    folder = pathlib.Path(__file__).parent

    def stays(transform):
        done = subprocess.run(
            [sys.executable, "-c", STEPS, transform], capture_output=True, text=True, timeout=600, cwd=folder
        )
        assert done.returncode == 0, done.stderr
        return tuple(float(mib) for mib in done.stdout.split())

    eager_kept = stays("eager")[1]
    for transform in ("unit_scale", "fp8", "track"):
        held, kept = stays(transform)
        assert kept < eager_kept + 10, f"{transform} keeps {kept:.0f} MiB, eager {eager_kept:.0f}"
        assert held - kept > 30, f"{transform} gave back {held - kept:.0f} MiB of {held:.0f}"
