"""Graphs whose inputs, mode or surroundings are of another kind than when they were captured."""

import copy
import warnings

import pytest
import torch
from torch import nn

import plumb


class Masked(nn.Module):
    def forward(self, x, mask=None):
        return x * 2 if mask is None else x * mask


@pytest.mark.parametrize("by_name", [False, True])
def test_a_tensor_where_none_was_captured_is_refused_and_the_other_way_round(by_name):
    x, mask = torch.randn(3), torch.rand(3)

    def call(module, m):
        return module(x, mask=m) if by_name else module(x, m)

    without = plumb.capture(Masked(), x, **{"mask": None}) if by_name else plumb.capture(Masked(), x, None)
    given = plumb.capture(Masked(), x, **{"mask": mask}) if by_name else plumb.capture(Masked(), x, mask)
    assert torch.equal(call(without, None), x * 2) and torch.equal(call(given, mask), x * mask)
    for module, wrong in ((without, mask), (given, None), (without, 1.5), (given, 1.5)):
        with pytest.raises(plumb.Error) as caught:
            call(module, wrong)
        assert caught.value.kind in (plumb.ErrorKind.StructureMismatch, plumb.ErrorKind.TensorMismatch)


def test_a_mask_given_later_is_refused_by_a_file_and_a_pipe_too(tmp_path):
    from plumb.pipelining import pipeline

    x, mask = torch.randn(3), torch.rand(3)
    plumb.save_pt2(plumb.capture(Masked(), x, None), tmp_path / "masked.pt2")
    loaded = plumb.load_pt2(tmp_path / "masked.pt2")
    pipe = pipeline(Masked(), (x, None))
    for call in (loaded, pipe):
        call(x, None)
        with pytest.raises(plumb.Error):
            call(x, mask)


def test_a_transformed_module_captures_again_for_a_mask():
    x, mask = torch.randn(3), torch.rand(3)
    tracked = plumb.transforms.track_scales(Masked())
    assert torch.equal(tracked(x, None), x * 2)
    assert torch.equal(tracked(x, mask), x * mask)


def test_a_graph_refuses_the_mode_that_it_was_not_captured_in(tmp_path):
    x = torch.randn(4, 8)
    net = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))
    graph = plumb.capture(net, x)
    graph.eval()
    with pytest.raises(plumb.Error, match="captured in training mode and cannot change to evaluation mode") as caught:
        graph(x)
    assert caught.value.kind is plumb.ErrorKind.InvalidState and "model.eval()" in caught.value.remedy
    graph.train()(x)
    still = plumb.capture(net.eval(), x)
    assert torch.equal(still(x), net(x))
    plumb.save_pt2(still, tmp_path / "still.pt2")
    loaded = plumb.load_pt2(tmp_path / "still.pt2")
    assert not loaded.training and torch.equal(loaded(x), net(x))
    for module in (still, copy.deepcopy(still), loaded):
        with pytest.raises(plumb.Error, match="captured in evaluation mode"):
            module.train()(x)


def test_attention_that_is_captured_without_dropout_does_not_train_without_it():
    q = torch.randn(1, 2, 4, 8)

    class Attention(nn.Module):
        def forward(self, q):
            return nn.functional.scaled_dot_product_attention(q, q, q, dropout_p=0.5 if self.training else 0.0)

    graph = plumb.capture(Attention().eval(), q)
    with pytest.raises(plumb.Error, match="evaluation mode"):
        graph.train()(q)


def test_a_graph_without_modes_runs_in_both():
    x = torch.randn(4, 8)
    graph = plumb.capture(nn.Linear(8, 8), x)
    assert torch.equal(graph.eval()(x), graph.train()(x))


def test_is_undisturbed_by_the_callers_modes():
    model = nn.Linear(4, 4)

    def text():
        return plumb.capture(model, torch.randn(2, 4)).graph.to_string()

    plain = text()
    with torch.no_grad():
        assert text() == plain
    with torch.inference_mode():
        assert text() == plain


def test_attention_in_eval_has_the_bits_of_eager_without_its_fused_kernels():
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 1).eval()
    x, padding = torch.randn(2, 4, 16), torch.tensor([[False] * 4, [False, False, True, True]])
    graph = plumb.capture(encoder, x, src_key_padding_mask=padding)
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.no_grad():
            assert torch.equal(graph(x, src_key_padding_mask=padding), encoder(x, src_key_padding_mask=padding))
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)


