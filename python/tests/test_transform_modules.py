"""Transformed modules as modules: parameters, torch.compile, copies, hooks."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
import zoo
from capture_checks import entries, needs_positions
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils.checkpoint import checkpoint
from transform_models import Branches

import plumb
from plumb.transforms import compile, report, simulate_format, simulate_fp8, track_scales, unit_scale

# --- parameters


@pytest.mark.parametrize("ran", [False, True])
@pytest.mark.parametrize(
    ("compute", "make_permanent"),
    [
        (lambda layer: prune.l1_unstructured(layer, "weight", 0.5), lambda layer: prune.remove(layer, "weight")),
        (parametrizations.weight_norm, lambda layer: parametrize.remove_parametrizations(layer, "weight")),
    ],
)
def test_a_scaled_weight_that_is_computed_later_is_refused_by_name_until_it_is_permanent(compute, make_permanent, ran):
    model, x = unit_scale(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))), torch.randn(6, 8)
    if ran:
        model(x)
    other = copy.deepcopy(model)
    compute(model[0])
    with pytest.raises(plumb.Error, match=r"'0\.weight' was unit-scaled, and is computed now") as caught:
        model(x)
    assert "before unit_scale" in caught.value.remedy
    make_permanent(model[0])
    other[0].weight.data.copy_(model[0].weight)
    assert torch.equal(model(x), other(x))
    model[0] = nn.Identity()  # not computed: gone
    assert model(torch.randn(6, 16)).shape == (6, 4)


class Packed(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.values, self.bias = [layer.weight.detach().clone()], layer.bias

    def weight(self):
        return self.values[0]

    def forward(self, x):
        return F.linear(x, self.weight(), self.bias)


class Adapted(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.base_layer, self.low = layer, nn.Linear(8, 16, bias=False)

    @property
    def weight(self):
        return self.base_layer.weight

    def forward(self, x):
        return self.base_layer(x) + self.low(x)


@pytest.mark.filterwarnings("ignore")  # quantize_dynamic is deprecated
@pytest.mark.parametrize("ran", [False, True])
@pytest.mark.parametrize("layer", [nn.Linear(8, 16), nn.LSTM(8, 16)])
def test_a_layer_that_is_quantized_after_it_was_scaled_is_refused_by_name(layer, ran):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, x):
            out = self.layer(x)
            return out if isinstance(out, torch.Tensor) else out[0]

    x = torch.randn(3, 6, 8)
    model = unit_scale(Model())
    if ran:
        model(x)
    quantized = torch.ao.quantization.quantize_dynamic(model, {type(layer)})
    with pytest.raises(plumb.Error, match=r"'layer\.weight.*' was unit-scaled, and is .* packed \(quantization\)"):
        quantized(x)
    before = unit_scale(torch.ao.quantization.quantize_dynamic(Model(), {type(layer)}))
    assert before(x).shape == (3, 6, 16)


def test_a_layer_in_the_place_of_a_scaled_one_shows_its_weight_or_is_refused():
    x = torch.randn(6, 8)
    model = unit_scale(nn.Sequential(nn.Linear(8, 16), nn.ReLU()))
    model(x)
    model[0] = Packed(layer := model[0])
    with pytest.raises(plumb.Error, match=r"'0\.weight' was unit-scaled.* by a Packed"):
        model(x)
    for shows in (Adapted(layer), nn.Sequential(layer, nn.ReLU())):
        model[0] = shows
        assert model(x).shape == (6, 16)


class FunctionalLinear(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(32, 32) * 0.02)

    def forward(self, x):
        return F.linear(x, self.w)


class WeightUsedTwice(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(16, 16)

    def forward(self, x):
        return self.l(x), self.l.weight.sum()


def test_a_weight_of_no_layer_is_scaled_with_its_operator():
    torch.manual_seed(0)
    model = unit_scale(FunctionalLinear())
    y = model(torch.randn(256, 32))
    assert abs(model.w.std() - 1) < 1e-4 and 0.85 < y.std() < 1.15
    assert model.w.mup_type == "weight"
    assert [e["node"] for e in entries(model, "weight")] == ["w"]


def test_a_weight_that_something_else_uses_keeps_its_values_and_its_operator():
    original = WeightUsedTwice()
    model = unit_scale(original)
    x = torch.randn(4, 16)
    y, total = model(x)
    torch.testing.assert_close(model.l.weight, original.l.weight)
    torch.testing.assert_close(model.l.bias, original.l.bias)
    torch.testing.assert_close((y, total), original(x))
    assert any(e["node"] == "l.weight" for e in entries(model, "left_alone"))


def test_values_loaded_before_the_first_forward_stay():
    trained = unit_scale(FunctionalLinear())
    x = torch.randn(8, 32)
    trained(x)
    with torch.no_grad():
        trained.w.mul_(3)
    other = unit_scale(FunctionalLinear())
    other.load_state_dict(trained.state_dict())
    assert torch.equal(other(x), trained(x)) and torch.equal(other.w, trained.w)


COPIES = {
    "copied": copy.deepcopy,
    "transformed": track_scales,
    "transformed twice": lambda m: track_scales(compile(m, backend="eager")),
    "pickled": lambda m: pickle.loads(pickle.dumps(m)),
}


@pytest.mark.parametrize("copied", COPIES)
@pytest.mark.parametrize("how", ["load", "assign", "by hand", "checkpoint", "before"])
def test_values_loaded_into_a_copy_before_its_first_forward_stay(copied, how, tmp_path):
    trained = unit_scale(FunctionalLinear())
    x = torch.randn(8, 32)
    trained(x)
    with torch.no_grad():
        trained.w.mul_(3)
    state = {name: value.clone() for name, value in trained.state_dict().items()}
    other = unit_scale(FunctionalLinear())
    if how == "before":
        other.load_state_dict(state)
    other = COPIES[copied](other)
    if how == "load":
        other.load_state_dict(state)
    elif how == "assign":
        other.load_state_dict(state, assign=True)
    elif how == "by hand":
        with torch.no_grad():
            for name, parameter in other.named_parameters():
                parameter.copy_(state[name])
    elif how == "checkpoint":
        plumb.checkpoint.save(tmp_path, trained, step=1)
        plumb.checkpoint.load(tmp_path, other)
    assert torch.equal(other(x), trained(x)) and torch.equal(other.w, trained.w)


def traced():
    torch.manual_seed(0)
    return torch.fx.symbolic_trace(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.GELU(), nn.Linear(8, 8)))


@pytest.mark.parametrize("again", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_modules_of_fx_stay_transformed_when_they_are_copied(again):
    x = torch.randn(16, 8)
    fp8 = track_scales(simulate_format(unit_scale(traced()), "e4m3fn-RN", "e5m2-RN"))
    fp8(x)
    copied = again(fp8)
    assert not any(copied.load_state_dict(fp8.state_dict()))
    assert torch.equal(copied(x), fp8(x)) and not torch.equal(copied(x), traced()(x))
    with pytest.raises(plumb.Error, match="called alone"):
        copied.get_submodule("0")(x)
    assert [part["pass"] for part in report(copied)] == [part["pass"] for part in report(fp8)]
    assert "these_weights_are_unit_scaled" in str(list(copied.state_dict()))
    fp8.eval()
    plain = plumb.transforms.fold(again(fp8), x)
    torch.testing.assert_close(plain.eval()(x), unit_scaled_alone(fp8)(x), rtol=1e-4, atol=1e-4)
    assert not any(traced().load_state_dict(plain.state_dict()))


def unit_scaled_alone(module):
    scaled = unit_scale(traced())
    scaled.load_state_dict(module.state_dict())
    return scaled.eval()


def test_functional_call_with_computed_parameters_gives_them_gradients_and_no_warnings(capfd):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))
    tracked, x, factor = track_scales(plain), torch.randn(3, 4), torch.tensor(1.5, requires_grad=True)
    found = []
    for module in (plain, tracked, tracked):
        parameters = {name: p.detach() * factor for name, p in plain.named_parameters()}
        y = torch.func.functional_call(module, parameters, (x,))
        found.append([y.detach(), *torch.autograd.grad(y.sum(), factor)])
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(other, found[0], strict=True))
    assert "Warning" not in capfd.readouterr().err


def test_the_users_own_tags_stay():
    model = unit_scale(nn.Sequential(plumb.Linear(8, 8), plumb.LinearReadout(8, 8)))
    model(torch.randn(2, 8))
    assert [p.mup_type for p in model.parameters()] == ["weight", "output"]


def test_tied_weights_share_one_tag_and_are_scaled_once():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(16, 8), nn.Linear(8, 16, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids):
            return self.head(self.embed(ids))

    torch.manual_seed(0)
    model = unit_scale(Tied())
    for used in (False, True):
        assert model.head.weight is model.embed.weight
        assert model.head.weight.mup_type == "weight" and abs(model.head.weight.std() - 1) < 1e-5
        model(torch.arange(4)) if not used else None
    assert [e["node"] for e in entries(model, "weight")] == ["embed.weight"]
    mine = Tied()
    plumb.parameter.tag_parameter(mine.head.weight, "output", 3)
    tagged = unit_scale(mine)
    tagged(torch.arange(4))
    assert (tagged.embed.weight.mup_type, tagged.embed.weight.mup_scaling_depth) == ("output", 3)


def test_taus_are_options_and_the_depth_rule_can_be_chosen():
    torch.manual_seed(0)
    model, ids = zoo.GPT(), torch.randint(50, (2, 8))
    fixed = unit_scale(model, tau_attention=0.25, tau_mlp=0.75)
    fixed(ids)
    assert [e["tau"] for e in entries(fixed, "residual")] == [0.25, 0.75, 0.25, 0.75]
    depth = unit_scale(model, depth_rule=True, residual_mult=0.5)
    depth(ids)
    taus = [e["tau"] for e in entries(depth, "residual")]
    rule = plumb.transformer_residual_scaling_rule(residual_mult=0.5)
    assert taus == pytest.approx([rule(i, 4) for i in range(4)])
    assert depth.blocks[0].qkv.weight.mup_scaling_depth == 4 and depth.tok.weight.mup_scaling_depth is None


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_are_scaled(kind):
    torch.manual_seed(0)
    model = unit_scale(kind(64, 64, batch_first=True))
    x = torch.randn(16, 24, 64, requires_grad=True)
    y, _ = model(x)
    y.backward(torch.randn_like(y))
    for t in (y, x.grad, model.weight_ih_l0, model.weight_ih_l0.grad, model.weight_hh_l0.grad):
        assert 0.75 < t.detach().square().mean().sqrt() < 1.35
    assert model.bias_ih_l0.abs().max() == 0
    assert any("unit-scaled weights" in e["reason"] for e in entries(model, "replaced"))


def test_a_cell_in_a_loop_is_scaled():
    class Loop(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = nn.LSTMCell(64, 64)

        def forward(self, x):
            h = c = x.new_zeros(x.shape[0], 64)
            out = []
            for t in range(x.shape[1]):
                h, c = self.cell(x[:, t], (h, c))
                out.append(h)
            return torch.stack(out, 1)

    torch.manual_seed(0)
    y = unit_scale(Loop())(torch.randn(16, 8, 64))
    assert 0.8 < y.square().mean().sqrt() < 1.2


def test_parametrized_layers_are_left_alone():
    for wrap in (nn.utils.parametrizations.spectral_norm, nn.utils.parametrizations.weight_norm):
        torch.manual_seed(0)
        model = nn.Sequential(wrap(nn.Linear(16, 16)), nn.Linear(16, 4)).eval()
        scaled, x = unit_scale(model), torch.randn(8, 16)
        assert scaled(x).shape == (8, 4)
        entries = report(scaled)[0]["entries"]
        why = [e["reason"] for e in entries if e["kind"] == "left_alone" and e.get("from") == "aten::linear"]
        assert len(why) == 1 and "is computed from 0.parametrizations.weight.original" in why[0]
        assert torch.equal(scaled[0].weight, model[0].weight)


# --- as a module


def test_names_hooks_modes_and_parameters_are_those_of_the_module(tmp_path):
    original = Branches()
    model = simulate_fp8(unit_scale(original))
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in original.named_parameters()]
    assert [n for n, _ in model.named_modules()] == [n for n, _ in original.named_modules()]
    calls = []
    hooks = [
        model.register_forward_pre_hook(lambda *_: calls.append("before")),
        model.register_forward_hook(lambda *_: calls.append("after")),
    ]
    model(torch.randn(2, 16))
    model(torch.randn(2, 16))
    for hook in hooks:
        hook.remove()
    assert calls == ["before", "after"] * 2
    assert not model.eval().norm.training and model.train().norm.training
    torch.save(model, tmp_path / "m.pt")
    loaded = torch.load(tmp_path / "m.pt", weights_only=False)
    assert loaded.state_dict().keys() == model.state_dict().keys()


def test_an_unused_copy_scales_what_its_first_graph_shows():
    x = torch.randn(256, 32)
    for model in (copy.deepcopy(unit_scale(FunctionalLinear())), pickle.loads(pickle.dumps(unit_scale(FunctionalLinear())))):
        assert 0.85 < model(x).std() < 1.15


def test_a_replaced_submodule_is_noticed():
    model = unit_scale(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    x = torch.randn(3, 4)
    model(x)
    model[1] = nn.Identity()
    y = model(x)
    assert (y < 0).any()
    model.append(nn.ReLU())
    assert (model(x) >= 0).all()


def test_graphs_are_kept_up_to_a_number():
    model = unit_scale(nn.Linear(4, 4))
    for n in range(1, 70):
        model(torch.randn(n, 4))
    assert len(model.forward._cache) == 64
    assert model(torch.randn(1, 4)).shape == (1, 4)


# --- what a graph is called by


@needs_positions
def test_nodes_are_named_after_variables_and_functions():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            hidden = self.linear(x)
            left, right = hidden.chunk(2, -1)
            left = left * 2
            left += torch.abs(right)
            return F.softmax(left, -1).sum()

    tracked = track_scales(Model())
    assert len(tracked.scales_graph().nodes) == 0
    tracked(torch.randn(2, 4))
    found = [(n.name, n.target) for n in tracked.scales_graph().nodes if n.op.startswith("call")]
    import operator

    assert found == [
        ("hidden", F.linear), ("left", "chunk"), ("right", "chunk"), ("left_1", operator.mul), ("abs_1", torch.abs),
        ("left_2", operator.iadd),
        ("softmax", F.softmax), ("sum_1", "sum"),
    ]  # fmt: skip


def test_hooks_of_parameters_are_kept():
    model = nn.Linear(4, 4)
    seen = []
    model.weight.register_hook(lambda g: g * 2)
    model.bias.register_post_accumulate_grad_hook(lambda p: seen.append(p))
    module, x = track_scales(model), torch.randn(3, 4)
    for m in (module, model):
        m(x).sum().backward()
    assert torch.equal(module.weight.grad, model.weight.grad) and seen[0] is module.bias and seen[1] is model.bias


def test_modules_with_scripted_parts():
    class Part(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            return torch.sigmoid(self.layer(x)) * x

    model, x = nn.Sequential(nn.Linear(4, 4), torch.jit.script(Part())), torch.randn(3, 4)
    tracked = track_scales(model)
    assert torch.equal(tracked(x), model(x))
    for module in (tracked, simulate_fp8(model), unit_scale(model)):
        module(x).sum().backward()
        assert module[1].layer.weight.grad is not None and module[0].weight.grad is not None
    plain = plumb.transforms.fold(unit_scale(model), x)
    torch.testing.assert_close(plain(x), unit_scale(model)(x))


def test_a_module_that_cannot_be_copied_says_so():
    model = nn.Linear(4, 4)
    model.lines = (line for line in "ab")
    with pytest.raises(plumb.Error, match="the Linear cannot be copied, and a transform is a copy: .*generator"):
        track_scales(model)


@pytest.mark.parametrize("transform", [track_scales, unit_scale, simulate_fp8])
def test_a_tensor_computed_from_weights_before_the_forward_is_not_a_constant_in_silence(transform):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(2, 4))
            self.first = self.weight[0]

        def forward(self, x, reads=True):
            return x * self.first if reads else x * self.weight[0]

    net, x = transform(Net()), torch.ones(3, 4)
    with pytest.raises(plumb.Error, match="'first', a tensor that was computed before") as caught:
        net(x)
    assert caught.value.kind is plumb.ErrorKind.Capture and "in the forward" in caught.value.remedy
    net(x, False).sum().backward()
    assert net.weight.grad[0].any()


def test_a_transform_made_in_inference_mode_trains_outside_of_it():
    with torch.inference_mode():
        made = unit_scale(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
        made(torch.randn(3, 4))
    made(torch.randn(3, 4)).sum().backward()
    assert made[0].weight.grad is not None and abs(made[0].weight.std().item() - 1) < 1e-3


@pytest.mark.parametrize("transform", [unit_scale, track_scales])
def test_a_first_call_in_a_checkpoint_is_counted_without_its_capture(transform):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8)), torch.randn(3, 8)
    gradients = []
    for checkpointed in (False, True):
        module = transform(model)
        y = checkpoint(module, x, use_reentrant=False) if checkpointed else module(x)
        gradients.append(torch.autograd.grad(y.square().sum(), list(module.parameters())))
    assert all(torch.equal(a, b) for a, b in zip(*gradients))
    module, counts = transform(model), []
    for _ in range(2):
        seen = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t) or t, lambda t: t):
            module(x)
        counts.append(len(seen))
    assert counts[0] == counts[1] > 0
