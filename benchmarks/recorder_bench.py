"""Cost of a Recorder for a training step: a GPT of 4 layers and width 256, sequence 128, batch 8, one thread. Prints
Markdown.

Times are the thread's own processor time, in rounds of ten steps taken in turn; ratios are medians over neighboring
rounds. "captured" is the same model's captured graph with nothing in it that measures.
"""

from __future__ import annotations

import copy
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
import torch  # noqa: E402
from execution_bench import ROOT  # noqa: E402, F401  (finds the zoo of the tests)
from plumb.transforms._apply import TransformedForward  # noqa: E402
from zoo import GPT  # noqa: E402

import plumb  # noqa: E402

ROUNDS, STEPS = int(os.environ.get("PLUMB_ROUNDS", 15)), 10
WIDTH, HEADS, LENGTH, BATCH, VOCABULARY = 256, 4, 128, 8, 512


def main() -> None:
    torch.set_num_threads(1)
    plumb.keep_freed_memory()  # as a program that trains would
    torch.manual_seed(0)
    x, y = torch.randint(VOCABULARY, (BATCH, LENGTH)), torch.randint(VOCABULARY, (BATCH, LENGTH))
    folder = Path(tempfile.mkdtemp())
    gradients = folder / "gradients.toml"
    gradients.write_text('[[rule]]\ndirection = "backward"\noperator = "parameter"\nstatistics = ["std", "abs_max"]\nevery = 10\n')
    watch = folder / "nan.toml"
    watch.write_text('[[rule]]\nname = "*ln*"\ndirection = "forward"\nwhen = { statistic = "nan_count", above = 0 }\nevery = 1\n')
    plain = GPT(vocab=VOCABULARY, d=WIDTH, layers=4, h=HEADS, context=LENGTH)
    captured = copy.deepcopy(plain)
    captured.__dict__["forward"] = TransformedForward(captured, [])
    models, recorders = {"eager": plain, "captured": captured}, {}
    for name, rules in {
        "attached, no step recorded": 10**9,
        "everything with histograms, every 10 steps": 10,
        "gradients of parameters, std and max, every 10 steps": gradients,
        "everything with histograms, every step": 1,
        "NaN watched for in norms, every step": watch,
    }.items():
        models[name] = copy.deepcopy(plain)
        recorders[name] = plumb.Recorder(models[name], rules, folder / f"{len(models)}.history")
    optimizers = {name: torch.optim.SGD(m.parameters(), 1e-3) for name, m in models.items()}

    def steps(name: str, count: int) -> float:
        recorder = recorders.get(name)
        begin = time.thread_time()
        for _ in range(count):
            loss = models[name](x, y)[1]
            optimizers[name].zero_grad()
            loss.backward()
            optimizers[name].step()
            if recorder:
                recorder.step(loss=loss.detach())
        return (time.thread_time() - begin) / count

    for name in models:
        steps(name, 1)
    times: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(ROUNDS):
        for name in models:
            times[name].append(steps(name, STEPS))
    print("\n| recorder | ms a step | over captured | over eager | bytes a step |")
    print("|---|---:|---:|---:|---:|")
    for name in models:
        over = [statistics.median(a / b for a, b in zip(times[name], times[base])) for base in ("captured", "eager")]
        index = list(models).index(name) + 1
        path = folder / f"{index}.history"
        size = f"{path.stat().st_size / (ROUNDS * STEPS + 1):,.0f}" if path.exists() else ""
        print(f"| {name} | {1e3 * statistics.median(times[name]):.1f} | {over[0]:.3f} | {over[1]:.3f} | {size} |")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