QUESTIONS = {
    "is_leaf": lambda m, x: x.is_leaf,
    "grad_fn": lambda m, x: x.grad_fn is None,
    "grad_fn of a result": lambda m, x: m.layer(x).grad_fn is None,
    "output_nr": lambda m, x: x.output_nr == 0,
    "retains_grad": lambda m, x: x.retains_grad,
    "grad": lambda m, x: x.grad is None,
    "grad of a parameter": lambda m, x: m.layer.weight.grad is None,
    "_version": lambda m, x: x._version == 0,
    "_version of a buffer": lambda m, x: m.buffer._version == 0,
    "_version of a parameter": lambda m, x: m.layer.weight._version == 0,
    "_base": lambda m, x: x._base is None,
    "_is_view": lambda m, x: x._is_view(),
    "_backward_hooks": lambda m, x: x._backward_hooks is None,
    "is_conj": lambda m, x: x.is_conj(),
    "is_neg": lambda m, x: x.is_neg(),
    "data_ptr": lambda m, x: x.data_ptr() == m.buffer.data_ptr(),
    "storage_offset": lambda m, x: x.storage_offset() == 0,
    "untyped_storage": lambda m, x: x.untyped_storage().nbytes() == 32,
    "storage": lambda m, x: len(x.storage()) == 8,
}


class Asks(nn.Module):
    def __init__(self, question):
        super().__init__()
        self.layer, self.question = nn.Linear(4, 4, bias=False), question
        self.register_buffer("buffer", torch.ones(4))

    def forward(self, x):
        return self.layer(x) * (2 if self.question(self, x) else 3)


@pytest.mark.parametrize("name", QUESTIONS)
@pytest.mark.parametrize("how", [plumb.capture, lambda m, x: plumb.transforms.track_scales(m)(x)])
def test_a_question_about_the_past_or_the_memory_of_a_tensor_is_refused_by_name(name, how):
    x = torch.randn(2, 4, requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, about the gradient of a tensor that is no leaf
        with pytest.raises(plumb.Error, match=f"asks a tensor for {name.split()[0]}, .*\n.*test_capture_modes.py"):
            how(Asks(QUESTIONS[name]), x)


@pytest.mark.parametrize("name", ["is_leaf", "grad_fn", "output_nr", "retains_grad"])
def test_the_past_of_a_tensor_that_requires_no_gradient_is_told(name):
    model, x = Asks(QUESTIONS[name]), torch.randn(2, 4)
    graph = plumb.capture(model, x)
    assert torch.equal(graph(x), model(x))
    with pytest.raises(plumb.Error, match="asked whether an input requires a gradient"):
        graph(x * torch.ones(1, requires_grad=True))


RESULTS = {
    "a result": lambda m, x: m.layer(x).requires_grad,
    "a result's past": lambda m, x: not m.layer(x).is_leaf if torch.is_grad_enabled() else m.layer(x).is_leaf,
    "a result inside of no_grad": lambda m, x: torch.no_grad()(m.layer)(x).requires_grad,
    "the mode inside of enable_grad": lambda m, x: torch.enable_grad()(lambda: torch.is_grad_enabled())(),
    "an input": lambda m, x: x.requires_grad,
}


@pytest.mark.parametrize("name", RESULTS)
def test_whether_a_result_requires_a_gradient_hangs_on_the_callers_mode_and_on_the_parameters(name):
    model = Asks(RESULTS[name])
    tracked = plumb.transforms.track_scales(model)
    for _ in range(2):
        for x in (torch.randn(2, 4), torch.randn(2, 4, requires_grad=True)):
            for trained in (True, False):
                if name == "a result's past" and (trained or x.requires_grad):
                    continue  # refused
                model.layer.weight.requires_grad_(trained)
                tracked.layer.weight.requires_grad_(trained)
                for grad_mode in (True, False):
                    with torch.set_grad_enabled(grad_mode):
                        assert torch.equal(tracked(x), model(x))


def test_a_result_that_may_be_of_a_block_with_gradients_is_refused_without_them():
    model, x = Asks(lambda m, x: torch.enable_grad()(m.layer)(x).requires_grad), torch.randn(2, 4)
    tracked = plumb.transforms.track_scales(model)
    assert torch.equal(tracked(x), model(x))
    with torch.no_grad(), pytest.raises(plumb.Error, match="enters torch.enable_grad"):
        tracked(x)


def test_a_graph_whose_forward_asks_a_result_is_for_parameters_that_require_gradients_as_they_did():
    model, x = Asks(RESULTS["a result"]), torch.randn(2, 4)
    graph = plumb.capture(model, x)
    assert torch.equal(graph(x), model(x)) and any("whether a result requires a gradient" in note for note in graph.notes)
    model.layer.weight.requires_grad_(False)
    with pytest.raises(plumb.Error, match="'layer.weight.requires_grad', which the forward had read, has changed"):
        graph(x)


FACTS = {
    "layer.weight.requires_grad": lambda m: m.layer.weight.requires_grad_(False),
    "buffer.requires_grad": lambda m: m.buffer.requires_grad_(),
    "tensor.requires_grad": lambda m: m.tensor.requires_grad_(),
    "layer.weight.layout": lambda m: setattr(m.layer.weight, "data", m.layer.weight.data.t().contiguous().t()),
    "buffer.layout": lambda m: setattr(m.buffer, "data", torch.ones(8)[::2]),
    "tensor.layout": lambda m: setattr(m.tensor, "data", torch.ones(8)[::2]),
    "buffer.grad": lambda m: setattr(m.buffer, "grad", torch.ones(4)),
}


@pytest.mark.parametrize("name", FACTS)
def test_what_a_parameter_or_buffer_was_asked_is_followed(name):
    path, _, question = name.rpartition(".")

    def asks(m, x):
        tensor = m.layer.weight if path == "layer.weight" else getattr(m, path)
        if question == "grad":
            return tensor.grad is None
        return tensor.is_contiguous() if question == "layout" else tensor.requires_grad

    def other(value):
        made = Asks(asks)
        made.tensor = torch.ones(4)
        return made.load_state_dict(value) and made

    state, x = Asks(asks).state_dict(), torch.randn(2, 4)
    model, tracked = other(state), plumb.transforms.track_scales(other(state))
    graph = plumb.capture(model, x)
    assert torch.equal(graph(x), model(x)) and torch.equal(tracked(x), model(x))
    FACTS[name](model)
    FACTS[name](tracked)
    if question == "grad":  # a graph does not follow it
        with pytest.raises(plumb.Error, match="asks a tensor for grad"):
            tracked(x)
    else:
        assert torch.equal(tracked(x), model(x))
    with pytest.raises(plumb.Error, match=f"'{name.replace('tensor', 'a tensor')}', which the forward had read, has changed"):
        graph(x)
    for changed in (model, tracked):
        changed.buffer = torch.ones(4)  # a slot is followed, not the tensor that it had
    assert torch.equal(tracked(x), model(x))


def test_what_is_the_same_in_every_call_may_be_asked():
    def asks(m, x):
        p = m.layer.weight
        x.detach().requires_grad_().sum().backward()
        return p.is_leaf and p.grad_fn is None and p._base is None and p.storage_offset() == 0

    model, x = Asks(asks), torch.randn(2, 4)
    assert torch.equal(plumb.capture(model, x)(x), model(x))


def test_a_graph_whose_forward_asks_for_the_order_of_dimensions_is_for_that_one():
    model, x = Asks(lambda m, x: x.dim_order() == (0, 1)), torch.randn(2, 4)
    with pytest.raises(plumb.Error, match="the forward asks for the layout"):
        plumb.capture(model, x)(torch.randn(4, 2).t())


class Joins(nn.Module):
    def forward(self, x, y=None, **more):
        return torch.cat([x, y, *more.values()])


def test_the_order_of_keywords_counts_where_the_forward_hears_it():
    model, (a, b, x, y) = Joins(), torch.rand(4, 4)
    graph = plumb.capture(model, x=x, y=y, a=a, b=b)
    for call in (graph, copy.deepcopy(graph), graph.on(graph._engine)):
        assert torch.equal(call(y=y, a=a, x=x, b=b), model(x, y, a=a, b=b))
        with pytest.raises(plumb.Error, match="come in another order"):
            call(x=x, y=y, b=b, a=a)
    tracked = plumb.transforms.track_scales(model)
    for more in ({"a": a, "b": b}, {"b": b, "a": a}):
        assert torch.equal(tracked(x, y, **more), model(x, y, **more))


def normed(make):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), make(), nn.Linear(6, 3))


