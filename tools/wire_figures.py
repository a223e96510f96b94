"""Figures of formats between stages, as Markdown: bytes and losses by schedule, and a step over a slow link.

    python tools/wire_figures.py             # over 2 and 4 processes, every schedule
    python tools/wire_figures.py --slow      # a step over a link of 100 Mbit/s; needs root, for a network namespace

The slow link is the loopback device of a network namespace of its own, with tc's token bucket: what both processes send
together goes at 100 Mbit/s.
"""

import argparse
import os
import pathlib
import statistics
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "python" / "tests"), str(ROOT / "examples")]
os.environ.setdefault("OMP_NUM_THREADS", "1")

import ranks  # noqa: E402
import torch  # noqa: E402
from gpt import GPT  # noqa: E402
from plumb.pipelining import SplitPoint, pipeline  # noqa: E402
from plumb.pipelining.schedules import Schedule1F1B  # noqa: E402

WIRE = ("e4m3fn", "e5m2")
MICROBATCHES = 8
SIZES = [(32, 16, 128), (64, 64, 32), (128, 64, 32)]  # width, rows of a microbatch, context


def by_schedule():
    import test_pipelining_wire as wired

    names = wired.SINGLE + wired.LOOPED + wired.V
    print("| processes | schedule | bytes, float32 | bytes, FP8 | share | losses are one process's |\n|---|---|---|---|---|---|")
    for size in (2, 4):
        ends = ranks.run(wired.train_by_each, size, names)
        expected = {(n, w): wired.reference(w, n) for n in (size, 2 * size) for w in (WIRE, None)}
        for name in names:
            num = size if name in wired.SINGLE else 2 * size
            sent = {w: sum(e[name, w][1] for e in ends) for w in (WIRE, None)}
            equal = all([e[name, w][0] for e in ends if e[name, w][0]] == [expected[num, w]] for w in (WIRE, None))
            share = sent[WIRE] / sent[None]
            print(f"| {size} | {name} | {sent[None]:,} | {sent[WIRE]:,} | {share:.2f} | {'yes' if equal else 'NO'} |")


def loss(y, t):
    return torch.nn.functional.cross_entropy(y.flatten(0, 1), t.flatten())


def model_and_batch(width, rows, context):
    torch.manual_seed(0)
    return GPT(vocab=64, d=width, layers=2, context=context), torch.randint(64, (rows * MICROBATCHES, context))


def steps(rank, size, wire, count, *sizes):
    """Seconds of each step, and a rank's seconds of a processor."""
    model, ids = model_and_batch(*sizes)
    pipe = pipeline(model, (ids[: sizes[1]],), split_spec={"blocks.1": SplitPoint.BEGINNING}, wire=wire)
    schedule = Schedule1F1B(pipe.build_stage(rank, torch.device("cpu")), MICROBATCHES, loss)
    seconds = []
    for _ in range(count):
        begin, busy = time.perf_counter(), time.process_time()
        schedule.step(*([ids] if rank == 0 else []), target=ids)
        seconds.append((time.perf_counter() - begin, time.process_time() - busy))
    return seconds[2:]


def half_of_eager(sizes):
    """A processor's seconds for half of what eager mode computes in a step: a rank's share."""
    torch.set_num_threads(1)
    model, ids = model_and_batch(*sizes)
    seconds = []
    for _ in range(8):
        busy = time.process_time()
        for batch in ids.chunk(MICROBATCHES):
            loss(model(batch), batch).backward()
        seconds.append(time.process_time() - busy)
    return statistics.median(seconds[2:]) / 2


def over_a_slow_link():
    """Medians in milliseconds: a step, and what the busier rank computes in it."""
    print(
        "| width, rows x context | half of eager | loopback, float32 | computed | FP8 | computed | 100 Mbit/s, float32 | FP8 | share |"
        "\n|---|---|---|---|---|---|---|---|---|"
    )
    cells = {sizes: [f"{1000 * half_of_eager(sizes):.0f} ms"] for sizes in SIZES}
    plain = {}
    for slow in (False, True):
        if slow:
            subprocess.run("tc qdisc add dev lo root tbf rate 100mbit burst 128kb latency 2s", shell=True, check=True)
        for sizes, row in cells.items():
            for wire in (None, WIRE):
                ends = ranks.run(steps, 2, wire, 12, *sizes, timeout=300.0)
                step = statistics.median(max(both)[0] for both in zip(*ends))
                busy = max(statistics.median(b for _, b in end) for end in ends)
                row += [f"{1000 * step:.0f} ms"] + ([] if slow else [f"{1000 * busy:.0f} ms"])
                if slow and wire:
                    row.append(f"{step / plain[sizes]:.2f}")
                plain[sizes] = step  # of float32, when FP8's comes
    for (width, rows, context), row in cells.items():
        print(f"| {width}, {rows} x {context} | {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slow", action="store_true")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.inside:
        over_a_slow_link()
    elif given.slow:
        inside = f"ip link set lo up && exec {sys.executable} {__file__} --inside"
        sys.exit(subprocess.run(["unshare", "--net", "sh", "-c", inside]).returncode)
    else:
        by_schedule()
