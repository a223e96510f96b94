#!/usr/bin/env python3
"""Plans of four uneven models, and of a GPT whose head weighs three layers, whole and divided by words; and what their
trainings then take: prints a table for docs/howto/plan.md.

    .venv/bin/python tools/plan_table.py [--ranks 2] [--steps 60]

Predicted: the plan's step. Measured: a step's time line from the first action to the last, the least and the middle of the
steps; the middle of a second such run over that of the first says how far runs are apart on this machine. Beside it the
processor time that ranks were predicted to work, and took for a step (a long training less a short one; with the optimizer,
the data and the messages). Memory: all tensors of the rank that has most, the optimizer's state included; needs a build
with -DPLUMB_BENCHMARKS=ON.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import pathlib
import resource
import statistics
import subprocess
import sys
import tempfile
import time

import torch
from tables import table
from torch import nn
from torch.nn import functional as F

BUILD = pathlib.Path(__file__).parent.parent / "build"
PLUMB = str(BUILD / "bin" / "plumb")
WIDTH, ROWS, LENGTH = 128, 4, 64


class Block(nn.Module):
    def __init__(self, width: int, inner: int):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Head(nn.Module):
    """A head that weighs four layers."""

    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(4096, WIDTH), nn.Linear(WIDTH, 4096)
        self.layers = nn.Sequential(*[Block(WIDTH, 4 * WIDTH) for _ in range(8)])

    def forward(self, ids, targets):
        return F.cross_entropy(self.head(self.layers(self.table(ids))).flatten(0, 1), targets.flatten())


class EncoderDecoder(nn.Module):
    """A narrow encoder; the decoder's layers read what it made."""

    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(512, WIDTH), nn.Linear(2 * WIDTH, 512)
        self.encoder = nn.Sequential(*[Block(WIDTH, 2 * WIDTH) for _ in range(6)])
        self.wide, self.memory = nn.Linear(WIDTH, 2 * WIDTH), nn.ModuleList(nn.Linear(WIDTH, 2 * WIDTH) for _ in range(4))
        self.decoder = nn.ModuleList(Block(2 * WIDTH, 8 * WIDTH) for _ in range(4))

    def forward(self, ids, targets):
        x = self.encoder(self.table(ids))
        y = self.wide(self.table(targets))
        for layer, memory in zip(self.decoder, self.memory):
            y = layer(y + memory(x))
        return F.cross_entropy(self.head(y).flatten(0, 1), ids.flatten())


class Experts(nn.Module):
    """Every other layer is eight times as wide inside."""

    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(512, WIDTH), nn.Linear(WIDTH, 512)
        self.layers = nn.Sequential(*[Block(WIDTH, (16 if i % 3 == 1 else 2) * WIDTH) for i in range(9)])

    def forward(self, ids, targets):
        return F.cross_entropy(self.head(self.layers(self.table(ids))).flatten(0, 1), targets.flatten())


class Unet(nn.Module):
    """Few wide rows in the middle, many narrow ones outside, and values that skip it."""

    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(512, WIDTH), nn.Linear(WIDTH, 512)
        self.down, self.up = nn.Linear(4 * WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, 4 * WIDTH)
        self.before, self.after = (nn.Sequential(*[Block(WIDTH, 4 * WIDTH) for _ in range(3)]) for _ in range(2))
        self.middle = nn.Sequential(*[Block(4 * WIDTH, 4 * WIDTH) for _ in range(4)])

    def forward(self, ids, targets):
        skip = self.before(self.table(ids))
        x = self.middle(self.down(skip.unflatten(1, (-1, 4)).flatten(2)))
        x = self.after(self.up(x).unflatten(2, (4, -1)).flatten(1, 2) + skip)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.proj = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.block = Block(WIDTH, 4 * WIDTH)

    def forward(self, x):
        q, k, v = (t.unflatten(2, (4, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, 2))
        return self.block(x + self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)))


class Gpt(nn.Module):
    """A layer has 12 x width^2 weights: the head, of 36 x width words, weighs three."""

    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(36 * WIDTH, WIDTH), nn.Linear(WIDTH, 36 * WIDTH, bias=False)
        self.layers, self.norm = nn.Sequential(*[Layer() for _ in range(8)]), nn.LayerNorm(WIDTH)

    def forward(self, ids, targets):
        return F.cross_entropy(self.head(self.norm(self.layers(self.table(ids)))).flatten(0, 1), targets.flatten())


MODELS = {"a head of four layers": Head, "encoder and decoder": EncoderDecoder, "experts": Experts, "U-Net": Unet, "GPT": Gpt}
WORDS = {Head: 4096, Gpt: 36 * WIDTH}


def run(command: list[str], folder: pathlib.Path) -> str:
    done = subprocess.run([PLUMB, *command], cwd=folder, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"plumb {' '.join(command)}\n{done.stderr}")
    return done.stdout


def processor_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def step_lengths(path: pathlib.Path) -> list[float]:
    """Seconds from the first action of a step to its last, from a time line in Chrome's format."""
    ends: dict[int, list[float]] = {}
    for event in json.loads(path.read_text())["traceEvents"]:
        if event.get("ph") == "X":
            step = event["args"].get("step", 0)
            begin, end = ends.setdefault(step, [float("inf"), 0.0])
            ends[step] = [min(begin, event["ts"]), max(end, event["ts"] + event["dur"])]
    return [(end - begin) / 1e6 for begin, end in ends.values()]


