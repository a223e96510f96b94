"""`replace` of unit_scale: functions, operators of torch's and of Python's."""

import operator

import plumb.functional as U
import pytest
import torch
import torch.nn.functional as F
from capture_checks import entries, needs_positions
from torch import nn

import plumb
from plumb.transforms import unit_scale


def own_gelu(x):
    return 0.5 * x * (1.0 + torch.erf(x / 2**0.5))


def double(x, approximate="none"):
    return torch.add(x, x)


class Calls(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x):
        return self.down(own_gelu(self.up(x)))


def test_replaces_a_function_of_the_users_by_one_of_torchs_which_is_then_scaled():
    torch.manual_seed(0)
    x = torch.randn(512, 32)
    model = unit_scale(Calls(), replace={own_gelu: F.gelu})
    assert 0.85 < model(x).std() < 1.15
    assert {"own_gelu", "aten::gelu"} <= {e["from"] for e in entries(model, "replaced")}


def test_what_a_replacement_does_is_left_as_it_is():
    x = torch.randn(8, 32)
    model = unit_scale(Calls(), replace={own_gelu: double})
    h = torch.ops.plumb.linear(x, model.up.weight, None, constraint=None)
    expected = torch.ops.plumb.linear(2 * h, model.down.weight, None, constraint=None)
    torch.testing.assert_close(model(x), expected)
    assert [e["to"] for e in entries(model, "replaced") if e["from"] == "own_gelu"] == ["double"]


def test_replaces_a_torch_function_by_one_of_the_users():
    x = torch.randn(8, 32)
    model = unit_scale(nn.Sequential(nn.Linear(32, 32), nn.GELU()), replace={F.gelu: double})
    torch.testing.assert_close(model(x), 2 * torch.ops.plumb.linear(x, model[0].weight, None, constraint=None))


@torch.library.custom_op("replace_py::cube", mutates_args=())
def cube(x: torch.Tensor) -> torch.Tensor:
    return x**3


cube.register_fake(torch.empty_like)
_CUBES = {"made": cube, "operator": torch.ops.replace_py.cube, "overload": torch.ops.replace_py.cube.default}


@pytest.mark.parametrize("key", _CUBES)
@pytest.mark.parametrize("call", _CUBES)
def test_an_operator_of_the_users_is_replaced_however_it_is_named_and_called(key, call):
    class Cubed(nn.Linear):
        def forward(self, x):
            return _CUBES[call](super().forward(x))

    x = torch.randn(8, 32)
    model = unit_scale(Cubed(32, 32), replace={_CUBES[key]: double})
    torch.testing.assert_close(model(x), 2 * torch.ops.plumb.linear(x, model.weight, None, constraint=None))


@pytest.mark.parametrize("key", [F.gelu, torch.ops.aten.gelu, "aten::gelu"])
def test_a_torch_function_in_place_of_another_is_scaled(key):
    x = torch.randn(8, 32)
    model = unit_scale(nn.Sequential(nn.Linear(32, 32), nn.GELU()), replace={key: F.silu})
    hidden = torch.ops.plumb.linear(x, model[0].weight, None, constraint=None)
    assert torch.equal(model(x), torch.ops.plumb.silu(hidden, constraint=None))


def test_a_replacement_loses_its_constraint_after_the_last_residual_add():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(32, 32)

        def forward(self, x):
            return own_gelu(x + own_gelu(self.linear(x)))

    x = torch.randn(8, 32)
    fixed = lambda x: U.gelu(x, constraint="to_output_scale")  # noqa: E731
    for new, last in ((U.gelu, None), (fixed, "to_output_scale")):
        model = unit_scale(Model(), replace={own_gelu: new})
        branch, skip = U.residual_split(x, 0.5)
        hidden = U.gelu(U.linear(branch, model.linear.weight, model.linear.bias))
        assert torch.equal(model(x), U.gelu(U.residual_add(hidden, skip, 0.5), constraint=last))


OPERATORS = {
    operator.add: lambda a, b: a + b, operator.sub: lambda a, b: a - b, operator.mul: lambda a, b: a * b,
    operator.truediv: lambda a, b: a / b, operator.floordiv: lambda a, b: a // b, operator.mod: lambda a, b: a % b,
    operator.pow: lambda a, b: a**b, operator.matmul: lambda a, b: a @ b, operator.neg: lambda a, b: -a,
    operator.getitem: lambda a, b: a[0], operator.lt: lambda a, b: a < b, operator.and_: lambda a, b: a & b,
}  # fmt: skip


@pytest.mark.parametrize("key", OPERATORS, ids=lambda key: key.__name__)
def test_replaces_pythons_operators(key):
    class Model(nn.Module):
        def forward(self, a, b):
            return OPERATORS[key](a, b)

    seen = []

    def new(*args):
        seen.append(args)
        return args[0].clone()

    a, b = torch.rand(2, 3, 3) > 0.5 if key is operator.and_ else torch.rand(2, 3, 3) + 1
    model = unit_scale(Model(), replace={key: new})
    assert torch.equal(model(a, b), a) and len(seen) == 1
    assert not entries(model, "left_alone")
    assert [(e["from"], e["to"].rpartition(".")[2]) for e in entries(model, "replaced")] == [(key.__name__, "new")]


