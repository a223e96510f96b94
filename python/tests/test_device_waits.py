"""While a model computes, the host neither reads the device's memory nor waits for it: the test device counts that."""

import device
import kernel_calls
import pytest
import torch
from plumb.pipelining import PipelineStage
from plumb.pipelining.schedules import get_schedule_class
from torch import nn

import plumb
from plumb import functional as U
from plumb.transforms import simulate_format, unit_scale, use_fp8

pytestmark = pytest.mark.skipif(device.NAME != "testdevice", reason="asks the test device")
reads = torch.ops.plumb_test_device.host_reads if device.NAME == "testdevice" else None
ops = torch.ops.plumb


def leaf(*sizes):
    return torch.randn(*sizes, device="cpu").to(device.NAME).requires_grad_()


def calls():
    """Calls of all operators that compute: (name, call)."""
    x, w, image = leaf(4, 8), leaf(8, 8), leaf(2, 4, 9, 9)
    ids, wrong = torch.arange(4), torch.tensor([1, 2, -100, 0])
    yield from kernel_calls.calls()
    yield "linear", lambda: U.linear(x, w, leaf(8))
    yield "linear_readout", lambda: U.linear_readout(x, w, leaf(8))
    yield "matmul", lambda: U.matmul(x, w)
    yield "add", lambda: U.add(x, x) + U.add(x, 2.0)
    yield "embedding", lambda: U.embedding(ids, w, padding_idx=1)
    yield "losses", lambda: U.cross_entropy(x, wrong) + U.mse_loss(x, x.detach())
    # (Both together wait: torch's own picks the targets that count.)
    yield "smoothed loss", lambda: U.cross_entropy(x, wrong, label_smoothing=0.1)
    yield "weighted loss", lambda: U.cross_entropy(x, wrong, weight=torch.rand(8))
    yield "norms", lambda: U.layer_norm(x, [8], leaf(8), leaf(8)) + U.rms_norm(x, [8], leaf(8))
    yield "batch norm", lambda: U.batch_norm(image, torch.zeros(4), torch.ones(4), leaf(4), leaf(4), True)
    yield "group norm", lambda: U.group_norm(image, 2, leaf(4), leaf(4))
    yield "activations", lambda: U.gelu(x) + U.silu(x) + U.relu(x) + U.sigmoid(x) + U.tanh(x) + U.softmax(x, -1)
    yield "silu_glu", lambda: U.silu_glu(x, x)
    yield "dropout", lambda: U.dropout(x, 0.3)
    heads = [leaf(2, 3, 16, 8) for _ in range(3)]
    yield "attention", lambda: U.scaled_dot_product_attention(*heads, is_causal=True)
    yield "residuals", lambda: U.residual_apply(lambda r: U.linear(r, w, None), x, 0.5)
    yield "factors", lambda: ops.scale_bwd(ops.scale_fwd(x, 2.0), 2.0) + ops.rescale(x, 2.0, 0.5)
    for n in (1, 2, 3):
        size = [9] * n
        given, back = leaf(2, 4, *size), [3] * n
        yield f"conv{n}d", lambda n=n, g=given, k=back: getattr(U, f"conv{n}d")(g, leaf(6, 4, *k), leaf(6))
        yield f"transposed{n}d", lambda n=n, g=given, k=back: getattr(U, f"conv_transpose{n}d")(g, leaf(4, 6, *k))
        yield f"pools{n}d", lambda n=n, g=given: getattr(U, f"avg_pool{n}d")(g, 3) + getattr(U, f"max_pool{n}d")(g, 3)
    yield "rounded", lambda: ops.simulate_format(x, "E4M3-SR", "E5M2-SR")
    layer = unit_scale(nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32)).to(device.NAME))
    plain, given = nn.Linear(32, 32).to(device.NAME), leaf(32, 32)
    for recipe in (None, "tensorwise", "rowwise", "blocks128", "mxfp8", "mxfp8-up", "delayed"):
        fp8 = use_fp8(plain if recipe else layer, recipe=recipe)
        yield f"fp8 {recipe}", lambda fp8=fp8: fp8(given)
    product = use_fp8(Product())
    yield "fp8 product", lambda: product(given, given)
    optimised = plumb.capture(unit_scale(Chain()), given)
    yield "optimised", lambda: optimised(given)


class Product(nn.Module):
    def forward(self, a, b):
        return a @ b


class Chain(nn.Module):
    def forward(self, x):
        return nn.functional.gelu(x) + x


def forward_and_back(call):
    out = call()
    for y in out if isinstance(out, (tuple, list)) else [out]:
        if isinstance(y, torch.Tensor) and y.requires_grad:
            y.backward(torch.ones_like(y), retain_graph=True)


CALLS = list(calls()) if device.NAME == "testdevice" else []

# Operators that only a tracked graph runs (test_devices.py trains one, too).
TRACKED = {"track_rounded", "track_traced"}
# Guards (read once a run or a step, test_devices.py), marks, functions of sizes, what is a function of the user's, and a
# view.
NO_VALUES = {
    "control_value", "decision", "guard_answer", "guard_check", "guard_equal", "guard_requires_grad", "guard_size",
    "guard_value", "guard_value_read", "check_input", "check_sizes", "pipe_split", "python_function",
    "data",
}  # fmt: skip


@pytest.mark.parametrize("name, call", CALLS, ids=[name for name, _ in CALLS])
def test_no_operator_waits_forward_or_backward(name, call):
    forward_and_back(call)  # captures, tables and kernels are made
    before = reads()
    forward_and_back(call)
    assert reads() == before


def test_all_operators_are_among_them():
    with torch.profiler.profile() as seen:
        for _, call in CALLS:
            forward_and_back(call)
    # (Not key_averages(), which makes a tree of 200,000 events: it takes half a minute.)
    names = {event.name().removeprefix("plumb::") for event in seen.profiler.kineto_results.events()}
    every = {s.name.removeprefix("plumb::") for s in torch._C._jit_get_all_schemas() if s.name.startswith("plumb::")}
    every = {name for name in every if not name.startswith("sym_") and not name.endswith("_scales")}
    assert every - names - TRACKED == NO_VALUES


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


@pytest.mark.parametrize("name", ["LoopedBFS", "InterleavedZeroBubble"])
@pytest.mark.parametrize("recompute", ["none", "cheap"])
def test_no_step_of_a_pipeline_waits(name, recompute):
    modules = [unit_scale(Block().to(device.NAME)), simulate_format(Block().to(device.NAME), "e4m3fn", "e5m2")]
    stages = [PipelineStage(m, i, 2, torch.device(device.NAME), recompute=recompute) for i, m in enumerate(modules)]
    schedule, losses = get_schedule_class(name)(stages, 2, nn.functional.mse_loss), []
    x, target = leaf(32, 64).detach(), leaf(32, 64).detach()
    schedule.step(x, target=target)  # captures, and compares what is computed again
    for _ in range(2):
        before = reads()
        schedule.step(x, target=target, losses=losses)
        assert reads() == before
    assert all(bool(stage.recomputed) == (recompute == "cheap") for stage in stages[:1])
    assert all(torch.isfinite(loss) for loss in losses)
