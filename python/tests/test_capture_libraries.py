"""Forwards of libraries' models, each rebuilt small: momentum encoders, custom functions that hold modules, tensors
left in attributes, layers that set themselves up."""

import copy
import functools
import gc
import subprocess
import sys
import weakref

import pytest
import torch
from plumb.pipelining import ScheduleInterleaved1F1B, SplitPoint, pipeline
from torch import nn

import plumb
from plumb.transforms import track_scales, unit_scale


def grads_of(module):
    return {name: p.grad for name, p in module.named_parameters()}


def same_grads(ours, theirs):
    found, expected = grads_of(ours), grads_of(theirs)
    assert found.keys() == expected.keys()
    for name in found:
        assert (found[name] is None) == (expected[name] is None), name
        assert found[name] is None or torch.equal(found[name], expected[name]), name


def same_steps(ours, theirs, x, steps=3):
    """Outputs, gradients and state, call after call."""
    for _ in range(steps):
        y, z = ours(x), theirs(x)
        assert torch.equal(y, z)
        y.sum().backward()
        z.sum().backward()
    same_grads(ours, theirs)
    state = theirs.state_dict()
    for name, tensor in ours.state_dict().items():
        assert torch.equal(tensor, state[name]), name


# --- assignments to .data


class MomentumEncoder(nn.Module):
    """A key encoder that follows the query encoder, as in MoCo and BYOL."""

    def __init__(self):
        super().__init__()
        self.query, self.key = nn.Linear(4, 4), nn.Linear(4, 4)
        for p in self.key.parameters():
            p.requires_grad = False

    def forward(self, x):
        with torch.no_grad():
            for new, old in zip(self.query.parameters(), self.key.parameters()):
                old.data = old.data * 0.9 + new.data * 0.1
            target = self.key(x)
        return self.query(x) * target


class MaxNorm(nn.Conv1d):
    """A weight that is kept in a ball, as in EEGNet."""

    def forward(self, x):
        self.weight.data = torch.renorm(self.weight.data, p=2, dim=0, maxnorm=0.3)
        return super().forward(x)


@pytest.mark.parametrize("model, shape", [(MomentumEncoder(), (3, 4)), (MaxNorm(2, 2, 3), (3, 2, 8))])
def test_assignments_to_data_are_recorded(model, shape, tmp_path):
    x = torch.randn(shape)
    before = {name: (t.clone(), t.data_ptr()) for name, t in model.state_dict(keep_vars=True).items()}
    graph = plumb.capture(copy.deepcopy(model), x, plumb_verify=True)
    plumb.save_pt2(graph, str(tmp_path / "model.pt2"))
    captured = copy.deepcopy(model)
    one = plumb.capture(captured, x)
    for name, t in captured.state_dict(keep_vars=True).items():
        assert torch.equal(t, before[name][0]), "a capture leaves the model as it was"
    assert any(".data is assigned" in note for note in one.notes)
    same_steps(one, copy.deepcopy(model), x)
    same_steps(track_scales(model), copy.deepcopy(model), x)
    same_steps(plumb.load_pt2(str(tmp_path / "model.pt2")), copy.deepcopy(model), x)


class ClampedWeight(nn.Linear):
    """Its forward writes through `.data`, as AltUp's does (Gemma 3n)."""

    def forward(self, x):
        self.weight.data.clamp_(-0.2, 0.2)
        return super().forward(x)


def test_backwards_may_wait_while_later_forwards_write_through_data():
    torch.manual_seed(0)
    eager, x = nn.Sequential(nn.Linear(4, 4), ClampedWeight(4, 4)), torch.randn(3, 4)
    (eager(x).sum() + eager(2 * x).sum()).backward()
    for make in (lambda net: plumb.capture(net, x), track_scales):
        module = make(copy.deepcopy(eager))
        module.zero_grad()
        (module(x).sum() + module(2 * x).sum()).backward()
        same_grads(module, eager)


