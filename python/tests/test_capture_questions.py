"""Questions of forwards to tensors, changes of themselves and objects passed around: capture returns, guards, or
refuses by name."""

import collections
import dataclasses
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from capture_checks import Fn, Net, check, refusal, same
from torch import nn
from torch.nn.utils import prune

import plumb


def test_a_layer_left_out_with_probability_zero_stays():
    for limit in (0.0, 1):
        check(Net(lambda m, x: x if torch.rand([]) < limit else m.layer(x).relu()), torch.randn(3, 4))
    message = refusal(lambda x: x if torch.rand([]) < 0.5 else x * 2)
    assert "random number" in message and "layerdrop" in message


def test_checks_that_only_raise_are_made_in_every_run():
    def positive(x):
        if not (x > 0).all():
            raise ValueError(f"expected positive values, got {x}")
        if x.sum() > 100:
            raise ValueError("too large")
        return x.log()

    m = plumb.capture(Fn(positive), torch.rand(4) + 1)
    assert sum("a check of a value" in n for n in m.notes) == 2
    x = torch.rand(4) + 2
    assert torch.equal(m(x), x.log())
    with pytest.raises(plumb.Error, match="test_capture_questions.py"):
        m(-x)
    with pytest.raises(plumb.Error, match="a check that the model makes"):
        m(x * 100)


def test_branches_that_do_more_than_raise_are_refused():
    def warns(x):
        if x.isnan().any():
            x = x.nan_to_num()
        return x * 2

    assert "aten::is_nonzero" in refusal(warns)
    assert "aten::is_nonzero" in refusal(lambda x: x if (x > 0).all() else -x)


def test_distributions_check_their_arguments():
    def sample(m, x):
        d = torch.distributions.Normal(m.layer(x), F.softplus(x))
        return d.rsample() + torch.distributions.kl_divergence(d, torch.distributions.Normal(0.0, 1.0))

    check(Net(sample), torch.randn(3, 4))


def test_a_function_that_returns_the_truth_leaves_the_branch_to_its_caller():
    def finite(x):
        return bool(x.isfinite().all())

    def raises(m, x):
        if not finite(x):
            raise ValueError("not finite")
        return m.layer(x)

    check(Net(raises), torch.randn(3, 4))
    assert "aten::is_nonzero" in refusal(lambda x: x if finite(x) else -x)


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x, chosen):
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            rows = torch.where(chosen == i)[0]
            if rows.numel() > 0:
                out = out.index_add(0, rows, expert(x[rows]))
        return out


def test_an_expert_without_rows_at_capture_is_missed_when_it_gets_some():
    model = Experts()
    x = torch.randn(4, 4)
    m = plumb.capture(model, x, torch.tensor([0, 0, 1, 0]))
    for good in ([1, 0, 0, 0], [1, 1, 1, 0]):
        assert torch.equal(m(x, torch.tensor(good)), model(x, torch.tensor(good)))
    with pytest.raises(plumb.Error, match="without elements"):
        m(x, torch.tensor([0, 1, 2, 0]))
    with pytest.raises(plumb.Error, match="with elements"):
        m(x, torch.tensor([0, 0, 0, 0]))


def test_a_size_that_depends_on_the_data_is_checked():
    m = plumb.capture(Fn(lambda x: x[x > 0].sum() / (x > 0).nonzero().shape[0]), torch.tensor([1.0, -1, 2]))
    assert m(torch.tensor([3.0, -1, 5])) == 4
    with pytest.raises(plumb.Error, match=r"\[2, 1\] when it was captured, \[3, 1\] now"):
        m(torch.tensor([3.0, 1, 5]))
    free = plumb.capture(Fn(lambda x: x[x > 0].mean() * x.shape[0]), torch.tensor([1.0, -1, 2]))
    assert "guard" not in str(free.graph) and free(torch.tensor([1.0, 2, 3])) == 6


def test_gradients_taken_inside_of_the_forward_are_part_of_the_graph():
    def energy(m, x):
        x = x.detach().requires_grad_()
        e = m.norm(torch.tanh(m.layer(x))).pow(2).sum()
        (force,) = torch.autograd.grad(e, x, create_graph=True)
        return e, force.norm(2, -1)

    model = Net(energy, norm=nn.LayerNorm(4))
    m = check(model, torch.randn(3, 4))
    assert "_constant" not in str(m.graph)


