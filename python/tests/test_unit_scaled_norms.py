"""Norms that are written in Python become unit-scaled ones, wherever they stand."""

import pytest
import torch
from torch import nn

import plumb
from plumb.transforms import unit_scale


def llama(w, x, eps=1e-6):
    dtype = x.dtype
    h = x.to(torch.float32)
    return w * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)).to(dtype)


def gemma(w, x, eps=1e-6):
    h = x.float()
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)
    return (h * (1.0 + w.float())).type_as(x)


def t5(w, x, eps=1e-6):
    h = x * torch.rsqrt(x.to(torch.float32).pow(2).mean(-1, keepdim=True) + eps)
    return w * (h.to(w.dtype) if w.dtype in (torch.float16, torch.bfloat16) else h)


def power(w, x, eps=1e-6):
    return (x.float() * torch.pow(x.float().square().mean(-1, keepdim=True) + eps, -0.5) * w.float()).type_as(x)


def weight_first(w, x, eps=1e-6):
    return w * x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps)


def weight_of_the_root(w, x, eps=1e-6):
    return x * (w * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps))


def divided(w, x, eps=1e-6):
    return x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + eps) * w


def inverted(w, x, eps=1e-6):
    return x * (1 / torch.sqrt(x.pow(2).mean(dim=2, keepdim=True) + eps)) * w


def cohere(w, x, eps=1e-6):
    h = x.to(torch.float32)
    mean = h.mean(-1, keepdim=True)
    h = (h - mean) * torch.rsqrt((h - mean).pow(2).mean(-1, keepdim=True) + eps)
    return (w.to(torch.float32) * h).to(x.dtype)


def deberta(w, x, eps=1e-6):
    h = x.float()
    mean = h.mean(-1, keepdim=True)
    h = (h - mean) / torch.sqrt((h - mean).pow(2).mean(-1, keepdim=True) + eps)
    return w * h.to(x.dtype) + w


def variance(w, x, eps=1e-6):
    mean, var = x.mean(-1, keepdim=True), x.var(-1, keepdim=True, unbiased=False)
    return (x - mean) * torch.rsqrt(var + eps) * w


NORMS = [llama, gemma, t5, power, weight_first, weight_of_the_root, divided, inverted, cohere, deberta, variance]


class Block(nn.Module):
    """Two residual layers, each behind a norm, and a last norm without a weight."""

    def __init__(self, norm):
        super().__init__()
        self.norm = norm
        self.weights = nn.ParameterList([nn.Parameter(torch.ones(32)) for _ in range(2)])
        self.layers = nn.ModuleList([nn.Linear(32, 32, bias=False) for _ in range(2)])

    def forward(self, x):
        for w, layer in zip(self.weights, self.layers, strict=True):
            x = x + layer(self.norm(w, x))
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("norm", NORMS, ids=lambda f: f.__name__)
def test_a_norm_inside_a_residual_is_unit_scaled_in_every_spelling(norm, dtype):
    torch.manual_seed(0)
    model, x = Block(norm).to(dtype), torch.randn(4, 64, 32, dtype=dtype)
    scaled = unit_scale(model)
    y = scaled(x.requires_grad_())
    assert y.dtype == model(x).dtype
    y.backward(torch.randn_like(y))
    entries = [e for part in plumb.report(scaled) for e in part["entries"]]
    assert sum(e["kind"] == "replaced" and e["to"].endswith("_norm") for e in entries) == 3
    assert [e["tau"] for e in entries if e["kind"] == "residual"] == [0.5, 0.5]
    assert not [e for e in entries if e["kind"] == "left_alone" and e["reason"].startswith("a norm")]
    for w in scaled.weights:
        assert 0.25 < w.grad.float().std() < 4


@pytest.mark.parametrize("norm", NORMS, ids=lambda f: f.__name__)
def test_a_norm_that_is_unit_scaled_computes_what_it_did(norm):
    torch.manual_seed(0)

    class Norm(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(32))

        def forward(self, x):
            return norm(self.w, x)

    model, x = Norm(), torch.randn(4, 8, 32)
    scaled = unit_scale(model)
    with torch.no_grad():
        scaled.w.copy_(model.w)
    torch.testing.assert_close(scaled(x), model(x), rtol=1e-4, atol=1e-5)


def test_a_norm_over_another_dimension_is_left_alone_and_the_report_says_that_it_is_a_norm():
    class Channels(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(8, 1, 1))

        def forward(self, x):
            mean = x.mean(1, keepdim=True)
            return self.w * (x - mean) / torch.sqrt((x - mean).pow(2).mean(1, keepdim=True) + 1e-6)

    scaled = unit_scale(Channels())
    scaled(torch.randn(2, 8, 4, 4, requires_grad=True))
    entries = [e for part in plumb.report(scaled) for e in part["entries"]]
    assert [e for e in entries if e["kind"] == "left_alone" and e["reason"].startswith("a norm in a form")]


def test_the_norms_of_transformers_are_unit_scaled():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = dict(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=64,
    )
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    ids = torch.randint(0, 64, (4, 16))
    scaled = unit_scale(model)
    scaled(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    entries = [e for part in plumb.report(scaled) for e in part["entries"]]
    assert sum(e["kind"] == "replaced" and e["to"].endswith("_norm") for e in entries) == 5
    assert [e["tau"] for e in entries if e["kind"] == "residual"] == [0.01, 0.5, 0.01, 0.5]


def test_a_mixture_of_experts_of_transformers_is_a_branch_without_attention():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = dict(
        vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        intermediate_size=64, moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    scaled = unit_scale(transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**sizes)))
    ids = torch.randint(0, 64, (4, 16))
    scaled(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    entries = [e for part in plumb.report(scaled) for e in part["entries"]]
    assert [e["tau"] for e in entries if e["kind"] == "residual"] == [0.01, 0.5]
