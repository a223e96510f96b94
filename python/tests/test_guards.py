"""Everything that a forward reads besides its inputs is followed: attributes, settings, hooks, forwards, globals."""

import copy
import gc
import pickle
import weakref

import guarded_model
import pytest
import torch
from guarded_model import CHANGES, Model, X, like
from torch import nn

from plumb.transforms import track_scales, unit_scale

model = guarded_model.model  # the fixture


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("grad", [True, False])
def test_a_transformed_module_follows(change, grad, model):
    tracked = track_scales(model)
    with torch.set_grad_enabled(grad):
        assert torch.equal(tracked(X), model(X))
        before = model(X)
        for m in (model, tracked):
            CHANGES[change](m)
        assert not torch.equal(before, model(like(model)))
        assert torch.equal(tracked(like(model)), model(like(model)))


def test_a_change_that_is_taken_back_uses_the_first_graph_again(model):
    tracked = track_scales(model)
    forward = tracked.__dict__["forward"]
    tracked(X)
    first = forward.last
    tracked.factor = 3.0
    tracked(X)
    assert forward.last is not first
    tracked.factor = 1.5
    tracked(X)
    assert forward.last is first


def test_what_the_forward_does_not_read_or_only_counts_takes_no_capture(model):
    tracked = track_scales(model)
    tracked(X)
    first = tracked.__dict__["forward"].last
    for step in range(3):
        tracked.epoch = tracked.config.unread = step
        tracked.calls = 10 * step
        tracked.factor = float("1.5")  # another object of the same value
        tracked.sizes = [1, 2]
        tracked(X)
    assert tracked.__dict__["forward"].last is first


def test_a_part_that_was_transformed_by_itself_tells_the_whole(model):
    whole = nn.Sequential(nn.Linear(8, 8), track_scales(model))
    tracked = track_scales(whole)
    assert torch.equal(tracked(X), whole(X))
    for m in (whole, tracked):
        m[1].factor = 9.0
    assert torch.equal(tracked(X), whole(X))


def test_copies_and_pickles_follow_their_own_attributes():
    tracked = track_scales(Model())
    tracked(X)
    for other in (copy.deepcopy(tracked), pickle.loads(pickle.dumps(tracked))):
        before = other(X)
        assert torch.equal(before, tracked(X))
        other.flag = False
        assert not torch.equal(other(X), before)
        assert torch.equal(tracked(X), before)


def test_a_transformed_module_that_was_called_is_freed(model):
    tracked = unit_scale(model)
    tracked(X)
    gone = weakref.ref(tracked)
    del tracked
    gc.collect()
    assert gone() is None


def test_attributes_that_keep_changing_are_named_once(model, caplog):
    tracked = track_scales(model)
    for n in range(20):
        model.factor = tracked.factor = float(n)
        assert torch.equal(tracked(X), model(X))
    assert [r.getMessage() for r in caplog.records if "keeps changing" in r.getMessage()] == [
        "the forward reads 'factor', which keeps changing: each of its values takes a capture"
    ]
