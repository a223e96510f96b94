#!/usr/bin/env python3
"""Loses ranks on purpose and prints what it cost, as Markdown for docs/howto/resume.md.

Trains a small model over four processes. Every row is a kind of fault and what makes up for it; faults come at random
actions of random ranks, many to a run, a seed each. Every run must end with the bits of the run that nothing befell:
its weights, and the loss of every step, also of those that were computed twice.

    python tools/fault_table.py                 # 200 kills, 40 stops, 40 exceptions: about half an hour on two slow cores
    python tools/fault_table.py --kills 12 --stops 2 --raises 2 --pairs 3
"""

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

STAGES, MICROBATCHES, PATIENCE = 4, 4, 2


class Model(nn.Module):
    def __init__(self, width, layers):
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(layers)
        )
        self.head = nn.Linear(width, 256)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def write_model(path, width, layers, rows, length):
    torch.manual_seed(0)
    tokens = torch.zeros(rows, length, dtype=torch.long)
    torch.export.save(torch.export.export(Model(width, layers), (tokens,)), path)


def actions(rank):
    return [f"{rank}{kind}{microbatch}" for kind in "FB" for microbatch in range(MICROBATCHES)]


def random_faults(kind, count, first, steps, dice):
    """Each in a step of its own, so that none of them is a loss of two neighbours at once."""
    chosen = sorted(dice.sample(range(first, steps + 1, 3), count))
    ranks = [dice.randrange(STAGES) for _ in chosen]
    return [f"{kind} rank {r} at {dice.choice(actions(r))} of step {s}" for r, s in zip(ranks, chosen, strict=True)]


class Runs:
    def __init__(self, command, folder):
        self.command, self.folder = command, folder

    def train(self, model, steps, *more):
        """The run's events, each with the time at which it came."""
        arguments = [self.command, "train", model, "--data", "tokens.bin", "--steps", str(steps), "--lr", "0.01"]
        arguments += ["--threads", "1", "--microbatches", str(MICROBATCHES), "--stages", str(STAGES), "--json", *more]
        events = []
        with open(self.folder / "errors.txt", "w") as errors:
            process = subprocess.Popen(arguments, cwd=self.folder, stdout=subprocess.PIPE, stderr=errors, text=True)
            for line in process.stdout:
                if line.startswith("{"):
                    events.append((time.monotonic(), json.loads(line)))
        return events, process.wait(), (self.folder / "errors.txt").read_text()


def losses(events):
    found = {}
    for _, event in events:
        if "loss" in event:
            assert found.setdefault(event["step"], event["loss"]) == event["loss"], event
    return found


def same_weights(a, b):
    a, b = (torch.export.load(name).state_dict for name in (a, b))
    return list(a) == list(b) and all(torch.equal(a[name], b[name]) for name in a)


def times_to_next_step(events):
    """Seconds from each fault to the begin of the next step, as they came to the launcher."""
    seconds, since = [], None
    for when, event in events:
        if "injected" in event and since is None:
            since = when
        if "resumed" in event and since is not None:
            seconds.append(when - since)
            since = None
    return seconds


class Row:
    def __init__(self, title):
        self.title, self.faults, self.seconds, self.wrong, self.again = title, 0, [], [], []

    def add(self, runs, kind, count, dice, whole, *more):
        steps = max(whole)
        faults = random_faults(kind, count, 2, steps - 1, dice)
        out = runs.folder / "out.pt2"
        out.unlink(missing_ok=True)
        options = [word for fault in faults for word in ("--inject", fault)]
        events, code, errors = runs.train(
            "small.pt2", steps, "--save", "out.pt2", "--max-restarts", "1000", "--patience", str(PATIENCE), *more, *options
        )
        happened = [event["injected"] for _, event in events if "injected" in event]
        self.faults += len(happened)
        self.seconds += times_to_next_step(events)
        good = code == 0 and losses(events) == whole and same_weights(runs.folder / "whole.pt2", out)
        if not good:
            self.wrong.append((code, faults, errors[-2000:]))
        for fault, event in zip(happened, [e for _, e in events if "resumed" in e], strict=False):
            self.again.append(int(fault.split()[-1]) - 1 - event["resumed"])
        print(f"{self.title}: {len(happened)} faults, {'the same bits' if good else 'WRONG'}", file=sys.stderr)

    def text(self):
        if not self.seconds:
            return f"| {self.title} | 0 | | | | |"
        return (
            f"| {self.title} | {self.faults} | {len(self.wrong)} | {statistics.median(self.seconds):.2f} s |"
            f" {max(self.seconds):.2f} s | {max(self.again)} |"
        )


