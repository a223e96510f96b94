"""`.pt2` files from Python: the zoo out of plumb into torch.export, and out of torch.export into plumb, bit for bit."""

import copy
import pickle

import device
import pytest
import torch
import transformers
import zoo
from torch import nn
from torch.export import Dim
from torch.utils import _pytree as pytree

import plumb

NEAREST = "e4m3fn-RN"

NOT_EXPORTED = zoo.NOT_EXPORTED if transformers.__version__.startswith("4.") else {}  # 5 makes the mask without vmap
# Whose exported program has other last bits than eager when torch itself runs it.
UNLIKE_EAGER = {"transformers Llama"}


def everything(module, args, kwargs):
    """Outputs, gradients of inputs and parameters, buffers: by name, each bit."""
    args = [a.clone().requires_grad_() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args]
    seen = {}
    torch.manual_seed(7)
    leaves = pytree.tree_leaves(module(*args, **kwargs))
    torch.manual_seed(8)
    loss = 0.0
    for i, y in enumerate(leaves):
        seen[f"output {i}"] = y.detach().clone() if isinstance(y, torch.Tensor) else y
        if isinstance(y, torch.Tensor) and y.requires_grad:
            loss = loss + (y * torch.randn_like(y)).sum()
    loss.backward()
    for i, a in enumerate(args):
        seen[f"gradient of input {i}"] = a.grad if isinstance(a, torch.Tensor) else None
    for name, p in module.named_parameters():  # a tied one under its first name, which torch's own modules untie
        seen[f"gradient of {name}"] = p.grad
    for name, b in module.named_buffers():
        seen[f"buffer {name}"] = b.clone()
    return seen


def same(got, want):
    # A shared module has its tensors under more names in eager than in a file.
    assert set(got) <= set(want) or set(want) <= set(got)
    assert sum(k.startswith("output") for k in got) == sum(k.startswith("output") for k in want)
    for what in set(got) & set(want):
        a, b = got[what], want[what]
        if isinstance(b, torch.Tensor) and isinstance(a, torch.Tensor):
            assert a.dtype == b.dtype and torch.equal(a, b), f"{what} differs by {(a.double() - b.double()).abs().max()}"
        else:
            assert type(a) is type(b) and a == b, what


MODELS = {**zoo.MODELS, **{f"transformers {name}": make for name, make in zoo.TRANSFORMERS.items()}}
models = pytest.mark.parametrize("name", list(MODELS))


@models
def test_captured_and_saved_runs_in_torch(name, tmp_path):
    torch.manual_seed(0)
    model, args, kwargs = MODELS[name]()
    captured = plumb.capture(model, *args, **kwargs)
    plumb.save_pt2(captured, tmp_path / "model.pt2")
    program = torch.export.load(tmp_path / "model.pt2")
    assert list(program.state_dict) == list(model.state_dict())
    want = everything(copy.deepcopy(model), args, kwargs)
    same(everything(program.module(), args, kwargs), want)
    same(everything(plumb.load_pt2(tmp_path / "model.pt2"), args, kwargs), want)


@models
def test_exported_by_torch_runs_in_plumb(name, tmp_path):
    torch.manual_seed(0)
    model, args, kwargs = MODELS[name]()
    if name in NOT_EXPORTED:
        with pytest.raises(Exception, match="flat_apply"):
            torch.export.save(torch.export.export(model, args, kwargs), tmp_path / "model.pt2")
        return
    torch.export.save(torch.export.export(copy.deepcopy(model), args, kwargs), tmp_path / "model.pt2")
    loaded = plumb.load_pt2(tmp_path / "model.pt2")
    program = torch.export.load(tmp_path / "model.pt2")
    assert set(loaded.state_dict()) == set(program.state_dict)
    wanted = program.module() if name in UNLIKE_EAGER else model
    same(everything(loaded, args, kwargs), everything(wanted, args, kwargs))


class Values(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 3)

    def forward(self, x, count: int, *, scale=2.0, mask=None, name="a"):
        y = self.fc(x) * scale * count
        return {"y": y if mask is None else y * mask, "count": count, "none": None}


def exported(tmp_path, model, args, kwargs=None, **options):
    torch.export.save(torch.export.export(model, args, kwargs, **options), tmp_path / "model.pt2")
    return tmp_path / "model.pt2"


