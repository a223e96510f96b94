#!/usr/bin/env python3
"""The tables of docs/howto/resume.md: a run that dies in one layout and goes on in another against one that nobody killed.

    layouts_table.py [--models gpt,fp8] [--seed 1] [--folder FOLDER]

Each model is trained `STEPS` steps by `plumb train` in one process: the run that all others are held against. In each layout a rank is
killed at a random step of a run with a checkpoint every second step; in each layout each of these runs is gone on with. A cell is how
many bits differ in the last checkpoint's weights, in its optimizer's state, and in the losses of all steps. Run it from the repository's
root.
"""

import argparse
import pathlib
import random
import sys
import tempfile

sys.path.insert(0, "python/tests")

from layout_runs import LAYOUTS, MODELS, STEPS, Run, go_on
from tables import table


def cells(run, whole_losses, wanted, random_steps):
    """A row for each layout that dies, a cell for each that goes on."""
    for first in LAYOUTS:
        killed = f"killed-{first}".replace(" ", "")
        step = random_steps.randint(4, STEPS - 2)
        losses = run.train(first, killed, kill_at=step)
        row = [f"{first}; step {step}"]
        for second in LAYOUTS:
            row.append(" ".join(map(str, go_on(run, losses, whole_losses, wanted, second, killed))))
        print(row, file=sys.stderr, flush=True)
        yield row


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", help="a new folder that stays")
    given = parser.parse_args()
    random_steps = random.Random(given.seed)
    with tempfile.TemporaryDirectory() as temporary:
        for model in given.models.split(","):
            folder = pathlib.Path(given.folder or temporary, model)
            folder.mkdir(parents=True)
            one = Run(folder, MODELS[model](folder))
            losses = one.train("1 x 1", "whole")
            wanted = one.last("whole")
            count = sum(a.size for a in wanted[1].values()), sum(a.size for a in wanted[2].values())
            print(f"\n{model}: {count[0]} numbers of weights and buffers, {count[1]} of the optimizer's state, {len(losses)} losses\n")
            print(table(["killed in", *[f"on in {layout}" for layout in LAYOUTS]], list(cells(one, losses, wanted, random_steps))), flush=True)


if __name__ == "__main__":
    main()
