"""Everything besides values of tensors that a forward asks, takes and returns: requires_grad, arrays, sizes, nothing at
all."""

import collections
import contextlib
import copy
import enum
import functools
import gc
import pickle
import signal
import types

import numpy as np
import pytest
import torch
from capture_checks import Net, check
from plumb._capture.attribute_writes import ModuleStateGuard
from plumb._capture.torch_patches import patched
from plumb.pipelining import ScheduleInterleaved1F1B, SplitPoint, pipeline
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import plumb
from plumb.transforms import simulate_fp8, track_scales, unit_scale


class Asks(nn.Module):
    """Doubles what requires a gradient, by way of its own parameters only behind `second`."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        h = (x.sin() + 1).relu()
        h = h * 2 if h.requires_grad else h
        y = self.second(self.first(h))
        return y + 1 if y.requires_grad else y


@contextlib.contextmanager
def set_meanwhile(setter, value, before):
    setter(value)
    try:
        yield
    finally:
        setter(before)


@pytest.mark.parametrize(
    "name, changed",
    [
        ("is_inference_mode_enabled", torch.inference_mode),
        ("are_deterministic_algorithms_enabled", lambda: set_meanwhile(torch.use_deterministic_algorithms, True, False)),
        ("is_anomaly_enabled", lambda: torch.autograd.set_detect_anomaly(True)),
        ("get_num_threads", lambda: set_meanwhile(torch.set_num_threads, 7, torch.get_num_threads())),
        ("get_float32_matmul_precision", lambda: set_meanwhile(torch.set_float32_matmul_precision, "high", "highest")),
        ("is_warn_always_enabled", lambda: set_meanwhile(torch.set_warn_always, True, False)),
    ],
)
def test_a_setting_of_torch_that_the_forward_asks_for_is_part_of_what_a_graph_was_made_for(name, changed):
    def asks(m, x):
        with torch.inference_mode():
            assert torch.is_inference_mode_enabled()  # which the forward itself has changed
        return m.layer(x) * (1 + len(repr(getattr(torch, name)())) + (getattr(torch, name)() == 7))

    model, x = Net(asks), torch.randn(2, 4)
    tracked, graph = track_scales(model), plumb.capture(model, x)
    before = model(x)
    assert torch.equal(tracked(x), before) and torch.equal(graph(x), before)
    with changed():
        after = model(x)
        assert not torch.equal(after, before)
        assert torch.equal(tracked(x), after) and torch.equal(plumb.capture(model, x)(x), after)
        with pytest.raises(plumb.Error, match=rf"'torch\.{name}\(\)', which the forward had read, has changed"):
            graph(x)
    assert torch.equal(tracked(x), before)


def test_a_forward_hears_whether_inputs_require_gradients_as_they_were_given():
    x = torch.randn(3, 4)
    model = Asks()
    for given, other in ((x, x.clone().requires_grad_()), (x.clone().requires_grad_(), x)):
        graph = plumb.capture(model, given, plumb_verify=True)
        for module in (graph, copy.deepcopy(graph), pickle.loads(pickle.dumps(graph)), track_scales(graph)):
            assert torch.equal(module(given), model(given))
            with pytest.raises(plumb.Error, match="whether an input requires a gradient") as caught:
                module(other)
            assert caught.value.kind is plumb.ErrorKind.GuardFailed and "test_capture_surroundings.py" in caught.value.where
    assert not torch.equal(model(x), model(x.clone().requires_grad_()))


def test_transformed_modules_have_a_graph_for_inputs_with_and_without_gradients():
    x = torch.randn(3, 4)
    model = Asks()
    tracked = track_scales(model)
    for given in (x, x.clone().requires_grad_(), x):
        assert torch.equal(tracked(given), model(given))
    around = nn.Sequential(nn.Identity(), tracked)
    for given in (x, x.clone().requires_grad_()):
        assert torch.equal(plumb.capture(around, given)(given), model(given))
        assert torch.equal(plumb.capture(tracked, given)(given), model(given))


def test_a_compiled_graph_refuses_inputs_with_other_gradients_too():
    x, model = torch.randn(3, 4), Asks()
    for given, other in ((x, x.clone().requires_grad_()), (x.clone().requires_grad_(), x)):
        compiled = torch.compile(plumb.capture(model, given), backend="aot_eager")
        assert torch.equal(compiled(given), model(given))
        with pytest.raises(plumb.Error, match="whether an input requires a gradient"):
            compiled(other)


def test_a_file_and_stages_take_the_branch_of_inputs_without_gradients(tmp_path):
    x = torch.randn(4, 4)
    model = Asks()
    plumb.save_pt2(plumb.capture(model, x), tmp_path / "asks.pt2")
    assert torch.equal(plumb.load_pt2(tmp_path / "asks.pt2")(x), model(x))
    eager, losses = copy.deepcopy(model), []
    pipe = pipeline(model, (x[:2],), split_spec={"second": SplitPoint.BEGINNING})
    stages = [pipe.build_stage(i, torch.device("cpu")) for i in range(2)]
    schedule = ScheduleInterleaved1F1B(stages, 2, lambda y, t: y.square().mean())
    schedule.step(x, target=x, losses=losses)
    want = [eager(part).square().mean() for part in x.split(2)]
    sum(want).div(2).backward()
    assert all(map(torch.equal, losses, want))
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), eager.parameters()))


class AsksModes(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        y = self.layer(x) if torch.is_grad_enabled() else self.layer(x.sin())
        with torch.no_grad():
            y = y if torch.is_grad_enabled() else y * 3
        return y if x.is_contiguous() else y + x.stride(0)


def test_transformed_modules_have_graphs_for_the_modes_and_layouts_that_their_forward_asks_for():
    model, x = AsksModes(), torch.randn(4, 4)
    tracked = track_scales(model)
    for _ in range(2):
        for given in (x, x.t(), torch.randn(4, 8)[:, ::2]):
            assert torch.equal(tracked(given), model(given))
            with torch.no_grad():
                assert torch.equal(tracked(given), model(given))
    with torch.no_grad():
        again = plumb.capture(model, x)
    assert torch.equal(again(x), model(x)) and any("torch.is_grad_enabled()" in note for note in again.notes)


def test_marks_for_the_profiler_are_no_part_of_a_graph(tmp_path):
    def marked(m, x):
        with torch.profiler.record_function("layer"):
            return m.layer(x)

    x = torch.randn(3, 4)
    graph = check(Net(marked), x)
    assert not any("profiler" in node.target for node in graph.graph.nodes)
    assert torch.equal(copy.deepcopy(graph)(x), graph(x))
    plumb.save_pt2(graph, tmp_path / "marked.pt2")
    assert torch.equal(plumb.load_pt2(tmp_path / "marked.pt2")(x), graph(x))


def by_condition(m, x):
    return torch.cond(x.sum() > 0, lambda x: m.layer(x).sin(), lambda x: m.layer(x).exp(), (x,))


def by_loop(m, x):
    return torch.while_loop(lambda i, x: i.sum() < 3, lambda i, x: (i + 1, x.sin()), (torch.zeros(()), m.layer(x)))[1]


def test_torch_cond_gets_a_graph_for_each_answer_and_one_graph_alone_refuses_it():
    model, x = Net(by_condition), torch.randn(3, 4)
    tracked = track_scales(model)
    for given in (x.abs(), -x.abs(), x.abs()):
        assert torch.equal(tracked(given), model(given))
        got, want = ([torch.autograd.grad(m(given).sum(), m.layer.weight)[0]] for m in (tracked, model))
        assert all(map(torch.equal, got, want))
    with pytest.raises(plumb.Error, match="is_nonzero takes a value out of a tensor") as caught:
        plumb.capture(model, x)
    assert caught.value.kind is plumb.ErrorKind.DataDependent and "test_capture_surroundings.py" in caught.value.where


def test_a_branch_of_torch_cond_that_is_not_taken_has_no_gradient_as_behind_an_if():
    net = Net(lambda m, x: torch.cond(x.sum() > 0, lambda x: m.layer(x), lambda x: m.other(x), (x,)))
    net.other = nn.Linear(4, 4)
    tracked = track_scales(net)
    tracked(torch.ones(3, 4)).sum().backward()
    assert tracked.other.weight.grad is None and tracked.layer.weight.grad is not None


def test_torch_while_loop_is_unrolled_where_its_length_is_known():
    check(Net(by_loop), torch.randn(3, 4))


def test_other_operators_on_functions_are_refused_by_name():
    from torch.nn.attention.flex_attention import flex_attention

    def attend(m, x):
        with torch.no_grad():  # flex_attention has no gradients on the CPU
            q = x.detach()
            return flex_attention(q, q, q)

    with pytest.raises(plumb.Error, match="flex_attention") as caught:
        plumb.capture(Net(attend), torch.randn(1, 2, 16, 16))
    assert caught.value.kind is plumb.ErrorKind.Capture and "scaled_dot_product_attention" in caught.value.remedy


def doubled(self, x):
    return self.second(self.first(x)) * 2


def set_forward(kind):
    model = nn.Module()
    model.first, model.second = nn.Linear(4, 4), nn.Linear(4, 4)
    ways = {"method": lambda: types.MethodType(doubled, model), "partial": lambda: functools.partial(doubled, model)}
    model.forward = ways[kind]() if kind in ways else lambda x: doubled(model, x)
    return model


@pytest.mark.parametrize("kind", ["method", "partial"])
def test_a_forward_that_was_set_on_the_module_is_transformed(kind, tmp_path):
    model, x = set_forward(kind), torch.randn(3, 4)
    tracked = track_scales(model)
    unit_scale(model)(x)
    for module in (tracked, copy.deepcopy(tracked), pickle.loads(pickle.dumps(tracked)), simulate_fp8(tracked)):
        module.first.weight.data.zero_()
        near = torch.allclose if module is not tracked and "simulate" in repr(module) else torch.equal
        module.second.weight.data.zero_()
        assert near(module(x), module.second(module.first(x)) * 2)
    assert model.first.weight.any() and torch.equal(model(x), doubled(model, x))
    with plumb.Recorder(model, 1, tmp_path / "set.history") as recorder:
        assert torch.equal(model(x), doubled(model, x))
        recorder.step()
    assert torch.equal(model(x), doubled(model, x))
    plain = plumb.transforms.fold(unit_scale(model), x)
    assert torch.allclose(plain(x), plumb.transforms.fold(plumb.capture(unit_scale(model), x))(x), atol=1e-5)


def test_a_forward_that_holds_the_model_is_refused_in_a_copy_of_it():
    model, x = set_forward("closure"), torch.randn(3, 4)
    assert torch.equal(plumb.capture(model, x)(x), model(x))
    with pytest.raises(plumb.Error, match="'first.weight' of the model that was given") as caught:
        simulate_fp8(track_scales(model))(x)
    assert "types.MethodType" in caught.value.remedy


def test_a_forward_may_return_nothing():
    def count(m, x):
        m.calls.add_(x.detach().sum())

    model = Net(count)
    model.register_buffer("calls", torch.zeros(()))
    graph = plumb.capture(model, torch.ones(3))
    for module in (graph, copy.deepcopy(graph), track_scales(model)):
        module.calls.zero_()
        assert module(torch.ones(3)) is None and module.calls == 3


class Shaped(nn.Module):
    def forward(self, x, shape):
        return x.expand(shape), torch.Size([shape.numel()]), {"of": x.shape}


def test_sizes_stay_sizes(tmp_path):
    x, shape = torch.randn(3, 1), torch.Size([3, 4])
    want = Shaped()(x, shape)
    graph = plumb.capture(Shaped(), x, shape)
    plumb.save_pt2(graph, tmp_path / "shaped.pt2")
    loaded = plumb.load_pt2(tmp_path / "shaped.pt2")
    for module in (graph, copy.deepcopy(graph), loaded, track_scales(Shaped())):
        got = module(x, shape)
        assert torch.equal(got[0], want[0]) and type(got[1]) is torch.Size and type(got[2]["of"]) is torch.Size
        assert got[1:] == want[1:]


class Kind(enum.Enum):
    LARGE = 1


class Returns(nn.Module):
    def __init__(self, also):
        super().__init__()
        self.also = also

    def forward(self, x, by=2.0):
        return x * float(by), self.also


@pytest.mark.parametrize("also", [Kind.LARGE, np.float32(3.5), b"text", torch.float16, torch.channels_last, torch.strided])
def test_what_holds_no_tensors_is_returned_as_it_was(also, tmp_path):
    graph = plumb.capture(Returns(also), torch.ones(2))
    for module in (graph, copy.deepcopy(graph), track_scales(Returns(also))):
        assert module(torch.ones(2))[1] == also and type(module(torch.ones(2))[1]) is type(also)
    with pytest.raises(plumb.Error, match="output 1 is a .*, which a .pt2 file cannot hold"):
        plumb.save_pt2(graph, tmp_path / "kind.pt2")


def test_numbers_that_no_file_holds_are_refused_by_their_place(tmp_path):
    with pytest.raises(plumb.Error, match="input 1 is a int of more than 64 bits"):
        plumb.save_pt2(plumb.capture(Returns(3), torch.ones(2), 2**70), tmp_path / "large.pt2")
    assert not any(tmp_path.iterdir())


def test_a_dict_with_a_factory_goes_through_a_file(tmp_path):
    class Grouped(nn.Module):
        def forward(self, x):
            return collections.defaultdict(list, y=x * 2, z=[x])

    x = torch.ones(2)
    plumb.save_pt2(plumb.capture(Grouped(), x), tmp_path / "grouped.pt2")
    for module in (plumb.load_pt2(tmp_path / "grouped.pt2"), torch.export.load(tmp_path / "grouped.pt2").module()):
        got = module(x)
        assert type(got) is collections.defaultdict and got["new"] == [] and torch.equal(got["y"], x * 2)


class Arrays(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x, array):
        return self.layer(x) * torch.from_numpy(array).sum() + np.float32(2.0)


def test_graphs_hold_arrays_against_those_that_they_were_made_with():
    x, array = torch.randn(4, 4), np.arange(3000.0, dtype=np.float32)
    other = array.copy()
    other[1500] = 7  # which their text does not show
    model = Arrays()
    graph = plumb.capture(model, x, array)
    tracked = track_scales(model)
    for module in (graph, copy.deepcopy(graph), tracked):
        assert torch.equal(module(x, array.copy()), model(x, array))
    assert torch.equal(tracked(x, other), model(x, other))
    pipe = pipeline(model, (x, array), split_spec={"layer": SplitPoint.END})
    array[5] = -1  # written in place
    assert torch.equal(tracked(x, array), model(x, array))
    for call in (graph, copy.deepcopy(graph), pipe):
        for wrong in (array, other, other[:5], other.astype(np.float64)):
            with pytest.raises(plumb.Error) as caught:
                call(x, wrong)
            assert caught.value.kind is plumb.ErrorKind.StructureMismatch


def test_numbers_of_another_type_or_sign_are_other_numbers():
    class Times(nn.Module):
        def forward(self, x, n):
            return x * n

    x, tracked = torch.arange(3), track_scales(Times())
    graph = plumb.capture(Times(), x, 1)
    for n in (1, 1.0, True, 0.0, -0.0, float("nan")):
        got, want = tracked(x, n), Times()(x, n)
        assert got.dtype == want.dtype and torch.equal(got.double().signbit(), want.double().signbit())
        if (type(n), n) != (int, 1):
            with pytest.raises(plumb.Error, match="captured with 1"):
                graph(x, n)
    nan = plumb.capture(Times(), x, float("nan"))
    assert nan(x, float("nan")).isnan().all()


def test_a_copy_of_a_data_parallel_module_computes_the_same():
    model, x = nn.DataParallel(nn.Linear(4, 4)), torch.randn(3, 4)
    graph = plumb.capture(model, x)
    for module in (graph, copy.deepcopy(graph), pickle.loads(pickle.dumps(graph))):
        assert torch.equal(module(x), model(x))


def test_a_closed_recorder_has_closed_its_file(tmp_path):
    model, x = nn.Linear(4, 4), torch.randn(3, 4)
    recorder = plumb.Recorder(model, 1, tmp_path / "run.history")
    kept = model.forward  # knows the recorder
    model(x).sum().backward()
    recorder.step()
    recorder.close()
    gc.collect()
    assert torch.equal(kept(x), model(x)) and torch.equal(kept(x[:2]), model(x[:2]))
    for use in (recorder.step, lambda: recorder.current_step):
        with pytest.raises(plumb.Error, match="closed"):
            use()
    with plumb.Recorder(model, 1, tmp_path / "run.history", append=True) as again:
        model(x).sum().backward()
        assert again.step()
    assert len(set(plumb.read_history(tmp_path / "run.history").columns["step"])) == 2


@pytest.fixture
def interrupts():
    """Interrupts raise, also where the shell that began the tests ignores them."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupting(function):
    """Returns `function`, which is interrupted at its beginning."""

    def interrupted(*args, **kwargs):
        signal.raise_signal(signal.SIGINT)
        return function(*args, **kwargs)

    return interrupted


