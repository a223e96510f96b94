"""The pipeline beside torch's own, in one run: cutting a model, halves of a stage's backward, cost of an action, a
GPT over two processes.

One thread a process. Backwards are timed by the thread's own processor time; steps over processes by the clock, plumb and
torch in turn, best and median, so other work on the machine shows in all of them. Peaks of allocations are exact: every
allocation of torch's CPU allocator is counted in each process from its start, the peak is that of the second step. Names
of schedules as arguments: only these. Prints Markdown.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from importlib import import_module
from typing import Any, Callable, Iterator

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("OMP_NUM_THREADS", "1")
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.distributed.pipelining  # noqa: E402
from execution_bench import load_library, table, verdict  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.pipelining import PipelineStage  # noqa: E402
from torch.distributed.pipelining import schedules as torch_schedules  # noqa: E402
from zoo import Block  # noqa: E402

WIDTH, HEADS, SEQUENCE, VOCABULARY, LAYERS, MICROBATCHES, ROWS = 256, 4, 128, 512, 8, 8, 4
TORCH = {  # plumb's name -> torch's class
    "GPipe": "ScheduleGPipe",
    "1F1B": "Schedule1F1B",
    "Interleaved1F1B": "ScheduleInterleaved1F1B",
    "LoopedBFS": "ScheduleLoopedBFS",
    "InterleavedZeroBubble": "ScheduleInterleavedZeroBubble",
    "ZBVZeroBubble": "ScheduleZBVZeroBubble",
    "DualPipeV": "ScheduleDualPipeV",
}
ONLY_PLUMB = ["ZBH1", "ZBH2", "VHalf", "VMin"]
KEEPING = ["1F1B", "ZBVZeroBubble", "DualPipeV"]  # also with recompute="none", which takes memory and saves time


def load_cases() -> ctypes.CDLL:
    cases = load_library("pipeline_cases")
    numbers = ctypes.POINTER(ctypes.c_double)
    cases.stage_backward_halves.argtypes = [ctypes.c_int64] * 6 + [numbers]
    cases.action_cost.argtypes = [ctypes.c_char_p, ctypes.c_int64, ctypes.c_int64, numbers]
    cases.train_gpt.argtypes = [ctypes.c_char_p] + [ctypes.c_int64] * 9 + [numbers]
    return cases


# --- what each process does ---


def on_torch_group(work: Callable[[int, int], Any]) -> Any:
    dist.init_process_group("gloo")
    result = work(dist.get_rank(), dist.get_world_size())
    dist.destroy_process_group()
    return result


def torch_schedule(name: str, stages: list[Any], loss: Callable) -> Any:
    kind = getattr(torch_schedules, TORCH[name])
    many = len(stages) > 1 or "Interleaved" in name or name in ("LoopedBFS", "ZBVZeroBubble", "DualPipeV")
    return kind(stages if many else stages[0], n_microbatches=len_microbatches(), loss_fn=loss)


def len_microbatches() -> int:
    return int(os.environ.get("BENCH_MICROBATCHES", MICROBATCHES))


def python_action_cost(library: Any, steps: int) -> list[float]:
    def work(rank: int, size: int) -> list[float]:
        torch.manual_seed(rank)
        stage = library.PipelineStage(nn.Linear(8, 8), rank, size, torch.device("cpu"))
        schedule = library.Schedule1F1B(stage, n_microbatches=len_microbatches(), loss_fn=nn.MSELoss())
        x, y, times = torch.randn(4 * len_microbatches(), 8), torch.randn(4 * len_microbatches(), 8), []
        for _ in range(steps + 5):
            begin = time.perf_counter()
            if rank == 0:
                schedule.step(x)
            elif rank == size - 1:
                schedule.step(target=y)
            times.append((time.perf_counter() - begin) / (2 * len_microbatches()))
            stage.submod.zero_grad()
        times = times[5:]
        return [min(times), statistics.median(times)]

    return on_torch_group(work)


class Part(nn.Module):
    """Layers [first, last) of the GPT, with its embedding and head where they belong."""

    def __init__(self, first: int, last: int) -> None:
        super().__init__()
        self.first, self.last = first == 0, last == LAYERS
        if self.first:
            self.words, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Parameter(torch.zeros(SEQUENCE, WIDTH))
        self.blocks = nn.Sequential(*[Block(WIDTH, HEADS) for _ in range(first, last)])
        if self.last:
            self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks(self.words(x) + self.places if self.first else x)
        return self.head(self.norm(x)) if self.last else x


def places_of(name: str, rank: int, size: int) -> tuple[list[int], int]:
    if name in ("GPipe", "1F1B"):
        return [rank], size
    if name in ("ZBVZeroBubble", "DualPipeV"):
        return [rank, 2 * size - 1 - rank], 2 * size
    return [rank, rank + size], 2 * size


def torch_gpt(name: str, steps: int) -> list[float]:
    cases = load_cases()

    def work(rank: int, size: int) -> list[float]:
        cases.count_allocations()
        mine, total = places_of(name, rank, size)
        torch.manual_seed(1)
        parts = [Part(LAYERS * s // total, LAYERS * (s + 1) // total) for s in mine]
        stages = [PipelineStage(p, s, total, torch.device("cpu")) for p, s in zip(parts, mine)]
        schedule = torch_schedule(
            name, stages, lambda out, y: nn.functional.cross_entropy(out.flatten(0, 1), y.flatten())
        )
        optimizer = torch.optim.AdamW([p for part in parts for p in part.parameters()], lr=1e-3)
        torch.manual_seed(7)
        x = torch.randint(VOCABULARY, (ROWS * MICROBATCHES, SEQUENCE))
        y = torch.randint(VOCABULARY, (ROWS * MICROBATCHES, SEQUENCE))
        times, peak, resident = [], 0, 0
        for step in range(steps + 2):
            if step == 1:
                resident = cases.live_allocations()
            begin = time.perf_counter()
            optimizer.zero_grad()
            losses: list[torch.Tensor] = []
            args = (x,) if 0 in mine else ()
            if total - 1 in mine:
                schedule.step(*args, target=y, losses=losses)
            else:
                schedule.step(*args)
            del losses
            optimizer.step()
            if step >= 2:
                times.append(time.perf_counter() - begin)
            if step == 1:
                peak = cases.peak_of_allocations()
        return [min(times), statistics.median(times), 0, 0, 0, 0, peak, resident]

    return on_torch_group(work)


def plumb_numbers(function: str, *args: Any) -> list[float]:
    out = (ctypes.c_double * 8)()
    if getattr(load_cases(), function)(*args, out):
        sys.exit(1)
    return list(out)


def child(what: str, name: str, steps: int) -> None:
    torch.set_num_threads(1)
    shape = (WIDTH, HEADS, SEQUENCE, VOCABULARY, LAYERS, MICROBATCHES, ROWS)
    result = {
        "torch action": lambda: python_action_cost(torch.distributed.pipelining, steps),
        "plumb action, Python": lambda: python_action_cost(import_module("plumb.pipelining"), steps),
        "plumb action": lambda: plumb_numbers("action_cost", b"1F1B", len_microbatches(), steps),
        "torch gpt": lambda: torch_gpt(name, steps),
        "plumb gpt": lambda: plumb_numbers("train_gpt", name.encode(), *shape, 1, steps),
        "plumb gpt keeping all": lambda: plumb_numbers("train_gpt", name.encode(), *shape, 0, steps),
    }[what]()
    print("RESULT " + json.dumps(result), flush=True)


# --- the parent ---


def run(what: str, name: str = "", steps: int = 10, ranks: int = 2, **more: str) -> list[list[float]]:
    """Returns the result of every rank."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    processes = []
    for rank in range(ranks):
        env = {**os.environ, **more}
        if ranks > 1:
            env |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
            env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        command = [sys.executable, __file__, what, name, str(steps)]
        processes.append(
            subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        )
    results = []
    for p in processes:
        out = p.communicate(timeout=1200)[0]
        lines = [line for line in out.splitlines() if line.startswith("RESULT ")]
        if p.returncode != 0 or not lines:
            raise RuntimeError(f"{what} {name} failed")
        results.append(json.loads(lines[0][7:]))
    return results


