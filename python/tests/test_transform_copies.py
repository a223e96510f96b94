"""Copies and pickles of transformed modules compute what they hold, in every way that a copy is made."""

import copy
import pickle

import pytest
import torch
from torch import nn
from transform_models import saved

import plumb
from plumb.transforms import simulate_format, track_scales, unit_scale

x = torch.linspace(-2, 2, 32).reshape(4, 8)


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.l = nn.Linear(8, 8)
        self.k = 1.0

    def forward(self, x):
        return torch.tanh(self.l(x) * self.k)


class CopiesItself(Scaled):
    def __deepcopy__(self, memo):
        made = memo[id(self)] = type(self).__new__(type(self))
        made.__dict__.update({key: copy.deepcopy(value, memo) for key, value in self.__dict__.items()})
        return made


class PicklesItself(Scaled):
    def __reduce__(self):
        return _made_again, (self.k, [p.detach().clone() for p in self.parameters()])


def _made_again(k, values):
    made = PicklesItself()
    made.k = k
    with torch.no_grad():
        for p, value in zip(made.parameters(), values):
            p.copy_(value)
    return made


TRANSFORMS = {"unit_scale": unit_scale, "simulate_format": lambda m: simulate_format(m, "E4M3-RN", "none"), "track_scales": track_scales}
COPIES = {
    "shallow": copy.copy,
    "deep": copy.deepcopy,
    "pickled": lambda m: pickle.loads(pickle.dumps(m)),
    "saved": saved,
    "shallow of deep": lambda m: copy.copy(copy.deepcopy(m)),
    "deep of shallow": lambda m: copy.deepcopy(copy.copy(m)),
    "shallow of pickled of shallow": lambda m: copy.copy(pickle.loads(pickle.dumps(copy.copy(m)))),
}


@pytest.mark.parametrize("make", [Scaled, CopiesItself, PicklesItself])
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("called_before", [True, False])
def test_an_attribute_of_a_copy_is_read_by_the_copy(make, transform, how, called_before):
    model = make()
    transformed, expected = (TRANSFORMS[transform](model) for _ in range(2))
    if called_before:
        transformed(x)
    copied = COPIES[how](transformed)
    copied.k = expected.k = 3.0
    assert torch.equal(copied(x), expected(x))
    assert f"plumb: {transform} (1 graph)" in repr(copied)
    expected.k = 1.0
    assert torch.equal(transformed(x), expected(x)) and not torch.equal(transformed(x), copied(x))
    if transform == "track_scales":
        by_k = next(n for n in copied.scales_graph().nodes if n.name == "mul")
        assert 3.0 in by_k.args and "metrics" in by_k.meta


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("how", COPIES)
def test_a_module_of_fx_is_transformed_in_every_copy(transform, how):
    transformed = TRANSFORMS[transform](torch.fx.symbolic_trace(Scaled()))
    copied = COPIES[how](transformed)
    assert torch.equal(copied(x), transformed(x)) and f"plumb: {transform}" in repr(copied)
    assert hasattr(copied, "scales_graph") == (transform == "track_scales")


def test_a_shallow_copy_has_the_modules_parameters_and_its_own_mode():
    model = simulate_format(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)), "E4M3-RN", "none")
    copied = copy.copy(model)
    assert copied[0].weight is model[0].weight
    copied[0] = nn.Linear(8, 8)  # the table of modules is the same one, as in eager
    assert torch.equal(copied.eval()(x), model.eval()(x))


def test_weights_are_loaded_into_a_shallow_copy_that_is_left_alone():
    copied, other = copy.copy(unit_scale(Scaled())), unit_scale(Scaled())
    with torch.no_grad():
        other.l.weight.mul_(2)
    assert not any(copied.load_state_dict(other.state_dict()))
    assert torch.equal(copied(x), other(x))
    with pytest.raises(RuntimeError, match="these_weights_are_unit_scaled"):
        copied.load_state_dict(Scaled().state_dict())


def test_a_copy_of_a_recorded_module_is_a_model_of_its_own(tmp_path):
    model = Scaled()
    with plumb.Recorder(model, 1, tmp_path / "run.history") as recorder:
        copied = copy.copy(model)
        copied.k = 3.0
        expected = torch.tanh(model.l(x) * 3.0)
        assert torch.equal(copied(x), expected)
        assert recorder.step() == 0
        model(x)
        assert recorder.step() > 0
    assert not {"forward", "__reduce_ex__"} & set(model.__dict__)


def test_a_protocol_that_knows_no_objects_of_c_plus_plus_is_refused():
    with pytest.raises(plumb.Error, match="pickled by protocol 1.*\n.*protocol 2 or newer"):
        pickle.dumps(unit_scale(Scaled()), protocol=1)


class Irreps(tuple):
    """A tuple whose length has no meaning, as in e3nn."""

    def __len__(self):
        raise NotImplementedError


def test_a_module_that_holds_a_tuple_without_a_length_is_transformed():
    model = Scaled()
    model.irreps = Irreps((1, 2))
    assert torch.equal(plumb.transforms.track_scales(model)(x), model(x))


class Features(nn.Module):
    """Reads what its hooks, which are closures, have stored."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head, self.kept = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), nn.Linear(16, 2), {}
        kept = self.kept

        def store(name):
            def hook(part, args, output):
                self.kept[name] = output

            return hook

        def doubled(part, args):
            kept["before"] = args[0] * 2

        self.body[1].register_forward_hook(store("inner"))
        self.body[2].register_forward_pre_hook(doubled)

    def forward(self, x):
        self.body(x)
        return self.head(torch.cat([self.kept["inner"], self.kept["before"]], -1))


def test_a_hook_whose_closure_holds_the_model_writes_into_the_copy():
    for used_before in (False, True):
        plain = Features()
        if used_before:
            plain(x + 1)
        tracked = track_scales(plain)
        y, expected = tracked(x), (eager := Features())(x)
        assert torch.equal(y, expected)
        (y.sum() + expected.sum()).backward()
        for p, q, unused in zip(tracked.parameters(), eager.parameters(), plain.parameters(), strict=True):
            assert unused.grad is None and (p.grad is q.grad is None or torch.equal(p.grad, q.grad))


def test_a_hook_of_a_copy_shares_what_is_no_part_of_the_model():
    plain, seen, calls = Scaled(), [], 0

    def hook(part, args, output):
        nonlocal calls
        calls += 1
        seen.append(type(part).__name__)

    plain.l.register_forward_hook(hook)
    module = track_scales(plain)
    module(x)
    assert calls == len(seen) > 0
