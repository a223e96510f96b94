"""Trainings that die in one layout and go on in another, for test_layouts.py and tools/layouts_table.py."""

import shutil
import struct
import sys

import numpy as np
from command import run
from safetensors.numpy import load_file

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