def peak_of_rank(rank: int) -> None:
    """Runs two steps of the plan in this folder as a rank, and prints the peak of its tensors in the second."""
    from plumb.pipelining import Plan, pipeline
    from plumb.pipelining.schedules import ScheduleTable

    import plumb

    cases = ctypes.CDLL(str(BUILD / "benchmarks" / "libpipeline_cases.so"))
    cases.peak_of_allocations.restype = ctypes.c_int64
    torch.set_num_threads(1)
    program, data = plumb.load_pt2("net.pt2"), torch.load("rows.pt")
    plan = Plan("best.json")
    store = f"file://{pathlib.Path.cwd()}/store"
    torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=plan.ranks)
    one, many = ([v[: rows * ROWS].clone() for v in data.values()] for rows in (1, plan.microbatches))
    pipe = pipeline(program, tuple(one), split_policy=plan, output_loss_value_spec=True)
    cases.count_allocations()
    stages = plan.build_stages(pipe, rank, "cpu")
    schedule = ScheduleTable(stages, plan.microbatches, table=plan.schedule)
    optimizer = torch.optim.AdamW([p for s in stages for p in s.submod.parameters()])
    held = sum(p.nbytes for s in stages for p in s.submod.parameters())  # from before the count
    schedule.step(*many)
    optimizer.step()
    optimizer.zero_grad()
    cases.live_allocations()
    schedule.step(*many)
    print(held + cases.peak_of_allocations())
    torch.distributed.destroy_process_group()


def peak_of_plan(ranks: int, folder: pathlib.Path) -> int:
    (folder / "store").unlink(missing_ok=True)
    children = [subprocess.Popen([sys.executable, __file__, "--peak-of", str(r)], cwd=folder, stdout=subprocess.PIPE)
                for r in range(ranks)]  # fmt: skip
    return max(int(child.communicate()[0]) for child in children)


def row_of_plan(model: str, folder: pathlib.Path, ranks: int, steps: int) -> list[str]:
    """Plans net.pt2 and trains it."""
    microbatches = str(2 * ranks)
    before, clock = processor_seconds(), time.monotonic()
    planned = json.loads(run(["plan", "net.pt2", "--loss", "output", "--transmit", "all", "--ranks", str(ranks), "--microbatches", microbatches,
                              "-o", "best.json", "--json"], folder))  # fmt: skip
    cost = f"{processor_seconds() - before:.0f} s ({time.monotonic() - clock:.0f} s)"
    plan = json.loads((folder / "best.json").read_text())
    job = ["train", "net.pt2", "--data", "rows.pt", "--loss", "output", "--threads", "1", "--json", "--save", "out.pt2"]
    used, runs = [], []
    for number in (5, 5 + steps, 5 + steps):
        before = processor_seconds()
        out = run([*job, "--plan", "best.json", "--steps", str(number), "--timeline", "line.json", "--timeline-steps",
                   str(steps)], folder)  # fmt: skip
        used.append(processor_seconds() - before)
        runs.append(step_lengths(folder / "line.json"))
    losses = [e["loss"] for e in map(json.loads, out.splitlines()) if "loss" in e]
    alone = run([*job, "--steps", "5", "--microbatches", microbatches], folder)
    same = [e["loss"] for e in map(json.loads, alone.splitlines()) if "loss" in e] == losses[:5]
    taken = next(c for c in planned["schedules"] if c["schedule"] == planned["taken"])
    work = taken["step"] * (1 - taken["bubble"]) * ranks
    least, ms, mib = min(runs[1]), 1e3, 2**20
    middle, again = (statistics.median(lengths) for lengths in runs[1:])
    memory, peak = max(plan["memory"]), peak_of_plan(ranks, folder)
    row = [model, planned["taken"], f"{ms * plan['seconds']:.1f}", f"{ms * least:.1f}", f"{ms * middle:.1f}",
            f"{plan['seconds'] / middle - 1:+.1%}", f"{again / middle - 1:+.1%}", f"{ms * work:.0f}", f"{ms * (used[1] - used[0]) / steps:.0f}",
            f"{planned['spread']:.0%}", f"{memory / mib:.1f}", f"{peak / mib:.1f} ({memory / peak - 1:+.1%})", cost,
            f"{losses[-1]:.4f}", "yes" if same else "no"]  # fmt: skip
    print(row, file=sys.stderr, flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--models", nargs="*", choices=MODELS, default=list(MODELS))
    parser.add_argument("--peak-of", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.peak_of is not None:
        return peak_of_rank(given.peak_of)
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        for model in given.models:
            make = MODELS[model]
            torch.manual_seed(0)
            words = WORDS.get(make, 512)
            ids, targets = torch.randint(words, (2, ROWS, LENGTH))
            torch.export.save(torch.export.export(make(), (ids, targets)), str(folder / "net.pt2"))
            many = {"ids": torch.randint(words, (512, LENGTH)), "targets": torch.randint(words, (512, LENGTH))}
            torch.save(many, folder / "rows.pt")
            rows.append(row_of_plan(model, folder, given.ranks, given.steps))
            if make is Gpt:
                run(["opt", "net.pt2", f"--pass=split_vocabulary,parts={given.ranks}", "-o", "divided.pt2"], folder)
                (folder / "divided.pt2").rename(folder / "net.pt2")
                rows.append(row_of_plan("GPT, its head divided by words", folder, given.ranks, given.steps))
    head = ["model", "plan", "predicted, ms:", "least step:", "middle:", "predicted over middle:", "second run over first:", "work predicted, ms:",
            "processor time of a step:", "spread of costs:", "memory predicted, MiB:", "measured:",
            "planning, processor time (clock)", "last loss:", "bits of one process"]  # fmt: skip
    print(table(head, rows))


if __name__ == "__main__":
    main()