@needs_positions
@pytest.mark.parametrize(
    "keys, call",
    [
        ((operator.abs, abs), lambda a: abs(a)),
        ((operator.abs,), lambda a: operator.abs(a)),
        ((operator.pow, pow), lambda a: pow(a, 2)),
        ((operator.add,), lambda a: sum([a, a])),
    ],
    ids=["abs", "operator.abs", "pow", "sum"],
)
def test_pythons_functions_that_call_an_operator_are_replaced_as_it(keys, call):
    class Model(nn.Module):
        def forward(self, a):
            return call(a)

    for key in keys:
        model, a = unit_scale(Model(), replace={key: lambda a, *_: a * 3}), torch.rand(3) + 1
        assert torch.equal(model(a), torch.as_tensor(a * 3 * (3 if key is operator.add else 1)))
        assert not entries(model, "left_alone")


def test_an_operator_is_no_method_and_keeps_the_order_of_its_operands():
    class Model(nn.Module):
        def forward(self, x):
            y = torch.add(x, 1).add(1)
            y += x
            return 3 - y, 2 < x

    def sub(a, b):
        return b * 2

    order = []
    model = unit_scale(Model(), replace={operator.iadd: lambda a, b: a, operator.sub: sub, operator.lt: lambda *o: order.append(o)})
    x = torch.randn(4)
    assert torch.equal(model(x)[0], (x + 1 + 1) * 2) and order[0][0] == 2
    assert not [e for e in entries(model, "left_alone") if "asked" in e["reason"]]
    model = unit_scale(Model(), replace={operator.add: sub})
    model(x)
    assert [e["node"] for e in entries(model, "left_alone") if "no call of it was found" in e["reason"]] == ["add"]


@pytest.mark.parametrize("key", [operator.add, F.gelu, own_gelu])
def test_torch_compile_sees_the_replacements(key):
    class Model(nn.Module):
        def forward(self, x):
            return own_gelu(F.gelu(x + 1))

    torch._dynamo.reset()
    model, x = unit_scale(Model(), replace={key: lambda *args: args[0] * 3}), torch.randn(4)
    compiled = torch.compile(model, backend="eager")(x)
    assert not [e for e in entries(model, "left_alone") if "asked" in e["reason"]]
    assert torch.equal(compiled, model(x))


def test_a_replacement_without_operators_was_called():
    model = unit_scale(Calls(), replace={own_gelu: lambda x: x})
    model(torch.randn(2, 32))
    assert not entries(model, "left_alone")


def test_wrong_replacements_are_named():
    for replace, said in [(None, "replace is a NoneType"), ([F.gelu], "replace is a list"), ({F.gelu: 3}, "replace has 3, which")]:
        with pytest.raises(TypeError, match=said):
            unit_scale(nn.Linear(2, 2), replace)


def test_keys_that_match_nothing_are_reported_and_logged(caplog):
    keys = {double: U.gelu, F.relu: double, "aten::sigmoid": "plumb::tanh", own_gelu: U.gelu}
    model = unit_scale(Calls(), replace=keys)
    model(torch.randn(2, 32))
    missing = [e["node"] for e in entries(model, "left_alone") if e["reason"].startswith("asked to be replaced")]
    assert missing == ["double", "relu", "aten::sigmoid"]
    told = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert [t.split()[3] for t in told] == missing


def test_the_users_map_sees_operators_as_they_were_written():
    class Swish(nn.Module):
        def forward(self, x):
            return x * torch.sigmoid(x)

    x = torch.randn(8, 32, requires_grad=True)
    model = unit_scale(Swish(), replace={"aten::sigmoid": "aten::tanh"})
    assert torch.equal(model(x), x * torch.tanh(x))


def test_a_replacement_may_use_what_it_replaces():
    x = torch.randn(8, 32)
    model = unit_scale(Calls(), replace={own_gelu: lambda x: 3 * own_gelu(x)})
    h = torch.ops.plumb.linear(x, model.up.weight, None, constraint=None)
    torch.testing.assert_close(model(x), torch.ops.plumb.linear(3 * own_gelu(h), model.down.weight, None, constraint=None))


def test_a_replaced_function_is_itself_again_afterwards():
    x = torch.randn(5)
    before = own_gelu(x)
    unit_scale(Calls(), replace={own_gelu: double})(torch.randn(2, 32))
    assert torch.equal(own_gelu(x), before) and own_gelu.__code__.co_name == "own_gelu"


def test_an_operator_cannot_become_a_python_function():
    with pytest.raises(plumb.Error, match="where an operator is called"):
        unit_scale(Calls(), replace={"aten::gelu": double})
