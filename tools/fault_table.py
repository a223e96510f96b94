#!/usr/bin/env python3
"""Loses ranks on purpose and prints what it cost, as Markdown for docs/howto/resume.md.

Trains a small model over four processes. Every row is a kind of fault and what makes up for it; faults come at random
actions of random ranks, many to a run, a seed each. Every run must end with the bits of the run that nothing befell:
its weights, and the loss of every step, also of those that were computed twice.

    python tools/fault_table.py                 # 200 kills, 40 stops, 40 exceptions: about half an hour on two slow cores
    python tools/fault_table.py --kills 12 --stops 2 --raises 2 --pairs 3
    python tools/fault_table.py --combinations 300     # every way that keeps a run alive with every kind of run
    python tools/fault_table.py --hosts 60 --partitions 20 --slow 20     # hosts, as network namespaces: needs root
    python tools/fault_table.py --combinations 300 --tally tally.jsonl     # goes on after the runs that tally.jsonl has
"""

import argparse
import itertools
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
from host_faults import host_table
from tables import table
from torch import nn

STAGES, MICROBATCHES, PATIENCE = 4, 4, 2


class Model(nn.Module):
    def __init__(self, width, layers, tied=False):
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(layers)
        )
        self.head = nn.Linear(width, 256, bias=not tied)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def write_model(path, width, layers, rows, length, tied=False):
    torch.manual_seed(0)
    tokens = torch.zeros(rows, length, dtype=torch.long)
    torch.export.save(torch.export.export(Model(width, layers, tied), (tokens,)), path)


def actions(stage, microbatches=MICROBATCHES):
    return [f"{stage}{kind}{microbatch}" for kind in "FB" for microbatch in range(microbatches)]


