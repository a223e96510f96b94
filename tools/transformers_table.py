#!/usr/bin/env python3
"""Tables of docs/zoo.md and docs/transforms.md on models of python/tests/zoo_transformers.py: transformers_table.py [NAME...].

Prints one table after the other. Run it from the repository's root with the package on the path. A cell says what holds, or the first
words of the error.
"""

import copy
import os
import sys
import warnings
from collections import Counter

sys.path[:0] = ["python/tests"]
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch  # noqa: E402
from compared import run, same, tried  # noqa: E402
from plumb.pipelining import pipeline  # noqa: E402
from plumb.transforms.utils import apply_transform  # noqa: E402
from tables import table  # noqa: E402
from transforms_table import counts, short  # noqa: E402
from zoo_transformers import MODELS  # noqa: E402

import plumb  # noqa: E402
from plumb.transforms import simulate_format, track_scales, unit_scale  # noqa: E402


def made(name):
    torch.manual_seed(0)
    model, args, kwargs = MODELS[name]()
    torch.manual_seed(3)
    return model, args, kwargs


# They set requires_grad of a view of their input themselves, which torch refuses where the input has asked for a gradient.
NO_INPUT_GRADIENTS = {"wav2vec 2.0", "HuBERT", "WavLM"}

# They keep a table of positions from their first forward, so that the second one is another program.
RUNS_FIRST = {"BEiT"}


def captured(name):
    model, args, kwargs = made(name)
    if name in RUNS_FIRST:
        run(model, args, kwargs)
        model.zero_grad()
    verify = name not in NO_INPUT_GRADIENTS
    expected = run(copy.deepcopy(model), args, kwargs, verify)
    graph = plumb.capture(model, *args, plumb_verify=verify, **kwargs)
    note = ", not verified" if not verify else ", after a first run" if name in RUNS_FIRST else ""
    return same(run(graph, args, kwargs, verify), expected) + note


def cut(name):
    model, args, kwargs = made(name)
    pipe = pipeline(model, args, kwargs, split_policy="balanced", num_stages=2)
    asked = name not in NO_INPUT_GRADIENTS
    expected = run(copy.deepcopy(model), args, kwargs, asked)
    result = same(run(pipe, args, kwargs, asked), expected, state=False)
    return f"{pipe.num_stages} stages, {result}" if pipe.num_stages != 2 else result


def tracked(name):
    model, args, kwargs = made(name)
    module = track_scales(model)
    asked = name not in NO_INPUT_GRADIENTS
    result = same(run(module, args, kwargs, asked), run(model, args, kwargs, asked))
    metrics = [n.meta["metrics"] for n in module.scales_graph().nodes if "metrics" in n.meta]
    return f"{result}: {len(metrics)}, {sum(m.bwd is not None for m in metrics)}"


def finite(results):
    first = results[0][0]
    assert first.isfinite().all() or not first.is_floating_point(), "the first output is not finite"


NORMS = {"layer_norm", "rms_norm", "group_norm", "batch_norm", "instance_norm", "native_layer_norm", "native_group_norm"}
PRODUCTS = {
    "linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "einsum", "scaled_dot_product_attention", "conv1d", "conv2d", "conv3d",
    "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "lstm", "gru", "_grouped_mm", "grouped_mm_fallback",
}  # fmt: skip


def base(target):
    return str(target).replace("::", ".").removeprefix("aten.").removeprefix("transformers.").split(".")[0]


def is_spelled_norm(node):
    """Returns whether the node is the root of a mean or a variance, in any spelling: every norm in Python has one."""
    inverse = base(node.target) == "pow" and node.args[1:] == (-0.5,)
    if base(node.target) not in ("rsqrt", "sqrt") and not inverse:
        return False
    while base(node.target) in ("rsqrt", "sqrt", "pow", "add", "clamp", "clamp_min", "to") and isinstance(
        next(iter(node.args), None), torch.fx.Node
    ):
        node = node.args[0]
    return base(node.target) in ("mean", "var")


def own_calls(name):
    """Returns the operator calls of the model's own graph; of a model that takes values out of tensors, those of the path it took."""
    model, args, kwargs = made(name)
    if name in RUNS_FIRST:
        run(model, args, kwargs)
    found = []

    def backend(gm, inputs):
        found[:] = [node for node in gm.graph.nodes if node.op == "call_function"]
        return gm

    run(apply_transform(model, backend), args, kwargs, name not in NO_INPUT_GRADIENTS)
    return found


def shares(name):
    """Norms found in the model's own graph and unit-scaled ones; matrix products likewise."""
    found, verify = own_calls(name), name not in NO_INPUT_GRADIENTS
    norms = sum(base(n.target) in NORMS or is_spelled_norm(n) for n in found)
    model, args, kwargs = made(name)
    module = unit_scale(model)
    run(module, args, kwargs, verify)
    entries, _ = counts(module)
    fused = sum(e["kind"] == "replaced" and e["to"].endswith("_norm") for e in entries)
    products = Counter(e["kind"] for e in entries if base(e.get("from", "")) in PRODUCTS)
    why = Counter(e["reason"] for e in entries if e["kind"] == "left_alone" and e["reason"].startswith("a norm"))
    reasons = "".join(f"; {n} {reason}" for reason, n in why.items())
    return f"{fused} of {norms}{reasons}", f"{products['replaced']} of {products['replaced'] + products['left_alone']}"


def scaled(name):
    model, args, kwargs = made(name)
    module = unit_scale(model)
    finite(run(module, args, kwargs, name not in NO_INPUT_GRADIENTS))
    entries, kinds = counts(module)
    taus = sorted({(e["tau"], sum(e["tau"] == f.get("tau") for f in entries)) for e in entries if e["kind"] == "residual"})
    reasons = [short(e.get("reason", "")) for e in entries if e["kind"] == "left_alone"]
    why = "; ".join(f"{reasons.count(r)} ({r})" for r in sorted(set(reasons), key=lambda r: (-reasons.count(r), r))[:3])
    residual = ", ".join(f"{n} × {tau:g}" for tau, n in taus) or "none"
    return f"{kinds['replaced']} replaced; residual {residual}; {kinds['weight']} weights; left alone: {why or 'nothing'}"


def rounded(name):
    model, args, kwargs = made(name)
    module = simulate_format(model, "e4m3fn-RN", "e5m2-RN")
    finite(run(module, args, kwargs, name not in NO_INPUT_GRADIENTS))
    _, kinds = counts(module)
    return f"{kinds['quantised']} of {kinds['quantised'] + kinds['left_alone']}"


def row(name, *columns):
    own = tried(lambda: run(*made(name), name not in NO_INPUT_GRADIENTS))
    return [name, *([f"the model itself {own}"] * len(columns) if isinstance(own, str) else [tried(c, name) for c in columns])]


def main():
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    names = sys.argv[1:] or list(MODELS)
    print("<!-- docs/zoo.md -->")
    print(table(["model of transformers", "captured, verified", "cut in 2"], [row(n, captured, cut) for n in names]))
    print("\n<!-- docs/transforms.md -->")
    both = {n: tried(shares, n) for n in names}
    shared = [[n, *(cells if isinstance(cells, tuple) else [cells] * 2)] for n, cells in both.items()]
    print(table(["model of transformers", "norms unit-scaled", "products unit-scaled"], shared) + "\n")
    rows = [row(n, scaled, rounded, tracked) for n in names]
    print(table(["model of transformers", "unit_scale", "products rounded", "track_scales: measured, gradients"], rows))


if __name__ == "__main__":
    main()