def test_a_pipe_follows_a_momentum_encoder():
    torch.manual_seed(0)
    model = nn.Sequential(MomentumEncoder(), MomentumEncoder())
    eager, x = copy.deepcopy(model), torch.randn(4, 4)
    pipe = pipeline(model, (x[:2],), split_spec={"1": SplitPoint.BEGINNING})
    stages = [pipe.build_stage(i, torch.device("cpu")) for i in range(2)]
    schedule = ScheduleInterleaved1F1B(stages, 2, loss_fn=lambda out, y: (out * y).sum(), scale_grads=False)
    for _ in range(2):
        schedule.step(x, target=x)
        for part in x.split(2):
            (eager(part) * part).sum().backward()
    same_grads(model, eager)
    assert torch.equal(model[1].key.weight, eager[1].key.weight)


class Assigns(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.a, self.b, self.how = nn.Linear(4, 4), nn.Linear(4, 4), how

    def forward(self, x):
        y = self.how(self, x)
        return self.a(x) if y is None else y


def shares_memory(m, x):
    m.a.weight.data = m.b.weight.data


def another_shape(m, x):
    m.a.weight.data = torch.zeros(8, 4)
    m.a.bias.data = torch.zeros(8)


def used_before(m, x):
    y = m.a(x)
    m.a.weight.data = m.a.weight.data * 0.5
    return y


def reads_the_old(m, x):
    old = m.a.weight.data
    m.a.weight.data = old * 0.5
    return m.a(x) + old.sum()


def writes_the_new(m, x):
    new = m.a.weight.data * 0.5
    m.a.weight.data = new
    new.mul_(2)
    return m.a(x)


def of_a_result(m, x):
    y = m.a(x)
    y.data = y.data * 2
    return y


@pytest.mark.parametrize(
    "how, said",
    [
        (shares_memory, "'a.weight' the memory of 'b.weight'"),
        (another_shape, "'a.weight' a tensor of another shape"),
        (used_before, "'a.weight' after it was used for results that need a gradient"),
        (reads_the_old, "uses memory that an assignment to .data took from its tensor"),
        (writes_the_new, "uses memory that an assignment to .data took from its tensor, or that both share"),
        (of_a_result, "a tensor that is no parameter, buffer or attribute"),
    ],
)
def test_assignments_that_no_graph_can_hold_are_refused_by_name(how, said):
    model, x = Assigns(how), torch.randn(2, 4)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(plumb.Error) as refused:
        plumb.capture(model, x)
    assert said in str(refused.value)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])
    assert model.a.weight.data_ptr() != model.b.weight.data_ptr()


def test_an_assignment_of_the_same_memory_is_none():
    model = Assigns(lambda m, x: setattr(m.a.weight, "data", m.a.weight.data.contiguous()))
    x = torch.randn(2, 4)
    graph = plumb.capture(model, x)
    assert "copy_" not in graph.graph.to_string()
    assert torch.equal(graph(x), model(x))


# --- buffers with other memory


class Resizes(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.linear, self.how = nn.Linear(4, 4), how
        self.register_buffer("scale", torch.zeros(0))

    def forward(self, x):
        if self.how == "resize_":
            self.scale.resize_(4).fill_(2)
        else:
            self.scale.set_(x.detach().abs().amax(0))
        return self.linear(x) * self.scale


@pytest.mark.parametrize("how", ["resize_", "set_"])
def test_a_buffer_that_the_forward_resizes_is_put_back(how):
    model, x = Resizes(how), torch.randn(3, 4)
    eager = copy.deepcopy(model)
    graph = plumb.capture(model, x)
    assert model.scale.shape == (0,)
    y = graph(x)
    assert torch.equal(y, eager(x)) and torch.equal(model.scale, eager.scale)
    assert torch.equal(graph(x), y)


def test_a_model_prepared_for_quantization_aware_training_does_not_end_the_process():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)).train()
    model.qconfig = torch.ao.quantization.get_default_qat_qconfig("x86")
    with pytest.warns():
        model = torch.ao.quantization.prepare_qat(model)
    eager, x = copy.deepcopy(model), torch.randn(3, 4)
    shapes = {name: t.shape for name, t in model.state_dict().items()}
    graph = plumb.capture(model, x)
    assert {name: t.shape for name, t in model.state_dict().items()} == shapes
    same_steps(graph, eager, x)


# --- custom functions


