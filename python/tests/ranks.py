"""Real processes over Gloo for tests: started from a server that has torch and plumb loaded already."""

import contextlib
import io
import multiprocessing
import os
import pathlib
import random
import runpy
import socket
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import device
import torch
import torch.distributed as dist

_context = multiprocessing.get_context("forkserver")
# torch imports its compiler for a process's first optimizer, which takes longer than most tests.
_context.set_forkserver_preload(["torch", "torch.distributed", "torch._dynamo", "plumb", "plumb.pipelining"])


@dataclass
class Ended:
    """How a rank ended: its result, or the type and text of what it raised; nothing if it was killed."""

    result: Any = None
    error: str = ""
    text: str = ""
    exit_code: int | None = None


def _rank(fn, rank, size, store, pipe, timeout, threads, args):
    torch.set_num_threads(threads)
    device.use()
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timedelta(seconds=timeout)
    )
    ended = Ended()
    try:
        ended.result = fn(rank, size, *args)
    except BaseException as error:
        ended.error, ended.text = type(error).__name__, f"{error}\n{traceback.format_exc()}"
    buffer = io.BytesIO()
    torch.save(ended, buffer)
    pipe.send_bytes(buffer.getvalue())
    pipe.close()
    if not ended.error:
        dist.destroy_process_group()
    os._exit(1 if ended.error else 0)


def start(fn, size, *args, timeout=600.0):
    """`fn(rank, size, *args)` on every rank of a group; the processes and the pipes their ends come through.

    Ranks have as many threads as this process: bits depend on it."""
    folder, threads = tempfile.mkdtemp(), torch.get_num_threads()
    started = []
    for rank in range(size):
        ours, theirs = _context.Pipe(duplex=False)
        process = _context.Process(
            target=_rank,
            args=(fn, rank, size, os.path.join(folder, "store"), theirs, timeout, threads, args),
            daemon=True,
        )
        process.start()
        theirs.close()
        started.append((process, ours))
    return started


def finish(started, limit=600.0) -> list[Ended]:
    """Returns the ends of all ranks; those that do not end within `limit` seconds are killed."""
    ends, until = [], time.monotonic() + limit
    for process, pipe in started:
        ended = Ended()
        try:
            if pipe.poll(max(0.0, until - time.monotonic())):
                ended = torch.load(io.BytesIO(pipe.recv_bytes()), weights_only=False)
        except EOFError:
            pass
        process.join(max(0.1, until - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()
        ended.exit_code = process.exitcode
        ends.append(ended)
    return ends


def run(fn, size, *args, timeout=600.0):
    """Returns the results of all ranks; raises what a rank raised."""
    ends = finish(start(fn, size, *args, timeout=timeout))
    for rank, ended in enumerate(ends):
        assert ended.exit_code == 0, f"rank {rank} ended with {ended.exit_code}: {ended.text}"
    return [ended.result for ended in ends]


def _program(path, environment, streams):
    for stream, file in enumerate(streams, 1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT, 0o666), stream)
    os.chdir(path.parent)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = [path.name]
    sys.path.insert(0, str(path.parent))
    runpy.run_path(path.name, run_name="__main__")


def run_program(path, environment):
    """Returns what a program in Python prints, run in its folder by a process that has torch and plumb loaded already."""
    with tempfile.TemporaryDirectory() as folder:
        out, err = (pathlib.Path(folder, name) for name in ("out", "err"))
        process = _context.Process(target=_program, args=(path, environment, (out, err)))
        process.start()
        process.join(600)
        process.kill()
        process.join()
        said = out.read_text()
        assert process.exitcode == 0, said + err.read_text()
        return said


def free_port():
    """Returns a free port of loopback outside the range that the system gives ports from: nothing takes it by chance."""
    with open("/proc/sys/net/ipv4/ip_local_port_range") as file:
        first, last = map(int, file.read().split())
    ports = [port for port in range(2048, 65536) if not first <= port <= last] or range(2048, 65536)
    for port in random.SystemRandom().sample(ports, 100):
        with socket.socket() as one, contextlib.suppress(OSError):
            one.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no port of 100 is free")
