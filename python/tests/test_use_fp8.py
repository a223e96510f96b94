"""use_fp8: products of FP8's codes have the bits of the simulation."""

import copy
import functools

import pytest
import torch
import zoo
from torch import nn

import plumb
from plumb.transforms import fold, report, simulate_format, simulate_fp8, track_scales, unit_scale, use_fp8


def gpt():
    return zoo.GPT(vocab=64, d=32, layers=2), lambda: (torch.randint(64, (4, 16)), torch.randint(64, (4, 16)))


def llama():
    return zoo.Llama(50, 16, 2, 4, 32), lambda: (zoo.ids(2, 8),)


def vit():
    return zoo.ViT(), lambda: (torch.randn(2, 3, 16, 16),)


def convnet():
    return zoo.convnet(), lambda: (torch.randn(2, 3, 12, 12),)


def moe():
    return zoo.MoE(), lambda: (torch.randn(9, 8),)


def tied():
    return zoo.GPT(tied=True), lambda: (zoo.ids(2, 8), zoo.ids(2, 8))


MODELS = [gpt, llama, vit, convnet, moe, tied]


def simulate(module):
    return simulate_format(module, "e4m3fn-RN", "e5m2-RN")


def losses_of(make, transform, steps=50):
    torch.manual_seed(0)
    model, batch = make()
    model = transform(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        out = model(*batch())
        out = out[1] if isinstance(out, tuple) else out["y"] if isinstance(out, dict) else out
        loss = out if out.dim() == 0 else out.float().square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize("scaled", [False, True])
def test_fifty_steps_have_the_losses_of_the_simulation(make, scaled):
    prepare = unit_scale if scaled else lambda m: m
    expected = losses_of(make, lambda m: simulate(prepare(m)))
    assert losses_of(make, lambda m: use_fp8(prepare(m))) == expected
    assert expected[-1] != expected[0]


def saved_by_products(out):
    """Returns the memory that products on autograd's graph keep, each once, in bytes."""
    products = {"AddmmBackward0": ("mat1", "mat2"), "MmBackward0": ("self", "mat2"), "BmmBackward0": ("self", "mat2")}
    seen, kept, nodes = set(), {}, [out.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        nodes += [n for n, _ in node.next_functions]
        for name in products.get(node.name(), ()):
            tensor = getattr(node, f"_saved_{name}")
            if not isinstance(tensor, torch.Tensor):
                continue
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return sum(kept.values())


def test_products_keep_a_quarter_of_float32s_bytes():
    class MLP(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k, self.up, self.down = (nn.Linear(64, 64) for _ in range(4))

        def forward(self, x):
            return self.down(self.up(torch.bmm(self.q(x), self.k(x).transpose(1, 2)) @ x))

    torch.manual_seed(0)
    model, x = MLP(), torch.randn(4, 64, 64, requires_grad=True)
    full = saved_by_products(model(x).sum())
    codes = {}

    def pack(tensor):
        if tensor.dtype == torch.uint8:
            codes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        else:
            assert tensor.numel() < 64, f"{tuple(tensor.shape)} of {tensor.dtype} is kept"
        return tensor

    fp8 = use_fp8(model)
    fp8(x)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        fp8(x).sum().backward()
    assert full > 0 and sum(codes.values()) <= 0.30 * full, (sum(codes.values()), full)


def test_kernels_give_the_same_numbers_but_for_the_order_of_sums():
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(96, 256), nn.GELU(), nn.Linear(256, 40)), torch.randn(24, 96)
    by_values = use_fp8(net, kernel="decoded")(x)
    assert torch.equal(use_fp8(net)(x), by_values), "a CPU multiplies the values"
    by_torch = use_fp8(net, kernel="scaled_mm")
    try:
        by_torch(x)
    except plumb.Error as refused:  # oneDNN may not use this CPU's units
        assert "torch cannot multiply FP8 on cpu" in refused.message
        return
    # The second layer's input is rounded: a last bit before it may become a step of the format.
    assert torch.allclose(by_torch(x), by_values, rtol=0.02, atol=0.02)
    by_torch(x).sum().backward()


def test_bfloat16_and_autocast_have_the_bits_of_the_simulation():
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(48, 64), nn.GELU(), nn.Linear(64, 32)), torch.randn(16, 48)
    low = copy.deepcopy(net).bfloat16()
    assert torch.equal(use_fp8(low)(x.bfloat16()), simulate(low)(x.bfloat16()))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(use_fp8(net)(x), simulate(net)(x))
        assert torch.equal(use_fp8(unit_scale(net))(x), simulate(unit_scale(net))(x))


def test_stochastic_rounding_has_the_bits_of_the_simulation():
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(48, 64), nn.GELU(), nn.Linear(64, 32)), torch.randn(16, 48)
    results = []
    for run in (use_fp8(net, "e4m3fn-SR", "e5m2-SR"), simulate_format(net, "e4m3fn-SR", "e5m2-SR")):
        torch.manual_seed(7)
        y = run(x)
        y.square().sum().backward()
        results.append([y, *(p.grad for p in run.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*results))


def test_nests_with_the_other_transforms_in_every_order():
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)), torch.randn(8, 16)
    one = track_scales(use_fp8(unit_scale(net)))
    other = unit_scale(track_scales(use_fp8(net)))
    assert torch.equal(one(x), other(x))
    text = str(report(one))
    assert "plumb::linear -> plumb::fp8_linear" in text and "e4m3fn-RN forward, e5m2-RN backward" in text


