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
MICROBATCHES, ROWS, CONTEXT, WIDTH = 8, 64, 32, 64


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


def steps(rank, size, wire, count):
    torch.manual_seed(0)
    model = GPT(vocab=64, d=WIDTH, layers=2, context=CONTEXT)
    ids = torch.randint(64, (ROWS * MICROBATCHES, CONTEXT))
    pipe = pipeline(model, (ids[:ROWS],), split_spec={"blocks.1": SplitPoint.BEGINNING}, wire=wire)
    stage = pipe.build_stage(rank, torch.device("cpu"))
    loss = lambda y, t: torch.nn.functional.cross_entropy(y.flatten(0, 1), t.flatten())  # noqa: E731
    schedule = Schedule1F1B(stage, MICROBATCHES, loss)
    seconds = []
    for _ in range(count):
        begin = time.perf_counter()
        schedule.step(*([ids] if rank == 0 else []), target=ids)
        seconds.append(time.perf_counter() - begin)
    return seconds[2:]


def over_a_slow_link():
    print("| link | format | a step, median | against float32 |\n|---|---|---|---|")
    for link in ("loopback", "100 Mbit/s"):
        if link != "loopback":
            subprocess.run("tc qdisc add dev lo root tbf rate 100mbit burst 128kb latency 2s", shell=True, check=True)
        plain = None
        for name, wire in (("float32", None), ("FP8", WIRE)):
            ends = ranks.run(steps, 2, wire, 12, timeout=300.0)
            median = statistics.median([max(both) for both in zip(*ends)])
            plain = plain or median
            print(f"| {link} | {name} | {1000 * median:.0f} ms | {median / plain:.2f} |", flush=True)


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
