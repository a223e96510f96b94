"""Reads by a detour are followed: of objects in globals and partial functions, bases, classes, imports, containers that a forward
writes."""

import array
import collections
import contextlib
import functools
import sys
import types

import pytest
import reads_helper
import torch
from reads_helper import Reads, X, follows
from torch import nn

import plumb

FACTOR = 2.0


@pytest.fixture(autouse=True)
def as_before():
    globals()["FACTOR"] = 2.0
    reads_helper.reset()
    DEFAULT[0] = SHOWN["k"] = 2.0
    yield
    globals()["FACTOR"] = 2.0
    reads_helper.reset()


# --- functions and what they read


def scaled_by(holder, x):
    return x * holder.scale


@torch.no_grad()
def without_gradients(x):
    return x * FACTOR


@contextlib.contextmanager
def factor():
    yield FACTOR


def in_a_context(m, x):
    with factor() as k:
        return x * k


def imports_a_module(m, x):
    import reads_helper as helper

    return x * helper.SCALE


def imports_a_function(m, x):
    from reads_helper import scaled

    return scaled(x)


def under_another_name(m, x):
    holder = reads_helper.HOLDER
    return x * holder.inner.scale


DEFAULT = [2.0]


def with_a_default(m, x, k=DEFAULT):
    return x * k[0]


SHOWN = {"k": 2.0}
SHOWS = types.MappingProxyType(SHOWN)


class Operators:
    def __getitem__(self, key):
        return FACTOR


def set_factor(m):
    globals()["FACTOR"] = 5.0


def set_helper(m):
    reads_helper.SCALE = 5.0


def set_holder(m):
    reads_helper.HOLDER.scale = 5.0


def set_inner(m):
    reads_helper.HOLDER.inner.scale = 5.0


def set_class(m):
    reads_helper.Settings.scale = 5.0


