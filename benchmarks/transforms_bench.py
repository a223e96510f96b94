"""Transformed modules beside eager: training steps, first calls, memory, tracking of small operators, large graphs.

Prints Markdown. One thread, the Python front end. Times are the thread's own processor time, every variant's step next to
an eager one in turn in one process; what counts is the median of those ratios. A step is forward and backward. Peaks are
exact: every allocation of torch's CPU allocator in a step is counted, parameters not. The oracle, the package
unit-scaling, is measured in the same rounds where it can be imported.

`resident` is what a process of its own holds after 20 steps, with malloc's settings as they are.

    transforms_bench.py [steps|models|chain|large|resident] [--quick] [--only=NAME,...]
"""

from __future__ import annotations

import copy
import gc
import json
import statistics
import subprocess
import sys
import warnings
from typing import Any, Callable

import torch
from execution_bench import load_cases, status, table, timed, verdict
from plumb._transformed import forward_of
from plumb.transforms._apply import CapturedGraph, Pass, apply_pass
from torch import nn

import plumb
from plumb import transforms as T

try:
    from unit_scaling import transforms as oracle
except ImportError:
    oracle = None

SIZE = dict(vocab=512, context=128, d=256, layers=4, h=4)
BATCH = 8


def without_positions() -> type:
    """Returns a model without positions: the oracle fails on `tok + pos`, as its model has no such sum."""
    from zoo import GPT

    class Model(GPT):
        def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> tuple:
            x = self.tok(ids)
            for block in self.blocks:
                x = block(x)
            logits = self.head(self.ln(x))
            return logits, nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    return Model


class Step:
    def __init__(self, transform: Callable[[nn.Module], nn.Module] | None = None, positions: bool = True) -> None:
        from zoo import GPT

        torch.manual_seed(0)
        self.model: nn.Module = (GPT if positions else without_positions())(**SIZE)
        self.ids, self.targets = torch.randint(512, (2, BATCH, SIZE["context"]))
        if transform:
            self.model = transform(self.model)

    def __call__(self) -> None:
        loss = self.model(self.ids, self.targets)[1]
        loss.backward()
        self.model.zero_grad(set_to_none=True)


def seconds_of_first_call(transform: Callable[[nn.Module], nn.Module], eager: float, positions: bool) -> float:
    """Seconds of transforming and the first step, beyond an eager step."""

    def first() -> None:
        Step(transform, positions)()

    build = timed(Step)
    return timed(first) - build - eager


def variants() -> dict[str, tuple[Callable[[nn.Module], nn.Module], float | None]]:
    found: dict[str, tuple[Callable[[nn.Module], nn.Module], float | None]] = {
        "captured": (_captured, None),
        "unit_scale": (T.unit_scale, 1.05),
        "optimise(unit_scale)": (lambda m: _optimised(T.unit_scale(m)), 1.05),
        "simulate_fp8": (T.simulate_fp8, 1.20),
        "simulate_fp8(unit_scale)": (lambda m: T.simulate_fp8(T.unit_scale(m)), 1.22),
        "track_scales": (T.track_scales, 1.15),
        "track_scales with histogram": (lambda m: T.track_scales(m, histogram=True), 1.22),
    }
    if oracle:
        found["oracle: unit_scale"] = (oracle.unit_scale, None)
        found["oracle: simulate_fp8"] = (oracle.simulate_fp8, None)
        found["oracle: simulate_fp8(unit_scale)"] = (lambda m: oracle.simulate_fp8(oracle.unit_scale(m)), None)
        found["oracle: track_scales"] = (oracle.track_scales, None)
    return found


def _optimised(model: nn.Module) -> nn.Module:
    def run(_: nn.Module, captured: CapturedGraph) -> dict:
        captured.engine.run_passes(["optimise"])
        return {"pass": "optimise", "entries": []}

    return apply_pass(model, Pass("optimise", run))


def _captured(model: nn.Module) -> nn.Module:
    ids = torch.zeros(BATCH, SIZE["context"], dtype=torch.long)
    return plumb.capture(model, ids, ids)