class Adjoint(torch.autograd.Function):
    """A backward that runs a function again that holds a module, as odeint_adjoint's."""

    @staticmethod
    def forward(ctx, function, x, *parameters):
        ctx.function = function
        ctx.save_for_backward(x, *parameters)
        with torch.no_grad():
            return function(x)

    @staticmethod
    def backward(ctx, grad):
        x, *parameters = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            y = ctx.function(x)
            return None, *torch.autograd.grad(y, (x, *parameters), grad, allow_unused=ctx.function is None)


class HoldsModule(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.first, self.second, self.how = nn.Linear(4, 4), nn.Linear(4, 4), how

    def scaled(self, x, factor):
        return self.second(x) * factor

    def forward(self, x):
        x = self.first(x)
        function = {
            "a module": self.second,
            "a closure": lambda y: self.second(y) * 2,
            "a method": functools.partial(self.scaled, factor=3),
        }[self.how]
        return Adjoint.apply(function, x, *self.second.parameters()).tanh()


@pytest.mark.parametrize("how", ["a module", "a closure", "a method"])
def test_tracking_keeps_the_gradients_of_functions_that_hold_a_module(how):
    model, x = HoldsModule(how), torch.randn(3, 4)
    tracked = track_scales(model)
    same_steps(tracked, copy.deepcopy(model), x)
    metrics = {n.meta["clean_name"]: n.meta["metrics"] for n in tracked.scales_graph().nodes if "metrics" in n.meta}
    assert metrics["self_modules_first_parameters_weight"].bwd is not None


@pytest.mark.parametrize("how", ["a module", "a closure", "a method"])
def test_a_model_whose_functions_hold_a_module_is_not_cut(how):
    model = nn.Sequential(HoldsModule(how), HoldsModule(how))
    with pytest.raises(plumb.Error, match="Adjoint is given a module, or a function that holds one.*cannot be cut"):
        pipeline(model, (torch.randn(3, 4),), num_stages=2, split_policy="balanced")


class HoldsContext(nn.Module):
    """Noise and context in a closure, as in zuko's FFJORD."""

    def __init__(self, wrap):
        super().__init__()
        self.linear, self.wrap = nn.Linear(4, 4), wrap

    def forward(self, x):
        context = x.sigmoid()
        return Adjoint.apply(self.wrap(lambda y, scale: y * context * scale, x.cos()), self.linear(x))


def test_a_closure_gets_the_tensors_of_every_run():
    model = HoldsContext(lambda f, scale: functools.partial(f, scale=scale))
    first, second = torch.randn(3, 4), torch.randn(3, 4)
    for ours in (plumb.capture(model, first), track_scales(model)):
        theirs = copy.deepcopy(model)
        ours.zero_grad()
        a, b, c, d = ours(first), ours(second), theirs(first), theirs(second)
        assert torch.equal(a, c) and torch.equal(b, d)
        (a.sum() + b.pow(2).sum()).backward()
        (c.sum() + d.pow(2).sum()).backward()
        same_grads(ours, theirs)


def test_the_tensors_that_a_closure_held_at_the_capture_are_freed():
    computed = []

    def wrap(f, scale):
        computed.append(weakref.ref(scale))
        return functools.partial(f, scale=scale)

    plumb.capture(HoldsContext(wrap), torch.randn(3, 4))
    gc.collect()
    assert computed and all(scale() is None for scale in computed)


class Scaled:
    def __init__(self, function, scale):
        self.function, self.scale = function, scale

    def __call__(self, y):
        return self.function(y, self.scale)


def test_a_function_that_holds_an_object_with_a_computed_tensor_is_refused():
    with pytest.raises(plumb.Error, match="an object that holds a tensor which the forward has computed"):
        plumb.capture(HoldsContext(Scaled), torch.randn(3, 4))


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, grad):
        return grad * 5 * ctx.saved_tensors[0]  # no derivative, so that calls can be distinguished


cube = Cube.apply


class KeptApply(nn.Module):
    """An apply() that is kept, as in TabNet, mambapy and torchrl."""

    def __init__(self):
        super().__init__()
        self.linear, self.function = nn.Linear(4, 4), Cube.apply

    def forward(self, x):
        return cube(self.linear(x)) + self.function(x)


