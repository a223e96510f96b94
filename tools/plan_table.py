#!/usr/bin/env python3
"""Plans of four uneven models, and what their trainings then take: prints a table for docs/howto/plan.md.

    .venv/bin/python tools/plan_table.py [--ranks 2] [--steps 60]

Predicted: the plan's step. Measured: a step's time line from the first action to the last, the least and the middle of the
steps, since other loads on a machine only lengthen them. Beside it the processor time that ranks were predicted to work, and
took for a step (a long training less a short one; with the optimizer, the data and the messages).
"""

from __future__ import annotations

import argparse
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

PLUMB = str(pathlib.Path(__file__).parent.parent / "build" / "bin" / "plumb")
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


MODELS = {"a head of four layers": Head, "encoder and decoder": EncoderDecoder, "experts": Experts, "U-Net": Unet}


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=60)
    given = parser.parse_args()
    microbatches, rows = 2 * given.ranks, []
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        for model, make in MODELS.items():
            torch.manual_seed(0)
            words = 4096 if make is Head else 512
            ids, targets = torch.randint(words, (2, ROWS, LENGTH))
            torch.export.save(torch.export.export(make(), (ids, targets)), str(folder / "net.pt2"))
            many = {"ids": torch.randint(words, (512, LENGTH)), "targets": torch.randint(words, (512, LENGTH))}
            torch.save(many, folder / "rows.pt")
            before, clock = processor_seconds(), time.monotonic()
            planned = json.loads(run(["plan", "net.pt2", "--loss", "output", "--ranks", str(given.ranks), "--microbatches",
                                      str(microbatches), "-o", "best.json", "--json"], folder))  # fmt: skip
            cost = f"{processor_seconds() - before:.0f} s ({time.monotonic() - clock:.0f} s)"
            plan = json.loads((folder / "best.json").read_text())
            job = ["train", "net.pt2", "--data", "rows.pt", "--loss", "output", "--plan", "best.json", "--threads", "1", "--json"]
            used = []
            for steps in (5, 5 + given.steps):
                before = processor_seconds()
                out = run([*job, "--steps", str(steps), "--timeline", "line.json", "--timeline-steps", str(given.steps),
                           "--save", "whole.pt2"], folder)  # fmt: skip
                used.append(processor_seconds() - before)
            losses = [e["loss"] for e in map(json.loads, out.splitlines()) if "loss" in e]
            alone = ["train", "net.pt2", "--data", "rows.pt", "--loss", "output", "--threads", "1", "--json", "--steps", "5",
                     "--microbatches", str(microbatches), "--save", "alone.pt2"]  # fmt: skip
            same = [e["loss"] for e in map(json.loads, run(alone, folder).splitlines()) if "loss" in e] == losses[:5]
            lengths = step_lengths(folder / "line.json")
            taken = next(c for c in planned["schedules"] if c["schedule"] == planned["taken"])
            work = taken["step"] * (1 - taken["bubble"]) * given.ranks
            least, middle, ms = min(lengths), statistics.median(lengths), 1e3
            rows.append([model, planned["taken"], f"{ms * plan['seconds']:.1f}", f"{ms * least:.1f}", f"{ms * middle:.1f}",
                         f"{plan['seconds'] / least - 1:+.0%}", f"{ms * work:.0f}",
                         f"{ms * (used[1] - used[0]) / given.steps:.0f}", f"{planned['spread']:.0%}", cost,
                         "yes" if same else "no"])  # fmt: skip
            print(rows[-1], file=sys.stderr, flush=True)
    head = ["model", "plan", "predicted, ms:", "least step:", "middle:", "predicted over least:", "work predicted, ms:",
            "processor time of a step:", "spread of costs:", "planning, processor time (clock)", "bits of one process"]  # fmt: skip
    print(table(head, rows))


if __name__ == "__main__":
    main()