def cutting(rounds: int) -> None:
    print(f"\n`pipeline()` on a GPT of {LAYERS} layers, in two stages: milliseconds of the first call and of later ones:")
    import plumb.pipelining as ours
    import torch.distributed.pipelining as theirs

    ids = torch.randint(VOCABULARY, (ROWS, SEQUENCE))
    times: dict[str, list[float]] = {"plumb": [], "torch": []}
    for _ in range(rounds):
        for name, library in (("plumb", ours), ("torch", theirs)):
            model = Part(0, LAYERS)  # torch cuts a model once: its marks stay
            start = time.perf_counter()
            library.pipeline(model, (ids,), split_spec={f"blocks.{LAYERS // 2}": library.SplitPoint.BEGINNING})
            times[name].append((time.perf_counter() - start) * 1e3)
    rows = []
    for name, (first, *later) in times.items():
        bar = verdict(statistics.median(later), 60, " ms") if name == "plumb" else ""
        rows.append([name, f"{first:.0f}", f"{min(later):.0f}", f"{statistics.median(later):.0f}", bar])
    table(["", "first", "best", "median", "bar"], rows)


def backward_halves() -> None:
    print("\nInput half and weight half of a stage's backward against the whole (4 transformer layers, one process):")
    rows = []
    for width, heads, sequence, rounds, bar in ((256, 4, 128, 40, 1.10), (64, 4, 64, 100, None), (8, 2, 16, 400, 1.35)):
        full, halves, ratio, share, equal, *_ = plumb_numbers(
            "stage_backward_halves", width, heads, 4, sequence, 4, rounds
        )
        best = halves / full
        rows.append([
            f"width {width}", f"{full * 1e3:.3g} ms", f"{halves * 1e3:.3g} ms", f"{best:.3f}", f"{ratio:.3f}",
            f"{share:.2f}", "yes" if equal else "**no**", verdict(best, bar) if bar else "",
        ])  # fmt: skip
    table(["stage", "whole", "halves", "ratio of the best", "median ratio", "input's share", "same bits", "bar"], rows)