def random_faults(kinds, count, first, steps, dice, stages=STAGES, replicas=1):
    """Returns faults, each in a step of its own, so that none of them is a loss of two neighbors at once."""
    chosen = sorted(dice.sample(range(first, steps + 1, 3), count))
    faults = []
    for step in chosen:
        rank = dice.randrange(stages * replicas)
        action = dice.choice(actions(rank % stages, MICROBATCHES // replicas))
        faults.append(f"{dice.choice(kinds)} rank {rank} at {action} of step {step}")
    return faults


class Runs:
    def __init__(self, command, folder):
        self.command, self.folder = command, folder

    def train(self, model, steps, *more):
        """Returns the run's events, each with the time at which it came."""
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
    """By step, with those of evaluations; None where one that was computed twice is another."""
    found = {}
    for _, event in events:
        for key, step in (("loss", "step"), ("eval_loss", "eval")):
            if key in event and found.setdefault((step, event[step]), event[key]) != event[key]:
                return None
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
        steps = len(whole)
        faults = random_faults([kind], count, 2, steps - 1, dice)
        out = runs.folder / "out.pt2"
        out.unlink(missing_ok=True)
        options = [word for fault in faults for word in ("--inject", fault)]
        events, code, errors = runs.train(
            "small.pt2",
            steps,
            "--save",
            "out.pt2",
            "--max-restarts",
            "1000",
            "--patience",
            str(PATIENCE),
            *more,
            *options,
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

    def cells(self):
        if not self.seconds:
            return [self.title, 0, "", "", "", ""]
        seconds = [f"{statistic(self.seconds):.2f} s" for statistic in (statistics.median, max)]
        return [self.title, self.faults, len(self.wrong), *seconds, max(self.again)]


KINDS = ["kill"] * 5 + ["raise", "stop"]
MAKE_UPS = {"a new process": [], "a spare": ["--spares", "4"], "re-cut to fewer": ["--recut"]}
WEIGHTS = {
    "untied": ("small.pt2", []),
    "tied, cut apart": ("tied.pt2", []),
    "tied, transmitted": ("tied.pt2", ["--transmit", "head.weight"]),
}
LAYOUTS = {"4 stages": (4, 1), "2 stages x 2": (2, 2)}
# Each is in a run or is not.
EXTRAS = {
    "evaluation": ["--eval-data", "held.bin", "--eval-every", "4", "--eval-batches", "1"],
    "wire": ["--wire", "e4m3fn,e5m2"],
    "recorder": ["--record", "rules.toml", "--history", "HISTORY"],
    "checkpoints": ["--checkpoints", "CHECKPOINTS", "--checkpoint-every", "3"],
}


def recorded(history):
    """Returns a history's values, or None if this Python has no plumb to read it."""
    try:
        import plumb
    except ImportError:
        return None
    frame = plumb.read_history(history).to_dataframe("std", "abs_max")
    place = [name for name in ("step", "stage", "name", "direction", "std", "abs_max") if name in frame]
    return sorted(map(str, frame[place].itertuples(index=False, name=None)))


class Combination:
    """Runs of one way of making up for lost ranks, kind of weights and layout; the extras are drawn for each run.

    add() does one run and returns the outcome, count() counts it.
    """

    def __init__(self, make_up, weights, layout):
        self.title = f"{make_up} | {weights} | {layout}"
        self.make_up, self.weights, self.layout = make_up, weights, layout
        self.faults = self.runs = self.lost = self.compared = self.other = 0

    def train(self, runs, name, steps, extras, *more):
        for path in runs.folder.glob(f"{name}.*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        model, words = WEIGHTS[self.weights]
        stages, replicas = LAYOUTS[self.layout]
        words = [*words, "--stages", str(stages), "--data-parallel", str(replicas)]
        words += ["--microbatches", str(MICROBATCHES // replicas), "--save", f"{name}.pt2"]
        for extra in extras:
            paths = {"HISTORY": f"{name}.history", "CHECKPOINTS": f"{name}.run"}
            words += [paths.get(word, word) for word in EXTRAS[extra]]
        return runs.train(model, steps, *words, *more)

    def add(self, runs, dice, steps, wholes):
        extras = tuple(extra for extra in EXTRAS if dice.random() < 0.5)
        stages, replicas = LAYOUTS[self.layout]
        # At another cut other values are rounded on the wire, and tied weights are summed in another order.
        comparable = self.make_up != "re-cut to fewer" or ("wire" not in extras and self.weights != "tied, cut apart")
        # Only the wire changes what is computed: a run is compared with one that does all the rest.
        key = (self.weights, self.layout, "wire" in extras)
        if comparable and key not in wholes:
            whole = f"whole-{len(wholes)}"
            events, code, errors = self.train(
                runs, whole, steps, [extra for extra in EXTRAS if extra != "wire" or extra in extras]
            )
            assert code == 0, errors
            wholes[key] = (whole, losses(events))
        # Faults are of the layout that is cut again: one of them counts.
        count = 1 if self.make_up == "re-cut to fewer" else dice.randint(2, (steps - 2) // 3)
        faults = random_faults(KINDS, count, 2, steps - 1, dice, stages, replicas)
        words = [*MAKE_UPS[self.make_up], "--max-restarts", "1000", "--patience", str(PATIENCE)]
        for fault in faults:
            words += ["--inject", fault]
        events, code, errors = self.train(runs, "out", steps, extras, *words)
        happened = sum("injected" in event for _, event in events)
        done = losses(events)
        lost = code != 0 or done is None or len([k for k in done if k[0] == "step"]) != steps
        other = False
        compared = comparable and not lost
        if compared:
            name, expected = wholes[key]
            expected = {k: v for k, v in expected.items() if k[0] == "step" or "evaluation" in extras}
            other = done != expected or not same_weights(runs.folder / f"{name}.pt2", runs.folder / "out.pt2")
            if "recorder" in extras and self.make_up != "re-cut to fewer":
                other = other or recorded(runs.folder / f"{name}.history") != recorded(runs.folder / "out.history")
        if lost or other:
            print(self.title, extras, code, faults, errors[-3000:], sep="\n", file=sys.stderr)
        return {
            "title": self.title,
            "extras": extras,
            "faults": happened,
            "compared": compared,
            "lost": lost,
            "other": other,
        }

    def count(self, one):
        self.runs += 1
        self.faults += one["faults"]
        self.compared += one["compared"]
        self.lost += one["lost"]
        self.other += one["other"]
        wrong = ", LOST" * one["lost"] + ", OTHER BITS" * one["other"]
        print(f"{self.title} | {' '.join(one['extras'])}: {one['faults']} faults{wrong}", file=sys.stderr, flush=True)

    def cells(self):
        return [*self.title.split(" | "), self.runs, self.faults, self.lost, f"{self.other} of {self.compared}"]


def combinations(runs, o, begin):
    write_model(runs.folder / "tied.pt2", 16, STAGES, 2, 12, tied=True)
    (runs.folder / "rules.toml").write_text("every = 2\n[[rule]]\n")
    (runs.folder / "held.bin").write_bytes((runs.folder / "tokens.bin").read_bytes()[:400])
    rows = [Combination(*names) for names in itertools.product(MAKE_UPS, WEIGHTS, LAYOUTS)]
    wholes, steps = {}, 17
    tally = Path(o.tally or runs.folder / "tally.jsonl")
    done = [json.loads(line) for line in tally.read_text().splitlines()] if tally.exists() else []
    for one in done:
        next(row for row in rows if row.title == one["title"]).count(one)
    while sum(row.faults for row in rows) < o.combinations and time.monotonic() - begin < o.seconds:
        dice = random.Random(f"{o.seed} {sum(row.runs for row in rows)}")
        row = min(rows, key=lambda row: (row.faults, dice.random()))
        one = row.add(runs, dice, steps, wholes)
        row.count(one)
        with tally.open("a") as lines:
            lines.write(json.dumps(one) + "\n")
    head = ["what makes up for a lost rank", "weights", "layout", "runs", "faults", "runs lost", "runs with other bits"]
    print(table(head, [row.cells() for row in rows]))
    wrong = sum(row.lost + row.other for row in rows)
    print(f"\n{sum(row.runs for row in rows)} runs, {sum(row.faults for row in rows)} faults, {wrong} wrong.")
    return 1 if wrong else 0


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
    parser.add_argument(
        "--combinations", type=int, default=0, help="so many faults over all combinations, and nothing else"
    )
    parser.add_argument("--tally", help="a line for each run of --combinations; runs that have one are not done again")
    parser.add_argument("--hosts", type=int, default=0, help="so many hosts lost, and nothing but hosts; needs root")
    parser.add_argument("--partitions", type=int, default=0, help="with --hosts: so many that are cut off")
    parser.add_argument("--slow", type=int, default=0, help="with --hosts: so many links that become slow")
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
        if o.hosts or o.partitions or o.slow:
            write_model(runs.folder / "hosts.pt2", 64, 4, 8, 64)  # its steps are long enough to be met
            return host_table(runs, o, begin, same_weights, losses)
        if o.combinations:
            return combinations(runs, o, begin)
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
        head = ["fault, and what makes up for it", "faults", "runs with other bits", "median to the next step's begin", "worst"]
        print(table([*head, "whole steps computed again, at most"], [row.cells() for row in rows]))
        if o.pairs and not o.only:
            print("\n" + overhead(runs, o.pairs, 256, 8, 64, 64, 8))
        for row in rows:
            for wrong in row.wrong:
                print(row.title, *wrong, sep="\n", file=sys.stderr)
        return 1 if any(row.wrong for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
