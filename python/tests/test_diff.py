"""plumb.diff: histories, state dicts, modules and files."""

import copy
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn
from transform_models import mlp

import plumb
from plumb.transforms import track_scales, unit_scale

RULES = '[[rule]]\nevery = 1\nstatistics = ["hash", "std"]\n'


def record(folder, name, spoil=None):
    """Three steps of two microbatches; `spoil` is called with the model before the third."""
    (folder / "rules.toml").write_text(RULES)
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(1)
    with plumb.Recorder(model, folder / "rules.toml", folder / name) as recorder:
        for step in range(3):
            if spoil and step == 2:
                spoil(model, optimizer)
            optimizer.zero_grad()
            for _ in range(2):
                model(torch.randn(6, 8, generator=generator)).square().mean().backward()
            optimizer.step()
            recorder.hash_state(optimizer)
            recorder.step()
    return str(folder / name)


def test_equal_runs_are_equal(tmp_path):
    found = plumb.diff(record(tmp_path, "a"), record(tmp_path, "b"))
    assert found.equal and found.first == {} and found.compared > 50, found
    assert "every bit should be equal" in found.statement


def test_a_flipped_weight_is_named_with_its_step(tmp_path):
    def flip(model, optimizer):
        model[2].weight.data.view(torch.int32)[1, 3] ^= 1 << 12

    found = plumb.diff(record(tmp_path, "a"), record(tmp_path, "b", flip))
    assert (found.first["tensor"], found.first["kind"], found.first["step"]) == ("2.weight", "value", 3), found
    assert found.following == found.differing - 1
    found.page(str(tmp_path / "diff.html"))
    assert "The first difference" in (tmp_path / "diff.html").read_text()


def test_a_flipped_state_of_the_optimizer_shows_after_the_step(tmp_path):
    def flip(model, optimizer):
        optimizer.state[model[0].weight]["exp_avg"].view(torch.int32)[0, 0] ^= 1 << 22

    found = plumb.diff(record(tmp_path, "a"), record(tmp_path, "b", flip))
    assert found.first["tensor"] == "0.weight" and found.first["kind"] == "after_step", found


def test_state_dicts_and_modules_are_compared(tmp_path):
    a, x = mlp(), torch.randn(6, 8)
    b = copy.deepcopy(a)
    assert plumb.diff(a.state_dict(), b.state_dict()).equal and plumb.diff(a, b, x).equal
    with torch.no_grad():
        b[0].bias[3] = torch.nextafter(b[0].bias[3], torch.tensor(9.0))
    by_name, by_graph = plumb.diff(a.state_dict(), b.state_dict()), plumb.diff(a, b, (x,))
    for found in (by_name, by_graph):
        assert (found.first["tensor"], found.first["ulps"], found.first["differing_elements"]) == ("0.bias", 1, 1), found
    assert by_graph.first["relative"] > 0 and all(p.grad is None for p in a.parameters())
    plumb.save_pt2(plumb.capture(a, x), tmp_path / "a.pt2")
    assert plumb.diff(str(tmp_path / "a.pt2"), a, x).equal


def test_checkpoints_are_compared_with_each_other_and_with_state_dicts(tmp_path):
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters())
    for step in (1, 2):
        model(torch.randn(6, 8)).sum().backward()
        optimizer.step()
        plumb.checkpoint.save(tmp_path / "run", model, optimizer, step=step)
    run = tmp_path / "run"
    assert plumb.diff(run, str(run / "step-00000002")).equal
    found = plumb.diff(run / "step-00000001", run)
    assert found.first["tensor"] == "0.bias" and "exp_avg/0.bias" in str(found), found
    found = plumb.diff(model.state_dict(), run)
    assert found.differing == 0 and "exp_avg/0.bias" in found.only_b, found
    with pytest.raises(plumb.Error, match="holds no checkpoint"):
        plumb.diff(tmp_path, run)


def test_a_gradient_that_differs_alone_is_found():
    a, x = mlp(), torch.randn(6, 8)
    found = plumb.diff(a, plumb.transforms.simulate_format(a, "none", "e5m2"), x)
    assert found.first["kind"] == "gradient", found