def test_hooks_on_gradients_are_refused_by_name():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    handle = model[1].register_full_backward_hook(lambda *_: None)
    with pytest.raises(plumb.Error, match=r"module '1' \(ReLU\) has backward hooks"):
        plumb.capture(model, torch.randn(2, 4))
    handle.remove()
    plumb.capture(model, torch.randn(2, 4))

    def hooked(x):
        y = x * 2
        y.register_hook(lambda g: g * 0)
        return y

    assert "hook is registered" in refusal(hooked) and "test_capture_questions.py" in refusal(hooked)
    assert "__len__" in torch.Tensor.__dict__ and "shape" not in torch.Tensor.__dict__


@dataclasses.dataclass
class Pair:
    a: torch.Tensor
    b: torch.Tensor
    n: int = 2


def test_dataclasses_and_mappings_come_and_go():
    model = Net(lambda m, p: Pair(m.layer(p.a) * p.b, p.a, p.n))
    m = plumb.capture(model, Pair(torch.randn(2, 4), torch.randn(2, 4)))
    given = Pair(torch.randn(2, 4), torch.randn(2, 4))
    got, expected = m(given), model(given)
    assert type(got) is Pair and got.n == 2 and torch.equal(got.a, expected.a)
    scaled = plumb.transforms.track_scales(model)
    assert torch.equal(scaled(given).a, expected.a) and torch.equal(scaled(Pair(given.b, given.a)).b, given.b)

    class Batch(collections.UserDict):
        pass

    model = Net(lambda m, d: m.layer(d["x"]))
    m = plumb.capture(model, Batch(x=torch.randn(2, 4)))
    assert torch.equal(m(Batch(x=given.a)), model.layer(given.a))
    alone = plumb.capture(model, {"x": given.b})
    assert torch.equal(alone({"x": given.a}), model.layer(given.a))


def test_objects_that_hold_tensors_are_refused():
    class Box:
        def __init__(self, x):
            self.parts = [x]

    with pytest.raises(plumb.Error, match="Box that holds tensors"):
        plumb.capture(Fn(lambda b: b.parts[0] * 2), Box(torch.randn(2)))
    with pytest.raises(plumb.Error, match="returns a .*Box"):
        plumb.capture(Fn(lambda x: Box(x)), torch.randn(2))


def test_state_kept_in_an_attribute_goes_on():
    def step(m, x):
        m.h = (m.h * 0.5 + x.mean(0)).detach()
        m.last = m.layer(x)
        return m.last + m.h

    torch.manual_seed(0)
    model, twin = Net(step, h=torch.zeros(4)), Net(step, h=torch.zeros(4))
    twin.load_state_dict(model.state_dict())
    m = plumb.capture(model, torch.randn(3, 4))
    assert torch.equal(model.h, torch.zeros(4)) and not hasattr(model, "last")
    assert any("attribute 'h' is re-assigned" in n for n in m.notes)
    for _ in range(3):
        x = torch.randn(3, 4)
        assert torch.equal(m(x), twin(x))