def test_numbers_text_and_none_are_checked_against_the_file(tmp_path):
    x = torch.randn(2, 3)
    model = Values()
    given = {"scale": 3.0, "mask": torch.ones(2, 3), "name": "b"}
    loaded = plumb.load_pt2(exported(tmp_path, model, (x, 4), given))
    want = model(x, 4, **given)
    got = loaded(x, 4, name="b", mask=given["mask"], scale=3.0)  # keywords in any order
    assert torch.equal(got["y"], want["y"]) and got["count"] == 4 and got["none"] is None
    with pytest.raises(plumb.Error, match="count"):
        loaded(x, 5, **given)
    with pytest.raises(plumb.Error, match="name"):
        loaded(x, 4, **{**given, "name": "c"})
    with pytest.raises(plumb.Error, match="takes 2 positional inputs .*'x', 'count'.*, got 1"):
        loaded(x)


def test_what_a_capture_fixed_is_fixed_in_its_file(tmp_path):
    x = torch.randn(2, 3)
    model = Values()
    plumb.save_pt2(plumb.capture(model, x, 4, name="b"), tmp_path / "m.pt2")
    again = torch.export.load(tmp_path / "m.pt2").module()
    got = again(x, 4, name="b")
    assert torch.equal(got["y"], model(x, 4)["y"]) and got["count"] == 4 and got["none"] is None
    with pytest.raises(plumb.Error, match="'count' is fixed to 4"):
        plumb.load_pt2(tmp_path / "m.pt2")(x, 5, name="b")


def test_dynamic_sizes_stay_dynamic_through_copies_and_files(tmp_path):
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU())
    path = exported(tmp_path, model, (torch.randn(4, 3),), dynamic_shapes=({0: Dim("batch", min=2, max=16)},))
    loaded = plumb.load_pt2(path)
    plumb.save_pt2(copy.deepcopy(loaded), tmp_path / "again.pt2")
    for module in (loaded, copy.deepcopy(loaded), pickle.loads(pickle.dumps(loaded)), plumb.load_pt2(tmp_path / "again.pt2"),
                   torch.export.load(tmp_path / "again.pt2").module()):  # fmt: skip
        x = torch.randn(7, 3)
        assert torch.equal(module(x), model(x))
    with pytest.raises(plumb.Error, match="16"):
        loaded(torch.randn(17, 3))
    with pytest.raises(Exception, match="16"):
        torch.export.load(tmp_path / "again.pt2").module()(torch.randn(17, 3))


def test_results_that_are_named_as_pythons_builtins_are_loaded_by_torch(tmp_path):
    class Largest(nn.Module):
        def forward(self, max):
            first, second = max.max(-1), (max * 2).max(-1)
            return first.values + second.values + abs(max).sum(-1) + max.sum(-1), second.indices, max.min()

    x = torch.randn(3, 4)
    plumb.save_pt2(plumb.capture(Largest(), x), tmp_path / "m.pt2")
    for again in (torch.export.load(tmp_path / "m.pt2").module(), plumb.load_pt2(tmp_path / "m.pt2")):
        for a, b in zip(again(x), Largest()(x)):
            assert torch.equal(a, b)


@pytest.mark.skipif(torch.__version__ < (2, 12), reason="torch 2.11 cannot write such a program")
def test_a_program_with_torch_func_says_how_to_save_it(tmp_path):
    class Rows(nn.Module):
        def forward(self, x):
            return torch.func.vmap(lambda row: row.sin().sum())(x)

    x = torch.randn(3, 4)
    program = torch.export.export(Rows(), (x,))
    torch.export.save(program, tmp_path / "m.pt2")
    with pytest.raises(plumb.Error, match="(?s)holds torch.func.*run_decompositions"):
        plumb.load_pt2(tmp_path / "m.pt2")
    torch.export.save(program.run_decompositions({}), tmp_path / "m.pt2")
    assert torch.equal(plumb.load_pt2(tmp_path / "m.pt2")(x), Rows()(x))


