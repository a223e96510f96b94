"""Flips bits in trainings and asks plumb.diff where: prints a table.

    .venv/bin/python tools/diff_flips.py 1000              # flips in one process
    .venv/bin/python tools/diff_flips.py --scheduled 700   # flips in one rank of several, under 12 schedules
    .venv/bin/python tools/diff_flips.py --layouts         # 36 layouts of one training, which must be equal, and a wrong message in each

A flip counts as named right if the first tensor that plumb.diff names has, undisturbed, the bits of the victim or of the
first recorded tensors that are made of it. An operator's backward makes tensors that are no gradient of the graph's; what is
recorded of such a victim is that gradient. "wrong kernel" is an operator that is wrong by one unit of the last place in one
element, each time that it runs. Among several ranks the tensor must be the one of the right rank, stage and microbatch, too.
"""

from __future__ import annotations

import argparse
import collections
import json
import pathlib
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta

import numpy
import torch
import torch.distributed as dist
from compared import tensors
from plumb._C import make_schedule
from plumb.pipelining import PipelineStage
from plumb.pipelining.schedules import get_schedule_class
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import plumb

PLUMB = str(pathlib.Path(__file__).parent.parent / "build" / "bin" / "plumb")
RULES = '[[rule]]\nevery = 1\nstatistics = ["hash"]\n'
IN_CALLS = ("wrong value", "rotten value", "wrong gradient", "rotten gradient", "wrong kernel")
KINDS = (*IN_CALLS, "weight", "optimizer state")
AFTER = ("after_step", "optimizer_state")
SCHEDULES = (
    *("GPipe", "1F1B", "ZBH1", "ZBH2", "Interleaved1F1B", "LoopedBFS"),
    *("InterleavedZeroBubble", "ZBVZeroBubble", "VHalf", "VMin", "DualPipe", "DualPipeV"),
)


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


MODELS = (Mlp, Convnet, Gpt)


def storage(x: torch.Tensor) -> int:
    return x.untyped_storage().data_ptr() if x.numel() else 0


def flip_bits(x: torch.Tensor, place: int, bits: tuple[int, ...]) -> None:
    """In memory, behind autograd's back."""
    words = x.detach().numpy().view(numpy.uint32)
    for bit in bits:
        words.flat[place % words.size] ^= numpy.uint32(1 << bit)


@dataclass
class Flip:
    """`kind` None: no flip. `at`: the operator call whose result is flipped, or a number of a parameter. `bits`: of the
    element of this `place`; none: the victim is only watched. `recorded`: hashes of the undisturbed training."""

    kind: str | None = None
    at: int | None = None
    place: int = 0
    bits: tuple[int, ...] = ()
    recorded: frozenset[int] = frozenset()

    @classmethod
    def by_chance(cls, kind: str, phases: list[str], chance: random.Random) -> Flip:
        backward = "gradient" in kind or (kind == "wrong kernel" and chance.random() < 0.5)
        at = chance.choice([i for i, phase in enumerate(phases) if (phase == "backward") == backward])
        bits = [0]
        if kind != "wrong kernel":
            bits = chance.sample(range(32), 1 if chance.random() < 0.5 else chance.randrange(2, 5))
        return cls(kind, at, chance.randrange(1 << 20), tuple(bits))


