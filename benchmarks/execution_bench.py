"""Captured graphs beside eager: time per node, training steps, memory, capture, work on large graphs. Prints Markdown.

One thread. Times are the thread's own processor time (other processes' turns do not count; a CPU backward runs on its
caller's thread), taken in turn in one process: the best of many rounds for times a node, for steps the median of the
ratios of neighboring rounds. Peaks of allocations are exact: every allocation of torch's CPU allocator is counted.
"""

from __future__ import annotations

import ctypes
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Callable

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
import torch  # noqa: E402
from torch import nn  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "python" / "tests"))
NODES = 1000


def load_library(name: str) -> ctypes.CDLL:
    """NAME.cpp of this folder, built; with the count of allocations that each of them has."""
    build = Path(os.environ.get("PLUMB_BUILD", "build"))
    library = ctypes.CDLL(str((build if build.is_absolute() else ROOT / build) / "benchmarks" / f"lib{name}.so"))
    library.peak_of_allocations.restype = ctypes.c_int64
    return library


def load_cases() -> ctypes.CDLL:
    cases = load_library("execution_cases")
    cases.eager_chain.restype = ctypes.c_double
    cases.eager_chain.argtypes = [ctypes.c_int64, ctypes.c_int64, ctypes.c_int]
    cases.graph_work.restype = ctypes.c_int64
    cases.graph_work.argtypes = [ctypes.c_int64, ctypes.c_int64, ctypes.c_char_p, ctypes.c_int64]
    return cases


def table(head: list[str], rows: list[list[str]]) -> None:
    print("\n| " + " | ".join(head) + " |")
    print("|---" + "|---:" * (len(head) - 1) + "|")
    for row in rows:
        print("| " + " | ".join(row) + " |")
    sys.stdout.flush()


def verdict(value: float, bar: float, unit: str = "") -> str:
    return f"<= {bar:g}{unit}: {'met' if value <= bar else '**missed**'}"


def timed(work: Callable[[], Any]) -> float:
    begin = time.thread_time()
    work()
    return time.thread_time() - begin


# --- a chain of small operators: what a node costs ---


class Chain(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(NODES):
            x = x * 1.0001
        return x


def chain(cases: ctypes.CDLL, rounds: int) -> None:
    import plumb

    rows = []
    for mode, name in enumerate(["forward, no grad", "forward, recording", "forward and backward"]):
        x, seed = torch.ones(16, requires_grad=mode > 0), torch.ones(16)
        eager = Chain()
        captured = plumb.capture(eager, x)

        def run(model: nn.Module, x: torch.Tensor = x, mode: int = mode) -> None:
            with torch.set_grad_enabled(mode > 0):
                y = model(x)
                if mode == 2:
                    y.backward(seed)
                    x.grad = None

        best = {"python": 1e9, "c++": 1e9, "plumb": 1e9}
        for _ in range(rounds):
            best["python"] = min(best["python"], timed(lambda: run(eager)) / NODES)
            best["c++"] = min(best["c++"], cases.eager_chain(NODES, 1, mode))
            best["plumb"] = min(best["plumb"], timed(lambda: run(captured)) / NODES)
        to_python, to_cpp = best["plumb"] / best["python"], best["plumb"] / best["c++"]
        rows.append(
            [
                name,
                *(f"{best[k] * 1e6:.2f}" for k in ("python", "c++", "plumb")),
                f"{to_python:.2f}",
                f"{to_cpp:.2f}",
                f"{verdict(to_python, 0.5)}; {verdict(to_cpp, 1)}" if mode == 0 else "",
            ]
        )
    print(f"\nChain of {NODES} `x * 1.0001` on 16 floats, microseconds a node.")
    table(["", "Python eager", "C++ eager", "plumb", "plumb / Python eager", "plumb / C++ eager", "bars"], rows)


# --- a training step of a GPT ---

SIZES = {
    "4 layers, width 256, batch 8 x 128": dict(batch=8, length=128, d=256, layers=4, h=8),
    "2 layers, width 64, batch 1 x 16": dict(batch=1, length=16, d=64, layers=2, h=4),
}


class Step:
    """Forward, backward, AdamW; eager or captured, from the same weights."""

    def __init__(self, captured: bool, batch: int, length: int, **size: int) -> None:
        from zoo import GPT

        torch.manual_seed(0)
        self.model: nn.Module = GPT(vocab=512, context=length, **size)
        self.ids, self.targets = torch.randint(512, (2, batch, length))
        if captured:
            import plumb

            plumb.keep_freed_memory()  # as a program that trains would
            self.model = plumb.capture(self.model, self.ids, self.targets)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)

    def __call__(self) -> float:
        loss = self.model(self.ids, self.targets)[1]
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.item()


