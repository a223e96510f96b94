#!/usr/bin/env python3
"""docs/transforms.md: every model of python/tests/transform_models.py under the three transforms.

Run it from the repository's root with the package on the path; it prints the file, but for the section that
transformers_table.py prints.
"""

import sys
from collections import Counter

sys.path.insert(0, "python/tests")

import torch  # noqa: E402
from tables import table  # noqa: E402
from transform_models import MODELS, made, run  # noqa: E402

from plumb.transforms import report, simulate_format, track_scales, unit_scale  # noqa: E402

HEAD = """# Every model under every transform

Each model runs forward and backward under `unit_scale`, `simulate_format` (e4m3fn forward, e5m2 backward, to nearest) and `track_scales`.
The numbers are counted from `plumb.report(model)`. `python/tests/test_transform_models.py` holds the reports to the graphs that run: every
replacement is there; every weight that is said to be scaled has unit variance, every other parameter its own values; every matrix product
is rounded or named; tracking changes no bit.

Made by `python tools/transforms_table.py`, which prints all but the last section.

- *replaced*: operators that became unit-scaled ones; *residual*: adds with their taus; *weights*: tensors with unit variance
- *left alone*: operators and parameters that stayed, by reason
- *products*: matrix products that are rounded, of all; *measured*: tensors, with how many gradients

"""


def counts(model):
    entries = [e for part in report(model) for e in part["entries"]]
    return entries, Counter(e["kind"] for e in entries)


def short(reason):
    if "is computed from" in reason:
        return "its weight is computed"
    for start, text in (("its weight ", "its weight has another use"), ("used by", "a parameter of an operator that stays")):
        if reason.startswith(start):
            return text
    return reason.split(":")[0]


def row(name):
    model, args, kwargs = made(name)
    scaled = unit_scale(model)
    run(scaled, args, kwargs)
    entries, kinds = counts(scaled)
    taus = Counter(f"{e['tau']:g}" for e in entries if e["kind"] == "residual")
    residual = ", ".join(f"{n} × {tau}" for tau, n in sorted(taus.items())) or "none"
    left = Counter(short(e.get("reason", "")) for e in entries if e["kind"] == "left_alone")
    why = "; ".join(f"{n} ({reason})" for reason, n in left.most_common(4)) or "nothing"
    low = simulate_format(model, "e4m3fn-RN", "e5m2-RN")
    run(low, args, kwargs)
    entries, of_low = counts(low)
    of_low["left_alone"] -= sum(e.get("reason", "").startswith("it sums over no dimension") for e in entries)  # no product
    tracked = track_scales(model)
    run(tracked, args, kwargs)
    metrics = [n.meta["metrics"] for n in tracked.scales_graph().nodes if "metrics" in n.meta]
    return [
        name, kinds["replaced"], residual, kinds["weight"], why,
        f"{of_low['quantised']} of {of_low['quantised'] + of_low['left_alone']}",
        f"{len(metrics)}, {sum(m.bwd is not None for m in metrics)}",
    ]  # fmt: skip


def main():
    torch.set_num_threads(1)
    head = ["model", "replaced", "residual", "weights", "left alone", "products", "measured"]
    print(HEAD + table(head, [row(name) for name in MODELS]))


if __name__ == "__main__":
    main()
