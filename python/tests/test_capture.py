"""The zoo in Python: capture, replay, gradients, buffers, bit for bit against eager."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
import zoo
from capture_checks import Fn, check, refusal
from plumb.pipelining import pipeline
from torch import nn

import plumb


@pytest.mark.parametrize("name", list(zoo.MODELS))
def test_zoo(name):
    torch.manual_seed(0)
    model, args, kwargs = zoo.MODELS[name]()
    check(model, *args, **kwargs)


@pytest.mark.parametrize("name", list(zoo.TRANSFORMERS))
def test_models_of_transformers(name):
    torch.manual_seed(0)
    model, args, kwargs = zoo.TRANSFORMERS[name]()
    check(model, *args, **kwargs)


def test_refuses_values_taken_out_of_tensors_naming_operator_and_line():
    def branch(x):
        return x if x.sum() > 0 else -x

    message = refusal(branch)
    assert "aten::is_nonzero" in message and "test_capture.py:" in message and "try:" in message
    assert "aten::item" in refusal(lambda x: x * x.sum().item())
    assert "numpy() or tolist()" in refusal(lambda x: x * x.tolist()[0][0])
    assert "numpy() or tolist()" in refusal(lambda x: x * float(x.detach().numpy()[0, 0]))


def test_names_the_module_of_a_refusal():
    class Inner(nn.Module):
        def forward(self, x):
            return x * float(x.max())

    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(Inner()))
    with pytest.raises(plumb.Error, match=r"1\.0"):
        plumb.capture(model, torch.randn(2, 4))


def test_keeps_tensor_literals_as_constants():
    m = plumb.capture(Fn(lambda x: x + torch.tensor([1.0, 2, 3, 4]) + x[[0, 2, 1, 3]]), torch.randn(4, 4), plumb_verify=True)
    x = torch.randn(4, 4)
    assert torch.equal(m(x), x + torch.tensor([1.0, 2, 3, 4]) + x[[0, 2, 1, 3]])
    assert "aten::empty" not in str(m.graph)


def test_lists_constants_made_outside():
    outside = torch.randn(4)
    m = plumb.capture(Fn(lambda x: x + outside), torch.randn(4, 4))
    assert any("_constant_0" in n for n in m.notes)


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        ctx.save_for_backward(x)
        return x**3 * scale

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * 100 * x, None


def test_a_custom_function_is_one_node_with_its_own_backward():
    m = plumb.capture(Fn(lambda x: Cube.apply(x, 2.0) + 1), torch.randn(3))
    assert "plumb::python_function" in str(m.graph)
    x = torch.full((3,), 2.0, requires_grad=True)
    m(x).sum().backward()
    assert torch.equal(x.grad, torch.full((3,), 200.0))


def test_reentrant_checkpoint_keeps_its_backward():
    from torch.utils.checkpoint import checkpoint

    class Net(nn.Module):
        def __init__(self, reentrant):
            super().__init__()
            self.a = nn.Linear(4, 4)
            self.reentrant = reentrant

        def forward(self, x):
            return checkpoint(lambda y: torch.tanh(self.a(y)), x, use_reentrant=self.reentrant)

    for reentrant in (True, False):
        model = Net(reentrant)
        m = plumb.capture(model, torch.randn(2, 4))
        x = torch.randn(2, 4, requires_grad=True)
        m(x).sum().backward()
        got, xg = model.a.weight.grad.clone(), x.grad.clone()
        model.zero_grad()
        x.grad = None
        model(x).sum().backward()
        assert torch.equal(got, model.a.weight.grad) and torch.equal(xg, x.grad)


def test_copies_stages_and_files_have_the_gradients_of_a_reentrant_checkpoint(tmp_path):
    from torch.utils.checkpoint import checkpoint

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 4)

        def forward(self, x):
            return checkpoint(lambda y: torch.tanh(self.b(y)), self.a(x).relu(), use_reentrant=True)

    model, x = Net(), torch.randn(2, 4)
    model(x).sum().backward()
    expected = {n: p.grad.clone() for n, p in model.named_parameters()}
    graph = plumb.capture(model, x)
    plumb.save_pt2(graph, tmp_path / "net.pt2")
    stages = plumb.pipelining.pipeline(model, (x,), split_policy="balanced", num_stages=2)
    for other in (copy.deepcopy(graph), plumb.load_pt2(tmp_path / "net.pt2"), stages):
        model.zero_grad()
        out = other(x)
        (out[0] if other is stages else out).sum().backward()
        grads = {n: p.grad for n, p in (model if other is stages else other).named_parameters()}
        assert all(torch.equal(grads[n], expected[n]) for n in expected)


def test_writes_a_reassigned_buffer():
    class EMA(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("h", torch.zeros(4))
            self.w = nn.Parameter(torch.ones(4))

        def forward(self, x):
            self.h = (self.h * 0.9 + x).detach()
            return self.h * self.w

    model, twin = EMA(), EMA()
    m = plumb.capture(model, torch.ones(4), plumb_verify=True)
    assert torch.equal(model.h, torch.zeros(4)) and any("'h' is re-assigned" in n for n in m.notes)
    for i in range(3):
        x = torch.randn(4)
        assert torch.equal(m(x), twin(x))
        assert torch.equal(model.h, twin.h)


def test_reports_and_restores_changed_attributes():
    class Count(nn.Module):
        def __init__(self):
            super().__init__()
            self.calls = 0

        def forward(self, x):
            self.calls += 1
            return x * 2

    model = Count()
    m = plumb.capture(model, torch.ones(2))
    assert model.calls == 0 and any("'calls' changed from 0 to 1" in n for n in m.notes)


class Recording(nn.Module):
    """It registers a hook in its first forward, and keeps what the hook sees, and a table."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.seen, self.handles, self.table, self.ready = [], [], {}, False

    def keep(self, module, inputs, output):
        self.seen.append(output)

    def forward(self, x):
        self.seen.clear()
        if not self.ready:
            self.handles.append(self.a.register_forward_hook(self.keep))
            self.ready = True
        if "bias" not in self.table:
            self.table["bias"] = self.b.bias * 2
        return self.b(self.a(x)) + self.table["bias"] + torch.stack(self.seen).sum(0)


