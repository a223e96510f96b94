"""A step of two processes over a link of 100 Mbit/s, with float32 and with FP8 between the stages. Prints Markdown.

1F1B, 8 microbatches, one thread a process. The link is the loopback device of a network namespace, for which the script needs
root, with tc's token bucket: what both processes send together goes at 100 Mbit/s. The processes do not see each other, as on
two hosts: messages within a host go through shared memory. Steps with float32 and with FP8 are taken in
turn in the same processes; times are medians, the share is the median of the ratios of neighboring steps. "Computed" is the
busier rank's time on a processor. "Kept waiting" is the share of the steps over the slow link in which a rank was ready to run
and had no processor: where that is more than a few percent, other programs ran, and the figures are not the link's.
"""

from __future__ import annotations

import ctypes
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("OMP_NUM_THREADS", "1")
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from execution_bench import ROOT, table, verdict  # noqa: E402

sys.path.append(str(ROOT / "examples"))
import ranks  # noqa: E402
from gpt import GPT  # noqa: E402
from plumb.pipelining import SplitPoint, pipeline  # noqa: E402
from plumb.pipelining.schedules import Schedule1F1B  # noqa: E402

WIRES = (None, ("e4m3fn", "e5m2"))
MICROBATCHES, STEPS, WARM = 8, 12, 2
SIZES = [(32, 16, 128), (64, 64, 32), (128, 64, 32)]  # width, rows of a microbatch, context
LINK = "tc qdisc add dev lo root tbf rate 100mbit burst 128kb latency 2s"


def loss(y, t):
    return torch.nn.functional.cross_entropy(y.flatten(0, 1), t.flatten())


def model_and_batch(width: int, rows: int, context: int):
    torch.manual_seed(0)
    return GPT(vocab=64, d=width, layers=2, context=context), torch.randint(64, (rows * MICROBATCHES, context))


def hide_other(rank: int) -> None:
    """Hides the other process from this one in /proc, through which it would open that one's memory."""
    pids: list[int] = [0, 0]
    dist.all_gather_object(pids, os.getpid())
    libc = ctypes.CDLL(None, use_errno=True)
    new_mounts, private = 0x20000, 0x4000 | 0x40000  # CLONE_NEWNS, MS_REC | MS_PRIVATE
    failed = libc.unshare(new_mounts) or libc.mount(b"none", b"/", None, private, None)
    if failed or libc.mount(b"none", b"/proc/%d" % pids[1 - rank], b"tmpfs", 0, None):
        raise OSError(ctypes.get_errno(), "no directory can be hidden")


def clocks() -> list[float]:
    """Seconds: by the clock, of this process on a processor, of its main thread waiting for one."""
    return [time.perf_counter(), time.process_time(), int(Path("/proc/self/schedstat").read_text().split()[1]) / 1e9]


def steps(rank: int, size: int, *sizes: int) -> list[list[list[float]]]:
    """Times of each step by each clock, [by wire][step][clock]."""
    hide_other(rank)
    schedules = []
    for wire in WIRES:
        model, ids = model_and_batch(*sizes)
        pipe = pipeline(model, (ids[: sizes[1]],), split_spec={"blocks.1": SplitPoint.BEGINNING}, wire=wire)
        schedules.append(Schedule1F1B(pipe.build_stage(rank, torch.device("cpu")), MICROBATCHES, loss))
    taken: list[list[list[float]]] = [[], []]
    for _ in range(WARM + STEPS):
        for schedule, times in zip(schedules, taken):
            dist.barrier()
            before = clocks()
            schedule.step(*([ids] if rank == 0 else []), target=ids)
            times.append([after - b for after, b in zip(clocks(), before)])
    return [times[WARM:] for times in taken]


def half_of_eager(*sizes: int) -> float:
    """Returns a processor's seconds for half of what eager mode computes in a step: a rank's share."""
    model, ids = model_and_batch(*sizes)
    seconds = []
    for _ in range(WARM + 6):
        busy = time.process_time()
        for batch in ids.chunk(MICROBATCHES):
            loss(model(batch), batch).backward()
        seconds.append(time.process_time() - busy)
    return statistics.median(seconds[WARM:]) / 2


def measure() -> None:
    torch.set_num_threads(1)
    print("A GPT of two layers over two processes, 1F1B, 8 microbatches; FP8 is what travels between the stages.")
    ms = lambda seconds: f"{1000 * statistics.median(seconds):.0f} ms"  # noqa: E731
    rows = {sizes: [f"width {sizes[0]}, {sizes[1]} x {sizes[2]}", ms([half_of_eager(*sizes)])] for sizes in SIZES}
    for slow in (False, True):
        if slow:
            subprocess.run(LINK, shell=True, check=True)
        for sizes, row in rows.items():
            ends = ranks.run(steps, 2, *sizes, timeout=300.0)
            walls = [[max(rank[wire][i][0] for rank in ends) for i in range(STEPS)] for wire in (0, 1)]
            if not slow:
                for wire in (0, 1):
                    busier = max(statistics.median(step[1] for step in rank[wire]) for rank in ends)
                    row += [ms(walls[wire]), ms([busier])]
                continue
            share = statistics.median(fp8 / plain for plain, fp8 in zip(*walls))
            waited = max(sum(step[2] for times in rank for step in times) for rank in ends)
            row += [
                ms(walls[0]),
                ms(walls[1]),
                f"{share:.2f}",
                f"{waited / sum(map(sum, walls)):.0%}",
                verdict(share, 0.45),
            ]
    table(
        ["rows x context of a microbatch", "half of eager", "loopback, float32", "computed", "FP8", "computed",
         "100 Mbit/s, float32", "FP8", "share", "kept waiting", "bar"],
        list(rows.values()),
    )  # fmt: skip


def main() -> None:
    if sys.argv[1:] == ["--inside"]:
        measure()
        return
    inside = f"ip link set lo up && exec {sys.executable} {__file__} --inside"
    if subprocess.run(["unshare", "--net", "sh", "-c", f"ip link set lo up && {LINK}"], capture_output=True).returncode:
        print("There is no network namespace for a slow link (it takes root, ip and tc): not measured.")
        return
    sys.exit(subprocess.run(["unshare", "--net", "sh", "-c", inside]).returncode)


if __name__ == "__main__":
    main()