def steps(cases: ctypes.CDLL, rounds: dict[str, int]) -> None:
    rows, memory = [], []
    for name, size in SIZES.items():
        eager, captured = Step(False, **size), Step(True, **size)
        for _ in range(3):
            if eager() != captured():
                raise SystemExit(f"{name}: the losses differ")
        times = []
        for _ in range(rounds[name] // 2):
            times.append((timed(eager), timed(captured)))
            times.append((timed(captured), timed(eager))[::-1])
        ratio = statistics.median(p / e for e, p in times)
        best = [min(t[i] for t in times) for i in (0, 1)]
        rows.append(
            [
                name,
                *(f"{statistics.median(t[i] for t in times) * 1e3:.2f}" for i in (0, 1)),
                f"{ratio:.3f}",
                f"{best[1] / best[0]:.3f}",
                verdict(ratio, 1),
            ]
        )
        peaks = []
        for step in (eager, captured):
            cases.count_allocations()
            step()
            peaks.append(cases.peak_of_allocations())
        memory.append(
            [
                f"{name}: allocated by a step",
                *(f"{p / 2**20:.2f}" for p in peaks),
                f"{peaks[1] / peaks[0]:.3f}",
                verdict(peaks[1] / peaks[0], 1.05),
            ]
        )
        del eager, captured
        resident = [alone("resident", name, str(captured))["peak"] for captured in (False, True)]
        memory.append(
            [
                f"{name}: the process's resident peak",
                *(f"{p / 2**20:.0f}" for p in resident),
                f"{resident[1] / resident[0]:.3f}",
                "",
            ]
        )
    print(
        "\nTraining step of a GPT (vocabulary 512; forward, backward, AdamW), milliseconds; losses equal bit for bit."
    )
    table(["", "Python eager", "plumb", "median ratio", "ratio of the best", "bar (median)"], rows)
    print("\nPeak memory of a training step, MiB. The process's peak has all of torch, plumb and the capture in it.")
    table(["", "Python eager", "plumb", "ratio", "bar"], memory)


# --- capture ---


def status(field: str) -> int:
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(field + ":"))
    return int(line.split()[1]) * 1024


def resident(name: str, captured: str) -> dict:
    step = Step(captured == "True", **SIZES[name])
    for _ in range(3):
        step()
    return {"peak": status("VmHWM")}


def capture_on_meta() -> dict:
    from zoo import llama_on_meta

    import plumb

    begin = time.thread_time()
    model = llama_on_meta()
    built = time.thread_time() - begin
    ids = torch.zeros(1, 128, dtype=torch.long, device="meta")
    before = status("VmRSS")
    seconds, nodes = [], 0
    for _ in range(2):  # the first one loads torch's meta kernels
        seconds.append(timed(lambda: model(ids)))
        begin = time.thread_time()
        nodes = len(plumb.capture(model, ids).graph)
        seconds.append(time.thread_time() - begin)
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "built": built,
        "seconds": seconds,
        "nodes": nodes,
        "added": status("VmHWM") - before,
        "peak": status("VmHWM"),
    }


def alone(what: str, *args: str) -> dict:
    out = subprocess.run([sys.executable, __file__, what, *args], check=True, stdout=subprocess.PIPE, text=True).stdout
    return json.loads(out.splitlines()[-1])


def captures(rounds: int) -> None:
    import plumb

    rows = []
    size = SIZES["4 layers, width 256, batch 8 x 128"]
    gpt = Step(False, **{**size, "batch": 1, "length": 4})
    x = torch.ones(16)
    for name, model, inputs in [("chain", Chain(), (x,)), ("GPT, 4 layers", gpt.model, (gpt.ids, gpt.targets))]:
        nodes = len(plumb.capture(model, *inputs).graph)
        eager = min(timed(lambda: model(*inputs)) for _ in range(rounds))
        best = min(timed(lambda: plumb.capture(model, *inputs)) for _ in range(rounds))
        rows.append(
            [name, str(nodes), f"{eager * 1e3:.1f} ms", f"{best * 1e3:.1f} ms", f"{best / nodes * 1e6:.1f}", ""]
        )
    meta = alone("meta")
    for i, name in enumerate(["first time in a process", "again"]):
        eager, seconds = meta["seconds"][2 * i : 2 * i + 2]
        rows.append(
            [
                f"Llama, {meta['parameters'] / 1e9:.2f} G parameters, on meta, {name}",
                str(meta["nodes"]),
                f"{eager:.2f} s",
                f"{seconds:.2f} s",
                f"{seconds / meta['nodes'] * 1e6:.1f}",
                f"peak {meta['peak'] / 2**20:.0f} MiB, {verdict(meta['peak'] / 2**30, 2, ' GiB')}" if i == 0 else "",
            ]
        )
    print("\nCapture beside one eager forward.")
    table(["", "nodes", "eager forward", "capture", "us a node", "memory"], rows)


def graph_work(cases: ctypes.CDLL, rounds: int) -> None:
    found = []
    for nodes in (10_000, 100_000):
        text = ctypes.create_string_buffer(1 << 16)
        count = cases.graph_work(nodes, rounds, text, len(text))
        if count < 0:
            raise SystemExit(text.value.decode())
        found.append((count, dict((k, float(v)) for k, v in (x.split("\t") for x in text.value.decode().splitlines()))))
    (small, few), (large, many) = found
    rows = [
        [
            k,
            f"{few[k]:.4f}",
            f"{many[k]:.3f}",
            f"{many[k] / large * 1e6:.2f}",
            f"{(many[k] / large) / (few[k] / small):.2f}",
        ]
        for k in many
    ]
    print(
        "\nWork on large graphs, seconds. The last column is 1 where time grows exactly as the graph does, 10 where it grows"
    )
    print("with its square; the larger graph has also outgrown the processor's caches.")
    table(["", f"{small} nodes", f"{large} nodes", "us a node", "growth a node"], rows)


def main(args: list[str]) -> None:
    torch.set_num_threads(1)
    alone_work = {"resident": resident, "meta": capture_on_meta}
    if args and args[0] in alone_work:
        print(json.dumps(alone_work[args[0]](*args[1:])))
        return
    cases = load_cases()
    scale = 0.1 if "--quick" in args else 1.0
    chosen = [a for a in args if not a.startswith("-")]
    parts: dict[str, Callable[[], None]] = {
        "chain": lambda: chain(cases, max(20, int(300 * scale))),
        "steps": lambda: steps(cases, dict(zip(SIZES, (max(5, int(30 * scale)), max(50, int(500 * scale)))))),
        "capture": lambda: captures(max(3, int(20 * scale))),
        "graph": lambda: graph_work(cases, 3),
    }
    for name, part in parts.items():
        if not chosen or name in chosen:
            part()


if __name__ == "__main__":
    main(sys.argv[1:])
