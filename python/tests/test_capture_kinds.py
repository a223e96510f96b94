"""Derivatives, custom functions and tensors of other kinds in a forward: torch.func, dual, nested and sparse tensors, integers that
are checked."""

import copy
import pickle

import pytest
import torch
from capture_checks import Net, check, refusal
from plumb.pipelining import pipeline
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import plumb
from plumb.transforms import track_scales, unit_scale


def energy(layer):
    return lambda x: torch.tanh(layer(x)).square().sum()


TORCH_FUNC = {
    "grad": lambda m, x: torch.func.grad(energy(m.layer))(x),
    "grad of grad": lambda m, x: torch.func.grad(lambda z: torch.func.grad(energy(m.layer))(z).sin().sum())(x),
    "gradients of rows": lambda m, x: torch.func.vmap(torch.func.grad(energy(m.layer)))(x),
    "vjp": lambda m, x: torch.func.vjp(m.layer, x)[1](x.cos())[0],
    "jacrev": lambda m, x: torch.func.jacrev(lambda z: m.layer(z).sum(0))(x),
    "jvp": lambda m, x: sum(torch.func.jvp(lambda z: torch.tanh(m.layer(z)), (x,), (x.cos(),))),
    "jacfwd": lambda m, x: torch.func.jacfwd(lambda z: m.layer(z).sum(0))(x),
    "jvp of grad": lambda m, x: torch.func.jvp(torch.func.grad(energy(m.layer)), (x,), (x.cos(),))[1],
}


def in_place(row):
    row = row.clone().mul_(3)
    row[1:] += row[:-1].clone()
    return row.clamp_(max=2)


ROWS = {
    "layer": lambda m, x: torch.vmap(m.layer)(x),
    "sum": lambda m, x: torch.vmap(lambda row: m.layer(row).sum())(x),
    "written": lambda m, x: torch.vmap(in_place)(m.layer(x)),
    "rows of rows": lambda m, x: torch.vmap(torch.vmap(lambda value: value.clone().mul_(3)))(m.layer(x)),
    "constants": lambda m, x: torch.vmap(lambda row: m.layer(row) * torch.zeros(4).add_(2))(x),
    "random": lambda m, x: torch.vmap(lambda row: m.layer(row) + torch.rand(4), randomness="different")(x),
    "gradients": lambda m, x: torch.vmap(torch.func.grad(lambda row: in_place(m.layer(row)).sum()))(x),
}


@pytest.mark.parametrize("name", ROWS)
def test_operators_inside_of_vmap_are_recorded_once(name):
    check(Net(ROWS[name]), torch.randn(3, 4))


@pytest.mark.parametrize("name", TORCH_FUNC)
def test_derivatives_by_torch_func_are_part_of_the_graph(name):
    check(Net(TORCH_FUNC[name]), torch.randn(3, 4))


def test_dual_tensors_are_refused():
    def tangent(x):
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
            return torch.autograd.forward_ad.unpack_dual(dual * dual).tangent

    assert "make_dual" in refusal(tangent)


def test_nested_tensors_are_refused():
    def rows(x):
        return torch.nested.to_padded_tensor(torch.nested.as_nested_tensor([x[:1], x[1:]]) * 2, 0.0)

    assert "nested tensor" in refusal(rows)
    nested = torch.nested.nested_tensor([torch.ones(1, 4), torch.ones(2, 4)])
    for layout in (torch.strided, torch.jagged):
        rows = torch.nested.nested_tensor([torch.ones(1, 4), torch.ones(2, 4)], layout=layout)
        with pytest.raises(plumb.Error, match="an input works on a nested tensor"):
            track_scales(nn.Linear(4, 4))(rows)
    assert "nested tensor" in refusal(lambda x: torch.nested.to_padded_tensor(x, 0.0), nested)