@pytest.mark.parametrize("runs_first", [False, True])
def test_lists_dicts_and_hooks_are_as_before_a_capture(runs_first):
    torch.manual_seed(0)
    model, x = Recording(), torch.randn(3, 4)
    expected = copy.deepcopy(model)(x)
    if runs_first:
        model(x)
        model.table.clear()
    before = [len(model.a._forward_hooks), len(model.seen), len(model.handles), model.ready]
    graph = plumb.capture(model, x, plumb_verify=True)
    assert [len(model.a._forward_hooks), len(model.seen), len(model.handles), model.ready] == before and not model.table
    tracked = plumb.transforms.track_scales(model)
    for module in (graph, tracked, graph, tracked, model):
        assert torch.equal(module(x), expected)
    assert all(p.grad is None for p in model.parameters())
    graph(x).sum().backward()
    assert torch.equal(model.b.bias.grad, torch.full((4,), 9.0)), "through the table, too"


def test_a_list_that_chooses_the_path_of_the_next_call_is_refused():
    class Grows(nn.Module):
        def __init__(self):
            super().__init__()
            self.calls, self.seen = 0, []

        def forward(self, x):
            self.calls += 1
            self.seen.append(1)
            return x * 2 if len(self.seen) == 1 else x * 3

    model = Grows()
    with pytest.raises(plumb.Error, match="takes another path in the next call"):
        plumb.capture(model, torch.ones(2))
    assert model.calls == 0 and model.seen == []