def test_exports_and_comes_back(tmp_path):
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)), torch.randn(8, 16)
    graph = plumb.capture(net, x)
    plumb.transforms.run_passes(graph, "use_fp8")
    plumb.save_pt2(graph, tmp_path / "fp8.pt2")
    again = plumb.load_pt2(tmp_path / "fp8.pt2")
    assert torch.equal(again(x), simulate(net)(x))
    assert torch.equal(torch.export.load(tmp_path / "fp8.pt2").module()(x), again(x))
    for p in again.parameters():
        p.grad = None
    again(x).sum().backward()
    assert all(p.grad is not None for p in again.parameters())


def test_compiles_in_one_graph():
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)), torch.randn(8, 16)
    fp8 = use_fp8(net)
    expected = fp8(x)
    expected.sum().backward()
    grads = [p.grad.clone() for p in fp8.parameters()]
    fp8.zero_grad()
    compiled = torch.compile(use_fp8(net), backend="aot_eager", fullgraph=True)
    out = compiled(x)
    out.sum().backward()
    assert torch.equal(out, expected)
    assert all(torch.equal(a, b) for a, b in zip(grads, (p.grad for p in compiled.parameters())))


@pytest.mark.parametrize(
    "given, message",
    [
        ({"fwd_format": "E4M3"}, "no unit multiplies the format E4M3"),
        ({"bwd_format": "mxfp8"}, "no unit multiplies"),
        ({"kernel": "cuda"}, "'cuda' is no kernel"),
    ],
)
def test_refuses_at_once_what_no_unit_multiplies(given, message):
    with pytest.raises(plumb.Error, match=message) as e:
        use_fp8(nn.Linear(4, 4), **given)
    assert e.value.remedy


def test_a_gradient_of_a_gradient_is_refused():
    net, x = nn.Linear(16, 16), torch.randn(4, 16, requires_grad=True)
    y = use_fp8(net)(x).square().sum()
    with pytest.raises(RuntimeError, match="no gradient of a gradient"):
        torch.autograd.grad(y, x, create_graph=True)


def test_fold_of_a_unit_scaled_fp8_module():
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)), torch.randn(8, 16)
    scaled = unit_scale(net)
    fp8 = use_fp8(scaled)
    fp8(x), scaled(x)
    assert torch.allclose(fold(fp8)(x), fold(scaled)(x), atol=1e-6)


def steps_of(module, x):
    """Outputs and gradients of one step."""
    x = x.clone().requires_grad_()
    result = module(x)
    result = result[0] if isinstance(result, tuple) else result
    result.float().square().sum().backward()
    return [result, x.grad, *(p.grad for p in module.parameters())]


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
def test_recurrent_layers_of_sixteen_bits_have_the_bits_of_the_simulation(kind, dtype, batch_first):
    torch.manual_seed(1)
    model = kind(16, 24, 2, batch_first=batch_first, bidirectional=True).to(dtype)
    x = torch.randn(3, 5, 16).to(dtype)
    ours = steps_of(use_fp8(copy.deepcopy(model)), x)
    theirs = steps_of(simulate_format(copy.deepcopy(model), "e4m3fn-RN", "e5m2-RN"), x)
    assert all(map(torch.equal, ours, theirs))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_linear_layer_of_transposed_values_has_the_bits_of_the_simulation(dtype):
    class Transposed(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(16, 24)

        def forward(self, x):
            return self.inner(x.transpose(0, 1))

    torch.manual_seed(2)
    model = Transposed().to(dtype)
    for x in (torch.randn(3, 5, 16), torch.randn(3, 5, 4, 16), torch.randn(16, 5)):
        x = x.to(dtype)
        ours = steps_of(use_fp8(copy.deepcopy(model)), x)
        theirs = steps_of(simulate_format(copy.deepcopy(model), "e4m3fn-RN", "e5m2-RN"), x)
        assert all(map(torch.equal, ours, theirs))


@pytest.mark.parametrize("transform", [simulate_fp8, use_fp8, functools.partial(use_fp8, recipe="tensorwise")])
def test_a_list_of_products_is_a_list_and_what_it_names_is_there(transform):
    net, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)), torch.randn(4, 8)
    for option, text in (("exclude", "head"), ("operators", "aten::linear")):
        with pytest.raises(TypeError, match=f"{option} is '{text}', not a list of texts"):
            transform(net, **{option: text})
    with pytest.raises(TypeError, match="operators is .*, not a list of texts"):
        transform(net, operators=[torch.ops.aten.linear])
    with pytest.raises(plumb.Error, match="'aten::lin' is no matrix product\n  try: .*aten::linear"):
        transform(net, operators=["aten::lin"])(x)
    by_bare_name = transform(net, operators=["linear"])
    by_bare_name(x)
    assert not [e for e in report(by_bare_name)[0]["entries"] if e["kind"] == "left_alone"]
    low = transform(net, exclude=["2", "3", "body.*"])
    low(x)
    reasons = {e["node"]: e["reason"] for e in report(low)[0]["entries"] if e["kind"] == "left_alone"}
    assert "excluded by '2'" in reasons.values() and "2" not in reasons
    assert all("no matrix product has this name" in reasons[name] for name in ("3", "body.*"))


def test_weights_written_past_autograd_count_while_a_graph_has_their_codes():
    torch.manual_seed(0)
    net, x = nn.Linear(32, 32), torch.randn(4, 32)
    low, simulated = use_fp8(net), simulate_format(net, "e4m3fn", "e5m2")
    outputs = [low(x)]
    for write in (lambda w: w.data.mul_(2), lambda w: w.detach().numpy().__imul__(3), lambda w: w.data[0].fill_(7)):
        for weight in {id(m.weight): m.weight for m in (low, simulated)}.values():
            write(weight)
        outputs.append(low(x))
        assert torch.equal(outputs[-1], simulated(x)) and not torch.equal(outputs[-1], outputs[-2])
