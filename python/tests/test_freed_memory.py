"""Who changes how the C library's heap keeps memory: only who asks."""

import ctypes
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