def test_a_checkpointed_batch_norm_counts_a_batch_once():
    class Checkpointed(nn.Sequential):
        inside = True

        def forward(self, x):
            if not self.inside:
                return super().forward(x)
            return torch.utils.checkpoint.checkpoint(super().forward, x, use_reentrant=False)

    torch.manual_seed(0)
    model, x = Checkpointed(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)), torch.randn(8, 4)
    plain = copy.deepcopy(model)
    plain.inside = False
    graph = plumb.capture(copy.deepcopy(model), x)
    with pytest.raises(plumb.Error, match=r"differs from eager in '1\.running_mean' after the run"):
        plumb.capture(copy.deepcopy(model), x, plumb_verify=True)
    for m in (model, plain, graph):
        m(x).sum().backward()
    assert [int(b) for m in (model, plain, graph) for n, b in m.named_buffers() if "tracked" in n] == [2, 1, 1]
    for a, b in zip(graph.buffers(), plain.buffers(), strict=True):
        assert torch.equal(a, b)
    for a, b, c in zip(graph.parameters(), plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad) and torch.equal(a.grad, c.grad)


def test_scripted_modules_with_buffers_are_captured():
    torch.manual_seed(0)
    module = torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    x = torch.randn(8, 4)
    graph = plumb.capture(module, x)
    expected = copy.deepcopy(module)
    assert torch.equal(graph(x), expected(x))
    assert all(torch.equal(a, b) for a, b in zip(graph.buffers(), expected.buffers(), strict=True))


def test_sees_through_vmap():
    m = plumb.capture(Fn(lambda x: torch.func.vmap(lambda r, k: (r * k).sum() + 1)(x, x + 1)), torch.randn(4, 4), plumb_verify=True)
    x = torch.randn(4, 4)
    assert torch.equal(m(x), torch.func.vmap(lambda r, k: (r * k).sum() + 1)(x, x + 1))


