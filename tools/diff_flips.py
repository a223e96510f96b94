"""Flips bits in trainings and asks plumb.diff where: prints a table.

    .venv/bin/python tools/diff_flips.py 1000            # flips
    .venv/bin/python tools/diff_flips.py --layouts       # 36 layouts of one training, which must be equal

A flip counts as named right if the first tensor that plumb.diff names has, undisturbed, the bits of the victim, or of what
an operator makes of it directly.
"""

from __future__ import annotations

import argparse
import collections
import pathlib
import random
import subprocess
import sys
import tempfile

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import plumb

RULES = '[[rule]]\nevery = 1\nstatistics = ["hash"]\n'
KINDS = ("wrong value", "rotten value", "wrong gradient", "rotten gradient", "weight", "optimizer state")


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
    flat = x.detach().as_strided((x.numel(),), (1,)) if not x.is_contiguous() else x.detach().view(-1)
    words = flat.view(torch.int32)
    word = int(words[place % len(words)])
    for bit in bits:
        word ^= 1 << bit
    words[place % len(words)] = word - (1 << 32) if word >= 1 << 31 else word


class Watch(TorchDispatchMode):
    """Flips in what the operator number `at` makes, at once or (`late`) when it is used; notes the hashes of both."""

    def __init__(self, at: int | None, late: bool, place: int, bits: list[int]):
        super().__init__()
        self.at, self.late, self.place, self.bits = at, late, place, bits
        self.count, self.phase, self.counts = 0, "forward", collections.Counter()
        self.victim: torch.Tensor | None = None
        self.near: list[int] = []  # hashes of the victim and of what is made of it
        self.flipped = at is None

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        ours = function.namespace == "plumb"
        taken = {storage(x) for x in tensors((args, kwargs or {}))}
        uses = self.victim is not None and storage(self.victim) in taken and not ours
        if uses and not self.flipped:
            flip(self.victim, self.place, self.bits)
            self.flipped = True
        out = function(*args, **(kwargs or {}))
        if ours:
            return out
        for x in tensors(out):
            if x.dtype != torch.float32 or not x.numel():
                continue
            if uses:
                self.near.append(int(torch.ops.plumb.tensor_hash(x)))
            if storage(x) in taken:
                continue
            if self.count == self.at:
                self.victim = x
                self.near.append(int(torch.ops.plumb.tensor_hash(x)))
                if not self.late and not self.flipped:
                    flip(x, self.place, self.bits)
                    self.flipped = True
            self.count += 1
            self.counts[self.phase] += 1
        return out


def train(make, folder: pathlib.Path, name: str, kind: str | None = None, at: int | None = None, place=0, bits=()):
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
            watch = Watch(at if spied else None, "rotten" in str(kind), place, list(bits))
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


def hash_of_first(history: plumb.History, first: dict) -> set[int]:
    return {
        h - (1 << 64) if h >= 1 << 63 else h
        for step, tensor, backward, h in history._engine.hashes()
        if step == first["step"] and history.tensors[tensor]["name"] == first["tensor"]
        and backward == (first["kind"] == "gradient")
    }


def flips(number: int) -> None:
    chance = random.Random(0)
    table: dict[str, collections.Counter] = {kind: collections.Counter() for kind in KINDS}
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        clean, counts, losses = {}, {}, {}
        for make in (Mlp, Convnet, Gpt):
            watch, _, losses[make] = train(make, folder, f"clean.{make.__name__}")
            clean[make], counts[make] = plumb.read_history(folder / f"clean.{make.__name__}"), watch.counts
            again = train(make, folder, f"again.{make.__name__}")
            assert plumb.diff(clean[make], plumb.read_history(folder / f"again.{make.__name__}")).equal, again
        for trial in range(number):
            make, kind = chance.choice((Mlp, Convnet, Gpt)), KINDS[trial % len(KINDS)]
            forward = counts[make]["forward"]
            at = chance.randrange(forward) if "value" in kind else forward + chance.randrange(counts[make]["backward"])
            bits = chance.sample(range(32), 1 if chance.random() < 0.5 else chance.randrange(2, 5))
            place = chance.randrange(1 << 20)
            path = folder / "flipped"
            path.unlink(missing_ok=True)
            watch, victim, loss = train(make, folder, "flipped", kind, at, place, bits)
            # The undisturbed values of the victim and of its users.
            undisturbed, _, _ = train(make, folder, "flipped.clean", None) if victim else (None, None, None)
            (folder / "flipped.clean").unlink(missing_ok=True)
            if victim is None:
                calm = folder / "calm"
                calm.unlink(missing_ok=True)
                undisturbed, _, _ = train(make, folder, "calm", kind, at, place, [])
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
                    bool(near & hash_of_first(clean[make], found.first)) or found.first["kind"] in ("after_step", "optimizer_state")
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


def layouts() -> None:
    """One training in 36 layouts: every tensor of its third step must be the same."""
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        torch.manual_seed(0)
        net = nn.Sequential(*[m for _ in range(8) for m in (nn.LayerNorm(16), nn.Linear(16, 16), nn.GELU())])
        x = torch.randn(128, 16)
        torch.save(x, folder / "x.pt")
        torch.save(x.sin(), folder / "y.pt")
        torch.export.save(torch.export.export(net, (x[:4],)), str(folder / "net.pt2"))
        base = ["plumb", "train", "net.pt2", "--data", "x.pt", "--targets", "y.pt", "--loss", "mse", "--steps", "4", "--threads", "1",
                "--quiet", "--replay", "3", "--gradient-groups", "2"]  # fmt: skip

        def run(history: str, *layout: str) -> None:
            subprocess.run([*base, "--hashes", history, *layout], cwd=folder, check=True)

        run("one.history", "--microbatches", "8")
        for schedule in SCHEDULES:
            for stages, replicas in ((2, 1), (4, 1), (2, 2)):
                history = f"{schedule}.{stages}.{replicas}.history"
                try:
                    run(history, "--schedule", schedule, "--stages", str(stages), "--data-parallel", str(replicas),
                        "--microbatches", str(8 // replicas))  # fmt: skip
                except subprocess.CalledProcessError:
                    print(f"| {schedule} | {stages} x {replicas} | cannot run |", flush=True)
                    continue
                found = plumb.diff(str(folder / "one.history"), str(folder / history))
                said = "equal" if found.equal else found.conclusion
                print(f"| {schedule} | {stages} x {replicas} | {found.compared} | {said} |", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("flips", type=int, nargs="?", default=100)
    parser.add_argument("--layouts", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    layouts() if given.layouts else flips(given.flips)