class Watch(TorchDispatchMode):
    """Flips in what the operator call `at` makes: at once, when it is used ("rotten"), or in what each call of that operator
    makes ("wrong kernel"). Notes the hashes of the victim and of what is made of it, up to the recorded ones."""

    def __init__(self, flip: Flip):
        super().__init__()
        self.at, self.late, self.all_alike = flip.at, "rotten" in str(flip.kind), flip.kind == "wrong kernel"
        self.place, self.bits, self.recorded = flip.place, flip.bits, flip.recorded
        self.phases: list[str] = []  # the phase of each result of an operator call
        self.wrong = None  # the operator of the victim
        self.made_of: list[torch.Tensor] = []  # the victim, and what is made of it and not recorded
        self.near: list[int] = []
        self.flipped = flip.at is None

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "plumb":
            return function(*args, **(kwargs or {}))
        taken = {storage(x) for x in tensors((args, kwargs or {}))}
        uses = any(storage(x) in taken for x in self.made_of)
        if uses and not self.flipped:
            flip_bits(self.made_of[0], self.place, self.bits)
            self.flipped = True
        out = function(*args, **(kwargs or {}))
        for x in tensors(out):
            if x.dtype != torch.float32 or not x.numel():
                continue
            if uses:
                self.note(x)
            if storage(x) in taken or "empty" in function.__name__:
                continue
            here = len(self.phases) == self.at
            if here:
                self.wrong = function
            if here or (self.all_alike and function is self.wrong):
                self.note(x, victim=True)
                if not self.late:
                    flip_bits(x, self.place, self.bits)
                    self.flipped = True
            self.phases.append("forward" if torch._C._current_graph_task_id() < 0 else "backward")
        return out

    def note(self, x: torch.Tensor, victim: bool = False) -> None:
        self.near.append(int(torch.ops.plumb.tensor_hash(x)))
        if victim or self.near[-1] not in self.recorded:
            self.made_of.append(x)


Modules = dict[int, nn.Module]  # by stage; -1: the whole model


def train(modules: Modules, run: Callable[[], float], path: pathlib.Path, flip: Flip, rank: int | None = None):
    """Three steps, the flip in the second. Returns the watch of that step, the flipped parameter's stage and name, and the
    last loss. `run` does the forward and backward of a step."""
    parameters = [(stage, name, p) for stage, m in modules.items() for name, p in m.named_parameters()]
    optimizer = torch.optim.AdamW([p for _, _, p in parameters], lr=1e-2, foreach=False)
    victim = None
    rules = path.with_suffix(f".rules{rank}")
    rules.write_text(RULES)
    with plumb.Recorder(modules.get(-1, modules), rules, path, rank=rank) as recorder:
        for step in range(3):
            optimizer.zero_grad()
            if step == 1 and flip.kind and flip.kind not in IN_CALLS:
                *victim, p = parameters[flip.at % len(parameters)]
                state = optimizer.state[p][("exp_avg", "exp_avg_sq")[flip.place % 2]]
                flip_bits(p.data if flip.kind == "weight" else state, flip.place, flip.bits)
            watch = Watch(flip if step == 1 and flip.kind in IN_CALLS else Flip())
            if step == 1:
                seen = watch
            with watch:
                loss = run()
            optimizer.step()
            recorder.hash_state(optimizer)
            recorder.step(loss=loss)
    return seen, victim, loss


def train_alone(make, path: pathlib.Path, flip: Flip = Flip()):
    torch.manual_seed(0)
    net = make()
    generator = torch.Generator().manual_seed(1)

    def run() -> float:
        x = torch.randn(8, 16, generator=generator)
        loss = (net(x) - x[:, :4].sin()).pow(2).mean()
        loss.backward()
        return loss.item()

    return train({-1: net}, run, path, flip)


def hashes(history: plumb.History, first: dict | None = None, anywhere: bool = False) -> frozenset[int]:
    """Returns the hashes of the second step, or of the tensor that a diff names first; `anywhere`: those of its name on all
    ranks, in all stages and microbatches."""

    def fits(tensor: dict, backward: bool, row: int) -> bool:
        if first is None:
            return True
        place = [-1 if tensor[key] is None else tensor[key] for key in ("stage", "rank")]
        right = anywhere or [*place, row] == [first["stage"], first["rank"], first["first_row"]]
        return right and tensor["name"] == first["tensor"] and backward == (first["kind"] == "gradient")

    return frozenset(
        h - (1 << 64) if h >= 1 << 63 else h
        for step, tensor, backward, h, row in history._engine.hashes()
        if step == 2 and fits(history.tensors[tensor], backward, row)
    )


