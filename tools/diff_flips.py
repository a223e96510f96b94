"""Flips bits in trainings and asks plumb.diff where: prints a table.

    .venv/bin/python tools/diff_flips.py 1000            # flips
    .venv/bin/python tools/diff_flips.py --layouts       # 36 layouts of one training, which must be equal, and a wrong message in each

A flip counts as named right if the first tensor that plumb.diff names has, undisturbed, the bits of the victim or of the
first recorded tensors that are made of it. An operator's backward makes tensors that are no gradient of the graph's; what is
recorded of such a victim is that gradient. "wrong kernel" is an operator that is wrong by one unit of the last place in one
element, each time that it runs.
"""

from __future__ import annotations

import argparse
import collections
import pathlib
import random
import re
import subprocess
import sys
import tempfile

import numpy
import torch
from plumb._C import make_schedule
from torch import nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import plumb

PLUMB = str(pathlib.Path(__file__).parent.parent / "build" / "bin" / "plumb")
RULES = '[[rule]]\nevery = 1\nstatistics = ["hash"]\n'
KINDS = ("wrong value", "rotten value", "wrong gradient", "rotten gradient", "wrong kernel", "weight", "optimizer state")


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.a, self.b, self.c = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 32), nn.Linear(32, 4)

    def forward(self, x):
        h = F.gelu(self.a(self.norm(x)))
        return self.c(h + F.silu(self.b(h)))


class Convnet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.pool, self.head = nn.Conv2d(1, 6, 3, padding=1), nn.AvgPool2d(2), nn.Linear(24, 4)

    def forward(self, x):
        return self.head(self.pool(torch.relu(self.conv(x.unflatten(1, (1, 4, 4))))).flatten(1))


class Gpt(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Linear(4, 16), nn.Linear(16, 1)
        self.norm, self.qkv, self.proj = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)
        self.norm2, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        h = self.embed(x.unflatten(1, (4, 4)))
        q, k, v = (t.unflatten(2, (2, 8)).transpose(1, 2) for t in self.qkv(self.norm(h)).chunk(3, 2))
        h = h + self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return self.head(h + self.down(F.gelu(self.up(self.norm2(h))))).flatten(1)


def storage(x: torch.Tensor) -> int:
    return x.untyped_storage().data_ptr() if x.numel() else 0


def tensors(tree: object) -> list[torch.Tensor]:
    return [x for x in pytree.tree_leaves(tree) if isinstance(x, torch.Tensor)]


def flip(x: torch.Tensor, place: int, bits: list[int]) -> None:
    """In memory, behind autograd's back."""
    words = x.detach().numpy().view(numpy.uint32)
    for bit in bits:
        words.flat[place % words.size] ^= numpy.uint32(1 << bit)


class Watch(TorchDispatchMode):
    """Flips in what the operator call `at` makes: at once, (`late`) when it is used, or (`all_alike`) in what each call of
    that operator makes. Notes the hashes of the victim and of what is made of it, up to those in `recorded`."""

    def __init__(self, at: int | None, late: bool, all_alike: bool, place: int, bits: list[int], recorded: set[int]):
        super().__init__()
        self.at, self.late, self.all_alike, self.place, self.bits = at, late, all_alike, place, bits
        self.recorded = recorded
        self.count, self.phase, self.counts = 0, "forward", collections.Counter()
        self.wrong = None  # the operator of the victim
        self.made_of: list[torch.Tensor] = []  # the victim, and what is made of it and not recorded
        self.near: list[int] = []
        self.flipped = at is None

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "plumb":
            return function(*args, **(kwargs or {}))
        taken = {storage(x) for x in tensors((args, kwargs or {}))}
        uses = any(storage(x) in taken for x in self.made_of)
        if uses and not self.flipped:
            flip(self.made_of[0], self.place, self.bits)
            self.flipped = True
        out = function(*args, **(kwargs or {}))
        for x in tensors(out):
            if x.dtype != torch.float32 or not x.numel():
                continue
            if uses:
                self.note(x)
            if storage(x) in taken:
                continue
            if self.count == self.at:
                self.wrong = function
            if self.count == self.at or (self.all_alike and function is self.wrong):
                self.note(x, victim=True)
                if not self.late:
                    flip(x, self.place, self.bits)
                    self.flipped = True
            self.count += 1
            self.counts[self.phase] += 1
        return out

    def note(self, x: torch.Tensor, victim: bool = False) -> None:
        self.near.append(int(torch.ops.plumb.tensor_hash(x)))
        if victim or self.near[-1] not in self.recorded:
            self.made_of.append(x)


