#!/usr/bin/env python3
"""docs/operator_statistics.md: scales of every unit-scaled operator as measured, for unit-normal inputs and gradients.

Run it from the repository's root with the package on the path; it prints the file.
"""

import math

import plumb.functional as U
import torch
from tables import table
from torch import Tensor

HEAD = """# Scales of the unit-scaled operators

The table gives standard deviations. Inputs, weights and output gradients are drawn from a unit normal distribution; a number is the mean
over three draws. The constraint is `None`, so each factor is as its rule says. (Under a constraint all factors of an operator are one,
and the measured numbers move with it.) *wanted* is 1 unless the rule itself says otherwise.

Made by `python tools/operator_statistics.py > docs/operator_statistics.md`.

"""
NOTES = """

- linear_readout: u-μP divides the output by the fan-in (256 here), not by its root: 1 / sqrt(256) = 0.0625.
- softmax: unit-scaling's rule counts the mean, and a flat distribution is mostly mean. So below mult 2 the standard deviation alone is
  smaller.
- attention has one factor for its output and all gradients. Query and key see it through logits over the head size, here 64 ** -0.5 of the
  value's gradient. If 4 heads share a key and a value, the gradients of these are sums of 4: twice as large. Causal: position i attends
  almost evenly to i values, so it gives the output a variance of 1/i, and query and key 1/i - 1/i² (a softmax over one value has no
  gradient). The mean over the positions counts.
- relu, sigmoid and max pooling have a mean; the standard deviation is 1.
- residual: split and add with tau 0.5 and the identity as branch. Both carry the same values, so they add up coherently:
  (1 + tau) / sqrt(1 + tau²) = 1.342.
- losses: the value is torch's own; the gradient has unit variance for a loss gradient of 1.
- conv1d counts every value as used by the whole kernel, as unit-scaling does: without padding values near the border are used
  less often, with padding zeros are counted. conv2d and conv3d count what happens.
- recurrent layers are no operators of plumb.functional: `unit_scale` puts factors around them
  (`plumb/scaling/rules_recurrent.h`). Inputs are independent from step to step here.
"""


def std(t: Tensor) -> float:
    return t.detach().double().std().item()


def rms(t: Tensor) -> float:
    return t.detach().double().square().mean().sqrt().item()


def measured(make, draws=3, stat=std):
    """Returns the statistics of the output and of every input's gradient."""
    total = None
    for draw in range(draws):
        torch.manual_seed(draw)
        run, inputs = make()
        for t in inputs.values():
            if t.is_floating_point():
                t.requires_grad_()
        out = run(**inputs)
        out.backward(torch.randn_like(out) if out.dim() else torch.ones_like(out))
        row = [stat(out) if out.dim() else None] + [stat(t.grad) for t in inputs.values() if t.grad is not None]
        total = row if total is None else [None if a is None else a + b for a, b in zip(total, row)]
    names = [n for n, t in inputs.items() if t.grad is not None]
    return [None if v is None else v / draws for v in total], names


def n(*sizes):
    return torch.randn(*sizes)


def causal_share(length: int) -> float:
    """Returns the standard deviation of query's and key's gradient, relative to attention to all positions: even
    attention, variance 1/i - 1/i² of 1/i."""
    positions = range(1, length + 1)
    return math.sqrt(1 - sum(i**-2 for i in positions) / sum(1 / i for i in positions))