PATHS_BY_MODE = {
    "spectral_norm": lambda: nn.utils.spectral_norm(nn.Linear(6, 6)),
    "parametrized": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6)),
    "instance norm": lambda: nn.InstanceNorm1d(2, track_running_stats=True),
}


@pytest.mark.parametrize("name", PATHS_BY_MODE)
def test_layers_of_torch_that_take_another_path_in_evaluation_are_not_evaluated_by_a_graph_of_training(name):
    x = torch.randn(4, 2, 6)
    graph = plumb.capture(normed(PATHS_BY_MODE[name]), x).eval()
    with pytest.raises(plumb.Error, match="cannot change to evaluation mode"):
        graph(x)


@pytest.mark.parametrize("name", PATHS_BY_MODE)
def test_pipes_follow_the_mode_of_layers_of_torch(name):
    net, x = normed(PATHS_BY_MODE[name]), torch.randn(4, 2, 6)
    pipe = plumb.pipelining.pipeline(net, (x,), split_spec={"1": plumb.pipelining.SplitPoint.BEGINNING})
    pipe(x)
    pipe.eval()
    state = [b.clone() for b in net.buffers()]
    out = pipe(x)[0]
    assert torch.equal(out, net.eval()(x)) and all(map(torch.equal, state, net.buffers()))


@pytest.mark.parametrize("make", [nn.InstanceNorm1d, lambda n: nn.BatchNorm1d(n, track_running_stats=False)])
def test_norms_without_running_statistics_have_one_path(make):
    net, x = normed(lambda: make(2)), torch.randn(4, 2, 6)
    assert torch.equal(plumb.capture(net, x).eval()(x), net.eval()(x))
