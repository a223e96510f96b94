#!/usr/bin/env python3
"""Makes each rank wrong once, in each way, in trainings with --audit: prints a table for docs/howto/diff.md.

    .venv/bin/python tools/audit_table.py            # the table
    .venv/bin/python tools/audit_table.py --pairs 20 # what an audit costs: trainings with and without, by turns

A rank that computes wrong does so from a step on: the table says how many steps later the audit comes upon it. What it had
done wrong before that stays in the weights; so the run that must end with the bits of one that nothing befell is another, in
which the rank is wrong in the step that is audited.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time

import torch
from tables import table
from torch import nn

PLUMB = str(pathlib.Path(__file__).parent.parent / "build" / "bin" / "plumb")
STEPS, FROM = 30, 4
LAYOUTS = {"4 stages": (4, 1), "2 stages, 2 replicas": (2, 2)}
KINDS = {
    "flip": "computes wrong",
    "rot": "a weight rots",
    "rot_state": "the optimizer's state rots",
    "rot_gradient": "a sum of gradients rots",
}


def write_model(folder: pathlib.Path, width: int, layers: int, rows: int) -> list[str]:
    torch.manual_seed(0)
    net = nn.Sequential(*[m for _ in range(layers) for m in (nn.LayerNorm(width), nn.Linear(width, width), nn.GELU())])
    x = torch.randn(4096, width)
    torch.save(x, folder / "x.pt")
    torch.save(x.sin(), folder / "y.pt")
    torch.export.save(torch.export.export(net, (x[:rows],)), str(folder / "net.pt2"))
    return [PLUMB, "train", "net.pt2", "--data", "x.pt", "--targets", "y.pt", "--loss", "mse", "--threads", "1", "--json"]


def run(command: list[str], folder: pathlib.Path, may_fail: bool = False) -> list[dict]:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode != 0 and not may_fail:
        sys.exit(f"{' '.join(command)}\n{done.stderr}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def losses(events: list[dict]) -> dict[int, float]:
    return {e["step"]: e["loss"] for e in events if "loss" in e}


def faults(kind: str, rank: int, stages: int, microbatches: int, steps: range, chance: random.Random) -> list[str]:
    stage, which = rank % stages, range(microbatches)
    if kind == "rot_gradient":
        places = [f"{stage}B{microbatches - 1}"]
    else:
        places = [f"{stage}F{m}" for m in which] if kind == "flip" else [f"{stage}{chance.choice('FB')}{chance.choice(which)}"]
    return [part for step in steps for at in places for part in ("--inject", f"{kind} rank {rank} at {at} of step {step}")]


def fault_table() -> None:
    chance, rows, audit = random.Random(0), [], ["--audit", "--audit-every", "1"]
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        base = [*write_model(folder, 16, 8, 4), "--steps", str(STEPS), "--gradient-groups", "2"]
        for layout, (stages, replicas) in LAYOUTS.items():
            microbatches = 4 // replicas
            job = [*base, "--stages", str(stages), "--data-parallel", str(replicas), "--microbatches", str(microbatches)]
            whole = losses(run([*job, "--save", "whole.pt2"], folder))
            weights = (folder / "whole.pt2").read_bytes()
            for kind, words in KINDS.items():
                found, named, same = [], 0, 0
                for rank in range(stages * replicas):
                    at = FROM
                    if kind == "flip":  # when does the audit come upon it?
                        always = faults(kind, rank, stages, microbatches, range(FROM, STEPS + 1), chance)
                        events = run([*job, *audit, "--max-restarts", "1", *always], folder, may_fail=True)
                        at = next((e["audit"] for e in events if "audit" in e), FROM)
                    spoiled = faults(kind, rank, stages, microbatches, range(at, at + 1), chance)
                    events = run([*job, *audit, "--max-restarts", "4", "--save", "other.pt2", *spoiled], folder)
                    audits = [e for e in events if "audit" in e]
                    found.append(audits[0]["audit"] - FROM if audits else None)
                    named += any(e["rank"] == rank for e in audits) and (replicas > 1 or len(audits) == 1)
                    same += losses(events) == whole and (folder / "other.pt2").read_bytes() == weights
                    print(layout, kind, rank, [(e["audit"], e["rank"], e["tensor"]) for e in audits], file=sys.stderr, flush=True)
                ranks = stages * replicas
                steps = ", ".join("never" if s is None else str(s) for s in found)
                rows.append([layout, words, steps, f"{named} of {ranks}", f"{same} of {ranks}"])
    print(table(["layout", "a rank", "found so many steps later, by rank", "the right rank named", "undisturbed bits"], rows))


def pairs(number: int) -> None:
    """Processor time of all ranks, and the clock's, of steps: a long run less a short one."""
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        base = [*write_model(folder, 256, 8, 1024), "--stages", "2", "--microbatches", "4", "--max-restarts", "1"]

        def cost(steps: int, *more: str) -> tuple[float, float]:
            before, clock = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
            run([*base, "--steps", str(steps), *more], folder)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, time.monotonic() - clock

        shares: list[list[float]] = [[], []]
        for pair in range(number):
            steps: dict[bool, list[float]] = {}
            for audited in (False, True) if pair % 2 else (True, False):
                more = ["--audit"] if audited else []
                short, long = cost(10, *more), cost(60, *more)
                steps[audited] = [(b - a) / 50 for a, b in zip(short, long)]
            for i in range(2):
                shares[i].append(steps[True][i] / steps[False][i] - 1)
            print([f"{1e3 * x:.2f} ms" for x in (*steps[False], *steps[True])], file=sys.stderr, flush=True)
        for what, all_of_it in zip(("processor time", "clock"), shares):
            ordered = sorted(all_of_it)
            low, high = ordered[len(ordered) // 4], ordered[3 * len(ordered) // 4]
            print(f"{what}: {statistics.median(ordered):+.1%} (middle half {low:+.1%} to {high:+.1%}), {number} pairs")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=0)
    given = parser.parse_args()
    pairs(given.pairs) if given.pairs else fault_table()
