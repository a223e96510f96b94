"""Calls of builtin functions that go elsewhere for a while, as those of torch.autograd.Function.apply do since torch 2.14."""

import contextlib
import datetime
import gc

import pytest
from plumb._capture.custom_functions import _builtin_goes_to

from plumb import _C

EPOCH, UTC = datetime.datetime(1970, 1, 1, tzinfo=datetime.timezone.utc), datetime.timezone.utc


class Later(datetime.datetime):
    pass


def test_calls_go_to_the_target_and_back_by_whatever_name_the_function_is_held():
    held, seen = Later.fromtimestamp, []

    def target(original, args, kwargs):
        seen.append((args, kwargs))
        return original(args[0], args[1] + 1, **kwargs)

    with _builtin_goes_to(datetime.datetime.fromtimestamp, target):
        assert held(0, tz=UTC) == EPOCH + datetime.timedelta(seconds=1) and type(held(0, tz=UTC)) is Later
        assert Later.fromtimestamp(0, UTC) == held(0, UTC)
        with _builtin_goes_to(datetime.datetime.fromtimestamp, target):  # the inner target calls the outer one
            assert held(0, tz=UTC) == EPOCH + datetime.timedelta(seconds=2)
    assert held(0, tz=UTC) == EPOCH == Later.fromtimestamp(0, UTC)
    assert seen[0] == ((Later, 0), {"tz": UTC}) and (Later, 0, UTC) in [args for args, _ in seen]


def test_errors_pass_and_leave_the_function_as_it_was():
    held = datetime.datetime.fromtimestamp

    def fails(original, args, kwargs):
        raise KeyError("from the target")

    with pytest.raises(KeyError, match="from the target"), _builtin_goes_to(held, fails):
        held(0, tz=UTC)
    with _builtin_goes_to(held, lambda original, args, kwargs: original(*args, **kwargs)):
        with pytest.raises(TypeError):
            held("no number")
    assert held(0, tz=UTC) == EPOCH
    _C.restore_builtin()  # nothing is to be restored
    assert held(0, tz=UTC) == EPOCH


def test_what_holds_a_call_of_the_original_may_outlast_the_target():
    kept = []
    with _builtin_goes_to(datetime.datetime.fromtimestamp, lambda original, args, kwargs: kept.append(original)):
        datetime.datetime.fromtimestamp(0, tz=UTC)
    gc.collect()
    assert kept[0](datetime.datetime, 0, tz=UTC) == EPOCH


def test_other_functions_are_refused():
    for function in (len, print, lambda: 0, int.from_bytes):
        with pytest.raises(TypeError), contextlib.ExitStack() as stack:
            stack.enter_context(_builtin_goes_to(function, lambda original, args, kwargs: None))
    with _builtin_goes_to(datetime.datetime.fromtimestamp, lambda original, args, kwargs: original(*args, **kwargs)):
        with pytest.raises(TypeError, match="now"):
            _C.redirect_builtin(datetime.datetime.strptime, None)
