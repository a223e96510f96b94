"""Run by test_python_versions.py under each Python, without torch: python_version_checks.py FOLDER-OF-PLUMB."""

import importlib.util
import sys
from pathlib import Path


def load(name):
    spec = importlib.util.spec_from_file_location(name, Path(sys.argv[1], f"{name}.py"))
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


cpython = load("_capture/cpython")
HAS_POSITIONS = sys.version_info >= (3, 11)


class Seen:
    """Looks at the frame that calls it, or asks for its truth or size."""

    def __init__(self):
        self.names, self.raises, self.empty, self.function, self.truth = [], [], [], [], True

    def look(self, value=True):
        code, n = cpython.running(sys._getframe(1))
        self.names.append(code.assigned(n))
        m = code.function_of(n)
        self.function.append(None if m is None else code.instructions[m].argval)
        return value

    def __bool__(self):
        code, n = cpython.running(sys._getframe(1))
        self.raises.append(code.decides_a_raise(n))
        return self.truth

    def __gt__(self, _):
        return self

    @property
    def size(self):
        code, n = cpython.running(sys._getframe(1))
        self.empty.append(code.asks_for_emptiness(n))
        return 3


def test_names_of_results():
    seen = Seen()

    def forward():
        x = seen.look()
        y = seen.look(x)  # noqa: F841
        a, b = seen.look((1, 2))  # noqa: F841
        c = d = seen.look()
        seen.look()
        e, (f, g) = seen.look((1, (2, 3)))  # noqa: F841
        h = [seen.look()]
        i = c + d  # noqa: F841
        return seen.look(h)

    forward()
    assert seen.names == [["x"], ["y"], ["a", "b"], ["c"], None, None, None, True], seen.names


def test_functions_that_are_called():
    seen = Seen()
    look = seen.look

    def forward():
        seen.look()
        look(1)
        x = (seen
             .look(2))  # fmt: skip
        look(value=x)
        return seen.look(value="a keyword and a constant")

    forward()
    assert seen.function == (["look"] * 5 if HAS_POSITIONS else [None] * 5), seen.function


def test_branches_that_only_raise():
    seen = Seen()

    def forward():
        assert seen, "message"
        if not seen:
            raise ValueError("no")
        if seen:
            x = 1
        else:
            x = 2
        y = 1 if seen else 2
        while not seen:
            x += y
        if bool(seen):
            return x
        raise TypeError(f"no {x}")

    forward()
    assert seen.raises == [True, True, False, False, False, True], seen.raises

    def compares():
        if seen > 1:
            raise ValueError("no")
        x = 1
        if seen > 1:
            x = 2
        return x

    seen.raises, seen.truth = [], False
    compares()
    assert seen.raises == [True, False], seen.raises


def test_sizes_that_are_held_against_zero():
    seen = Seen()

    def forward():
        if seen.size > 0:
            pass
        if seen.size == 0:
            pass
        if seen.size:
            pass
        a = not seen.size
        b = seen.size > 1
        c = seen.size >= 0
        d = seen.size + 0
        return a, b, c, d

    forward()
    assert seen.empty == [True] * 4 + [False] * 3, seen.empty


class Counter:
    def __init__(self):
        self.value, self.updates = 0, []

    @property
    def calls(self):
        code, n = cpython.running(sys._getframe(1))
        self.updates.append(code.updates_attribute(n, "calls"))
        return self.value

    @calls.setter
    def calls(self, value):
        self.value = value


def test_attributes_that_are_read_for_their_own_new_value():
    counter, other = Counter(), Seen()

    def forward():
        counter.calls += 1
        counter.calls = counter.calls + 1
        counter.calls = max(counter.calls, 5)
        other.calls = counter.calls
        x = counter.calls
        if counter.calls > 3:
            pass
        return [x, counter.calls]

    forward()
    assert counter.updates == [True] * 3 + [False] * 4, counter.updates


def plain(a, b=2, *rest, c=3, **others):
    return a, b, rest, c, others


def closure_over(value):
    def inner(x, y=value):
        return x, y, value

    return inner


def test_calls_go_to_another_function_and_back():
    calls = []

    def target(original, args, kwargs):
        calls.append((args, kwargs))
        return "swapped", original(*args, **kwargs)

    for function, args, kwargs in [
        (plain, (1,), {}),
        (plain, (1, 5, 6), {"c": 7, "d": 8}),
        (closure_over(9), (1,), {}),
        (closure_over(9), (), {"x": 1, "y": 2}),
    ]:
        before, code, name = function(*args, **kwargs), function.__code__, function.__name__
        held = [function]
        with cpython.calls_go_to(function, target):
            for _ in range(50):  # often enough for an interpreter that specializes calls
                assert held[0](*args, **kwargs) == ("swapped", before)
            assert function.__name__ == name
        assert calls[-1] == (args, kwargs)
        assert function(*args, **kwargs) == before
        assert function.__code__ is code


def test_a_swap_ends_with_an_exception_too():
    def target(original, args, kwargs):
        raise KeyError("inside")

    try:
        with cpython.calls_go_to(plain, target):
            plain(1)
    except KeyError:
        pass
    assert plain(1) == (1, 2, (), 3, {})


def test_swaps_nest():
    def outer(original, args, kwargs):
        return ["outer", original(*args, **kwargs)]

    def inner(original, args, kwargs):
        return ["inner", original(*args, **kwargs)]

    with cpython.calls_go_to(plain, outer):
        with cpython.calls_go_to(plain, inner):
            assert plain(1)[:1] == ["inner"] and plain(1)[1][0] == "outer"
        assert plain(1)[0] == "outer"
    assert plain(1)[0] == 1


for name, test in list(globals().items()):
    if name.startswith("test_"):
        test()
print("ok", *sys.version_info[:2])
