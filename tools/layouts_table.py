#!/usr/bin/env python3
"""The tables of docs/howto/resume.md: a run that dies in one layout and goes on in another against one that nobody killed.

    layouts_table.py [--models gpt,fp8] [--seed 1] [--folder FOLDER]

Each model is trained `STEPS` steps by `plumb train` in one process: the run that all others are held against. In each layout a rank is
killed at a random step of a run with a checkpoint every second step; in each layout each of these runs is gone on with. A cell is how
many bits differ in the last checkpoint's weights, in its optimizer's state, and in the losses of all steps. Run it from the repository's
root.
"""

import argparse
import json
import os
import pathlib
import random
import shutil
import struct
import subprocess
import sys
import tempfile

sys.path.insert(0, "tools")

import numpy as np
from safetensors.numpy import load_file
from zoo_table import table

COMMAND = os.path.join(os.environ.get("PLUMB_BUILD_DIR", "build"), "bin", "plumb")
STEPS = 20
LAYOUTS = {  # stages x replicas, schedule; 4 microbatches in 2 groups everywhere
    "1 x 1": [],
    "1 x 2, GPipe": ["--data-parallel", "2", "--schedule", "GPipe"],
    "2 x 1, ZBVZeroBubble": ["--stages", "2", "--schedule", "ZBVZeroBubble"],
    "2 x 2, 1F1B": ["--stages", "2", "--data-parallel", "2"],
    "3 x 1, GPipe": ["--stages", "3", "--schedule", "GPipe"],
    "2 x 2, Interleaved1F1B": ["--stages", "2", "--data-parallel", "2", "--schedule", "Interleaved1F1B"],
}


def gpt(folder):
    """Tied weights and dropout."""
    save_gpt(folder / "gpt.pt2", lambda model: model, tied=True, dropout=0.1)
    return ["gpt.pt2", "--data", "tokens.bin", "--lr", "0.01", "--transmit", "tok.weight"]


def fp8(folder):
    """Unit-scaled, in simulated FP8, values between stages as FP8 too, with dropout."""
    import plumb

    save_gpt(folder / "fp8.pt2", lambda model: plumb.transforms.simulate_fp8(plumb.transforms.unit_scale(model)), dropout=0.1)
    return ["fp8.pt2", "--data", "tokens.bin", "--lr", "0.2"]