def test_integers_that_the_model_checks_keep_their_values_in_a_verification():
    class Bags(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.EmbeddingBag(10, 4)

        def forward(self, x, starts):  # torch wants the first one to be zero
            return self.table(x, starts)

    check(Bags(), torch.arange(6), torch.tensor([0, 2, 4]))


def test_compressed_sparse_buffers_pass_verification():
    x = torch.randn(4, 4)
    model = Net(lambda m, x: m.sparse @ m.layer(x))
    model.register_buffer("sparse", torch.eye(4).to_sparse_csr())
    m = plumb.capture(model, x, plumb_verify=True)
    assert torch.equal(m(x), model(x))


def test_memory_that_a_product_is_told_not_to_read_need_not_be_written():
    def scores(m, x):
        return (
            torch.baddbmm(torch.empty(2, 3, 3), x, x.mT, beta=0, alpha=0.5)
            + torch.addmm(torch.empty(3, 4), x[0], m.layer.weight, beta=0)[:, :3]
        )

    check(Net(scores), torch.randn(2, 3, 4))
    assert "torch.empty" in refusal(lambda x: torch.baddbmm(torch.empty(2, 3, 3), x, x.mT), torch.randn(2, 3, 4))


def test_memory_that_nobody_wrote_may_be_asked_for_its_shape():
    def shaped(m, x):
        like = torch.empty(3, 4)
        return m.layer(x) * torch.rand_like(like) + torch.zeros_like(like) + like.new_ones(4) * torch.bernoulli(like, 0.5)

    check(Net(shaped), torch.randn(3, 4))
    dropout = Net(lambda m, x: torch.vmap(lambda row: F.dropout(m.layer(row), 0.5), randomness="different")(x))
    check(dropout, torch.randn(3, 4))


def test_what_is_written_through_data_gives_the_buffer_no_gradient():
    def moving(m, x):
        y = m.layer(x)
        m.mean.data.lerp_(y.mean(0), 0.1)
        return y - m.mean

    model = Net(moving)
    model.register_buffer("mean", torch.zeros(4))
    graph = check(model, torch.randn(3, 4))
    for module in (graph, plumb.transforms.simulate_fp8(model)):
        for _ in range(2):
            module(torch.randn(3, 4)).sum().backward()
        assert not module.mean.requires_grad and module.mean.any()


class Counts(torch.autograd.Function):
    """Doubles its input, and writes a buffer: under autograd's eyes, or past them."""

    @staticmethod
    def forward(ctx, x, seen, through_data):
        (seen.data if through_data else seen).add_(x.detach().sum())
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2, None, None


@pytest.mark.parametrize("through_data", [False, True])
def test_buffers_that_a_custom_function_writes_are_written_by_calls_alone(through_data):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x):
            return Counts.apply(self.linear(x), self.seen, through_data) + self.seen

    torch.manual_seed(0)
    net, x = Net(), torch.randn(3, 4)
    eager = copy.deepcopy(net)
    graph = plumb.capture(net, x)
    assert net.seen == 0
    for given in (x, x + 1):
        assert torch.equal(graph(given), eager(given))
        assert torch.equal(net.seen, eager.seen) and eager.seen != 0


class Holder(torch.autograd.Function):
    """Gives a module its gradients itself, as reversible layers do."""

    @staticmethod
    def forward(ctx, x, module):
        ctx.module = module
        ctx.save_for_backward(x)
        with torch.no_grad():
            return module(x)

    @staticmethod
    def backward(ctx, grad):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            ctx.module(x).backward(grad)
        return x.grad, None


def test_graphs_whose_functions_hold_modules_are_neither_copied_nor_cut():
    model, x = Net(lambda m, x: Holder.apply(x * 2, m.layer)), torch.randn(3, 4)
    graph = plumb.capture(model, x)
    assert torch.equal(graph(x), model(x))
    for use in (copy.deepcopy, pickle.dumps, lambda g: plumb.pipelining.pipeline(g, split_policy="equal_size", num_stages=2)):
        with pytest.raises(plumb.Error, match="Holder is given a module") as caught:
            use(graph)
        assert "test_capture_kinds.py" in caught.value.where


def seeds(x):
    torch.manual_seed(0)
    return torch.randn_like(x)


def forks(x):
    with torch.random.fork_rng():
        return torch.randn_like(x)


def puts_back(x):
    state = torch.get_rng_state()
    drawn = torch.randn_like(x)
    torch.set_rng_state(state)
    return drawn


@pytest.mark.parametrize("draws", [seeds, forks, puts_back])
@pytest.mark.parametrize("use", [plumb.capture, lambda model, x: track_scales(model)(x)])
def test_a_forward_that_sets_the_random_state_is_refused(draws, use):
    class Model(nn.Linear):
        def forward(self, x):
            return super().forward(x) + draws(x)

    state = torch.get_rng_state()
    with pytest.raises(plumb.Error, match="sets torch's random state") as refused:
        use(Model(4, 4), torch.ones(2, 4))
    assert "test_capture_kinds.py" in str(refused.value)
    torch.set_rng_state(state)  # nothing of torch stays changed


