"""Unit-scaled weights and the way back: fold, the mark of state dicts, parts that refuse to be called alone."""

import copy
import pickle

import plumb.functional as U
import pytest
import torch
import torch.nn.functional as F
import zoo
from command import run
from plumb.pipelining import SplitPoint, pipeline
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from transform_models import FOLDED, difference, first_tensor, made, trained

import plumb
from plumb.transforms import fold, simulate_fp8, track_scales, unit_scale

ROUNDING = 1e-5


@pytest.mark.parametrize("name", FOLDED)
def test_folded_weights_load_into_the_plain_model(name):
    if "transformers" in name:
        pytest.importorskip("transformers")
    model, args, kwargs = made(name)
    scaled = trained(model, args, kwargs)
    plain = fold(scaled, *args, **kwargs)
    assert type(plain) is type(model) and "forward" not in plain.__dict__
    model.load_state_dict(plain.state_dict())
    for m in (scaled, plain, model):
        m.eval()
    with torch.no_grad():
        wanted = first_tensor(scaled(*args, **kwargs))
        assert difference(first_tensor(plain(*args, **kwargs)), wanted) < ROUNDING, plumb.report(plain)
        assert difference(first_tensor(model(*args, **kwargs)), wanted) < ROUNDING
    assert "folded" in str(plumb.report(plain))
    assert not any(hasattr(p, "mup_type") for p in plain.parameters())


class NumbersInResiduals(nn.Module):
    def __init__(self, add):
        super().__init__()
        self.up, self.down, self.norm, self.add = nn.Linear(32, 64), nn.Linear(64, 32), nn.LayerNorm(32), add

    def forward(self, x):
        return self.add(x, self.down(F.gelu(self.up(self.norm(x)))))


@pytest.mark.parametrize(
    "add", [lambda x, f: 2 * x + f, lambda x, f: x + f * 0.5, lambda x, f: x.add(f, alpha=0.1), lambda x, f: 2 * f + x * 3]
)
def test_numbers_that_weight_residual_layers_are_in_tau_and_in_the_folded_model(add):
    torch.manual_seed(0)
    net = nn.Sequential(*(NumbersInResiduals(add) for _ in range(12)), nn.LayerNorm(32))
    scaled, x = unit_scale(net), torch.randn(64, 32, requires_grad=True)
    y = scaled(x)
    y.backward(torch.randn_like(y))
    assert 0.5 < x.grad.std() < 2, "the gradient grew by 1.4 in each layer, or the stream shrank"
    assert difference(fold(scaled)(x), y) < ROUNDING
    assert difference(fold(plumb.capture(scaled, x))(x), y) < ROUNDING


def test_a_plain_model_names_fold_when_it_is_given_unit_scaled_weights(tmp_path):
    model, args, kwargs = zoo.MODELS["GPT"]()
    scaled = trained(model, args, kwargs)
    torch.save(scaled.state_dict(), tmp_path / "trained.pt")
    state = torch.load(tmp_path / "trained.pt")
    with pytest.raises(RuntimeError, match="Unexpected key.*unit_scaled.*fold"):
        model.load_state_dict(state)
    again = unit_scale(model)
    assert not any(again.load_state_dict(state)), "no key is missing, none unexpected"
    assert torch.equal(first_tensor(again(*args)), first_tensor(scaled(*args)))
    wrapped = nn.Sequential(unit_scale(model))
    wrapped.load_state_dict(nn.Sequential(scaled).state_dict())
    assert torch.equal(first_tensor(wrapped(*args)), first_tensor(scaled(*args)))


@pytest.mark.parametrize("graph", [False, True], ids=["module", "graph"])
def test_torchs_distributed_checkpoints_take_a_model_with_a_unit_scaled_part(graph):
    x = torch.randn(3, 4)

    def model():
        scaled = unit_scale(nn.Linear(4, 4))
        return nn.Sequential(plumb.capture(scaled, x) if graph else scaled, nn.Tanh())

    trained, again = model(), model()
    set_model_state_dict(again, get_model_state_dict(trained))
    assert torch.equal(again(x), trained(x))
    plain = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    with pytest.raises(RuntimeError, match="Unexpected key.*unit_scaled.*fold"):
        set_model_state_dict(plain, get_model_state_dict(trained))


