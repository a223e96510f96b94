"""How near plumb's CUDA kernels come to the memory's speed: bytes a second, beside those of `clone`. Prints Markdown."""

import torch

SIZE = 1 << 27  # values: beyond any cache
TURNS = 20


def seconds(run):
    """Returns the median of a call's times, on the device's own clock."""
    for _ in range(3):
        run()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(TURNS)]
    for begin, end in events:
        begin.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return sorted(begin.elapsed_time(end) for begin, end in events)[TURNS // 2] / 1e3


def cases(x):
    """Name, the call, bytes that it reads and writes a value."""
    ops, wide = torch.ops.plumb, x.element_size()
    codes = ops.encode(x, "e4m3fn-RN")
    rows = x.view(-1, 4096)
    yield "clone", lambda: x.clone(), 2 * wide
    yield "quantise, nearest", lambda: ops.quantise(x, "e4m3fn-RN"), 2 * wide
    yield "quantise, stochastic", lambda: ops.quantise(x, "e4m3fn-SR", seed=1), 2 * wide
    yield "quantise, mxfp8", lambda: ops.quantise(rows, "mxfp8"), 2 * wide
    yield "quantise, nvfp4", lambda: ops.quantise(rows, "nvfp4"), 3 * wide
    yield "encode", lambda: ops.encode(x, "e4m3fn-RN"), wide + 1
    yield "decode", lambda: ops.decode(codes, "e4m3fn-RN", dtype=x.dtype), wide + 1
    yield "unit-scaled gelu", lambda: ops.gelu(x), 2 * wide
    yield "metrics", lambda: ops.tensor_metrics(x), wide
    yield "metrics with histogram", lambda: ops.tensor_metrics(x, True), wide
    yield (
        "pointwise, four steps",
        lambda: ops.pointwise([x, x], "scale #0 0.5 1; add $0 #1; silu $1; scale $2 2 1"),
        3 * wide,
    )


def main():
    if not torch.cuda.is_available():
        print("There is no CUDA device: not measured.")
        return
    import plumb  # noqa: F401

    print("| kernel | type | TB/s | of clone |\n|---|---|---:|---:|")
    for dtype in [torch.float32, torch.bfloat16, torch.float16]:
        x = torch.randn(SIZE, device="cuda").to(dtype)
        clone = None
        for name, run, moved in cases(x):
            speed = SIZE * moved / seconds(run)
            clone = clone or speed
            print(
                f"| {name} | {str(dtype).removeprefix('torch.')} | {speed / 1e12:.2f} | {speed / clone:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