def named(clean: plumb.History, first: dict, watch: Watch, victim: list | None, rank: int | None = None) -> str:
    """Returns "named", "wrong place" if only the rank, stage or microbatch is wrong, or "other". `watch` has seen the
    undisturbed training on the victim's rank."""
    here = rank is None or first["rank"] == rank
    if victim:
        stage, name = victim
        right = first["step"] in (1, 2) and first["tensor"].endswith(name)
        return "other" if not right else "named" if here and first["stage"] == stage else "wrong place"
    if first["step"] != 2:
        return "other"
    if first["kind"] in AFTER:  # a sum of gradients, which is not recorded
        sizes = next(t["sizes"] for t in clean.tensors if t["name"] == first["tensor"])
        if all(torch.Size(sizes).numel() != x.numel() for x in watch.made_of):
            return "other"
        holders = {t["rank"] for t in clean.tensors if t["stage"] == first["stage"]}
        return "named" if rank is None or {rank, first["rank"]} <= holders else "wrong place"
    near, found = set(watch.near), hashes(clean, first)
    if near & found and (here or watch.near[0] in found):  # on the rank that the victim was sent to, else
        return "named"
    return "wrong place" if near & hashes(clean, first, anywhere=True) else "other"


def print_table(table: dict[str, collections.Counter], keys: tuple[str, ...]) -> None:
    print("| flipped | " + " | ".join(keys) + " |\n|---|" + "---:|" * len(keys))
    for kind, row in table.items():
        print(f"| {kind} | " + " | ".join(str(row[key]) for key in keys) + " |")


def flips(number: int) -> None:
    chance = random.Random(0)
    table: dict[str, collections.Counter] = {kind: collections.Counter() for kind in KINDS}
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        clean, phases, losses, recorded = {}, {}, {}, {}
        for make in MODELS:
            watch, _, losses[make] = train_alone(make, folder / f"clean.{make.__name__}")
            clean[make], phases[make] = plumb.read_history(folder / f"clean.{make.__name__}"), watch.phases
            recorded[make] = hashes(clean[make])
            train_alone(make, folder / f"again.{make.__name__}")
            assert plumb.diff(clean[make], folder / f"again.{make.__name__}").equal
        for trial in range(number):
            make, kind = chance.choice(MODELS), KINDS[trial % len(KINDS)]
            flip = Flip.by_chance(kind, phases[make], chance)
            for old in ("flipped", "calm"):
                (folder / old).unlink(missing_ok=True)
            watch, victim, loss = train_alone(make, folder / "flipped", flip)
            if victim is None:  # the undisturbed values of the victim and of its users
                watch, _, _ = train_alone(make, folder / "calm", replace(flip, bits=(), recorded=recorded[make]))
            row = table[kind]
            row["flips"] += 1
            row["same loss"] += loss == losses[make]
            row["loss within 1e-3"] += abs(loss - losses[make]) < 1e-3
            found = plumb.diff(clean[make], folder / "flipped")
            what = "without effect" if found.equal else named(clean[make], found.first, watch, victim)
            row[what] += 1
            if what == "other":
                print("OTHER", make.__name__, flip, found.conclusion, file=sys.stderr)
    print_table(table, ("flips", "named", "without effect", "same loss", "loss within 1e-3"))


class Layout:
    """This rank's place in `replicas` pipelines of `ranks` ranks each."""

    def __init__(self, rank: int, ranks: int, replicas: int):
        self.rank, self.ranks, self.replicas = rank, ranks, replicas
        self.replica, self.index = divmod(rank, ranks)
        pipes = [dist.new_group([r * ranks + i for i in range(ranks)]) for r in range(replicas)]
        alike = [dist.new_group([r * ranks + i for r in range(replicas)]) for i in range(ranks)]
        self.pipe, self.alike = pipes[self.replica], alike[self.index]

    def of_replicas(self, module: nn.Module) -> nn.Module:
        several = self.replicas > 1
        return nn.parallel.DistributedDataParallel(module, process_group=self.alike) if several else module

    def train(self, make, schedule: str, path: pathlib.Path, flip: Flip = Flip()):
        microbatches = 2 * self.ranks
        table = make_schedule(schedule, self.ranks, microbatches).csv().split()
        placement = [{int(stage) for stage in re.findall(r"(\d+)F\d", row)} for row in table]
        last = max(max(stages) for stages in placement)
        torch.manual_seed(0)
        made = [make() if i == last else nn.Sequential(make(), nn.Linear(4, 16)) for i in range(last + 1)]
        here = {i: made[i] for i in sorted(placement[self.index])}
        stages = [PipelineStage(self.of_replicas(m), i, last + 1, "cpu", group=self.pipe) for i, m in here.items()]
        runner = get_schedule_class(schedule)(stages if len(stages) > 1 else stages[0], microbatches, nn.MSELoss())
        generator = torch.Generator().manual_seed(1)
        rows = 2 * microbatches

        def run() -> float:
            x = torch.randn(self.replicas * rows, 16, generator=generator)[self.replica * rows :][:rows]
            losses: list[torch.Tensor] = []
            target = {"target": x[:, :4].sin(), "losses": losses} if last in here else {}
            runner.step(*([x] if 0 in here else []), **target)
            return sum(loss.item() for loss in losses)

        return train(here, run, path, flip, self.rank)