def test_checkpoints_that_keep_the_random_state_are_captured():
    class Model(nn.Linear):
        def forward(self, x):
            return checkpoint(lambda x: F.dropout(super(Model, self).forward(x)), x, use_reentrant=False)

    model, x = Model(4, 4), torch.ones(2, 4)
    torch.manual_seed(0)
    expected = model(x)
    graph = plumb.capture(model, x)
    torch.manual_seed(0)
    assert torch.equal(graph(x), expected)


class Replayed(torch.autograd.Function):
    """A reversible block: the backward computes again what the forward drew, from a state that the block keeps."""

    @staticmethod
    def forward(ctx, x, block):
        ctx.block = block
        ctx.save_for_backward(x)
        block.state, block.seen = torch.get_rng_state(), {}
        return torch.nn.functional.dropout(x)

    @staticmethod
    def backward(ctx, d):
        block = ctx.block
        block.seen["backward"] = block.state
        with torch.random.fork_rng(), torch.enable_grad():
            torch.set_rng_state(block.state)
            x = ctx.saved_tensors[0].detach().requires_grad_()
            torch.nn.functional.dropout(x).backward(d)
        return x.grad, None


class ReplayedBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.state, self.seen = nn.Linear(4, 4), None, {}

    def forward(self, x):
        return Replayed.apply(self.linear(x), self)


def test_verifying_leaves_a_functions_backward_what_its_forward_left():
    x = torch.randn(3, 4, requires_grad=True)
    model = ReplayedBlock()
    graph = plumb.capture(model, x, plumb_verify=True)
    assert model.state is None and model.seen == {}
    torch.manual_seed(0)
    graph(x).sum().backward()
    ours, x.grad = x.grad, None
    torch.manual_seed(0)
    model(x).sum().backward()
    assert torch.equal(ours, x.grad)


class OfTheWeightAlone(torch.autograd.Function):
    """Refuses to compute a gradient of its input, as kernels of gpytorch do."""

    @staticmethod
    def forward(ctx, x, w):
        if ctx.needs_input_grad[0]:
            raise RuntimeError("there is no gradient of x")
        ctx.save_for_backward(x)
        return x * w

    @staticmethod
    def backward(ctx, d):
        return None, d * ctx.saved_tensors[0]


class Weighs(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(3, 4))

    def forward(self, x):
        return OfTheWeightAlone.apply(x + 1, self.w)


def test_a_custom_function_hears_which_gradients_are_needed_as_its_inputs_were_given():
    model, x = Weighs(), torch.randn(3, 4)
    graph = plumb.capture(model, x, plumb_verify=True)
    assert torch.equal(graph(x), model(x))
    unit_scale(model)(x).sum().backward()


class Tripled(torch.autograd.Function):
    """A square whose gradient is three times the input."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, d):
        return 3 * d * ctx.saved_tensors[0]


class TwiceTripled(nn.Module):
    def forward(self, x):
        return Tripled.apply(Tripled.apply(x).tanh())


@pytest.mark.parametrize("module", [TwiceTripled(), nn.Sequential(TwiceTripled(), nn.Linear(4, 4))])
def test_a_custom_function_of_anothers_result_keeps_its_backward_where_inputs_were_captured_without_a_gradient(module):
    x = torch.randn(3, 4)
    graph = plumb.capture(module, x, plumb_verify=True)
    gradients = []
    for model in (graph, module):
        given = x.clone().requires_grad_()
        model(given).pow(2).sum().backward()
        gradients.append(given.grad)
    assert torch.equal(*gradients)


class Doubled(torch.Tensor):
    """Overloads an operator."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        result = super().__torch_function__(function, types, args, kwargs or {})
        return result * 2 if function is torch.tanh else result


class AsksTheClass(nn.Linear):
    def forward(self, x):
        return torch.tanh(super().forward(x)) + isinstance(x, Doubled)


def test_a_forward_is_captured_with_the_class_of_its_inputs():
    torch.manual_seed(0)
    model, x = AsksTheClass(4, 4), torch.randn(3, 4)
    ours, tracked = x.as_subclass(Doubled), track_scales(model)
    stage = pipeline(model, (ours,)).get_stage_module(0)
    for run in (plumb.capture(model, ours), stage, tracked):
        assert torch.equal(run(ours), model(ours).as_subclass(torch.Tensor))
    assert torch.equal(tracked(x), model(x))