def test_a_buffer_made_by_the_forward_is_not_left_behind():
    class Rotary(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("cos", None, persistent=False)

        def forward(self, x):
            if self.cos is None:
                self.cos = torch.arange(x.shape[0]).float().cos()
            return x * self.cos[:, None]

    model = Rotary()
    x = torch.randn(3, 2)
    m = plumb.capture(model, x)
    assert model.cos is None and torch.equal(m(x), model(x))


def test_values_of_buffers_are_read_while_they_stay():
    class Temperature(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("t", torch.tensor(2.0))

        def forward(self, x):
            return x / self.t.item()

    model = Temperature()
    m = plumb.capture(model, torch.ones(2))
    assert torch.equal(m(torch.ones(2)), torch.full((2,), 0.5))
    model.t.fill_(4)
    with pytest.raises(plumb.Error, match="a buffer whose value"):
        m(torch.ones(2))
    norm = nn.BatchNorm1d(4, momentum=None)
    with pytest.raises(plumb.Error, match="takes a value"):
        plumb.capture(norm, torch.randn(3, 4))

    class Queue(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("at", torch.tensor(0))

        def forward(self, x):
            y = x[int(self.at)]
            self.at += 1
            return y

    with pytest.raises(plumb.Error, match="'at' is taken into the program, and the forward writes"):
        plumb.capture(Queue(), torch.randn(3, 4))


def test_draws_of_other_libraries_are_told_and_undone():
    before = random.getstate(), np.random.get_state()[1].copy()
    with pytest.warns(UserWarning, match="NumPy's random generator"):
        m = plumb.capture(Fn(lambda x: x * float(np.random.rand()) + random.random()), torch.ones(2))
    assert random.getstate() == before[0] and (np.random.get_state()[1] == before[1]).all()
    assert any("Python's random generator" in n for n in m.notes)


def test_scripted_modules_are_seen_after_they_were_optimized():
    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            return torch.relu(self.layer(x)) * x

    scripted = torch.jit.script(Inner())
    x = torch.randn(3, 4, requires_grad=True)
    for _ in range(3):
        scripted(x).sum().backward()
    scripted.zero_grad()
    m = plumb.capture(nn.Sequential(scripted, nn.Linear(4, 2)), x)
    assert str(m.graph).count("aten::linear") == 2


def test_the_kernel_of_attention_that_a_context_chooses_is_kept():
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def attend(m, x):
        with sdpa_kernel(SDPBackend.MATH):
            return F.scaled_dot_product_attention(m.layer(x), x, x)

    check(Net(attend), torch.randn(2, 2, 5, 4))


def test_packed_sequences_of_known_lengths():
    from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

    class Packed(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = nn.GRU(4, 4, batch_first=True)

        def forward(self, x):
            return pad_packed_sequence(self.rnn(pack_padded_sequence(x, [3, 2], batch_first=True))[0])[0]

    check(Packed(), torch.randn(2, 3, 4))


def test_layers_without_shapes_yet_are_refused():
    model = nn.Sequential(nn.LazyLinear(3))
    with pytest.raises(plumb.Error, match=r"'0.weight' of LazyLinear has no shape yet"):
        plumb.capture(model, torch.randn(2, 4))
    with pytest.raises(plumb.Error, match="no shape yet"):
        plumb.transforms.unit_scale(model)(torch.randn(2, 4))
    model(torch.randn(2, 4))
    plumb.capture(model, torch.randn(2, 4))


def test_a_refusal_that_the_program_catches_is_still_one():
    def tries(x):
        try:
            return x * float(x[0, 0])
        except RuntimeError:
            return x * 2

    assert "aten::item" in refusal(tries)


def test_complex_numbers_show_in_graphs():
    m = plumb.capture(Fn(lambda x: torch.fft.irfft(torch.fft.rfft(x) * 1j, n=4)), torch.randn(2, 4))
    x = torch.randn(2, 4)
    assert torch.equal(m(x), torch.fft.irfft(torch.fft.rfft(x) * 1j, n=4))
    assert any(a == 1j for n in m.graph.nodes for a in n.args)


def test_modules_that_keep_results_are_transformed():
    kept = {}
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    prune.l1_unstructured(model[0], "weight", 0.5)
    model[1].kept = kept
    model[1].register_forward_hook(lambda m, i, o: m.kept.update(h=o))
    x = torch.randn(3, 4)
    expected = model(x)
    same([plumb.transforms.track_scales(model)(x)], [expected], "output")


def test_other_answers_of_tensors_get_a_graph_of_their_own():
    torch.manual_seed(0)
    model = Experts()
    x = torch.randn(4, 4)
    m = plumb.transforms.track_scales(model)
    for chosen in ([0, 0, 1, 0], [0, 1, 2, 0], [2, 2, 2, 2], [0, 0, 0, 1]):
        chosen = torch.tensor(chosen)
        assert torch.equal(m(x, chosen), model(x, chosen))

    def positive(m, x):
        if (x <= 0).any():
            raise ValueError("not positive")
        return m.layer(x)

    m = plumb.transforms.unit_scale(Net(positive))
    m(torch.ones(2, 4))
    with pytest.raises(ValueError, match="not positive"):
        m(torch.zeros(2, 4))
    m(torch.ones(2, 4))


def test_custom_functions_and_boolean_masks_pass_verification():
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, g):
            return g * 2

    check(Net(lambda m, x: Double.apply(m.layer(x))[x > 0]), torch.randn(3, 4))


def test_transforms_see_into_checkpoints():
    from torch.utils.checkpoint import checkpoint

    model = Net(lambda m, x: checkpoint(lambda y: torch.tanh(m.layer(y)), x * 1.0, use_reentrant=True))
    x = torch.randn(3, 4, requires_grad=True)
    scaled = plumb.transforms.unit_scale(model)
    scaled(x).sum().backward()
    assert "aten::linear -> plumb::linear" in str(plumb.report(scaled)) and scaled.layer.weight.grad is not None
    with torch.autocast("cpu", dtype=torch.bfloat16):
        m = plumb.capture(model, x)
        expected = model(x)
    assert torch.equal(m(x), expected)


def test_names_of_modules_need_not_be_names_of_python():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.ModuleDict({"b_c-0": nn.Linear(4, 4)})
            self.a_b = nn.ModuleDict({"c-0": nn.Linear(4, 4)})

        def forward(self, x):
            return self.a["b_c-0"](x) + self.a_b["c-0"](x)

    m = check(Named(), torch.randn(2, 4))
    x = torch.randn(2, 4)
    torch.testing.assert_close(torch.compile(m, backend="aot_eager", fullgraph=True)(x), m(x))


def test_what_torch_compile_asks_stays_the_same_function():
    """torch.compile finds it by identity, and may be loaded for the first time by a forward that is captured."""
    seen = []

    def forward(x):
        seen.append((torch.compiler.is_compiling, torch.compiler.is_compiling()))
        return x * 2

    before = torch.compiler.is_compiling
    plumb.capture(Fn(forward), torch.ones(2))
    assert all(function is before and said is False for function, said in seen) and seen
    assert torch.compiler.is_compiling is before


def test_a_custom_function_inside_torch_func_grad_is_refused():
    class Double(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(x):
            return x * 2

        @staticmethod
        def setup_context(ctx, inputs, output):
            pass

        @staticmethod
        def backward(ctx, grad):
            return grad * 2

    message = refusal(lambda x: torch.func.grad(lambda y: Double.apply(y).sum())(x * 1.0))
    assert "inside torch.func (vmap, grad)" in message


class Counts(nn.Module):
    def __init__(self, forward):
        super().__init__()
        self.calls = 0
        self.body = forward

    def forward(self, x):
        return self.body(self, x)


def refuse_counting(forward):
    module = Counts(forward)
    with pytest.raises(plumb.Error) as caught:
        plumb.capture(module, torch.ones(3))
    assert caught.value.kind is plumb.ErrorKind.DataDependent and "test_capture_questions.py" in caught.value.where
    assert module.calls == 0 and type(module) is Counts
    return caught.value.message


def test_a_path_chosen_by_a_counter_of_calls_is_refused():
    def every_second(self, x):
        self.calls += 1
        return x * 2 if self.calls % 2 else x * 3

    assert "takes another path in the next call" in refuse_counting(every_second)


def test_a_path_that_a_counter_may_choose_later_is_refused():
    def every_hundredth(self, x):
        self.calls += 1
        return x * 3 if self.calls % 100 == 0 else x * 2

    assert "reads the attribute 'calls', which it changes in every call" in refuse_counting(every_hundredth)


def test_what_happens_in_the_first_call_alone_is_refused():
    def first(self, x):
        if self.calls == 0:
            self.calls = 1
            return x * 2
        return x

    assert "takes another path in the next call" in refuse_counting(first)


def test_a_number_of_calls_that_enters_the_arithmetic_is_refused():
    def scaled(self, x):
        self.calls += 1
        return x * self.calls

    assert "takes another path in the next call" in refuse_counting(scaled)


def test_a_counter_that_nothing_reads_is_left_alone_and_noted():
    def counted(self, x):
        self.calls += 1
        return x * 2

    module = Counts(counted)
    graph = plumb.capture(module, torch.ones(3))
    assert torch.equal(graph(torch.ones(3)), torch.full((3,), 2.0))
    assert module.calls == 0 and type(module) is Counts
    assert any("'calls' changed from 0 to 1" in note for note in graph.notes)


def test_an_attribute_that_keeps_its_value_after_the_first_call_is_noted():
    def remembers(self, x):
        if self.calls != x.shape[0]:
            self.calls = x.shape[0]
        return x * 2

    graph = plumb.capture(Counts(remembers), torch.ones(3))
    assert torch.equal(graph(torch.ones(3)), torch.full((3,), 2.0))