OUTSIDE = {
    "an_object_given_to_a_function": (lambda m, x: scaled_by(reads_helper.HOLDER, x), set_holder),
    "a_method_of_a_global": (lambda m, x: reads_helper.HOLDER.scaled(x), set_holder),
    "an_object_in_a_global": (lambda m, x: reads_helper.HOLDER.deep(x), set_inner),
    "an_object_in_a_list_in_a_dict": (
        lambda m, x: x * reads_helper.BY_NAME["one"][0].scale,
        lambda m: setattr(reads_helper.BY_NAME["one"][0], "scale", 5.0),
    ),
    "a_local_name_of_a_global": (under_another_name, set_inner),
    "a_class_method": (lambda m, x: x * reads_helper.Inner.of_class(), set_class),
    "a_class_given_to_a_function": (lambda m, x: scaled_by(reads_helper.Inner, x), set_class),
    "a_decorated_function": (lambda m, x: x + without_gradients(x), set_factor),
    "a_context_manager": (in_a_context, set_factor),
    "a_module_imported_inside": (imports_a_module, set_helper),
    "a_function_imported_inside": (imports_a_function, set_helper),
    "a_default": (with_a_default, lambda m: DEFAULT.__setitem__(0, 5.0)),
    "a_dict_shown_by_a_proxy": (lambda m, x: x * SHOWS["k"], lambda m: SHOWN.update(k=5.0)),
    "the_default_dtype": (
        lambda m, x: x.double() + torch.full((8,), 1 / 3),
        lambda m: torch.set_default_dtype(torch.float64),
    ),
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_what_functions_read_outside_of_the_module_is_followed(name):
    read, change = OUTSIDE[name]
    try:
        follows(lambda: Reads(read), change)
    finally:
        torch.set_default_dtype(torch.float32)


# --- attributes


class Slots:
    __slots__ = ("inner", "scale")

    def __init__(self, inner=None):
        self.scale, self.inner = 2.0, inner


class DictOfMine(dict):
    scale = 2.0


def counts_beside(m, x):
    m.kept["calls"] += 1
    return x * m.kept["scale"]


def counts_in_a_list(m, x):
    m.kept[1] += 1
    return x * m.kept[0]


def counts_below(m, x):
    m.kept["counts"]["calls"] += 1
    return x * m.kept["scale"]


def made_once(m, x):
    if m.kept is None:
        m.kept = 2.0
    return x * m.kept


def maybe(m, x):
    return x * m.extra if hasattr(m, "extra") else x


def replace(m, value=5.0):
    m.kept = value


ATTRIBUTES = {
    "an_object_in_a_slot": (lambda m, x: x * m.kept.inner.scale, lambda: Slots(Slots()), lambda m: setattr(m.kept, "inner", types.SimpleNamespace(scale=5.0))),
    "an_object_of_a_bound_method": (
        lambda m, x: m.kept(x), lambda: reads_helper.Holder().scaled, lambda m: setattr(m.kept.__self__, "scale", 5.0)
    ),
    "an_object_of_a_partial_function": (
        lambda m, x: m.kept(x),
        lambda: functools.partial(scaled_by, reads_helper.Holder()),
        lambda m: setattr(m.kept.args[0], "scale", 5.0),
    ),
    "a_list_of_a_partial_function": (
        lambda m, x: m.kept(x), lambda: functools.partial(lambda k, x: x * k[0], [2.0]), lambda m: m.kept.args[0].__setitem__(0, 5.0)
    ),
    "a_method_that_an_operator_calls": (lambda m, x: x * m.kept["any"], Operators, set_factor),
    "an_attribute_of_a_dict": (lambda m, x: x * m.kept.scale, DictOfMine, lambda m: setattr(m.kept, "scale", 5.0)),
    "a_user_dict": (lambda m, x: x * m.kept["a"], lambda: collections.UserDict(a=2.0), lambda m: m.kept.update(a=5.0)),
    "a_bytearray": (lambda m, x: x * m.kept[0], lambda: bytearray(b"\2"), lambda m: m.kept.__setitem__(0, 5)),
    "an_array": (lambda m, x: x * m.kept[0], lambda: array.array("f", [2.0]), lambda m: m.kept.__setitem__(0, 5.0)),
    "a_set_of_another_type": (lambda m, x: (x * 0).long() + sum(m.kept), lambda: {1}, lambda m: replace(m, {1.5})),
    "an_equal_number_of_another_type_in_a_set": (
        lambda m, x: x * 2 if type(min(m.kept)) is int else x * 5, lambda: {1}, lambda m: (m.kept.clear(), m.kept.add(1.0))
    ),
    "a_dict_that_the_forward_writes": (counts_beside, lambda: {"calls": 0, "scale": 2.0}, lambda m: m.kept.update(scale=5.0)),
    "a_list_that_the_forward_writes": (counts_in_a_list, lambda: [2.0, 0], lambda m: m.kept.__setitem__(0, 5.0)),
    "a_dict_around_one_that_it_writes": (
        counts_below, lambda: {"counts": {"calls": 0}, "scale": 2.0}, lambda m: m.kept.update(scale=5.0)
    ),
    "a_value_that_the_forward_makes_once": (made_once, lambda: None, replace),
    "a_buffer_that_was_not_there": (maybe, lambda: None, lambda m: m.register_buffer("extra", torch.tensor(3.0))),
    "a_parameter_that_was_not_there": (maybe, lambda: None, lambda m: setattr(m, "extra", nn.Parameter(torch.tensor(3.0)))),
}  # fmt: skip


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_what_attributes_hold_is_followed(name):
    read, kept, change = ATTRIBUTES[name]
    follows(lambda: Reads(read, kept=kept()), change)


def fivefold(owner, name):
    value = object.__getattribute__(owner, name)
    return 5 * value if name == "kept" else value


class Fivefold:
    __getattribute__ = fivefold


class ReadsByAnotherBase(Reads, Fivefold):
    pass


class ReadsItself(Reads):
    __getattribute__ = fivefold


@pytest.mark.parametrize("cls", (ReadsByAnotherBase, ReadsItself, Reads))
def test_attributes_are_read_as_other_bases_or_a_program_say(cls, monkeypatch):
    if cls is Reads:
        monkeypatch.setattr(nn.Module, "__getattribute__", fivefold)
    follows(lambda: cls(lambda m, x: x * m.kept, kept=2.0), lambda m: setattr(m, "kept", 3.0))


class NameWithoutHash(str):
    def __hash__(self):
        raise ValueError("no hash")


def reads_a_name_without_hash(m, x):
    try:
        return x * getattr(m, NameWithoutHash("kept"))
    except ValueError:
        return x * 3


def test_an_error_of_an_attributes_name_is_its_own():
    model = Reads(reads_a_name_without_hash, kept=2.0)
    assert torch.equal(plumb.capture(model, X)(X), model(X))


def test_a_counter_beside_what_is_read_takes_no_capture():
    for kept, read in (({"calls": 0, "scale": 2.0}, counts_beside), ([2.0, 0], counts_in_a_list)):
        model = Reads(read, kept=kept)
        graph = plumb.capture(model, X)
        for _ in range(3):
            assert torch.equal(graph(X), model(X))


def test_a_value_that_was_made_once_is_no_change():
    model = Reads(made_once, kept=None)
    graph = plumb.capture(model, X)
    assert model.kept is None
    for _ in range(3):
        assert torch.equal(graph(X), model(X))
    assert model.kept == 2.0


# --- classes


class Base(nn.Module):
    width = 2.0

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return self.linear(x) * FACTOR

    @classmethod
    def of_class(cls):
        return cls.width


class CallsSuper(Base):
    def forward(self, x):
        return super().forward(x) + 1


class NamesItsBase(Base):
    def forward(self, x):
        return Base.forward(self, x) + 1


class AsksItsClass(Base):
    def forward(self, x):
        return self.linear(x) * type(self).width


class AsksByAttribute(Base):
    def forward(self, x):
        return self.linear(x) * self.__class__.width


class AsksByMethod(Base):
    def forward(self, x):
        return self.linear(x) * self.of_class()


class Decorated(Base):
    @torch.no_grad()
    def forward(self, x):
        return self.linear(x) * FACTOR


class Maybe(Base):
    def forward(self, x):
        return self.linear(x) * getattr(self, "later", 1.0)


class Raises:
    def __get__(self, owner, cls=None):
        return owner.sizes["a"]


class Computes(Base):
    size = Raises()

    def __init__(self):
        super().__init__()
        self.sizes = {"a": 2.0}

    def forward(self, x):
        return self.linear(x) * self.size


@pytest.mark.parametrize(
    ("cls", "change"),
    [
        (CallsSuper, set_factor),
        (NamesItsBase, set_factor),
        (Decorated, set_factor),
        (AsksItsClass, lambda m: setattr(Base, "width", 5.0)),
        (AsksByAttribute, lambda m: setattr(Base, "width", 5.0)),
        (AsksByMethod, lambda m: setattr(Base, "width", 5.0)),
        (Maybe, lambda m: setattr(Maybe, "later", 5.0)),
        (Computes, lambda m: m.sizes.update(a=5.0)),
    ],
)
@pytest.mark.parametrize("part", [False, True])
def test_what_is_read_from_a_class_is_followed(cls, change, part):
    def on(m):
        change(m[0] if part else m)

    try:
        follows((lambda: nn.Sequential(cls())) if part else cls, on)
    finally:
        Base.width = 2.0
        if hasattr(Maybe, "later"):
            del Maybe.later


# --- objects that are replaced


class Settings:
    def __init__(self, factor=2.0):
        self.factor = factor


class Registry:
    settings = None  # a new object in every call, as libraries keep what they know of backends

    def factor(self):
        self.settings = Settings(self.settings.factor)
        return self.settings.factor


REGISTRY = Registry()
MODULES = sys.modules


def test_an_object_that_is_replaced_by_an_equal_one_is_no_change_and_what_is_done_to_that_one_is():
    class Net(nn.Module):
        def forward(self, x):
            return x * REGISTRY.factor()

    REGISTRY.settings = Settings()
    net = Net()
    graph = plumb.capture(net, X)
    for _ in range(2):
        assert torch.equal(graph(X), net(X))
    REGISTRY.settings.factor = 3.0
    with pytest.raises(plumb.Error, match="settings'"):
        graph(X)
    REGISTRY.settings = Settings()
    assert torch.equal(graph(X), X * 2)
    REGISTRY.settings = types.SimpleNamespace(factor=2.0)
    with pytest.raises(plumb.Error, match="settings'"):
        graph(X)


def test_an_import_between_is_no_change_to_a_forward_that_looks_into_sys_modules():
    class Net(nn.Module):
        def forward(self, x):
            return x * (2 if "torch" in MODULES else 3)

    net = Net()
    graph = plumb.capture(net, X)
    MODULES["imported_between"] = types.ModuleType("imported_between")
    try:
        assert torch.equal(graph(X), net(X))
    finally:
        del MODULES["imported_between"]
