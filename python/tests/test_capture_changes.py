"""Layers that change on their first batch, state that is re-assigned, and tensors that are taken away."""

import copy

import numpy as np
import pytest
import torch
from capture_checks import Net
from plumb.pipelining import ScheduleInterleaved1F1B, SplitPoint, pipeline
from torch import nn
from torch.nn import functional as F

import plumb
from plumb.transforms import track_scales


class ByBuffer(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))
        self.register_buffer("ready", torch.tensor(0, dtype=torch.uint8))

    def forward(self, x):
        if self.ready.item() == 0:
            with torch.no_grad():
                self.scale.copy_(1 / x.std(0))
                self.ready.fill_(1)
        return x * self.scale


class ByFlag(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale, self.ready = nn.Parameter(torch.ones(8)), False

    def forward(self, x):
        if not self.ready:
            with torch.no_grad():
                self.scale.copy_(1 / x.std(0))
            self.ready = True
        return x * self.scale


class ByNewFlag(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x):
        if not hasattr(self, "ready"):
            with torch.no_grad():
                self.scale.copy_(1 / x.std(0))
            self.ready = True
        return x * self.scale


class ByParameter(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = None

    def forward(self, x):
        if self.scale is None:
            self.scale = nn.Parameter(1 / x.detach().std(0))
        return x * self.scale


class ByModule(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = None

    def forward(self, x):
        if self.head is None:
            self.head = nn.Linear(x.shape[-1], 2)
        return self.head(x)


@pytest.mark.parametrize("make", [ByBuffer, ByFlag, ByNewFlag, ByParameter, ByModule])
@pytest.mark.parametrize("use", [plumb.capture, lambda model, x: track_scales(model)(x)])
def test_layers_that_initialize_themselves_are_to_be_run_once_before(make, use):
    model, x = make(), torch.randn(4, 8)
    names = list(model.state_dict())
    with pytest.raises(plumb.Error) as refused:
        use(model, x)
    assert "the model once before" in str(refused.value)
    assert list(model.state_dict()) == names
    model(x)
    use(model, x)
    assert torch.equal(plumb.capture(model, x)(x), model(x))


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("n", torch.zeros(()))

    def forward(self, x):
        self.n = self.n + 1
        return x + self.linear(x)


def test_counters_in_each_layer_leave_places_to_cut():
    torch.manual_seed(0)
    model, x = nn.Sequential(*[Counts() for _ in range(4)]), torch.randn(4, 8)
    eager = copy.deepcopy(model)
    pipe = pipeline(model, (x[:2],), num_stages=4, split_policy="balanced")
    stages = [pipe.build_stage(i, torch.device("cpu")) for i in range(4)]
    schedule = ScheduleInterleaved1F1B(stages, 2, loss_fn=lambda out, y: (out * y).sum(), scale_grads=False)
    schedule.step(x, target=x)
    for part in x.split(2):
        (eager(part) * part).sum().backward()
    for (name, p), q in zip(model.named_parameters(), eager.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad), name
    for (name, b), c in zip(model.named_buffers(), eager.named_buffers(), strict=True):
        assert torch.equal(b, c[1]), name


class Swaps(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("a", torch.zeros(4))
        self.register_buffer("b", torch.ones(4))
        self.register_buffer("c", torch.ones(4))

    def forward(self, x):
        self.a, self.b = self.b, self.a
        y = x * self.a
        self.c = self.a * y.mean()
        self.c.mul_(2)
        return y + self.b + self.c


def test_buffers_that_are_reassigned_hold_what_the_model_leaves():
    model, x = Swaps(), torch.randn(3, 4)
    eager, graph = copy.deepcopy(model), plumb.capture(model, x)
    for _ in range(3):
        assert torch.equal(graph(x), eager(x))
        for name, buffer in graph.named_buffers():
            assert torch.equal(buffer, eager.get_buffer(name)), name


def test_a_parameter_that_is_taken_away_is_named():
    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    graph = plumb.capture(model, x)
    graph.bias = None
    with pytest.raises(plumb.Error, match="'bias' is None or gone"):
        graph(x)
    graph.bias = nn.Parameter(torch.ones(4))
    assert torch.equal(graph(x), F.linear(x, graph.weight, graph.bias))


def test_a_transformed_module_follows_a_parameter_that_is_taken_away():
    module, x = track_scales(nn.Linear(4, 4)), torch.randn(2, 4)
    module(x)
    module.bias = None
    assert torch.equal(module(x), F.linear(x, module.weight))


class Scratch(nn.Module):
    """Clears a dict at the start of each call, and reads what the same call has put there, as gpytorch's strategies do."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        self.kept = {}
        self.kept["normal"] = torch.distributions.Normal(self.layer(x), 1.0, validate_args=False)
        return self.kept["normal"].mean * 2


def test_an_attribute_that_a_call_writes_before_it_reads_it_is_its_own():
    x = torch.randn(3, 4)
    model = Scratch()
    graph = plumb.capture(model, x, plumb_verify=True)
    tracked = track_scales(model)
    for _ in range(2):
        assert torch.equal(tracked(x), graph(x))
    assert torch.equal(model(x), graph(x))


class KeepsStates(nn.Module):
    """Hooks its layers in its first call, and marks itself as hooked by an attribute that was not there, as transformers does."""

    mark = True

    def __init__(self):
        super().__init__()
        self.layers, self.seen = nn.ModuleList(nn.Linear(4, 4) for _ in range(2)), []

    def keep(self, _module, _args, output):
        self.seen.append(output)

    def forward(self, x):
        self.seen.clear()
        if not getattr(self, "hooked", None):
            handles = [layer.register_forward_hook(self.keep) for layer in self.layers]
            self.hooked = self.mark or handles
        for layer in self.layers:
            x = layer(x)
        return tuple(self.seen)


@pytest.mark.parametrize("mark", [True, None], ids=["a flag", "handles"])
def test_an_attribute_that_the_forward_makes_is_gone_after_a_capture(mark):
    torch.manual_seed(0)
    model, x = KeepsStates(), torch.randn(3, 4)
    model.mark = mark
    expected, before = copy.deepcopy(model)(x), list(vars(model))
    graph = plumb.capture(model, x, plumb_verify=True)
    assert list(vars(model)) == before
    tracked = track_scales(model)
    assert len(tracked(x[:1])) == 2 and list(vars(model)) == before
    for module in (graph, tracked, model, graph, tracked):
        for found, state in zip(module(x), expected, strict=True):
            assert torch.equal(found, state)


def test_an_array_that_the_forward_makes_once_is_gone_after_a_capture():
    def f(m, x):
        if not hasattr(m, "factors"):
            m.factors = np.arange(4.0)
        return m.layer(x) * float(m.factors[3])

    model, x = Net(f), torch.randn(3, 4)
    graph = plumb.capture(model, x)
    assert not hasattr(model, "factors")
    for module in (graph, model, graph):
        assert torch.equal(module(x), model.layer(x) * 3)


class CountsItsTable(nn.Module):
    """Keeps a table in a buffer and its length in an attribute, as rotary embeddings do."""

    def __init__(self):
        super().__init__()
        self.layer, self.length = nn.Linear(4, 4), 0
        self.register_buffer("table", torch.zeros(8, 1), persistent=False)

    def forward(self, x):
        if self.length < len(x):
            self.table[: len(x)] = torch.arange(1.0, 1 + len(x))[:, None]
            self.length = len(x)
        return self.layer(x) * self.table[: len(x)]


def test_verifying_begins_every_run_with_the_same_attributes():
    model, x = CountsItsTable(), torch.randn(3, 4)
    with pytest.raises(plumb.Error, match=r"changes the attribute 'length' and takes another path.*(\n.*)*once before"):
        plumb.capture(model, x, plumb_verify=True)
    model(x)
    assert torch.equal(plumb.capture(model, x, plumb_verify=True)(x), model(x))


def test_a_backward_that_leaves_gradients_in_parameters_is_refused_by_name():
    def trains(m, x):
        given = x.detach().requires_grad_()
        m.layer(given).sum().backward()
        return given.grad * 2

    def asks(m, x):
        given = x.detach().requires_grad_()
        return torch.autograd.grad(m.layer(given).sum(), given)[0] * 2

    def sets(m, x):
        m.layer.weight.grad = m.layer.weight * 2
        return m.layer(x)

    x = torch.randn(3, 4)
    for forward, before in [(trains, None), (trains, torch.ones(4, 4)), (sets, torch.ones(4, 4))]:
        model = Net(forward)
        model.layer.weight.grad = before
        for capture in (plumb.capture, lambda m, x: plumb.transforms.track_scales(m)(x)):
            with pytest.raises(plumb.Error, match="leaves a gradient in 'layer.weight'.*\n.*\n.*torch.autograd.grad"):
                capture(model, x)
        assert model.layer.weight.grad is before and (before is None or torch.equal(before, torch.ones(4, 4)))
    model = Net(asks)
    assert torch.equal(plumb.capture(model, x)(x), model(x))


def test_an_input_is_written_without_gradients_through_a_view():
    def f(m, x):
        with torch.no_grad():
            x[0] = 1
            rows = x[1:]
            rows.sub_(1)
            rows.mul_(2)
        return m.layer(x)

    x, model = torch.randn(3, 4), Net(f)
    graph = plumb.capture(model, x)
    given, expected = x.clone(), x.clone()
    assert torch.equal(graph(given), model(expected)) and torch.equal(given, expected)


def test_a_forward_that_freezes_its_parameters_is_refused():
    class Freezes(nn.Module):
        def __init__(self, how):
            super().__init__()
            self.part, self.how = nn.Linear(4, 4), how

        def forward(self, x):
            self.how(self.part)
            return self.part(x)

    x = torch.randn(2, 4)
    for how in (
        lambda part: part.requires_grad_(False),
        lambda part: part.weight.requires_grad_(False),
        lambda part: setattr(part.weight, "requires_grad", False),
    ):
        net = Freezes(how)
        with pytest.raises(plumb.Error, match=r"(?s)sets requires_grad of a parameter.*\(4, 4\).*False.*test_capture_changes.py"):
            plumb.capture(net, x)
        assert net.part.weight.requires_grad
    same = Freezes(lambda part: part.requires_grad_().weight.requires_grad_(True))
    assert torch.equal(plumb.capture(same, x)(x), same(x))


def test_a_capture_between_a_forward_and_its_backward_leaves_buffers_that_autograd_saved_as_they_were():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)), torch.randn(7, 8)
    tracked, cut = plumb.transforms.track_scales(model), copy.deepcopy(model)
    pipe = pipeline(cut, (x[:3],), split_spec={"1": SplitPoint.BEGINNING})
    for run in (model, tracked, lambda rows: pipe.get_stage_module(1)(pipe.get_stage_module(0)(rows))):
        sum([run(rows).square().sum() for rows in x.tensor_split(3)]).backward()  # 3, 2 and 2 rows
    for got in (tracked, cut):
        assert all(torch.equal(a.grad, b.grad) for a, b in zip(got.parameters(), model.parameters()))
        assert all(torch.equal(a, b) for a, b in zip(got.buffers(), model.buffers()))


def test_hooks_that_the_forward_registers_on_parameters_saved_tensors_or_nodes_are_refused():
    def hooks_a_parameter(m, x):
        m.layer.weight.register_hook(lambda g: g * 2)
        return m.layer(x)

    def hooks_its_gradient(m, x):
        m.layer.weight.register_post_accumulate_grad_hook(lambda p: None)
        return m.layer(x)

    def hooks_saved_tensors(m, x):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 2, lambda t: t):
            return m.layer(x)

    def hooks_nodes(m, x):
        with torch.autograd.graph.node_creation_hook(lambda node: None):
            return m.layer(x)

    def offloads(m, x):
        with torch.autograd.graph.save_on_cpu():
            return m.layer(x)

    x = torch.randn(3, 4)
    hooking = [(hooks_a_parameter, "is registered"), (hooks_its_gradient, "is registered"), (hooks_saved_tensors, "sees the tensors")]
    hooking += [(hooks_nodes, "sees the nodes")] * hasattr(torch.autograd.graph, "node_creation_hook")  # since torch 2.15
    for capture in (plumb.capture, lambda m, x: plumb.transforms.track_scales(m)(x)):
        for forward, kind in hooking:
            model = Net(forward)
            with pytest.raises(plumb.Error, match=f"a hook {kind}.*\n.*test_capture_changes.py"):
                capture(model, x)
            assert not model.layer.weight._backward_hooks and not model.layer.weight._post_accumulate_grad_hooks
    model = Net(offloads)
    assert torch.equal(plumb.capture(model, x)(x), model(x))