def test_a_batch_norm_that_run_decompositions_made_functional_trains_as_the_model(tmp_path):
    class Twice(nn.Module):  # one norm twice: its first result is the second one's statistics
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(6)

        def forward(self, x):
            return self.norm(self.norm(x).relu())

    x = torch.randn(5, 3, 8, 8)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 6), nn.BatchNorm1d(6, affine=False))
    path = tmp_path / "net.pt2"
    torch.export.save(torch.export.export(net, (x,)).run_decompositions(), path)
    loaded = plumb.load_pt2(path)
    assert "functional" not in str(loaded.graph)
    for _ in range(2):
        for module in (loaded, net):
            module.zero_grad()
            module(x).pow(2).sum().backward()
        for name, tensor in net.state_dict(keep_vars=True).items():
            mine = loaded.state_dict(keep_vars=True)[name]
            assert torch.equal(mine, tensor)
            assert tensor.grad is None or torch.equal(mine.grad, tensor.grad)
    plumb.save_pt2(loaded, path)
    again = torch.export.load(path).module()
    assert torch.equal(again(x), net(x))
    assert torch.equal(again.get_buffer("1.running_var"), net[1].running_var)

    twice, y = Twice(), torch.randn(5, 6)
    torch.export.save(torch.export.export(twice, (y,)).run_decompositions(), path)
    assert torch.equal(plumb.load_pt2(path)(y), twice(y))


@pytest.mark.parametrize("strict", [False, True])
def test_a_model_that_counts_its_steps_is_cut(strict, tmp_path):
    """torch.export ends self.steps += 1 with a copy of the buffer onto itself, which no cut may be before."""
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
            self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

        def forward(self, x):
            self.steps += 1
            return self.down(self.up(x / self.steps).tanh())

    net, x, path = Counts(), torch.randn(4, 8), tmp_path / "net.pt2"
    torch.export.save(torch.export.export(net, (x,), strict=strict), path)
    net.steps.zero_()
    loaded = plumb.load_pt2(path)
    pipe = plumb.pipelining.pipeline(loaded, (x,), split_policy=plumb.pipelining.Balanced(2, measure=False))
    assert pipe.num_stages == 2
    plumb.save_pt2(loaded, tmp_path / "again.pt2")
    again = torch.export.load(tmp_path / "again.pt2").module()
    for _ in range(3):
        want = net(x)
        for module in (loaded, again):
            assert torch.equal(module(x), want) and torch.equal(module.steps, net.steps)


def test_an_assignment_that_run_decompositions_made_functional_trains_as_the_model(tmp_path):
    class Shifts(nn.Module):
        def __init__(self):
            super().__init__()
            self.l = nn.Linear(8, 8)

        def forward(self, x):
            h = self.l(x)
            out = torch.zeros_like(h)
            out[:, 1:] = h[:, :-1]
            out[0] = h.sum(0)
            return out.tanh()

    net, x, path = Shifts(), torch.randn(4, 8), tmp_path / "net.pt2"
    rows = ({0: torch.export.Dim("n", min=2, max=9)},)
    for shapes in (None, rows):
        torch.export.save(torch.export.export(net, (x,), dynamic_shapes=shapes).run_decompositions(), path)
        loaded = plumb.load_pt2(path)
        plumb.save_pt2(loaded, tmp_path / "again.pt2")
        changed = plumb.load_pt2(path)
        plumb.transforms.run_passes(changed, "functionalise", "fuse_patterns", "dead_code")
        for mine in (loaded, plumb.load_pt2(tmp_path / "again.pt2"), changed):
            for module in (mine, net):
                module.zero_grad()
                module(x).pow(2).sum().backward()
            assert torch.equal(mine(x), net(x))
            for name, parameter in net.named_parameters():
                torch.testing.assert_close(mine.get_parameter(name).grad, parameter.grad, rtol=1e-6, atol=1e-6)
    assert torch.equal(loaded(x[:3]), net(x[:3]))


