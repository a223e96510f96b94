"""Cost of a checkpoint in the background for a training: a GPT of 6 layers and width 320 with AdamW, sequence 128,
batch 8, one thread, a save every 20 steps. Prints Markdown.

Rounds of 20 steps with a save at their begin and without are taken in turn; ratios are of neighboring rounds. "Clock" is what a
person waits, "thread" the processor time of the thread that trains, "process" that of all threads, the writing one's too: what
the save takes from others where no core is idle.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
import torch  # noqa: E402
from execution_bench import ROOT  # noqa: E402, F401  (finds the zoo of the tests)
from zoo import GPT  # noqa: E402

import plumb  # noqa: E402

ROUNDS, STEPS = int(os.environ.get("PLUMB_ROUNDS", 8)), 20
CLOCKS = {"clock": time.perf_counter, "thread": time.thread_time, "process": time.process_time}


def main() -> None:
    torch.set_num_threads(1)
    plumb.keep_freed_memory()  # as a program that trains would
    torch.manual_seed(0)
    x, y = torch.randint(512, (8, 128)), torch.randint(512, (8, 128))
    model = GPT(vocab=512, d=320, layers=6, h=5, context=128)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    writer = plumb.checkpoint.Writer(tempfile.mkdtemp(), keep_last=2)

    def round_of(step: int | None) -> list[float]:
        begin = [clock() for clock in CLOCKS.values()]
        if step is not None:
            writer.save(model, optimizer, step=step)
        for _ in range(STEPS):
            optimizer.zero_grad()
            model(x, y)[1].backward()
            optimizer.step()
        times = [clock() - b for clock, b in zip(CLOCKS.values(), begin)]
        writer.wait()
        return times

    round_of(0)
    pairs = []
    for i in range(ROUNDS):
        first, second = (round_of(i + 1), round_of(None)) if i % 2 == 0 else (round_of(None), round_of(i + 1))[::-1]
        pairs.append((first, second))
    reports = writer.reports()[1:]
    print(f"\nA step takes {statistics.median(p[1][0] for p in pairs) / STEPS:.2f} s, a checkpoint is {reports[0]['bytes'] / 1e6:.0f} MB:", end=" ")
    print(f"copied in {1e3 * statistics.median(r['copied'] for r in reports):.0f} ms,", end=" ")
    print(f"written in {statistics.median(r['written'] for r in reports):.2f} s, {ROUNDS} pairs.\n")
    print("| time | with a save every 20 steps over without, median | range |")
    print("|---|---:|---|")
    for k, name in enumerate(CLOCKS):
        ratios = [saved[k] / plain[k] for saved, plain in pairs]
        print(f"| {name} | {statistics.median(ratios):.4f} | {min(ratios):.4f} to {max(ratios):.4f} |")


if __name__ == "__main__":
    main()
