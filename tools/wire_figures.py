"""Bytes and losses of formats between stages over 2 and 4 processes, by every schedule, as Markdown."""

import os
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "python" / "tests"))
os.environ.setdefault("OMP_NUM_THREADS", "1")

import ranks  # noqa: E402

WIRE = ("e4m3fn", "e5m2")


def by_schedule():
    import test_pipelining_wire as wired

    names = wired.SINGLE + wired.LOOPED + wired.V
    print("| processes | schedule | bytes, float32 | bytes, FP8 | share | losses are one process's |\n|---|---|---|---|---|---|")
    for size in (2, 4):
        ends = ranks.run(wired.train_by_each, size, names)
        expected = {(n, w): wired.reference(w, n) for n in (size, 2 * size) for w in (WIRE, None)}
        for name in names:
            num = size if name in wired.SINGLE else 2 * size
            sent = {w: sum(e[name, w][1] for e in ends) for w in (WIRE, None)}
            equal = all([e[name, w][0] for e in ends if e[name, w][0]] == [expected[num, w]] for w in (WIRE, None))
            share = sent[WIRE] / sent[None]
            print(f"| {size} | {name} | {sent[None]:,} | {sent[WIRE]:,} | {share:.2f} | {'yes' if equal else 'NO'} |")


if __name__ == "__main__":
    by_schedule()