def scheduled_rank(rank: int, ranks: int, replicas: int, numbers: list[int], folder: pathlib.Path) -> None:
    """Trains with a flip in one of the ranks, for each number; that rank writes how it was named, a line of JSON each."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks * replicas,
                            timeout=timedelta(minutes=5))  # fmt: skip
    layout, known = Layout(rank, ranks, replicas), {}
    with open(folder / f"results{rank}", "w") as results:
        for number in numbers:
            chance = random.Random(number)
            make, schedule = chance.choice(MODELS), chance.choice(SCHEDULES)
            kind = KINDS[number % len(KINDS)]
            of = f"{schedule}.{make.__name__}"
            if of not in known:
                watch, _, _ = layout.train(make, schedule, folder / f"{of}.clean")
                layout.train(make, schedule, folder / f"{of}.again")
                dist.barrier()
                clean = plumb.read_history(folder / f"{of}.clean")
                assert (again := plumb.diff(clean, folder / f"{of}.again")).equal, again
                known[of] = clean, hashes(clean), watch.phases
            clean, recorded, phases = known[of]
            mine = chance.randrange(ranks * replicas) == rank
            flip = Flip.by_chance(kind, phases, chance) if mine else Flip()
            watch, victim, _ = layout.train(make, schedule, folder / f"{number}.flipped", flip)
            if kind in IN_CALLS:
                calm = replace(flip, bits=(), recorded=recorded)
                watch, _, _ = layout.train(make, schedule, folder / f"{number}.calm", calm)
            dist.barrier()
            if not mine:
                continue
            found = plumb.diff(clean, folder / f"{number}.flipped")
            what = "without effect" if found.equal else named(clean, found.first, watch, victim, rank)
            for old in folder.glob(f"{number}.*.rank*"):
                old.unlink()
            print(json.dumps([kind, schedule, what]), file=results, flush=True)
            if what in ("other", "wrong place"):
                place = f"rank {rank} of {ranks} x {replicas}: {victim or watch.wrong}"
                print(what.upper(), number, of, place, flip, found.conclusion, file=sys.stderr)
    dist.destroy_process_group()


def scheduled(number: int) -> None:
    """A quarter each on 2 and on 4 ranks, with 1 and with 2 replicas."""
    table: dict[str, collections.Counter] = {kind: collections.Counter() for kind in KINDS}
    schedules = {name: collections.Counter() for name in SCHEDULES}
    for i, (ranks, replicas) in enumerate(((2, 1), (4, 1), (2, 2), (4, 2))):
        with tempfile.TemporaryDirectory() as name:
            folder = pathlib.Path(name)
            mine = list(range(number))[i::4]
            torch.multiprocessing.spawn(scheduled_rank, (ranks, replicas, mine, folder), ranks * replicas)
            for path in folder.glob("results*"):
                for line in path.read_text().splitlines():
                    kind, schedule, what = json.loads(line)
                    for row in (table[kind], schedules[schedule]):
                        row["flips"] += 1
                        row[what] += 1
    for each in (table, schedules):
        print_table(each, ("flips", "named", "without effect", "wrong place", "other"))


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
    parser.add_argument("--scheduled", type=int, metavar="FLIPS")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.scheduled:
        scheduled(given.scheduled)
    elif given.layouts is None:
        flips(given.flips)
    else:
        layouts(given.layouts or SCHEDULES)