def action_costs(rounds: int, steps: int) -> None:
    print("\nCost of an action: 1F1B, 64 microbatches, one 8 x 8 linear a rank; best and median of all steps:")
    one = [run("plumb action", ranks=1, steps=steps, BENCH_MICROBATCHES="64")[0] for _ in range(rounds)]
    us = lambda results, i: f"{min(r[i] for r in results) * 1e6:.1f} us"  # noqa: E731
    best, eager = min(r[0] for r in one), min(r[2] for r in one)
    table(
        ["", "best", "median", "bar"],
        [
            ["C++ eager, one process", us(one, 2), us(one, 3), ""],
            ["plumb, one process", us(one, 0), us(one, 1), verdict(best / eager, 1.3, " of eager")],
        ],
    )
    for cores in ("idle cores sleep", "cores kept awake", "one core for both"):
        print(f"\nTwo processes, {cores}; in turn, best and median of all steps of the median run:")
        what = {"plumb action": steps, "plumb action, Python": steps, "torch action": max(steps // 5, 20)}
        runs: dict[str, list[list[float]]] = {name: [] for name in what}
        with on_cores(cores):
            for _ in range(rounds):
                for name, count in what.items():
                    runs[name].append(run(name, steps=count, BENCH_MICROBATCHES="64")[0])
        typical = {name: [statistics.median(r[i] for r in results) for i in (0, 1)] for name, results in runs.items()}
        theirs = typical["torch action"]
        bar = 0.5 if cores != "one core for both" else 1.0
        table(
            ["", "best", "median", "of torch's", "of torch's median", "bar"],
            [
                [name, *(f"{t * 1e6:.1f} us" for t in mine), *(f"{m / t:.2f}" for m, t in zip(mine, theirs)),
                 "" if name == "torch action" else verdict(max(m / t for m, t in zip(mine, theirs)), bar)]
                for name, mine in typical.items()
            ],
        )  # fmt: skip


@contextlib.contextmanager
def on_cores(which: str) -> Iterator[None]:
    """Waking a thread takes longest where idle cores sleep, as those of a virtual machine do. A process a core that runs
    when nothing else wants to keeps them awake."""
    cores, busy = os.sched_getaffinity(0), []
    if which == "one core for both":
        os.sched_setaffinity(0, {min(cores)})
    if which == "cores kept awake":
        for core in cores:
            busy.append(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
            os.sched_setscheduler(busy[-1].pid, os.SCHED_IDLE, os.sched_param(0))
            os.sched_setaffinity(busy[-1].pid, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)
        for process in busy:
            process.kill()
            process.wait()


def gpt(rounds: int, steps: int, only: list[str]) -> None:
    print(
        f"\nGPT over two processes ({LAYERS} layers, width {WIDTH}, {HEADS} heads, sequence {SEQUENCE}, vocabulary "
        f"{VOCABULARY}, {MICROBATCHES} microbatches of {ROWS}, AdamW), milliseconds a step, best and median of all. "
        "Peaks are those of the rank that has most, of all tensors, weights and optimizer included; beside: without what "
        "lives between steps. Bubbles are of the quickest step, simulated with its stages' mean durations."
    )
    names = [n for n in [*TORCH, *ONLY_PLUMB] if not only or n in only]
    plumb: dict[str, list[list[list[float]]]] = {n: [] for n in names}
    keeping: dict[str, list[list[list[float]]]] = {n: [] for n in KEEPING if n in names}
    other: dict[str, list[list[list[float]]]] = {n: [] for n in names if n in TORCH}
    for _ in range(rounds):
        for name in names:
            plumb[name].append(run("plumb gpt", name, steps))
            if name in keeping:
                keeping[name].append(run("plumb gpt keeping all", name, steps))
            if name in TORCH:
                other[name].append(run("torch gpt", name, steps))

    def step(runs: list[list[list[float]]]) -> float:
        return min(max(rank[0] for rank in r) for r in runs)

    def median(runs: list[list[list[float]]]) -> float:
        return min(max(rank[1] for rank in r) for r in runs)

    def peak(runs: list[list[list[float]]]) -> float:
        return max(rank[6] for rank in runs[0]) / 2**20

    def beside(runs: list[list[list[float]]]) -> float:
        return max(rank[6] - rank[7] for rank in runs[0]) / 2**20

    def quickest(runs: list[list[list[float]]]) -> list[float]:
        """Times that rank 0 measured in the quickest run."""
        return min(runs, key=lambda r: max(rank[0] for rank in r))[0]

    rows = []
    for name, mine in [*plumb.items(), *((f"{n}, all kept", r) for n, r in keeping.items())]:
        theirs = other.get(name.split(",")[0])
        bubble, simulated, multiple = quickest(mine)[3:6]
        rows.append([
            name, f"{step(mine) * 1e3:.0f}", f"{median(mine) * 1e3:.0f}",
            *([f"{step(theirs) * 1e3:.0f}", f"{median(theirs) * 1e3:.0f}", f"{step(mine) / step(theirs):.3f}"]
              if theirs else ["", "", ""]),
            f"{peak(mine):.0f} MiB", f"{peak(theirs):.0f} MiB" if theirs else "",
            f"{peak(mine) / peak(theirs):.2f}" if theirs else "",
            f"{beside(mine):.0f} MiB", f"{beside(mine) / beside(theirs):.2f}" if theirs else "",
            f"{bubble * 100:.1f} %", f"{simulated * 100:.1f} %", f"{multiple:.3f}",
        ])  # fmt: skip
    table(
        ["schedule", "plumb", "median", "torch", "median", "ratio", "peak, plumb", "peak, torch", "ratio", "beside",
         "ratio", "bubble", "simulated", "simulated step / step"],
        rows,
    )  # fmt: skip
    if "1F1B" not in names:
        return
    # The rows above are minutes apart: the quickest of them run once more, in turn.
    best, best_keeping, best_other = (min(runs, key=lambda n: step(runs[n])) for runs in (plumb, keeping, other))
    again: dict[str, list[list[list[float]]]] = {"plumb gpt": [], "plumb gpt keeping all": [], "torch gpt": []}
    for _ in range(2 * rounds):
        for what, name in zip(again, (best, best_keeping, best_other)):
            again[what].append(run(what, name, steps))
    quick, quick_keeping, quick_other = (step(runs) for runs in again.values())
    mine, theirs, kept = plumb["1F1B"], other["1F1B"], keeping["1F1B"]
    apart = max(abs(quickest(r)[3] - quickest(r)[4]) for r in plumb.values())
    table(
        ["", "", "bar"],
        [
            ["1F1B / torch's 1F1B", f"{step(mine) / step(theirs):.3f}", verdict(step(mine) / step(theirs), 1.0)],
            [f"best ({best}) / torch's best ({best_other}), in turn", f"{quick / quick_other:.3f}",
             verdict(quick / quick_other, 0.95)],
            ["1F1B, all kept / torch's 1F1B", f"{step(kept) / step(theirs):.3f}", verdict(step(kept) / step(theirs), 1.0)],
            [f"best, all kept ({best_keeping}) / torch's best, in turn", f"{quick_keeping / quick_other:.3f}",
             verdict(quick_keeping / quick_other, 0.95)],
            ["peak of 1F1B / torch's", f"{peak(mine) / peak(theirs):.3f}", verdict(peak(mine) / peak(theirs), 0.8)],
            ["peak of 1F1B beside weights / torch's", f"{beside(mine) / beside(theirs):.3f}",
             verdict(beside(mine) / beside(theirs), 0.8)],
            ["largest distance of bubbles, as a share of the step", f"{apart:.3f}", verdict(apart, 0.05)],
        ],
    )  # fmt: skip


def main() -> None:
    if len(sys.argv) == 4 and sys.argv[1].startswith(("plumb ", "torch ")):
        child(sys.argv[1], sys.argv[2], int(sys.argv[3]))
        return
    torch.set_num_threads(1)
    parts = [a for a in sys.argv[1:] if a not in (*TORCH, *ONLY_PLUMB)] or ["cutting", "backward", "actions", "gpt"]
    if "cutting" in parts:
        cutting(rounds=11)
    if "backward" in parts:
        backward_halves()
    if "actions" in parts:
        action_costs(rounds=5, steps=200)
    if "gpt" in parts:
        gpt(rounds=2, steps=6, only=[a for a in sys.argv[1:] if a in (*TORCH, *ONLY_PLUMB)])


if __name__ == "__main__":
    main()