def test_a_recurrent_layers_value_of_no_known_type_has_none_after_saving_either(tmp_path):
    """simulate_format takes a recurrent layer apart; nobody says what types the parts have."""
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm, self.head = nn.LSTM(5, 4, batch_first=True), nn.Linear(4, 4)

        def forward(self, x):
            return self.head(self.lstm(x)[0])

    x, path = torch.randn(3, 5, 5), tmp_path / "net.pt2"
    graph = plumb.capture(Net(), x)
    plumb.transforms.run_passes(graph, "simulate_format,fwd=e4m3fn-RN,bwd=e5m2-RN")
    plumb.save_pt2(graph, path)
    loaded = plumb.load_pt2(path)
    metas = [{v.name: v.meta for n in g.graph.nodes for v in n.results if v.is_tensor} for g in (graph, loaded)]
    unknown = {name for name, meta in metas[0].items() if meta is None}
    assert unknown and all(metas[1][name] is None or metas[1][name]["shape"] for name in unknown)
    assert torch.equal(loaded(x), graph(x)) and torch.equal(torch.export.load(path).module()(x), graph(x))
    pipe = plumb.pipelining.pipeline(loaded, (x,), split_policy=plumb.pipelining.Balanced(2, measure=False))
    assert pipe.num_stages == 2 and torch.equal(pipe(x)[0], graph(x))


def test_trains_a_loaded_file_and_saves_it(tmp_path):
    torch.manual_seed(0)
    model = zoo.GPT(tied=True)
    ids, targets = zoo.ids(2, 8), zoo.ids(2, 8)
    loaded = plumb.load_pt2(exported(tmp_path, model, (ids, targets)))
    for module in (model, loaded):
        optimizer = torch.optim.AdamW(module.parameters(), 1e-2)
        for _ in range(3):
            optimizer.zero_grad()
            module(ids, targets)[1].backward()
            optimizer.step()
    plumb.save_pt2(loaded, tmp_path / "trained.pt2")
    trained = torch.export.load(tmp_path / "trained.pt2").state_dict
    assert list(trained) == list(model.state_dict())
    for name, tensor in model.state_dict().items():
        assert torch.equal(trained[name], tensor), name


def test_saves_the_tensors_that_the_module_has_now(tmp_path):
    captured = plumb.capture(nn.Linear(3, 2), torch.randn(1, 3))
    captured.load_state_dict({"weight": torch.ones(2, 3), "bias": torch.zeros(2)}, assign=True)
    plumb.save_pt2(captured, tmp_path / "m.pt2")
    assert torch.equal(plumb.load_pt2(tmp_path / "m.pt2")(torch.ones(1, 3)), torch.full((1, 2), 3.0))


def test_a_unit_scaled_model_in_fp8_goes_through_a_file(tmp_path):
    x = torch.randn(4, 8)
    torch.manual_seed(0)
    scaled = plumb.transforms.simulate_format(plumb.transforms.unit_scale(nn.Sequential(nn.Linear(8, 8), nn.GELU())), NEAREST, NEAREST)
    plumb.save_pt2(plumb.capture(scaled, x), tmp_path / "m.pt2")
    assert torch.equal(plumb.load_pt2(tmp_path / "m.pt2")(x), scaled(x))
    assert torch.equal(torch.export.load(tmp_path / "m.pt2").module()(x), scaled(x))


def test_transforms_and_compiles_what_was_loaded(tmp_path):
    x = torch.randn(4, 8)
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU())
    loaded = plumb.load_pt2(exported(tmp_path, model, (x,)))
    simulated = [plumb.transforms.simulate_format(m, NEAREST, NEAREST) for m in (loaded, model)]
    assert torch.equal(simulated[0](x), simulated[1](x)) and not torch.equal(simulated[0](x), model(x))
    assert torch.equal(torch.export.export(loaded, (x,)).module()(x), model(x))