def test_what_cannot_be_compared_is_refused(tmp_path):
    with pytest.raises(plumb.Error, match="compared with a module"):
        plumb.diff(mlp(), str(tmp_path / "a.history"))
    with pytest.raises(plumb.Error, match="compared on inputs"):
        plumb.diff(mlp(), mlp())


def test_state_dicts_are_compared_in_all_they_have():
    def state(lr, grad):
        model = mlp()
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
        model(torch.full((2, 8), grad)).sum().backward()
        optimizer.step()
        return optimizer.state_dict()

    assert plumb.diff(state(0.1, 1.0), state(0.1, 1.0)).equal
    assert plumb.diff(state(0.1, 1.0), state(0.1, 2.0)).first["tensor"] == "state.0.exp_avg"
    assert plumb.diff(state(0.1, 1.0), state(0.2, 1.0)).first["tensor"] == "param_groups.0.lr"
    with pytest.raises(plumb.Error, match="'x' is a object"):
        plumb.diff({"x": object()}, {"x": object()})


def test_what_only_one_of_two_state_dicts_has_makes_them_unequal():
    a, b = {"a": torch.ones(1), "b": torch.ones(1)}, {"a": torch.ones(1)}
    assert not plumb.diff(a, b).equal and "1 are only in a" in plumb.diff(a, b).conclusion
    assert not plumb.diff(a, {}).equal and plumb.diff({}, {}).conclusion.startswith("Nothing was compared")


@pytest.mark.parametrize(
    "a, b",
    [
        (torch.tensor([2**60]), torch.tensor([2**60 + 1])),
        (torch.tensor([1 + 2j]), torch.tensor([1 + 3j])),
        (torch.ones(0, 3), torch.ones(3, 0)),
        (torch.ones(0), torch.ones(3)),
        (torch.ones(2), torch.ones(2).double()),
        (torch.eye(3).to_sparse(), 2 * torch.eye(3).to_sparse()),
        (torch.tensor([1.0, 2.0]).to(torch.float8_e4m3fn), torch.tensor([1.0, 2.5]).to(torch.float8_e4m3fn)),
    ],
)
def test_a_difference_of_any_dtype_or_size_is_one(a, b):
    assert not plumb.diff({"x": a}, {"x": b}).equal
    assert plumb.diff({"x": a}, {"x": a}).equal


def test_equal_bits_are_equal_and_units_of_the_last_place_are_exact():
    nan = torch.tensor([1.0, float("nan")])
    for x in (nan, nan.to(torch.float8_e4m3fn), nan.to(torch.complex64)):
        assert plumb.diff({"x": x}, {"x": x.clone()}).equal
    one = torch.tensor([1.0], dtype=torch.float64)
    assert plumb.diff({"x": one}, {"x": torch.nextafter(one, 2 * one)}).first["ulps"] == 1
    with pytest.raises(plumb.Error, match="x: a meta tensor has no values"):
        plumb.diff({"x": one.to("meta")}, {"x": one})
    with pytest.raises(plumb.Error, match="x: a nested tensor"):
        plumb.diff({"x": torch.nested.nested_tensor([one])}, {"x": one})


def test_infinities_that_both_have_count_in_no_distance():
    scores = torch.tensor([1.0, 2.0, 4.0, float("-inf"), float("nan")])
    other = scores.clone()
    other[1] += 2**-10
    found = plumb.diff({"x": scores}, {"x": other})
    assert found.first["relative"] == pytest.approx(2**-10 / 21**0.5, rel=1e-12)
    assert not plumb.diff({"x": scores}, {"x": other.nan_to_num()}).equal
    tiny = torch.tensor([3e-200, 4e-200], dtype=torch.float64)
    assert plumb.diff({"x": tiny}, {"x": tiny * 1.5}).first["relative"] == pytest.approx(0.5)
    model = Masked()
    near = copy.deepcopy(model)
    near.fc.weight.data[0, 0] += 1e-5
    x = torch.randn(3, 4)
    assert not plumb.diff(model, near, x).equal and plumb.diff(model, near, x, tolerance=0.01).equal


def test_modules_keep_buffers_and_draw_the_same_numbers():
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))
    before, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    x = torch.randn(4, 8, generator=torch.Generator())
    assert plumb.diff(model, model, x).equal and plumb.diff(model, copy.deepcopy(model), x).equal
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)


