"""Bytes and losses of formats between stages over 2 and 4 processes, by every schedule, as Markdown."""

import os
import sys

sys.path.insert(0, "python/tests")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import ranks  # noqa: E402
from pipelines import LOOPED, SINGLE, V  # noqa: E402
from tables import table  # noqa: E402
from wire_runs import WIRE, reference, train_by_each  # noqa: E402


def rows():
    names = SINGLE + LOOPED + V
    for size in (2, 4):
        ends = ranks.run(train_by_each, size, names)
        expected = {(n, w): reference(w, n) for n in (size, 2 * size) for w in (WIRE, None)}
        for name in names:
            num = size if name in SINGLE else 2 * size
            sent = {w: sum(e[name, w][1] for e in ends) for w in (WIRE, None)}
            equal = all([e[name, w][0] for e in ends if e[name, w][0]] == [expected[num, w]] for w in (WIRE, None))
            share = f"{sent[WIRE] / sent[None]:.2f}"
            yield [size, name, f"{sent[None]:,}", f"{sent[WIRE]:,}", share, "yes" if equal else "NO"]


if __name__ == "__main__":
    print(table(["processes", "schedule", "bytes, float32", "bytes, FP8", "share", "losses are one process's"], rows()))