def steps(rounds: int, only: list[str]) -> None:
    cases = load_cases()
    eager = Step()
    for _ in range(2):
        eager()
    base = statistics.median(timed(eager) for _ in range(3))
    made, first = {}, {}
    for name, (transform, bar) in variants().items():
        if only and name not in only:
            continue
        ours = not name.startswith("oracle")
        seconds_of_first_call(transform, base, ours)  # warm: libraries loaded, operators looked up
        first[name] = min(seconds_of_first_call(transform, base, ours) for _ in range(3))
        made[name] = (Step(transform, ours), bar)
    ratios: dict[str, list[float]] = {name: [] for name in made}
    for step, _ in made.values():
        step()
    times = []
    for r in range(rounds):
        for name, (step, _) in made.items():
            if name.startswith("oracle") and r >= 5:
                continue
            if r % 2:
                mine, other = timed(step), timed(eager)
            else:
                other, mine = timed(eager), timed(step)
            times.append(other)
            ratios[name].append(mine / other)
    peaks = {}
    for name, (step, _) in [("eager", (eager, None)), *made.items()]:
        if name.startswith("oracle"):  # its autograd functions take the counter for a profiler
            continue
        cases.count_allocations()
        step()
        peaks[name] = cases.peak_of_allocations()
    rows = []
    for name, (_, bar) in made.items():
        ratio, memory = statistics.median(ratios[name]), peaks.get(name, 0) / peaks["eager"]
        rows.append(
            [
                name,
                f"{ratio:.3f}",
                f"{min(ratios[name]):.2f} to {max(ratios[name]):.2f}",
                verdict(ratio, bar) if bar else "",
                f"{first[name]:.3f}",
                verdict(first[name], 0.1) if bar else "",
                f"{memory - 1:+.1%}" if memory else "",
                verdict(memory, 1.1) if bar else "",
            ]
        )
    print(
        f"\nStep of a GPT (4 layers, width 256, 4 heads, batch 8 x 128, vocabulary 512), over eager's"
        f" {statistics.median(times) * 1e3:.0f} ms and {peaks['eager'] / 2**20:.1f} MiB; {rounds} pairs."
    )
    table(["", "ratio", "range", "bar", "first call, s", "bar", "peak memory", "bar"], rows)


class TinyOperators(nn.Module):
    """Many operators on few numbers, some in chains, some not."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, layer in enumerate(self.layers):
            y = layer(x) * 0.5
            y = nn.functional.gelu(y) if i % 2 else torch.tanh(y) * torch.sigmoid(y) + 1.0
            x = (x + y) / 1.5
        return x


class LSTM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(64, 128, batch_first=True), nn.Linear(128, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.rnn(x)[0]) * 0.5)


def convolutional() -> nn.Module:
    def block(inputs: int, outputs: int) -> list[nn.Module]:
        return [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]

    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)]
    return nn.Sequential(*block(3, 32), nn.MaxPool2d(2), *block(32, 64), nn.SiLU(), *head)


def small_models() -> dict[str, Callable[[], tuple[nn.Module, torch.Tensor]]]:
    from zoo import LlamaBlock

    encoder = dict(d_model=128, nhead=4, dim_feedforward=512, activation="gelu", batch_first=True)
    return {
        "convolutions, batch norm": lambda: (convolutional(), torch.randn(8, 3, 32, 32)),
        "LSTM": lambda: (LSTM(), torch.randn(16, 32, 64)),
        "Llama block": lambda: (LlamaBlock(256, 4, 704), torch.randn(2, 128, 256)),
        "tiny operators": lambda: (TinyOperators(), torch.randn(8, 16)),
        "encoder like BERT": lambda: (nn.TransformerEncoderLayer(**encoder), torch.randn(4, 64, 128)),
    }


def models(rounds: int, only: list[str]) -> None:
    """Effect of `optimise` on graphs of several kinds: it must make none slower."""
    rows = []
    for name, make in small_models().items():
        if only and name not in only:
            continue
        for transform in ("captured", "unit_scale"):
            steps, nodes = [], []
            for passes in (lambda m: m, _optimised):
                torch.manual_seed(0)
                model, x = make()
                model = passes(T.unit_scale(model) if transform == "unit_scale" else _again(model))

                def step(model: nn.Module = model, x: torch.Tensor = x) -> None:
                    model(x).square().mean().backward()
                    model.zero_grad(set_to_none=True)

                for _ in range(5):
                    step()
                nodes.append(len(forward_of(model).last.engine.graph.nodes))
                steps.append(step)
            ratios, times = [], []
            for r in range(rounds):
                seconds = dict((i, timed(steps[i])) for i in ((0, 1) if r % 2 else (1, 0)))
                ratios.append(seconds[1] / seconds[0])
                times.append(seconds[0])
            ratio = statistics.median(ratios)
            low, _, high = statistics.quantiles(ratios, n=4)
            rows.append(
                [
                    name,
                    transform,
                    f"{statistics.median(times) * 1e3:.2f}",
                    f"{nodes[0]} to {nodes[1]}",
                    f"{ratio:.3f}",
                    f"{low:.2f} to {high:.2f}",
                    verdict(ratio, 1.02),
                ]
            )
    print(f"\nSteps of optimized graphs over those of the same graphs as they were; {rounds} pairs, middle half as range.")
    table(["", "graph", "ms", "nodes", "ratio", "range", "bar"], rows)


def _again(model: nn.Module) -> nn.Module:
    return apply_pass(model, Pass("nothing", lambda _, captured: {"pass": "nothing", "entries": []}))


class Chain(nn.Module):
    def __init__(self, length: int) -> None:
        super().__init__()
        self.length = length

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.length):
            x = x * 1.0001
        return x


def chain(rounds: int) -> None:
    x = torch.ones(16, requires_grad=True)
    eager = Chain(1000)
    models = {"eager": eager, "captured": plumb.capture(eager, x), "tracked": T.track_scales(eager)}
    models["tracked with histogram"] = T.track_scales(eager, histogram=True)
    if oracle:
        models["oracle: tracked"] = oracle.track_scales(copy.deepcopy(eager))
    best = dict.fromkeys(models, (1e9, 1e9))
    for r in range(rounds):
        for name, model in models.items():
            if name.startswith("oracle") and r >= 5:
                continue
            y = None

            def forward(model: nn.Module = model) -> None:
                nonlocal y
                y = model(x)

            f = timed(forward)
            b = timed(y.sum().backward)
            best[name] = (min(best[name][0], f), min(best[name][1], b))
            x.grad = None
    rows = []
    for name, (f, b) in best.items():
        over = "eager" if name.startswith("oracle") else "captured"
        cost = [(one - other) * 1e3 for one, other in zip((f, b), best[over])]
        tracked = "tracked" in name
        rows.append(
            [
                name,
                f"{f * 1e3:.2f}",
                f"{b * 1e3:.2f}",
                *(f"{c:.2f}" if tracked else "" for c in cost),
                verdict(cost[0], 3, " us") if name.startswith("tracked") else "",
            ]
        )
    print(
        "\nChain of 1,000 `x * 1.0001` on 16 floats: microseconds a node, and what tracking adds to the untracked graph"
    )
    print("(the oracle's: to eager).")
    table(["", "forward", "backward", "tracking, forward", "tracking, backward", "bar"], rows)


def large(nodes: int) -> None:
    x = torch.ones(16, requires_grad=True)
    model = Chain(nodes)
    rows = []

    def work(name: str, run: Callable[[], Any]) -> Any:
        result = None

        def keep() -> None:
            nonlocal result
            result = run()

        seconds = timed(keep)
        rows.append([name, f"{seconds:.2f}", f"{seconds / nodes * 1e6:.1f}", verdict(seconds, 10, " s")])
        return result

    scaled = T.unit_scale(model)
    work("unit_scale, with its first forward", lambda: scaled(x))
    tracked = T.track_scales(model)
    work("track_scales, with its first forward", lambda: tracked(x))
    y = tracked(x)
    work("backward of the tracked chain", lambda: y.sum().backward())
    graph = work("scales_graph", tracked.scales_graph)
    work("prune_non_float_tensors", lambda: T.prune_non_float_tensors(graph))
    work("prune_same_scale_tensors", lambda: T.prune_same_scale_tensors(graph))
    targets = [torch.ops.aten.mul.Tensor]
    work("prune_selected_nodes", lambda: T.prune_selected_nodes(graph, targets))
    print(f"\nChain of {nodes} nodes, seconds.")
    table(["", "seconds", "us a node", "bar"], rows)


def resident_of(name: str) -> None:
    before = status("VmRSS")
    step = Step(None if name == "eager" else variants()[name][0])
    for _ in range(20):
        step()
    held, peak = status("VmRSS"), status("VmHWM")
    gc.collect()  # the models that transforms copied
    plumb.release_freed_memory()
    print(json.dumps([x - before for x in (held, peak, status("VmRSS"))]))


def resident(only: list[str]) -> None:
    """Growth of the process's memory: most of it is free memory of the heap, which can be given back."""
    rows = []
    for name in ["eager", *(v for v in variants() if not v.startswith("oracle"))]:
        if only and name not in only:
            continue
        run = subprocess.run([sys.executable, __file__, f"--resident-of={name}"], check=True, stdout=subprocess.PIPE, text=True)
        rows.append([name, *(f"{x / 2**20:.0f}" for x in json.loads(run.stdout.splitlines()[-1]))])
    print("\nResident memory that a fresh process has grown by after 20 steps of that GPT, MiB; once what is free is given back")
    print("(`gc.collect()`, `plumb.release_freed_memory()`).")
    table(["", "after 20 steps", "at its peak", "given back"], rows)


