"""plumb.diff of two modules: what is paired, what is drawn, and what makes them unequal."""

import copy
import warnings

import pytest
import torch
from torch import nn

import plumb
from plumb.transforms import simulate_format


def exported(net, x, path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.export's, about the weights of recurrent layers
        torch.export.save(torch.export.export(net, (x,)), path)
    return path


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.inert = nn.Dropout(0.0)
        self.rnn = nn.LSTM(8, 12, num_layers=2, batch_first=True, dropout=0.5)
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(12, 5)

    def forward(self, x):
        return self.head(self.dropout(self.rnn(self.inert(x))[0]))


class NativeDropout(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x):
        return torch.ops.aten.native_dropout(self.fc(x), 0.5, True)[0]


@pytest.mark.parametrize("make", [Recurrent, NativeDropout])
def test_a_model_and_its_file_draw_the_same_numbers(tmp_path, make):
    torch.manual_seed(0)
    net, x = make(), torch.randn(4, 5, 8)
    found = plumb.diff(net, exported(net, x, tmp_path / "net.pt2"), x)
    assert found.equal, found


def test_recurrent_layers_draw_the_same_numbers_where_a_format_takes_them_apart():
    torch.manual_seed(0)
    net, x = Recurrent(), torch.randn(4, 5, 8)
    assert plumb.diff(net, simulate_format(net, "fp32", "fp32"), x).equal
    found = plumb.diff(net, simulate_format(net, "bf16", "bf16"), x)
    assert not found.equal and found.first["relative"] < 0.01, found


class Autocast(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            h = self.a(x)
        return self.b(h.float())


def test_casts_that_come_in_another_order_are_compared_by_what_they_cast(tmp_path):
    torch.manual_seed(0)
    net, x = Autocast(), torch.randn(8, 8)
    found = plumb.diff(net, exported(net, x, tmp_path / "net.pt2"), x)
    assert found.equal and not found.only_a, found


class Constant(nn.Module):
    def __init__(self, constant):
        super().__init__()
        self.fc, self.constant = nn.Linear(4, 4), constant

    def forward(self, x):
        return {"y": self.fc(x), "constant": self.constant, "none": None}


@pytest.mark.parametrize(("one", "other"), [(3, 4), (True, False), (2.5, 2.0), ("a", "b"), (torch.half, torch.bfloat16)])
def test_constant_outputs_are_compared(tmp_path, one, other):
    a, b, x = Constant(one), Constant(other), torch.randn(8, 4)
    b.load_state_dict(a.state_dict())
    found = plumb.diff(a, b, x)
    assert not found.equal and found.other_outputs == ["constant"]
    if not isinstance(one, torch.dtype):  # which torch.export does not save
        assert plumb.diff(a, exported(a, x, tmp_path / "a.pt2"), x).equal


def double(parameter):
    parameter.grad.mul_(2)


def test_the_gradient_of_a_parameter_is_what_its_hooks_leave_of_it():
    torch.manual_seed(0)
    a, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)), torch.randn(8, 4)
    b = copy.deepcopy(a)
    b[2].weight.register_hook(lambda gradient: gradient * 2)
    b[0].bias.register_post_accumulate_grad_hook(double)
    found = plumb.diff(a, b, x)
    assert (found.first["tensor"], found.first["kind"], found.differing) == ("2.weight", "gradient", 2)
    assert plumb.diff(b, b, x).equal and b[2].weight.grad is None


@pytest.mark.parametrize("how", ["frozen", "detached"])
def test_a_parameter_that_has_a_gradient_in_one_module_alone_makes_them_unequal(how):
    class Net(nn.Module):
        def __init__(self, detached):
            super().__init__()
            self.a, self.b, self.detached = nn.Linear(4, 4), nn.Linear(4, 2), detached

        def forward(self, x):
            h = self.a(x)
            return self.b(h.detach() if self.detached else h)

    net, x = Net(False), torch.randn(8, 4)
    other = Net(how == "detached")
    other.load_state_dict(net.state_dict())
    if how == "frozen":
        other.a.requires_grad_(False)
    found = plumb.diff(net, other, x)
    assert not found.equal and not found.first
    assert "Parameters of which one has no gradient: a.weight, a.bias" in found.conclusion


def test_parameters_and_buffers_that_no_operator_takes_are_compared(tmp_path):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.unused = nn.Linear(4, 4), nn.Parameter(torch.zeros(3))
            self.register_buffer("table", torch.zeros(2, dtype=torch.long))

        def forward(self, x):
            return self.fc(x)

    a, x = Net(), torch.randn(8, 4)
    b = copy.deepcopy(a)
    assert plumb.diff(a, b, x).equal
    with torch.no_grad():
        b.unused.fill_(7)
        b.table.fill_(9)
    for pair in ((a, b), (exported(a, x, tmp_path / "a.pt2"), exported(b, x, tmp_path / "b.pt2"))):
        found = plumb.diff(*pair, x)
        assert (found.first["tensor"], found.differing) == ("unused", 2), found