def test_wrong_files_and_modules_say_what_to_do(tmp_path):
    (tmp_path / "cut.pt2").write_bytes(exported(tmp_path, nn.Linear(2, 2), (torch.randn(1, 2),)).read_bytes()[:900])
    torch.save({}, tmp_path / "other.pt2")
    for path, says in ((tmp_path / "missing.pt2", "missing.pt2"), (tmp_path, "regular file"), (tmp_path / "cut.pt2", "cut.pt2"),
                       (tmp_path / "other.pt2", "torch.export.save")):  # fmt: skip
        with pytest.raises(plumb.Error, match=says):
            plumb.load_pt2(path)
    with pytest.raises(TypeError, match="plumb.capture"):
        plumb.save_pt2(nn.Linear(2, 2), tmp_path / "m.pt2")
    with pytest.raises(TypeError):
        plumb.load_pt2(3)
    captured = plumb.capture(nn.Linear(2, 2), torch.randn(1, 2))
    with pytest.raises(plumb.Error, match="no/such"):
        plumb.save_pt2(captured, tmp_path / "no/such/m.pt2")
    with pytest.raises(RuntimeError):
        plumb.load_pt2(tmp_path / "model.pt2", device="nonsense")

    class OfDtype(nn.Module):
        def forward(self, x, dtype):
            return x.to(dtype)

    class Text(nn.Module):
        def forward(self, x):
            return x * 2, "text"

    with pytest.raises(plumb.Error, match="string"):  # torch writes such a file and cannot read it
        plumb.save_pt2(plumb.capture(Text(), torch.randn(2)), tmp_path / "m.pt2")
    with pytest.raises(plumb.Error, match="input 1 is a dtype"):
        plumb.save_pt2(plumb.capture(OfDtype(), torch.randn(2), torch.float64), tmp_path / "m.pt2")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["cut.pt2", "model.pt2", "other.pt2"]


@pytest.mark.parametrize("strict", [False, True], ids=["traced", "through Dynamo"])
@pytest.mark.parametrize("transform", [plumb.transforms.unit_scale, plumb.transforms.track_scales])
def test_torch_export_takes_a_transformed_module(transform, strict, tmp_path):
    torch.manual_seed(0)
    x = torch.randn(4, 8)
    module = transform(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)))
    if not strict:
        with pytest.raises(plumb.Error, match="call the module once"):
            torch.export.export(module, (x,), strict=False)
    expected = module(x)
    program = torch.export.export(module, (x,), strict=strict)
    assert torch.equal(program.module()(x), expected)
    torch.export.save(program, tmp_path / "m.pt2")
    assert torch.equal(plumb.load_pt2(tmp_path / "m.pt2")(x), expected)


@pytest.mark.skipif(device.NAME != "cpu", reason="autograd makes a device's gradients in another thread: capture refuses that")
def test_a_file_holds_a_gradient_computed_in_the_forward(tmp_path):
    class Gradient(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(2, 3, 8))

        def forward(self, x):
            x = x.detach().requires_grad_()
            y = torch.stack(x.unbind(1)).squeeze().view(4, 2, 2, 4).movedim(0, 1).reshape(2, -1)
            energy = (y.pow(2).sum() + (x @ self.weight.mT).pow(2).sum()) / 2
            return torch.autograd.grad(energy, x, create_graph=True)[0]

    model, x = Gradient(), torch.randn(2, 4, 8)
    graph = plumb.capture(model, x)
    plumb.save_pt2(graph, str(tmp_path / "model.pt2"))
    loaded = plumb.load_pt2(str(tmp_path / "model.pt2"))
    y, z = loaded(x), model(x)
    assert torch.equal(y, z)
    y.pow(2).sum().backward()
    z.pow(2).sum().backward()
    assert torch.equal(loaded.weight.grad, model.weight.grad)


def test_parameters_without_elements_stay_two(tmp_path):
    class Empty(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Parameter(torch.empty(0, 4)), nn.Parameter(torch.empty(0, 4))

        def forward(self, x):
            return torch.cat([x, self.first, self.second])

    torch.export.save(torch.export.export(Empty(), (torch.randn(3, 4),)), str(tmp_path / "empty.pt2"))
    loaded = plumb.load_pt2(str(tmp_path / "empty.pt2"))
    assert [name for name, _ in loaded.named_parameters()] == ["first", "second"]


def test_a_file_with_several_programs_gives_the_named_one(tmp_path):
    from torch.export.pt2_archive._package import package_pt2

    x, nets = torch.randn(2, 4), {"first": nn.Linear(4, 3), "second": nn.Linear(4, 5)}
    path = tmp_path / "several.pt2"
    package_pt2(path, exported_programs={name: torch.export.export(net, (x,)) for name, net in nets.items()})
    with pytest.raises(plumb.Error, match="has no program 'model'\n  try: it has first, second: name one .load_pt2's argument model"):
        plumb.load_pt2(path)
    for name, net in nets.items():
        assert torch.equal(plumb.load_pt2(path, model=name)(x), net(x))