@pytest.mark.parametrize("graph", [False, True], ids=["module", "graph"])
def test_plain_weights_are_refused_by_a_unit_scaled_module(graph, tmp_path):
    model, args, _ = zoo.MODELS["GPT"]()
    scaled = unit_scale(model)
    before = {name: tensor.clone() for name, tensor in scaled.state_dict().items()}
    module = plumb.capture(scaled, *args) if graph else scaled
    for one, state in ((module, model.state_dict()), (nn.Sequential(module), nn.Sequential(model).state_dict())):
        with pytest.raises(RuntimeError, match="Missing key.*these_weights_are_unit_scaled"):
            one.load_state_dict(state)
    module.load_state_dict(before)
    missing = module.load_state_dict({"head.weight": before["head.weight"]}, strict=False).missing_keys
    assert any("unit_scaled" in key for key in missing)
    plumb.checkpoint.save(tmp_path, model, step=1)
    with pytest.raises(plumb.Error, match="its weights are plain, and the model is unit-scaled"):
        plumb.checkpoint.load(tmp_path, module)
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())


def test_a_captured_graph_bears_the_mark_of_its_module():
    model, args, _ = zoo.MODELS["GPT"]()
    scaled = unit_scale(model)
    graph = plumb.capture(scaled, *args)
    with pytest.raises(RuntimeError, match="fold"):
        model.load_state_dict(graph.state_dict())
    assert not any(scaled.load_state_dict(graph.state_dict())) and not any(graph.load_state_dict(scaled.state_dict()))
    model.load_state_dict(fold(graph).state_dict())


def test_a_file_bears_the_mark_of_its_module(tmp_path):
    """However the file was made: by Python, by the command, from a capture with dynamic sizes, in a pipeline's weights."""
    path, model = tmp_path / "m.pt2", nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    x = torch.randn(6, 8)
    scaled = unit_scale(model)
    dynamic = plumb.capture(model, x, dynamic_shapes=({0: torch.export.Dim("n", min=2, max=64)},))
    plumb.transforms.run_passes(dynamic, "unit_scale")
    plumb.save_pt2(plumb.capture(model, x), path)
    run(["scale", str(path), "-o", "command.pt2"], tmp_path)
    by_pass = plumb.capture(model, x)
    plumb.transforms.run_passes(by_pass, "unit_scale")
    plumb.save_pt2(by_pass, tmp_path / "by_pass.pt2")
    plumb.save_pt2(dynamic, tmp_path / "dynamic.pt2")
    plumb.save_pt2(plumb.capture(scaled, x), path)
    loaded = {name: plumb.load_pt2(tmp_path / name) for name in ("m.pt2", "command.pt2", "by_pass.pt2", "dynamic.pt2")}
    plumb.save_pt2(loaded["m.pt2"], tmp_path / "again.pt2")
    loaded |= {"again": plumb.load_pt2(tmp_path / "again.pt2"), "copy": copy.deepcopy(loaded["m.pt2"])}
    loaded |= {"pass": by_pass, "dynamic": dynamic}
    for graph in loaded.values():
        with pytest.raises(RuntimeError, match="Unexpected key.*unit_scaled.*fold"):
            model.load_state_dict(graph.state_dict())
        assert not any(scaled.load_state_dict(graph.state_dict())) and not any(graph.load_state_dict(scaled.state_dict()))
        assert not any(model.load_state_dict(fold(graph).state_dict()))
    stages = pipeline(loaded["m.pt2"], (x,), split_spec={"2": SplitPoint.BEGINNING})
    with pytest.raises(RuntimeError, match="fold"):
        model.load_state_dict(stages.merge_state_dict())
    plumb.transforms.run_passes(by_pass, "fold")
    assert not any(model.load_state_dict(by_pass.state_dict()))


def test_a_file_of_unit_scaled_layers_bears_no_mark(tmp_path):
    """Its weights are those of the model that was written so."""
    model, x = nn.Sequential(plumb.nn.Linear(8, 16), plumb.nn.GELU(), plumb.nn.LinearReadout(16, 4)), torch.randn(6, 8)
    plumb.save_pt2(plumb.capture(model, x), tmp_path / "m.pt2")
    loaded = plumb.load_pt2(tmp_path / "m.pt2")
    assert not any(model.load_state_dict(loaded.state_dict())) and not any(loaded.load_state_dict(model.state_dict()))
    plumb.save_pt2(pickle.loads(pickle.dumps(loaded)), tmp_path / "again.pt2")
    assert not any(model.load_state_dict(plumb.load_pt2(tmp_path / "again.pt2").state_dict()))
    plain = plumb.capture(nn.Sequential(nn.Linear(8, 4)), x)
    plumb.save_pt2(plain, tmp_path / "plain.pt2")
    assert plumb.load_pt2(tmp_path / "plain.pt2").state_dict().keys() == plain.state_dict().keys()


