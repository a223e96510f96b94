"""plumb.Error and its fields."""

import copy
import pickle
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import plumb


class Gate(nn.Module):
    def forward(self, x):
        return x if x.sum().item() > 0 else -x


def test_an_error_says_kind_place_and_remedy_apart():
    with pytest.raises(plumb.Error) as caught:
        plumb.capture(nn.Sequential(nn.Linear(2, 2), Gate()), torch.ones(1, 2))
    error = caught.value
    assert error.kind is plumb.ErrorKind.DataDependent
    assert error.message == "aten::item takes a value out of a tensor, so the program would depend on the data"
    assert re.fullmatch(r'1 \(.*test_errors.py:\d+.*\)', error.where), error.where
    assert error.remedy.startswith("use torch.where or masks")
    assert str(error) == f"{error.message}\n  at: {error.where}\n  try: {error.remedy}"


def test_kinds_tell_failures_apart():
    graph = plumb.capture(nn.Linear(2, 2), torch.ones(1, 2))
    tracked = plumb.transforms.track_scales(nn.Linear(2, 2))

    def kind_of(call):
        with pytest.raises(plumb.Error) as caught:
            call()
        return caught.value.kind

    kind = plumb.ErrorKind
    assert kind_of(lambda: graph(torch.ones(3, 2))) is kind.TensorMismatch
    assert kind_of(lambda: graph(torch.ones(1, 2), 3)) is kind.StructureMismatch
    assert kind_of(lambda: plumb.report(tracked)) is kind.InvalidState
    assert kind_of(lambda: plumb.parse_graph("graph {")) is kind.InvalidGraph
    assert kind_of(lambda: plumb.parse_graph("graph {\n  %x = no::such()\n}")) is kind.InvalidGraph
    assert kind_of(lambda: plumb.load_pt2("no-such-file.pt2")) is kind.BadFile
    assert kind_of(lambda: plumb.save_pt2(graph, "no-such-folder/x.pt2")) is kind.CannotWrite


def test_a_buffer_that_changed_fails_the_guard():
    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("by", torch.tensor(2.0))

        def forward(self, x):
            return x * self.by.item()

    graph = plumb.capture(Scale(), torch.ones(2))
    graph.by.fill_(3.0)
    with pytest.raises(plumb.Error) as caught:
        graph(torch.ones(2))
    assert caught.value.kind is plumb.ErrorKind.GuardFailed


def test_errors_are_copied_and_pickled_with_their_fields():
    error = plumb.Error("no", kind=plumb.ErrorKind.Schedule, where="here", remedy="this")
    for other in (copy.copy(error), pickle.loads(pickle.dumps(error))):
        assert type(other) is plumb.Error
        assert (other.message, other.kind, other.where, other.remedy) == ("no", plumb.ErrorKind.Schedule, "here", "this")
        assert str(other) == str(error) == "no\n  at: here\n  try: this"


def test_an_error_of_pythons_keeps_its_fields_through_the_engine():
    error = plumb.Error("my own refusal", kind=plumb.ErrorKind.Unsupported, remedy="another module")

    class Refuses(nn.Module):
        def forward(self, x):
            raise error

    with pytest.raises(plumb.Error) as caught:
        plumb.capture(Refuses(), torch.ones(2))
    assert caught.value is error


def test_every_kind_has_a_sentence():
    for name in plumb.ErrorKind.__members__:
        assert re.search(rf"{name} : [A-Z].*\.", plumb.ErrorKind.__doc__), name


def test_no_code_decides_by_an_errors_text():
    package = Path(plumb.__file__).parent
    for file in package.rglob("*.py"):
        for line in file.read_text().splitlines():
            assert not re.search(r"\bin str\((e|err|error|exc)\)", line), f"{file}: {line.strip()}"