class Wrapped(torch.Tensor):
    """A tensor subclass whose operators run in Python."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args, kwargs=None):
        unwrap = lambda z: z.inner if isinstance(z, Wrapped) else z  # noqa: E731
        out = func(*torch.utils._pytree.tree_map(unwrap, args), **(kwargs or {}))
        return torch.utils._pytree.tree_map(lambda z: Wrapped(z) if isinstance(z, torch.Tensor) else z, out)


def test_refuses_dispatch_subclasses():
    assert "__torch_dispatch__" in refusal(lambda x: (Wrapped(x) * 2).inner + x)


def test_refuses_bilinear_under_autocast_which_casts_in_its_own_kernel():
    w = torch.randn(3, 4, 4)

    def product(x):
        with torch.autocast("cpu", torch.bfloat16):
            return nn.functional.bilinear(x, x, w)

    assert "einsum" in refusal(product)

    def einsum(x):
        with torch.autocast("cpu", torch.bfloat16):
            return torch.einsum("bi,oij,bj->bo", x, w, x)

    model, x = nn.Module(), torch.randn(4, 4)
    model.forward = einsum
    assert torch.equal(plumb.capture(model, x)(x), einsum(x))


@pytest.mark.parametrize("make", [torch.empty, torch.zeros])
def test_refuses_raw_memory(make):
    def raw(x):
        e = make(4, 4)
        e.numpy().fill(3.0)
        return e * x

    assert "outside of torch's sight" in refusal(raw)


def test_verify_finds_what_leaves_torch_unseen():
    from torch.utils import dlpack

    assert "verify" in refusal(lambda x: x * dlpack.from_dlpack(x.detach() * 2), verify=True)
    assert "storage" in refusal(lambda x: x * float(x.detach().untyped_storage()[0]), verify=True)


def test_refuses_other_shapes_dtypes_and_structure():
    m = plumb.capture(nn.Linear(4, 3), torch.randn(2, 4))
    with pytest.raises(plumb.Error, match=r"should be f32\[2, 4\].*, got f32\[3, 4\]"):
        m(torch.randn(3, 4))
    with pytest.raises(plumb.Error, match=r"takes 1 positional input \('input'\), got 2"):
        m(torch.randn(2, 4), torch.randn(2, 4))


def test_copies_pickles_and_saves(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU())
    m = plumb.capture(model, torch.randn(5, 4))
    x = torch.randn(5, 4)
    twin = copy.deepcopy(m)
    again = pickle.loads(pickle.dumps(m))
    torch.save(m, tmp_path / "m.pt")
    loaded = torch.load(tmp_path / "m.pt", weights_only=False)
    expected = model(x)
    for other in (twin, again, loaded):
        assert torch.equal(other(x), expected)
        assert not any(a is b for a, b in zip(other.parameters(), model.parameters()))
        assert dict(other.named_parameters()).keys() == dict(model.named_parameters()).keys()
    twin.load_state_dict({k: v * 0 for k, v in m.state_dict().items()}, assign=True)
    assert torch.equal(twin(x), torch.zeros(5, 4))


def test_a_graph_goes_on_after_a_shallow_copy():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.randn(5, 4)
    m = plumb.capture(model, x)
    shallow = copy.copy(m)
    assert all(a is b for a, b in zip(shallow.parameters(), m.parameters()))
    m.load_state_dict({k: v * 2 for k, v in m.state_dict().items()}, assign=True)
    assert torch.equal(shallow(x), model(x))
    assert torch.equal(m(x), 2 * model(x))


def test_hooks_on_the_modules_of_a_graph_which_calls_none_are_refused():
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU())), torch.randn(2, 4)
    graph, stage = plumb.capture(model, x), pipeline(model, (x,)).get_stage_module(0)
    for whole in (graph, copy.deepcopy(graph), stage):
        for kind in ("forward", "forward_pre", "full_backward", "full_backward_pre"):
            with pytest.raises(plumb.Error, match=r"a hook on module '1\.0' of a graph would never be called"):
                getattr(whole.get_submodule("1.0"), f"register_{kind}_hook")(lambda *_: None)
        seen = []
        whole.register_forward_hook(lambda *_, seen=seen: seen.append(1))
        assert torch.equal(whole(x), model(x)) and seen
        assert plumb.transforms.unit_scale(whole)(x).shape == (2, 4)  # which hooks parts itself


def test_compiles_and_exports():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2))
    x = torch.randn(3, 4)
    m = plumb.capture(model, x)
    exported = torch.export.export(m, (x,))
    torch.testing.assert_close(exported.module()(x), model(x))
    assert set(exported.state_dict) == set(model.state_dict()) == set(m.state_dict())
    compiled = torch.compile(m, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), model(x))
    assert set(m.state_dict()) == set(model.state_dict())


def test_keeps_hooks_and_modes():
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    seen = []
    model[0].register_forward_hook(lambda *_: seen.append(1))
    model.eval()
    plumb.capture(model, torch.randn(2, 4))
    assert not model.training and len(model[0]._forward_hooks) == 1 and seen == [1]


def test_seven_billion_parameters_on_meta(capfd):
    import resource
    import time

    model = zoo.llama_on_meta()
    assert sum(p.numel() for p in model.parameters()) > 6.5e9
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.time()
    m = plumb.capture(model, torch.zeros(1, 128, dtype=torch.long, device="meta"))
    seconds = time.time() - start
    print(f"{len(m.graph)} nodes in {seconds:.1f} s")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2 * 1024 * 1024  # KiB


def test_functional_dropout_masks_follow_the_seed():
    m = plumb.capture(Fn(lambda x: F.dropout(x, 0.5)), torch.ones(100))
    torch.manual_seed(3)
    a = m(torch.ones(100))
    torch.manual_seed(3)
    assert torch.equal(a, F.dropout(torch.ones(100), 0.5))


class Halved(nn.Linear):
    def forward(self, x):
        return super().forward(x) / 2.5


def test_a_graph_first_run_in_inference_mode_trains_later():
    module, x = Halved(4, 4), torch.randn(2, 4)
    graph = plumb.capture(module, x)
    with torch.inference_mode():
        assert torch.equal(graph(x), module(x))
    graph(x).sum().backward()
    found, module.weight.grad = module.weight.grad, None
    module(x).sum().backward()
    assert torch.equal(found, module.weight.grad)