def test_an_apply_that_was_taken_before_the_capture_is_one_node():
    model, x = KeptApply(), torch.randn(3, 4, requires_grad=True)
    graph = plumb.capture(model, x, plumb_verify=True)
    assert graph.graph.to_string().count("plumb::python_function") == 2
    same_steps(graph, copy.deepcopy(model), x)
    same_steps(track_scales(model), copy.deepcopy(model), x)


# --- tensors left in attributes


class Box:
    def __init__(self):
        self.values = []


class LeavesBehind(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.aux, self.box, self.seen, self.losses = nn.Linear(4, 4), None, Box(), {}, []
        self.last_two = []

    def forward(self, x):
        y = self.linear(x)
        self.aux = y.pow(2).mean()
        self.distribution = torch.distributions.Normal(y, y.exp(), validate_args=False)
        self.box.values.append(y.sum())
        self.losses.append(y.mean())
        self.last_two.clear()
        self.last_two += [y.amax(), y.amin()]
        self.seen["last"] = (y.detach(), "label")
        return y.tanh()


def test_a_transformed_module_leaves_in_attributes_what_the_module_does():
    model = LeavesBehind()
    eager, module = copy.deepcopy(model), track_scales(model)
    for factor in (1, 2, 3):
        x = torch.randn(3, 4) * factor
        y, z = module(x), eager(x)
        assert torch.equal(y, z) and torch.equal(module.aux, eager.aux)
        assert torch.equal(module.distribution.mean, eager.distribution.mean)
        assert torch.equal(module.distribution.stddev, eager.distribution.stddev)
        assert torch.equal(module.seen["last"][0], eager.seen["last"][0]) and module.seen["last"][1] == "label"
        assert [v.item() for v in module.box.values] == [v.item() for v in eager.box.values]
        for name in ("losses", "last_two"):
            assert [v.item() for v in getattr(module, name)] == [v.item() for v in getattr(eager, name)]
        if factor == 2:  # a list that somebody has replaced
            module.losses, eager.losses = [], []
        (y.sum() + module.aux + module.distribution.mean.sum()).backward()
        (z.sum() + eager.aux + eager.distribution.mean.sum()).backward()
    same_grads(module, eager)
    assert model.aux is None and not hasattr(model, "distribution") and not model.box.values


def test_a_unit_scaled_module_leaves_its_auxiliary_loss():
    module = unit_scale(LeavesBehind())
    module(torch.randn(3, 4))
    first = module.aux
    module(torch.randn(3, 4) * 2)
    assert module.aux is not first and module.aux.requires_grad


def test_a_capture_says_what_it_does_not_leave():
    model = LeavesBehind()
    graph = plumb.capture(model, torch.randn(3, 4))
    (said,) = [note for note in graph.notes if "leaves tensors" in note]
    assert "'aux'" in said and "'distribution'" in said
    assert model.aux is None and not hasattr(model, "distribution") and not model.box.values


class State:
    def __init__(self, h):
        self.h = h


def test_a_state_kept_in_an_object_is_refused():
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.state = nn.Linear(4, 4), State(torch.zeros(4))

        def forward(self, x):
            self.state = State(self.linear(x + self.state.h).mean(0).detach())
            return self.state.h

    with pytest.raises(plumb.Error, match="reads the attribute 'state', which it changes in every call"):
        plumb.capture(Recurrent(), torch.randn(3, 4))


def test_a_class_whose_module_is_no_name_is_captured():
    class Cython:  # as functions of NumPy 2.2's random are
        __module__ = property(lambda self: "somewhere")

        def __init__(self):
            self.scale = 2.0

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.by = Cython()

        def forward(self, x):
            return x * self.by.scale

    x = torch.randn(3)
    assert torch.equal(plumb.capture(Scaled(), x)(x), x * 2)


def test_what_torch_asks_first_in_a_capture_is_right_after_it():
    program = """
import torch, plumb
class Asks(torch.nn.Module):
    def forward(self, x):
        torch.overrides.get_default_nowrap_functions()  # as the import of torch._dynamo does
        return x * 2
plumb.capture(Asks(), torch.ones(2))
assert torch.Tensor.grad.__get__ in torch.overrides.get_default_nowrap_functions()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