def save_gpt(path, transform, **options):
    import torch

    import plumb

    sys.path.insert(0, "examples")
    from gpt import GPT

    torch.manual_seed(0)
    model = transform(GPT(vocab=64, d=16, layers=3, h=2, context=16, **options).train())
    plumb.save_pt2(plumb.capture(model, torch.zeros(2, 16, dtype=torch.long)), path)
    (path.parent / "tokens.bin").write_bytes(bytes((i * i + i // 7) % 64 for i in range(4000)))


def convnet(folder):
    """Batch norm, and targets of which some do not count, so that parts of a batch weigh unequally."""
    import torch
    from torch import nn

    import plumb

    torch.manual_seed(0)
    blocks = [[nn.Conv2d(a, b, 3, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU()] for a, b in ((1, 8), (8, 8), (8, 8), (8, 8))]
    net = nn.Sequential(*sum(blocks, []), nn.Flatten(), nn.Linear(8 * 64, 10))
    plumb.save_pt2(plumb.capture(net, torch.randn(4, 1, 8, 8)), folder / "convnet.pt2")
    torch.save(torch.randn(100, 1, 8, 8), folder / "x.pt")
    torch.save(torch.where(torch.rand(100) < 0.3, -100, torch.randint(10, (100,))), folder / "y.pt")
    return ["convnet.pt2", "--data", "x.pt", "--targets", "y.pt", "--lr", "0.003"]


def llama(folder):
    """Returns a model of transformers, through its folder."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = dict(vocab_size=64, hidden_size=16, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2)
    LlamaForCausalLM(LlamaConfig(intermediate_size=32, max_position_embeddings=16, **sizes)).save_pretrained(folder / "llama")
    run(["import", "llama", "-o", "llama.pt2", "--batch", "2", "--length", "16"], folder)
    (folder / "tokens.bin").write_bytes(bytes((i * i + i // 7) % 64 for i in range(4000)))
    return ["llama.pt2", "--weights", "llama", "--data", "tokens.bin", "--lr", "0.01"]


MODELS = {"gpt": gpt, "convnet": convnet, "llama": llama, "fp8": fp8}


def run(arguments, folder, dies=False):
    """Returns the JSON that `plumb` prints."""
    done = subprocess.run([COMMAND, *arguments], cwd=folder, text=True, capture_output=True)
    if (done.returncode != 0) != dies:
        sys.exit(f"plumb {' '.join(arguments)} ended with {done.returncode}:\n{done.stderr}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


class Run:
    """A training of a model in a folder of checkpoints."""

    def __init__(self, folder, options):
        self.folder, self.options = folder, options

    def train(self, layout, checkpoints, kill_at=None):
        """Returns the losses by step, as printed; rank 0 is killed in step `kill_at`."""
        layout_options = LAYOUTS[layout]
        microbatches = 2 if "--data-parallel" in layout_options else 4
        options = self.options if "--stages" in layout_options else without(self.options, "--transmit")
        common = ["--microbatches", microbatches, "--gradient-groups", 2, "--threads", 1, "--seed", 3, "--clip", 0.5]
        common += ["--steps", STEPS, "--rate", "cosine", "--warmup", 4, "--checkpoints", checkpoints, "--json"]
        if kill_at is not None:
            common += ["--checkpoint-every", 2, "--inject", f"kill rank 0 at 0F1 of step {kill_at}"]
        told = run(["train", *options, *map(str, common), *layout_options], self.folder, kill_at is not None)
        return {event["step"]: event["loss"] for event in told if "loss" in event}

    def last(self, checkpoints):
        """Returns the last checkpoint's step, weights and optimizer's state."""
        newest = max((self.folder / checkpoints).glob("step-????????"))
        tensors = [{}, {}]
        for kind, found in zip(("model", "optimizer"), tensors):
            for path in sorted(newest.glob(f"{kind}-*.safetensors")):
                found.update(load_file(path))
        return int(newest.name.removeprefix("step-")), *tensors


def without(options, name):
    return [o for i, o in enumerate(options) if o != name and (i == 0 or options[i - 1] != name)]


def differing_bits(mine, theirs):
    """Counts differing bits of dicts of arrays, or of losses by step; all bits if one of them lacks an entry."""
    bits = 0
    for name in mine.keys() | theirs.keys():
        pair = [bytes_of(each.get(name)) for each in (mine, theirs)]
        length = max(map(len, pair))
        padded = [np.frombuffer(b.ljust(length, b"\0" if b else b"\xff"), np.uint8) for b in pair]
        bits += int(np.unpackbits(padded[0] ^ padded[1]).sum())
    return bits


def bytes_of(value):
    if value is None:
        return b""
    return struct.pack("<d", value) if isinstance(value, float) else value.tobytes()


def go_on(run, losses, whole_losses, wanted, layout, checkpoints):
    """Bits that differ in weights, in the optimizer's state and in losses from those of a run that nobody killed."""
    step = run.last(checkpoints)[0]
    shutil.copytree(run.folder / checkpoints, run.folder / "again")
    rest = run.train(layout, "again")
    last, weights, state = run.last("again")
    shutil.rmtree(run.folder / "again")
    if min(rest) != step + 1 or last != STEPS:
        sys.exit(f"{checkpoints}, on in {layout}: went on with step {min(rest)} to {last}, the checkpoint is of step {step}")
    mine = {s: loss for s, loss in losses.items() if s <= step} | rest
    return differing_bits(weights, wanted[1]), differing_bits(state, wanted[2]), differing_bits(mine, whole_losses)


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