def test_weights_merged_from_stages_bear_the_mark():
    model, args, _ = zoo.MODELS["GPT"]()
    scaled = unit_scale(model)
    merged = pipeline(scaled, args, split_spec={"blocks.1": SplitPoint.BEGINNING}).merge_state_dict()
    with pytest.raises(RuntimeError, match="fold"):
        model.load_state_dict(merged)
    assert not any(scaled.load_state_dict(merged))


def test_copies_pickles_and_further_transforms_keep_the_mark():
    model, args, _ = zoo.MODELS["ViT"]()
    scaled = unit_scale(model)
    for m in (copy.deepcopy(scaled), pickle.loads(pickle.dumps(scaled)), track_scales(simulate_fp8(scaled))):
        with pytest.raises(RuntimeError, match="fold"):
            model.load_state_dict(m.state_dict())
        assert not any(scaled.load_state_dict(m.state_dict()))
        with pytest.raises(plumb.Error, match=r"'head' \(Linear\) was called alone"):
            m.head(torch.randn(2, 16))


def test_a_part_of_a_unit_scaled_module_refuses_to_be_called_alone():
    model, args, _ = zoo.MODELS["GPT"]()
    scaled = unit_scale(model)
    with pytest.raises(plumb.Error, match=r"'blocks\.0' \(Block\) was called alone.*\n.*fold") as caught:
        scaled.blocks[0](torch.randn(2, 8, 16))
    assert caught.value.kind is plumb.ErrorKind.InvalidState
    scaled(*args)
    assert torch.equal(scaled.tok(args[0]), F.embedding(args[0], scaled.tok.weight)), "an embedding has no factor"
    fold(scaled).blocks[0](torch.randn(2, 8, 16))


def test_fold_takes_an_example_or_the_last_forward_and_says_which_length_it_holds_for():
    model, args, kwargs = zoo.MODELS["GPT"]()
    scaled = unit_scale(model)
    with pytest.raises(plumb.Error, match="has not run yet") as caught:
        fold(scaled)
    assert "fold(module, *inputs)" in caught.value.remedy
    plain = fold(scaled, zoo.ids(3, 5))
    assert "its factor holds for a length of 5 alone" in str(plumb.report(plain))
    with pytest.raises(plumb.Error, match="was not unit-scaled"):
        fold(model)
    with pytest.raises(plumb.Error, match="was not unit-scaled"):
        fold(track_scales(model))


class TwoFactors(nn.Module):
    """gelu needs the embedding as it is, the head needs its factor."""

    def __init__(self):
        super().__init__()
        self.tok, self.head = nn.Embedding(8, 8), nn.Linear(8, 8, bias=False)
        self.head.weight = self.tok.weight

    def forward(self, ids):
        return self.head(F.gelu(self.tok(ids)))


def test_what_cannot_be_folded_is_named_and_stays_in_a_graph():
    scaled = unit_scale(TwoFactors())
    ids = torch.arange(5)
    scaled(ids)
    with pytest.raises(plumb.Error, match="cannot take 1 of the unit-scaled one's factors") as caught:
        fold(scaled)
    assert caught.value.kind is plumb.ErrorKind.Unsupported and "plumb.capture" in caught.value.remedy
    graph = plumb.capture(scaled, ids)
    plain = fold(graph)
    assert "plumb::" not in str(plain.graph) and "aten::mul" in str(plain.graph)
    torch.testing.assert_close(plain(ids), scaled(ids), rtol=1e-5, atol=1e-6)
    assert "remains" in str(plumb.report(plain))
    with pytest.raises(RuntimeError, match="Unexpected key.*unit_scaled"):  # the multiplication would be missing
        TwoFactors().load_state_dict(plain.state_dict())
    fold(graph).load_state_dict(plain.state_dict())
    assert not any(hasattr(p, "mup_type") for p in plain.parameters())


def test_attention_weights_that_are_returned_keep_their_factor():
    model, args, kwargs = zoo.MODELS["MultiheadAttention"]()
    scaled = trained(model, args, kwargs)
    with pytest.raises(plumb.Error, match="output: %mean times"):
        fold(scaled)
    plain = fold(plumb.capture(scaled, *args))
    torch.testing.assert_close(plain(*args), scaled(*args), rtol=1e-4, atol=1e-5)