def cases():
    """Name, what is made of it, the wanted scales where they are not 1."""
    yield "linear", lambda: (lambda x, w, b: U.linear(x, w, b, None), {"x": n(512, 256), "w": n(384, 256), "b": n(384)}), {}
    yield "linear_readout", lambda: (lambda x, w: U.linear_readout(x, w, None, None), {"x": n(512, 256), "w": n(384, 256)}), {"output": 0.0625}
    yield "matmul", lambda: (lambda x, y: U.matmul(x, y, None), {"x": n(4, 128, 256), "y": n(4, 256, 64)}), {}
    yield "matmul, shared right", lambda: (lambda x, y: U.matmul(x, y, None), {"x": n(8, 128, 256), "y": n(256, 64)}), {}
    for d, f in enumerate((U.conv1d, U.conv2d, U.conv3d), 1):
        for padding in (0, "same"):
            size = {1: 64, 2: 20, 3: 10}[d]
            yield f"conv{d}d, kernel 3, padding {padding}", lambda f=f, d=d, p=padding, s=size: (
                lambda x, w: f(x, w, padding=p, constraint=None),
                {"x": n(8, 16, *[s] * d), "w": n(24, 16, *[3] * d)},
            ), {}  # fmt: skip
    for d, f in enumerate((U.conv_transpose1d, U.conv_transpose2d, U.conv_transpose3d), 1):
        yield f"conv_transpose{d}d, kernel 3, stride 2", lambda f=f, d=d: (
            lambda x, w: f(x, w, stride=2, constraint=None), {"x": n(8, 16, *[{1: 64, 2: 16, 3: 8}[d]] * d), "w": n(16, 24, *[3] * d)},
        ), {}  # fmt: skip
    for mult in (0.5, 1.0, 2.0):
        for f in (U.gelu, U.silu, U.tanh, U.sigmoid):
            yield f"{f.__name__}, mult {mult:g}", lambda f=f, m=mult: (lambda x: f(x, mult=m, constraint=None), {"x": n(512, 512)}), {}
        yield f"silu_glu, mult {mult:g}", lambda m=mult: (lambda x, gate: U.silu_glu(x, gate, m), {"x": n(512, 512), "gate": n(512, 512)}), {}
        yield f"softmax over 256, mult {mult:g}", lambda m=mult: (lambda x: U.softmax(x, -1, constraint=None, mult=m), {"x": n(1024, 256)}), {}
    yield "relu", lambda: (lambda x: U.relu(x, None), {"x": n(512, 512)}), {}
    yield "dropout, p 0.3", lambda: (lambda x: U.dropout(x, 0.3), {"x": n(512, 512)}), {}
    yield "add", lambda: (lambda x, y: U.add(x, y, None), {"x": n(512, 512), "y": n(512, 512)}), {}
    yield "add, broadcast", lambda: (lambda x, y: U.add(x, y, None), {"x": n(512, 512), "y": n(512)}), {}
    yield "residual, tau 0.5", lambda: (lambda x: U.residual_apply(lambda t: t, x, 0.5), {"x": n(512, 512)}), {"output": 1.342, "x": 1.342}
    yield "layer_norm", lambda: (lambda x, w, b: U.layer_norm(x, (256,), w, b), {"x": n(512, 256), "w": torch.ones(256), "b": torch.zeros(256)}), {}
    yield "rms_norm", lambda: (lambda x, w: U.rms_norm(x, (256,), w), {"x": n(512, 256), "w": torch.ones(256)}), {}
    yield "group_norm", lambda: (lambda x, w, b: U.group_norm(x, 4, w, b), {"x": n(64, 16, 64), "w": torch.ones(16), "b": torch.zeros(16)}), {}
    yield "batch_norm", lambda: (
        lambda x, w, b: U.batch_norm(x, None, None, w, b, training=True), {"x": n(256, 64, 16), "w": torch.ones(64), "b": torch.zeros(64)}
    ), {}  # fmt: skip
    yield "embedding", lambda: (lambda ids, w: U.embedding(ids, w), {"ids": torch.randint(64, (64, 256)), "w": n(64, 128)}), {}
    for causal in (False, True):
        for length in (64, 256):
            yield f"attention, {length} positions{', causal' if causal else ''}", lambda c=causal, t=length: (
                lambda q, k, v: U.scaled_dot_product_attention(q, k, v, is_causal=c), {name: n(4, 4, t, 64) for name in "qkv"},
            ), dict.fromkeys("qk", 0.125 * (causal_share(length) if causal else 1))  # fmt: skip
    yield "attention, 64 positions, 8 heads share 2", lambda: (
        lambda q, k, v: U.scaled_dot_product_attention(q, k, v, enable_gqa=True), {"q": n(4, 8, 64, 64), "k": n(4, 2, 64, 64), "v": n(4, 2, 64, 64)},
    ), {"q": 0.125, "k": 0.25, "v": 2}  # fmt: skip
    for d, size in ((1, 64), (2, 32), (3, 12)):
        for kind in ("avg", "max"):
            f = getattr(U, f"{kind}_pool{d}d", None)
            if f is not None:
                yield f"{kind}_pool{d}d, kernel 2", lambda f=f, d=d, s=size: (lambda x: f(x, 2, constraint=None), {"x": n(8, 16, *[s] * d)}), {}
    yield "cross_entropy, 256 classes", lambda: (
        lambda x, t: U.cross_entropy(x, t), {"x": n(2048, 256) * 0.0625, "t": torch.randint(256, (2048,))}
    ), {}  # fmt: skip
    yield "mse_loss", lambda: (lambda x, y: U.mse_loss(x, y), {"x": n(512, 64), "y": n(512, 64)}), {}


def recurrent_cases():
    from torch import nn

    from plumb.transforms import unit_scale

    for kind in (nn.LSTM, nn.GRU, nn.RNN):
        for steps in (16, 64):
            def make(kind=kind, steps=steps):
                model = unit_scale(kind(128, 128, batch_first=True))
                return model, steps

            totals = None
            for draw in range(3):
                torch.manual_seed(draw)
                model, length = make()
                x = torch.randn(16, length, 128, requires_grad=True)
                y, _ = model(x)
                y.backward(torch.randn_like(y))
                row = [rms(y), rms(x.grad), rms(model.weight_ih_l0.grad), rms(model.weight_hh_l0.grad), rms(model.bias_ih_l0.grad)]
                totals = row if totals is None else [a + b for a, b in zip(totals, row)]
            yield f"{kind.__name__}, {steps} steps", [t / 3 for t in totals], ["x", "w_ih", "w_hh", "bias"]


def line(name, values, inputs, wanted):
    def cell(key, value):
        if value is None:
            return "torch's"
        return f"{value:.3f}" + (f" ({wanted[key]:.4g})" if key in wanted else "")

    gradients = ", ".join(f"{k} {cell(k, v)}" for k, v in zip(inputs, values[1:]))
    return [name, cell("output", values[0]), gradients]


def main():
    torch.set_num_threads(1)
    rows = [line(name, *measured(make), wanted) for name, make, wanted in cases()]
    rows += [line(name, values, inputs, {}) for name, values, inputs in recurrent_cases()]
    print(HEAD + table(["operator", "output (wanted)", "gradients (wanted)"], rows) + NOTES, end="")


if __name__ == "__main__":
    main()