def overhead(runs, pairs, width, layers, rows, length, steps):
    """Share of time that copies cost, by pairs of runs beside each other in time: with and without."""
    write_model(runs.folder / "large.pt2", width, layers, rows // MICROBATCHES, length)
    shares, steps_of = [], []
    for pair in range(pairs):
        times = {}
        for copies in (False, True) if pair % 2 == 0 else (True, False):
            more = ["--max-restarts", "1"] if copies else []
            events, code, errors = runs.train("large.pt2", steps, "--batch", str(rows), *more)
            assert code == 0, errors
            ends = [event["seconds"] for _, event in events if "loss" in event]
            times[copies] = statistics.median(b - a for a, b in zip(ends[1:], ends[2:], strict=False))
        shares.append(times[True] / times[False] - 1)
        steps_of.append(times[False])
        print(f"pair {pair}: {times[False]:.4f} s, with copies {times[True]:.4f} s", file=sys.stderr)
    parameters = sum(p.numel() for p in Model(width, layers).parameters())
    shares.sort()
    return (
        f"Overhead of the copies, {pairs} pairs of {steps} steps: median {100 * statistics.median(shares):+.1f} %"
        f" ({100 * shares[0]:+.1f} to {100 * shares[-1]:+.1f} %); {parameters / 1e6:.1f} million parameters with AdamW,"
        f" {rows * length} tokens and {statistics.median(steps_of):.2f} s a step."
    )


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--stops", type=int, default=40)
    parser.add_argument("--raises", type=int, default=40)
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="rows whose title has this")
    parser.add_argument("--seconds", type=float, default=1e9, help="begins no run after so many, shared by the rows")
    parser.add_argument("--command", default=os.environ.get("PLUMB_COMMAND", "plumb"))
    return parser.parse_args()


def main():
    o = parse()
    dice, begin = random.Random(o.seed), time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        runs = Runs(os.path.abspath(shutil.which(o.command) or o.command), Path(name))
        write_model(runs.folder / "small.pt2", 16, STAGES, 2, 12)
        noise = torch.Generator().manual_seed(1)
        (runs.folder / "tokens.bin").write_bytes(bytes(torch.randint(97, 105, (40000,), generator=noise).tolist()))
        steps = 64
        events, code, errors = runs.train("small.pt2", steps, "--save", "whole.pt2")
        assert code == 0, errors
        whole = losses(events)
        kills = o.kills // 4
        plan = [
            ("killed, a new process", "kill", o.kills - kills - kills // 2, 16, []),
            ("killed, a spare", "kill", kills, 5, ["--spares", "5"]),
            ("killed, re-cut to one fewer", "kill", kills // 2, 1, ["--recut"]),
            (f"SIGSTOP, killed after {PATIENCE} s, a new process", "stop", o.stops, 14, []),
            ("exception, a new process", "raise", o.raises, 14, []),
        ]
        rows = []
        plan = [part for part in plan if o.only in part[0]]
        for part, (title, kind, count, each, more) in enumerate(plan, 1):
            row = Row(title)
            rows.append(row)
            while row.faults < count and not row.wrong and time.monotonic() - begin < o.seconds * part / len(plan):
                row.add(runs, kind, min(each, count - row.faults), dice, whole, *more)
        print(
            "| fault, and what makes up for it | faults | runs with other bits | median to the next step's begin | worst |"
            " whole steps computed again, at most |\n|---|---|---|---|---|---|"
        )
        print("\n".join(row.text() for row in rows))
        if o.pairs and not o.only:
            print("\n" + overhead(runs, o.pairs, 256, 8, 64, 64, 8))
        for row in rows:
            for wrong in row.wrong:
                print(row.title, *wrong, sep="\n", file=sys.stderr)
        return 1 if any(row.wrong for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