def test_modules_keep_the_weights_that_their_forwards_write():
    model, ids = nn.Sequential(nn.Embedding(8, 4, max_norm=0.5), nn.Linear(4, 4)), torch.arange(8)
    before = copy.deepcopy(model.state_dict())
    assert plumb.diff(model, model, ids).equal
    assert torch.equal(model[0].weight, before["0.weight"])


class Cache(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x, cache):
        cache[0].copy_(self.fc(x)[0].detach())
        return self.fc(x) + cache


def test_what_a_module_writes_into_an_input_is_not_seen_by_the_other(tmp_path):
    torch.manual_seed(0)
    model, x, cache = Cache(), torch.randn(4, 4), torch.zeros(4, 4)
    torch.export.save(torch.export.export(model, (x, cache.clone())), tmp_path / "net.pt2")
    for other in (model, tmp_path / "net.pt2"):
        found = plumb.diff(model, other, (x, cache))
        assert found.equal and found.compared > 4, found
    assert not cache.any()


class Masked(Cache):
    def forward(self, x):
        scores = self.fc(x) @ x.mT
        return scores.masked_fill(torch.ones(3, 3).triu(1).bool(), float("-inf")).softmax(-1) @ x


class Spectrum(Cache):
    def forward(self, x):
        return torch.fft.rfft(self.fc(x)), self.fc(x).to(torch.float8_e5m2)


def test_outputs_without_a_real_sum_have_gradients():
    model = Spectrum()
    assert plumb.diff(model, copy.deepcopy(model), torch.randn(4, 4)).equal


