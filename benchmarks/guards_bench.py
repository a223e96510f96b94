"""Cost of checking that a transformed module's forward would read the same values as before. Prints Markdown.

python benchmarks/guards_bench.py [ROUNDS]    pairs of steps of a small GPT, with the check and without, one after the other
"""

import os
import statistics
import sys
import time
from unittest import mock

import torch

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "examples"))
from gpt import GPT  # noqa: E402
from plumb._capture import guards  # noqa: E402

from plumb.transforms import track_scales, unit_scale  # noqa: E402


def main(rounds: int) -> None:
    torch.set_num_threads(1)
    ids = torch.randint(64, (1, 16))
    print("| GPT, width 64, batch 1 x 16 | step, µs of CPU | check, µs of CPU | check, alone | step without it, pairs |")
    print("|---|---|---|---|---|")
    for name, transform in (("unit_scale", unit_scale), ("track_scales", track_scales)):
        torch.manual_seed(0)
        model = transform(GPT(vocab=64, d=64, layers=2, h=4, context=16))
        model(ids, ids)

        def step() -> float:
            begin = time.process_time()
            model.zero_grad()
            model(ids, ids)[1].backward()
            return time.process_time() - begin

        for _ in range(50):
            step()
        graph = model.forward.last
        pairs = []
        for i in range(rounds):  # which of the two comes first alternates
            first = step() if i % 2 else None
            with mock.patch.object(guards.Guards, "hold", lambda self: True):
                without = step()
            pairs.append((step() if first is None else first, without))
        begin = time.process_time()
        for _ in range(1000):
            graph.guards.hold()
        check = (time.process_time() - begin) / 1000
        own = statistics.median(a for a, _ in pairs)
        ratio = statistics.median(b / a for a, b in pairs)
        count = len(graph.guards.entries)
        print(f"| {name}, {count} things read | {own * 1e6:.0f} | {check * 1e6:.1f} | {check / own:.2%} | {ratio - 1:+.2%} |")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 500)
