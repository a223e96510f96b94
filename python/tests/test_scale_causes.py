"""Why tensors of a tracked module are not near unit scale."""

import pytest
import torch
from torch import nn

import plumb
from plumb.transforms import fold, scale_causes, track_scales, unit_scale


class Net(nn.Module):
    """Its head is divided by a number, as T5's is."""

    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.Linear(64, 64), nn.Linear(64, 16)

    def forward(self, x, labels):
        h = nn.functional.gelu(self.layer(x))
        return nn.functional.cross_entropy(self.head(h * 0.01), labels)


def measured(module, *inputs):
    torch.manual_seed(0)
    tracked = track_scales(unit_scale(module))
    tracked(*inputs).backward()
    return tracked


def test_a_number_that_shrinks_all_gradients_before_it_is_named_with_what_it_concerns():
    torch.manual_seed(0)
    tracked = measured(Net(), torch.randn(128, 64, requires_grad=True), torch.randint(0, 16, (128,)))
    causes = scale_causes(tracked)
    (shrunk,) = [c for c in causes if c["gradients"] and "multiplies by a number: 0.01" in c["reason"]]
    assert (
        shrunk["small"] and shrunk["target"] == "aten::mul.Tensor" and shrunk["factor"] == pytest.approx(0.01, rel=0.1)
    )
    stds = {
        n.name: n.meta["metrics"].bwd.std
        for n in tracked.scales_graph().nodes
        if n.meta.get("metrics") and n.meta["metrics"].bwd
    }
    small = [name for name, std in stds.items() if std < 0.25]
    assert small and len(shrunk["tensors"]) == len(small), "every small gradient"
    assert {"layer.weight", "head.weight"} <= set(shrunk["tensors"]), "the head's because of its input"
    assert "gradients are small" in str(causes) and "0.01" in str(causes)


def test_there_are_no_causes_where_all_is_near_one():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 64, bias=False), nn.GELU(), nn.Linear(64, 64, bias=False))
    tracked = track_scales(unit_scale(net))
    y = tracked(torch.randn(128, 64, requires_grad=True))
    y.backward(torch.randn_like(y))
    assert scale_causes(tracked) == [] and "within the limits" in str(scale_causes(tracked))
    assert scale_causes(tracked, low=0.999, high=1.001) != []
    with pytest.raises(plumb.Error, match="0 < low < high"):
        scale_causes(tracked, low=2.0, high=1.0)


def test_a_module_that_is_not_tracked_or_has_not_run_has_no_causes_to_tell():
    scaled = unit_scale(nn.Linear(4, 4))
    scaled(torch.randn(2, 4))
    with pytest.raises(plumb.Error, match="does not measure its scales") as error:
        scale_causes(scaled)
    assert error.value.kind is plumb.ErrorKind.InvalidState
    with pytest.raises(plumb.Error, match="has not run"):
        scale_causes(track_scales(nn.Linear(4, 4)))
    forward_alone = track_scales(nn.Linear(4, 4))
    forward_alone(torch.randn(2, 4))
    with pytest.raises(plumb.Error, match="no gradient was measured"):
        scale_causes(forward_alone)
    with pytest.raises(plumb.Error, match="does not measure its scales"):
        scale_causes(fold(scaled))
    for other in (None, [scaled], {}):
        with pytest.raises(plumb.Error, match=f"a {type(other).__name__} is no module"):
            scale_causes(other)


def llama(transformers, sizes):
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))


def qwen(transformers, sizes):
    experts = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, head_dim=16)
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**sizes, **experts))


@pytest.mark.parametrize("make", [llama, qwen])
def test_what_is_outside_in_models_of_transformers_at_the_start_has_a_cause_in_the_report(make):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = dict(
        vocab_size=128,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=128,
    )
    ids = torch.randint(2, 128, (4, 64))
    tracked = track_scales(unit_scale(make(transformers, sizes)))
    tracked(input_ids=ids, labels=torch.randint(2, 128, (4, 64)), use_cache=False).loss.backward()
    causes = scale_causes(tracked)
    explained = {(name, c["gradients"]) for c in causes for name in c["tensors"]}
    for node in tracked.scales_graph().nodes:
        metrics = node.meta.get("metrics")
        if metrics is None or metrics.bwd is None or metrics.fwd.numel < 2:
            continue
        name = node.target if node.op == "get_attr" else node.name
        assert ((name, True) in explained) == (not 0.25 <= metrics.bwd.std <= 4), name
        if node.op != "get_attr":
            assert ((name, False) in explained) == (not 0.25 <= metrics.fwd.std <= 4), name
    of_llama = {"plumb::scaled_dot_product_attention"}
    assert {c["target"] for c in causes if c["gradients"]} >= of_llama
    if make is llama:
        assert {c["target"] for c in causes} == of_llama
        assert all("query and key" in c["reason"] for c in causes)
    else:
        assert any("grouped_mm" in c["target"] for c in causes)  # its result, before the factor behind it