class One(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return x * 2, self.function(x)


def test_outputs_of_other_names_are_compared_by_their_places():
    x = torch.randn(3, 4)
    found = plumb.diff(One(torch.round), One(torch.floor), x)
    assert not found.equal and found.first["tensor"] == "round", found
    a, b = mlp(), nn.Sequential(nn.Sequential(mlp()))
    found = plumb.diff(a, b, torch.randn(2, 8))
    assert found.equal and "only in a: 0.weight" in found.conclusion, found
    torch.manual_seed(1)
    b[0][0][2].reset_parameters()
    assert plumb.diff(a, b, torch.randn(2, 8)).first["tensor"] == "2.linear_1"


class Ends(nn.Module):
    def __init__(self, end):
        super().__init__()
        self.fc, self.end = nn.Linear(4, 4), end

    def forward(self, x):
        y = self.fc(x)
        return self.end(y * 2, y.exp())


@pytest.mark.parametrize("end", [lambda a, b: (b, a), lambda a, b: (a, b * 1.5), lambda a, b: (a, a)])
def test_outputs_of_equal_names_are_compared_by_their_places_too(end):
    model, x = Ends(lambda a, b: (a, b)), torch.randn(3, 4)
    other = Ends(end)
    other.load_state_dict(model.state_dict())
    found, outs = plumb.diff(model, other, x), [m(x) for m in (model, other)]
    place = next(i for i, (a, b) in enumerate(zip(*outs)) if not torch.equal(a, b))
    assert not found.equal and found.first["output"] == str(place), found
    assert f"output {place}, {['mul', 'exp'][place]} against" in found.conclusion


@pytest.mark.parametrize(
    ("end", "other_end", "says"),
    [
        (lambda a, b: {"p": a, "q": b}, lambda a, b: {"q": b, "p": a}, "Equal."),
        (lambda a, b: {"p": a, "q": b}, lambda a, b: {"p": b, "q": a}, "output p, mul against exp"),
        (lambda a, b: {"p": a, "q": [b]}, lambda a, b: {"p": a, "q": [b, a]}, "one lacks, or has another constant in: q.1."),
        (lambda a, b: (a, b, None), lambda a, b: (a, b, a), "one lacks, or has another constant in: 2."),
        (lambda a, b: a, lambda a, b: (a,), "Equal."),
    ],
)
def test_outputs_are_compared_by_their_keys_and_places(end, other_end, says):
    model, other = Ends(end), Ends(other_end)
    other.load_state_dict(model.state_dict())

    def loss(out):
        return (out["p"] if isinstance(out, dict) else out[0] if isinstance(out, tuple) else out).sum()

    found = plumb.diff(model, other, torch.randn(3, 4), loss=loss)
    assert says in found.conclusion and found.equal == (says == "Equal."), found


class Sums(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        y = self.fc(x)
        return y.sum(0) * y.pow(2).sum(0) + y.abs().pow(3).sum(0)


def test_a_file_of_torch_export_is_compared_in_the_order_of_its_operators(tmp_path):
    torch.manual_seed(0)
    model, x = Sums(), torch.randn(3, 4)
    torch.export.save(torch.export.export(model, (x,)), tmp_path / "net.pt2")
    found = plumb.diff(tmp_path / "net.pt2", model, x)
    assert found.equal and found.only_a == found.only_b == [], found


class Largest(nn.Module):
    def __init__(self, dim, scale=1.0):
        super().__init__()
        self.fc, self.dim, self.scale = nn.Linear(4, 4), dim, scale
        self.register_buffer("offset", torch.arange(4))

    def forward(self, x):
        y = self.fc(x)
        return y, y.argmax(self.dim) + self.offset, torch.fft.rfft(y) * complex(0, self.scale), y > 0


def test_differences_of_numbers_that_are_not_floats_are_found(tmp_path):
    torch.manual_seed(0)
    model, x = Largest(0), torch.randn(4, 4)

    def other(*options):
        made = Largest(*options)
        made.load_state_dict(model.state_dict())
        return made

    assert plumb.diff(model, other(0), x).equal
    assert plumb.diff(model, other(1), x).first["operator"] == "aten::argmax"
    moved = other(0)
    moved.offset[2] = 9
    assert plumb.diff(model, moved, x).first["tensor"] == "offset"
    scaled = plumb.diff(model, other(0, 2.0), x).first
    assert (scaled["operator"], scaled["kind"], scaled["relative"]) == ("aten::mul.Tensor", "value", 1.0), scaled


class Filled(Cache):
    def forward(self, x):
        indices = torch.empty(64, dtype=torch.long)
        indices.fill_(2)
        out = x.new_empty(2, 4, 4)
        out[0] = self.fc(x)
        out[1] = x
        return out, indices.sum()


def test_equal_values_of_another_dtype_are_a_difference():
    class Cast(nn.Module):
        def __init__(self, dtype):
            super().__init__()
            self.dtype = dtype

        def forward(self, ids):
            return ids.to(self.dtype) + 1

    found = plumb.diff(Cast(torch.int64), Cast(torch.int32), torch.arange(3, dtype=torch.int16))
    assert not found.equal and "types Long and Int, equal" in found.conclusion, found


def test_histories_keep_their_paths_as_names(tmp_path):
    a, b = (Path(record(tmp_path, name)) for name in "ab")
    shutil.copy(a, tmp_path / "c")
    with open(tmp_path / "c", "ab") as file:
        file.write(b"half")
    assert f"the last record of {tmp_path / 'c'} (4 bytes)" in plumb.diff(b, tmp_path / "c").statement


def test_memory_that_nothing_has_written_yet_is_no_difference():
    model, x = Filled(), torch.randn(4, 4)
    held = [torch.randint(1 << 60, (size,)) for size in (16, 64) * 20]
    del held  # leaves numbers in the memory that torch.empty gives out
    found = plumb.diff(model, copy.deepcopy(model), x)
    assert found.equal and found.compared > 4, found
    scaled = plumb.transforms.unit_scale(model)
    assert torch.equal(plumb.capture(scaled, x)(x)[0], scaled(x)[0])


def test_wrong_arguments_are_refused_with_what_to_do():
    def refused(match, *args, **options):
        with pytest.raises(plumb.Error, match=match):
            plumb.diff(*args, **options)

    x, states = torch.randn(2, 8), ({"a": torch.ones(1)}, {"a": torch.ones(1)})
    refused("dict and str are not compared", states[0], "b.history")
    refused("tolerance=nan", mlp(), mlp(), x, tolerance=float("nan"))
    refused("are for two modules", *states, tolerance=0.1)
    refused("the loss has 8 elements", mlp(), mlp(), x, loss=lambda out: out)
    refused("loss=3", mlp(), mlp(), x, loss=3)
    refused("the loss is complex", mlp(), mlp(), x, loss=lambda out: out.sum() * 1j)
    endless: dict = {}
    endless["itself"] = endless
    refused("holds itself", endless, endless)
    refused("the loss is a NoneType", mlp(), mlp(), x, loss=lambda out: None)
    refused("the loss depends on no parameter", mlp(), mlp(), x, loss=lambda out: out.detach().sum())


def test_gradients_that_one_module_alone_has_are_named():
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 2)), torch.randn(3, 8)
    frozen = copy.deepcopy(net)
    frozen[0].requires_grad_(False)
    assert set(plumb.diff(net, frozen, x).only_a) >= {"the gradient of 0.weight", "the gradient of 0.bias"}
    assert set(plumb.diff(frozen, net, x).only_b) >= {"the gradient of 0.weight", "the gradient of 0.bias"}
    assert plumb.diff(net, net, x).only_a == []