def main(args: list[str]) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    alone = next((a.partition("=")[2] for a in args if a.startswith("--resident-of=")), None)
    if alone:
        return resident_of(alone)
    plumb.keep_freed_memory()  # as a program that trains would
    quick = "--quick" in args
    only = next((a[7:].split(",") for a in args if a.startswith("--only=")), [])
    chosen = [a for a in args if not a.startswith("-")]
    parts: dict[str, Callable[[], None]] = {
        "steps": lambda: steps(5 if quick else 21, only),
        "models": lambda: models(21 if quick else 101, only),
        "chain": lambda: chain(20 if quick else 200),
        "large": lambda: large(10_000 if quick else 100_000),
        "resident": lambda: resident(only),
    }
    taken = [name for name in parts if not chosen or name in chosen]
    if only:
        cases = {"steps": [*variants()], "models": [*small_models()], "resident": ["eager", *variants()]}
        known = [case for name in taken for case in cases.get(name, ())]
        if unknown := set(only) - set(known):
            sys.exit(f"--only={','.join(sorted(unknown))}: no case of these parts\n  try: {', '.join(dict.fromkeys(known))}")
        taken = [name for name in taken if set(only) & set(cases.get(name, ()))]
    for name in taken:
        parts[name]()


if __name__ == "__main__":
    main(sys.argv[1:])