def train(make, folder: pathlib.Path, name: str, kind: str | None = None, at: int | None = None, place=0, bits=(),
          recorded=frozenset()):  # fmt: skip
    """Three steps, the flip in the second; returns the watch of that step and the victim's name, if it is known."""
    torch.manual_seed(0)
    net = make()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, foreach=False)
    generator = torch.Generator().manual_seed(1)
    victim = None
    rules = folder / "rules.toml"
    rules.write_text(RULES)
    with plumb.Recorder(net, rules, folder / name) as recorder:
        for step in range(3):
            x = torch.randn(8, 16, generator=generator)
            optimizer.zero_grad()
            parameters = list(net.named_parameters())
            if step == 1 and kind in ("weight", "optimizer state"):
                victim, p = parameters[at % len(parameters)]
                target = p.data if kind == "weight" else optimizer.state[p][("exp_avg", "exp_avg_sq")[place % 2]]
                flip(target, place, bits)
            spied = step == 1 and kind not in ("weight", "optimizer state")
            alike = kind == "wrong kernel"
            watch = Watch(at if spied else None, "rotten" in str(kind), alike, place, list(bits), recorded)
            if step == 1:
                seen = watch
            with watch:
                loss = (net(x) - x[:, :4].sin()).pow(2).mean()
                watch.phase = "backward"
                loss.backward()
            optimizer.step()
            recorder.hash_state(optimizer)
            recorder.step(loss=loss)
    return seen, victim, loss.item()


def hashes(history: plumb.History, first: dict | None = None) -> set[int]:
    """Returns the hashes of the second step, or of the tensor that a diff names first."""
    return {
        h - (1 << 64) if h >= 1 << 63 else h
        for step, tensor, backward, h in history._engine.hashes()
        if step == 2 and (first is None or (history.tensors[tensor]["name"] == first["tensor"]
                                            and backward == (first["kind"] == "gradient")))
    }  # fmt: skip


def flips(number: int) -> None:
    chance = random.Random(0)
    table: dict[str, collections.Counter] = {kind: collections.Counter() for kind in KINDS}
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        clean, counts, losses, recorded = {}, {}, {}, {}
        for make in (Mlp, Convnet, Gpt):
            watch, _, losses[make] = train(make, folder, f"clean.{make.__name__}")
            clean[make], counts[make] = plumb.read_history(folder / f"clean.{make.__name__}"), watch.counts
            recorded[make] = hashes(clean[make])
            again = train(make, folder, f"again.{make.__name__}")
            assert plumb.diff(clean[make], plumb.read_history(folder / f"again.{make.__name__}")).equal, again
        for trial in range(number):
            make, kind = chance.choice((Mlp, Convnet, Gpt)), KINDS[trial % len(KINDS)]
            forward = counts[make]["forward"]
            backward = "gradient" in kind or (kind == "wrong kernel" and chance.random() < 0.5)
            at = forward + chance.randrange(counts[make]["backward"]) if backward else chance.randrange(forward)
            bits = [0] if kind == "wrong kernel" else chance.sample(range(32), 1 if chance.random() < 0.5 else chance.randrange(2, 5))
            place = chance.randrange(1 << 20)
            path = folder / "flipped"
            path.unlink(missing_ok=True)
            watch, victim, loss = train(make, folder, "flipped", kind, at, place, bits)
            if victim is None:  # the undisturbed values of the victim and of its users
                (folder / "calm").unlink(missing_ok=True)
                undisturbed, _, _ = train(make, folder, "calm", kind, at, place, [], recorded[make])
            row = table[kind]
            row["flips"] += 1
            row["same loss"] += loss == losses[make]
            row["loss within 1e-3"] += abs(loss - losses[make]) < 1e-3
            found = plumb.diff(clean[make], plumb.read_history(path))
            if found.equal:
                row["without effect"] += 1
            elif victim:
                row["named"] += found.first["step"] in (1, 2) and victim in found.first["tensor"]
            else:
                near = set(undisturbed.near)
                right = found.first["step"] == 2 and (
                    bool(near & hashes(clean[make], found.first)) or found.first["kind"] in ("after_step", "optimizer_state")
                )
                row["named"] += right
                if not right:
                    print("OTHER", make.__name__, kind, at, bits, found.conclusion, file=sys.stderr)
    keys = ("flips", "named", "without effect", "same loss", "loss within 1e-3")
    print("| flipped | " + " | ".join(keys) + " |\n|---|" + "---:|" * len(keys))
    for kind, row in table.items():
        print(f"| {kind} | " + " | ".join(str(row[key]) for key in keys) + " |")