def test_functions_of_the_users_own_cannot_be_folded_but_unit_scaled_forms_can():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.head = nn.Linear(8, 8), nn.Linear(8, 3)

        def forward(self, x):
            return self.head(F.gelu(self.fc(x)))

    x = torch.randn(4, 8)
    other = unit_scale(Net(), replace={F.gelu: F.silu})
    other(x)
    with pytest.raises(plumb.Error, match=r"gelu became \S*silu, as asked for"):
        fold(other)
    same = unit_scale(Net(), replace={F.gelu: U.gelu})
    torch.testing.assert_close(fold(same, x)(x), same(x))


def test_dropout_between_recurrent_layers_is_folded_in_evaluation():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.head = nn.LSTM(6, 8, 2, dropout=0.3), nn.Linear(8, 3)

        def forward(self, x):
            return self.head(self.rnn(x)[0])

    x = torch.randn(5, 2, 6)
    scaled = trained(Net(), (x,), {})
    with pytest.raises(plumb.Error, match="dropout between its layers") as caught:
        fold(scaled)
    assert "model.eval()" in caught.value.remedy
    plain = fold(scaled, x)
    assert scaled.training and plain.training
    assert difference(plain.eval()(x), scaled.eval()(x)) < 1e-5
    assert difference(fold(scaled)(x), scaled(x)) < 1e-5, "the last forward was in evaluation"


def test_a_checkpoint_of_transformers_is_folded_before_it_is_saved(tmp_path):
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    model, args, kwargs = zoo.TRANSFORMERS["GPT-2"]()
    scaled = trained(model, args, kwargs)
    fold(scaled).save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    scaled.eval()
    again.eval()
    assert difference(again(**kwargs).logits, scaled(**kwargs).logits) < 1e-5


@pytest.mark.parametrize("name", ["GPT", "GPT tied", "ViT", "ConvNet eval", "Llama", "root Sequential", "Llama of transformers"])
def test_a_graph_is_unit_scaled_and_keeps_its_function(name):
    if "transformers" in name:
        pytest.importorskip("transformers")
    model, args, kwargs = made(name)
    graph = plumb.capture(model.eval(), *args, **kwargs)
    before = {n: p.detach().clone() for n, p in graph.named_parameters()}
    scaled = unit_scale(graph, preserve=True)
    with torch.no_grad():
        assert difference(first_tensor(scaled(*args, **kwargs)), first_tensor(graph(*args, **kwargs))) < 10 * ROUNDING
    assert all(torch.equal(p, before[n]) for n, p in graph.named_parameters())
    assert "multiplied by" in str(plumb.report(scaled)) and any("plumb::" in str(n.target) for n in scaled.graph.nodes)
    plain = dict(fold(scaled).named_parameters())
    assert all(difference(plain[n], p) < ROUNDING for n, p in before.items() if p.abs().max() > 0)
    with pytest.raises(plumb.Error, match="works on a graph"):
        unit_scale(model, preserve=True)


@pytest.mark.parametrize("join", [
    lambda a, b: torch.distributions.Normal(a, b.square() + 1, validate_args=False).log_prob(torch.zeros(())),
    lambda a, b: torch.stack(torch.broadcast_tensors(a, b[:, :1])),
    lambda a, b: torch.stack(torch.atleast_2d(a, b)),
    lambda a, b: torch.view_as_real(torch.complex(a, b)),
    lambda a, b: torch.diff(a, prepend=b),
    lambda a, b: torch.linalg.vector_norm(a, 0, dim=1) + b.sum(1),
], ids=["Normal", "broadcast_tensors", "atleast_2d", "complex", "diff", "norm of order 0"])  # fmt: skip
def test_operators_on_several_tensors_fold_to_the_same_numbers(join):
    class Heads(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = torch.nn.Linear(8, 4), torch.nn.Linear(8, 4)

        def forward(self, x):
            return join(self.a(x), torch.nn.functional.gelu(self.b(x)))

    torch.manual_seed(0)
    x = torch.randn(3, 8)
    graph = plumb.capture(Heads(), x)
    kept = plumb.transforms.unit_scale(graph, preserve=True)
    torch.testing.assert_close(kept(x), graph(x), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(plumb.transforms.fold(kept)(x), graph(x), rtol=1e-4, atol=1e-4)
