"""Every operator on a CUDA device against the CPU: with plumb's CUDA kernels, and with ATen's operators in their place."""

import os
import subprocess
import sys

import pytest
import torch

import plumb

# These comparisons need a GPU; plumb/cuda/kernels_test.cpp runs the same kernels' texts on any machine.
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
FORMATS = ["e4m3fn-RN", "e5m2-RN-inf", "E4M3-SR", "e5m2-SR8", "E4M3-RZ", "E8M3-RN", "e4m3fnuz-RN", "E3M0-RN", "bf16-RN"]
BLOCKS = ["mxfp8", "mxfp6", "mxfp4-SR", "nvfp4"]
PROGRAMS = [("add #0 #1; mul $0 #2; scale $1 0.5 0.25; neg $2", 3), ("relu! #0; sub $0 #1", 2)]
ops = torch.ops.plumb


def values(dtype):
    if dtype == torch.float32:
        torch.manual_seed(0)
        bits = torch.arange(0, 2**32, 65521, dtype=torch.int64)
        wild = (bits - 2**31).to(torch.int32).view(torch.float32)
        return torch.cat([wild, torch.randn(100003), torch.randn(5000).abs() * 2.0**-140])
    return torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype)


def same_bits(found, wanted):
    found = found.cpu()
    assert found.shape == wanted.shape and found.dtype == wanted.dtype
    if not wanted.is_floating_point():
        return torch.equal(found, wanted)
    word = {2: torch.int16, 4: torch.int32, 8: torch.int64}[wanted.element_size()]
    bits = found.contiguous().view(word) == wanted.contiguous().view(word)
    return bool((bits | (found.isnan() & wanted.isnan())).all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("text", FORMATS + BLOCKS)
def test_rounds_to_the_bits_of_the_cpu(text, dtype):
    x = values(dtype)
    assert same_bits(ops.quantise(x.cuda(), text, seed=5), ops.quantise(x, text, seed=5))
    odd = x[3:5000].cuda()  # not on a vector's boundary, and no whole number of them
    assert same_bits(ops.quantise(odd, text, seed=5), ops.quantise(x[3:5000], text, seed=5))
    rows = x[:6000].view(60, 100)
    assert same_bits(ops.quantise(rows.cuda().t(), text, seed=5), ops.quantise(rows.t(), text, seed=5))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("text", ["e4m3fn-RN", "e5m2-RN-inf", "E4M3-SR", "e2m1fn-RN"])
def test_codes_are_those_of_the_cpu(text, dtype):
    x = values(dtype)
    codes = ops.encode(x, text, seed=9)
    assert same_bits(ops.encode(x.cuda(), text, seed=9), codes)
    assert same_bits(ops.decode(codes.cuda(), text, dtype=dtype), ops.decode(codes, text, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("histogram", [False, True])
def test_metrics_are_those_of_the_cpu(histogram, dtype):
    normal = torch.randn(1_000_003).to(dtype)
    for x in [normal, normal + 100, values(dtype), torch.zeros(7, dtype=dtype), torch.empty(0, dtype=dtype)]:
        found, wanted = ops.tensor_metrics(x.cuda(), histogram).cpu(), ops.tensor_metrics(x, histogram)
        # A mean may be all but zero: its digits are those of larger sums.
        for i, scale in enumerate(wanted[[0, 0, 2]]):
            torch.testing.assert_close(found[i], wanted[i], rtol=0, atol=float(1e-6 * scale.abs().nan_to_num()), equal_nan=True)
        assert torch.equal(found[3:].nan_to_num(-1), wanted[3:].nan_to_num(-1))


@pytest.mark.parametrize("dtype", DTYPES)
def test_simulation_rounds_forward_and_backward(dtype):
    x, g = values(dtype), values(dtype).flip(0)
    results = []
    for device in ["cpu", "cuda"]:
        leaf = x.to(device).detach().requires_grad_()
        y = ops.simulate_format(leaf, "e4m3fn-SR", "e5m2-RN", seed=3)
        y.backward(g.to(device))
        results.append((y.detach().cpu(), leaf.grad.cpu()))
    (y, grad), (cuda_y, cuda_grad) = results
    assert same_bits(cuda_y, y) and same_bits(cuda_grad, grad)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("count", [1, 255, 4097, 1_000_003])
def test_masks_of_dropout_are_the_cpus(count, dtype):
    x, results = torch.ones(count, dtype=dtype), []
    for device in ["cpu", "cuda"]:
        torch.manual_seed(4)
        results.append([t.cpu() for t in ops.native_dropout(x.to(device), 0.1, True)])
    assert all(same_bits(found, wanted) for wanted, found in zip(*results))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("program", PROGRAMS)
def test_pointwise_programs_are_those_of_the_cpu(program, dtype):
    text, count = program
    torch.manual_seed(2)
    inputs = [torch.randn(1031, 3).to(dtype) for _ in range(count)]
    results = []
    for device in ["cpu", "cuda"]:
        leaves = [x.to(device).detach().requires_grad_() for x in inputs]
        y = ops.pointwise(leaves, text)
        y.sum().backward()
        results.append([y.detach().cpu(), *(leaf.grad.cpu() for leaf in leaves)])
    assert all(same_bits(found, wanted) for wanted, found in zip(*results))


def test_transformed_models_train_as_on_the_cpu():
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Linear(128, 8))
    x = torch.randn(32, 64)
    model = plumb.transforms.track_scales(plumb.transforms.simulate_fp8(plumb.transforms.unit_scale(net)))
    torch.manual_seed(1)  # seed of the stochastic rounding
    expected = model(x)
    torch.manual_seed(1)
    found = model.cuda()(x.cuda())
    torch.testing.assert_close(found.cpu(), expected, rtol=0.1, atol=0.1)
    found.sum().backward()
    assert all(p.grad is not None and p.grad.is_cuda for p in model.parameters())


def test_without_its_kernels_it_says_so_once_and_computes_the_same():
    script = (
        "import torch, plumb, warnings\n"
        "x = torch.randn(1000)\n"
        "for _ in range(2):\n"
        "  y = torch.ops.plumb.quantise(x.cuda(), 'e4m3fn-RN')\n"
        "assert torch.equal(y.cpu(), torch.ops.plumb.quantise(x, 'e4m3fn-RN'))\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, "PLUMB_CUDA_KERNELS": "0"}, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    assert run.stderr.count("CUDA kernels are not used") == 1


def test_kernels_run_on_the_current_stream():
    stream = torch.cuda.Stream()
    x = torch.randn(1 << 22)
    with torch.cuda.stream(stream):
        y = ops.quantise(x.cuda(non_blocking=True), "e4m3fn-RN")
    stream.synchronize()
    assert same_bits(y, ops.quantise(x, "e4m3fn-RN"))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [(2, 5, 1024), (600, 8), (3, 149), (7, 4096)])
def test_softmax_and_rms_norm_are_the_cpus_but_for_the_order_of_sums(sizes, dtype):
    bound = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[dtype]
    calls = [lambda x, w: ops.softmax(x, -1, mult=0.7), lambda x, w: ops.rms_norm(x, [sizes[-1]], w)]
    torch.manual_seed(0)
    x, g, w = torch.randn(sizes).to(dtype), torch.randn(sizes).to(dtype), torch.rand(sizes[-1]) + 0.5
    for call in calls:
        results = []
        for device in ("cpu", "cuda"):
            leaves = [t.to(device).detach().requires_grad_() for t in (x, w)]
            y = call(*leaves)
            y.backward(g.to(device))
            results.append([y.detach().cpu(), *(t.grad.cpu() for t in leaves if t.grad is not None)])
        for wanted, found in zip(*results, strict=True):
            apart = (wanted.double() - found.double()).abs().max() / wanted.double().abs().max().clamp_min(0.1)
            assert apart <= bound