SCHEDULES = (
    "GPipe 1F1B ZBH1 ZBH2 Interleaved1F1B LoopedBFS InterleavedZeroBubble ZBVZeroBubble VHalf VMin DualPipe DualPipeV".split()
)


def layouts(schedules: list[str]) -> None:
    """One training in 36 layouts: every tensor of its third step must be the same. In each, a rank takes a wrong message: a
    bit of what reaches one of its stages is flipped, in a microbatch by chance."""
    chance = random.Random(0)
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        torch.manual_seed(0)
        net = nn.Sequential(*[m for _ in range(8) for m in (nn.LayerNorm(16), nn.Linear(16, 16), nn.GELU())])
        x = torch.randn(128, 16)
        torch.save(x, folder / "x.pt")
        torch.save(x.sin(), folder / "y.pt")
        torch.export.save(torch.export.export(net, (x[:4],)), str(folder / "net.pt2"))
        base = [PLUMB, "train", "net.pt2", "--data", "x.pt", "--targets", "y.pt", "--loss", "mse", "--steps", "4", "--threads", "1",
                "--quiet", "--replay", "3"]  # fmt: skip

        def run(history: str, *layout: str) -> plumb.Diff | None:
            for old in folder.glob(history + "*"):
                old.unlink()
            done = subprocess.run([*base, "--hashes", history, *layout], cwd=folder, capture_output=True, text=True)
            if done.returncode != 0:
                print(done.stderr.strip().splitlines()[-1][:300], file=sys.stderr)
            return None if done.returncode != 0 else plumb.diff(str(folder / one), str(folder / history))

        for one, groups in (("one2.history", "2"), ("one4.history", "4")):
            run(one, "--microbatches", "8", "--gradient-groups", groups)
        for schedule in schedules:
            for stages, replicas in ((2, 1), (4, 1), (2, 2)):
                layout = ["--schedule", schedule, "--stages", str(stages), "--data-parallel", str(replicas),
                          "--microbatches", str(8 // replicas)]  # fmt: skip
                one = "one2.history"
                if schedule != "DualPipe":
                    layout += ["--gradient-groups", "2"]
                elif replicas == 2:  # it has two groups a replica by itself, and takes no more
                    one = "one4.history"
                found = run("other.history", *layout)
                if found is None:
                    print(f"| {schedule} | {stages} x {replicas} | cannot run | |", flush=True)
                    continue
                rows = make_schedule(schedule, stages, 8 // replicas).csv().split()
                rank, at = chance.choice([(rank + replica * stages, at) for replica in range(replicas)
                                          for rank, row in enumerate(rows)
                                          for at in re.findall(r"\b[1-9]\d*F\d+\b", row)])  # fmt: skip
                spoiled = run("spoiled.history", *layout, "--inject", f"flip rank {rank} at {at} of step 3")
                said = f"{at} of rank {rank}: {spoiled and spoiled.conclusion}"
                print(f"| {schedule} | {stages} x {replicas} | {found.compared} | "
                      f"{'equal' if found.equal else found.conclusion} | {said} |", flush=True)  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("flips", type=int, nargs="?", default=100)
    parser.add_argument("--layouts", nargs="*", choices=SCHEDULES)
    given = parser.parse_args()
    torch.set_num_threads(1)
    flips(given.flips) if given.layouts is None else layouts(given.layouts or SCHEDULES)