class Filter(nn.Module):
    def __init__(self):
        super().__init__()
        self.filter = nn.Parameter(torch.full((4,), 1 + 1j))

    def forward(self, x):
        return torch.view_as_real(self.filter * x)


def test_gradients_of_complex_tensors_are_compared():
    model, x, factors = Filter(), torch.randn(4), iter([1.0, 3.0])
    assert plumb.diff(model, model, x).equal
    found = plumb.diff(model, model, x, loss=lambda out: out.sum() * next(factors))
    assert (found.compared, found.differing) == (8, 4)  # values and gradients of x, filter, mul and view_as_real


class WeightOfNoLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(8, 8) * 3)

    def forward(self, x):
        return torch.nn.functional.linear(x, self.w)


def test_a_module_that_would_scale_its_weights_at_its_first_call_keeps_its_bits():
    x = torch.randn(4, 8)
    tracked = track_scales(unit_scale(WeightOfNoLayer()))
    before = tracked.w.detach().clone()
    assert not plumb.diff(tracked, WeightOfNoLayer(), x).equal
    assert torch.equal(tracked.w, before) and not len(tracked.scales_graph().nodes)
    tracked(x)
    assert not torch.equal(tracked.w, before)  # which its own first call does


class Averaged(nn.Module):
    """Writes a buffer in its forward, which the next microbatch reads."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        y = self.fc(x)
        self.mean.mul_(0.9).add_(y.detach().mean(0), alpha=0.1)
        return y - self.mean


def record_lengths(folder, name, model, lengths, spoil=None):
    """A step of microbatches of these lengths; each other length is another graph. `spoil` is called before each."""
    (folder / "rules.toml").write_text(RULES)
    batches = {n: torch.full((n, 4), 1.0 / n) for n in sorted(lengths)}
    with plumb.Recorder(model, folder / "rules.toml", folder / name) as recorder:
        for _ in range(2):
            for number, n in enumerate(lengths):
                if spoil:
                    spoil(model, number)
                model(batches[n]).square().sum().backward()
            recorder.step()
    return str(folder / name)


def test_microbatches_are_numbered_through_whichever_graph_runs_them(tmp_path):
    model = nn.Linear(4, 4)
    a, b, c = (
        record_lengths(tmp_path, name, model, n) for name, n in (("a", (5, 7, 6)), ("b", (5, 7, 6)), ("c", (5, 6, 7)))
    )
    assert plumb.diff(a, b).equal
    found = plumb.diff(a, c)
    place = [found.first[key] for key in ("tensor", "step", "microbatch")]
    assert place == ["input", 1, 1], found


def test_what_a_microbatch_wrote_into_a_buffer_differs_after_its_own_values(tmp_path):
    def recorded(name, spoil=None):
        torch.manual_seed(0)
        return record_lengths(tmp_path, name, Averaged(), (5, 7, 6), spoil)

    def change_weight(model, number):
        if number == 0:
            model.fc.weight.data[0, 0] += 1e-3

    def change_buffer(model, number):
        if number == 2:
            model.mean[0] += 1e-3

    a = recorded("a")
    assert plumb.diff(a, recorded("again")).equal
    assert plumb.diff(a, recorded("weight", change_weight)).first["tensor"] == "fc.weight"
    assert plumb.diff(a, recorded("buffer", change_buffer)).first["tensor"] == "mean"