def test_an_interrupt_waits_until_a_class_is_as_before(interrupts):
    class Meta(type):
        __delattr__ = interrupting(type.__delattr__)

    class Owner(metaclass=Meta):
        pass

    with pytest.raises(KeyboardInterrupt), patched(Owner, a=1, b=2):
        assert Owner.a == 1 and Owner.b == 2
    assert not hasattr(Owner, "a") and not hasattr(Owner, "b")


def test_an_interrupt_at_the_end_of_a_capture_waits_until_model_and_torch_are_as_before(monkeypatch, interrupts):
    class Counting(nn.Linear):
        calls = 0

        def forward(self, x):
            self.calls += 1
            return super().forward(x)

    model, x = Counting(4, 4), torch.randn(2, 4)
    restore, before = ModuleStateGuard.restore, dict(vars(torch.Tensor))
    at_end = interrupting(restore)
    monkeypatch.setattr(ModuleStateGuard, "restore", lambda self, warn=True: (at_end if warn else restore)(self, warn))
    with pytest.raises(KeyboardInterrupt):
        plumb.capture(model, x)
    assert vars(model).get("calls", 0) == 0 and dict(vars(torch.Tensor)) == before
    monkeypatch.undo()
    assert torch.equal(plumb.capture(model, x)(x), model(x))


def test_a_weight_that_parametrize_has_cached_is_computed_by_the_graph():
    model = parametrizations.weight_norm(nn.Linear(4, 4)).requires_grad_(False)
    tracked, given = track_scales(model), [torch.randn(3, 4), torch.randn(2, 4)]
    with torch.no_grad(), parametrize.cached():
        graph = [model(given[0]), plumb.capture(model, given[0])][1]
        assert all(torch.equal(tracked(x), model(x)) for x in given)
    for module in (model, tracked):
        module.parametrizations.weight.original0.mul_(2)
    assert all(torch.equal(tracked(x), model(x)) for x in given) and torch.equal(graph(given[0]), model(given[0]))
