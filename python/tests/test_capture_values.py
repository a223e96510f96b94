"""Models that take values out of tensors: a transformed module has a graph for each path, and never takes a wrong one."""

import copy

import pytest
import torch
import zoo
from plumb._transformed import forward_of
from torch import nn

import plumb
from plumb.transforms import _apply, simulate_format, simulate_fp8, track_scales, unit_scale


class Experts(nn.Module):
    """Top-2 routing, over the experts that were chosen alone, as libraries of models have it."""

    def __init__(self, experts=6, width=8):
        super().__init__()
        self.router = nn.Linear(width, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 16), nn.SiLU(), nn.Linear(16, width)) for _ in range(experts)
        )

    def forward(self, x):
        weights, chosen = self.router(x).softmax(-1).topk(2, -1)
        out = torch.zeros_like(x)
        mask = nn.functional.one_hot(chosen, len(self.experts)).permute(2, 1, 0)
        for expert in torch.greater(mask.sum((-1, -2)), 0).nonzero():
            place, row = torch.where(mask[expert].squeeze(0))
            hidden = self.experts[expert](x[None, row].reshape(-1, x.shape[-1])) * weights[row, place, None]
            out.index_add_(0, row, hidden)
        return x + out


class Lists(nn.Module):
    """A list of values, a number and a condition."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        for n in (x[:, :2] > 0).sum(0).tolist():
            x = self.layers[n % 3](x)
        if x.sum() > 0:
            x = x * 2
        return x * int((x > 0).sum())


MODELS = {
    "experts": (lambda: Experts(), (3, 8)),
    "deep experts": (lambda: nn.Sequential(Experts(), Experts()), (3, 8)),
    "lists": (lambda: Lists(), (3, 4)),
}  # fmt: skip


def made(name):
    torch.manual_seed(0)
    make, shape = MODELS[name]
    return make(), [torch.randn(shape) for _ in range(8)]


def graphs(module):
    ((first,),) = forward_of(module)._cache.values()
    return first


@pytest.mark.parametrize("name", MODELS)
def test_every_path_gets_a_graph_with_the_bits_of_the_model(name):
    model, inputs = made(name)
    tracked = track_scales(model)
    for x in inputs + inputs:
        results = []
        for m in (model, tracked):
            given = x.clone().requires_grad_()
            m.zero_grad()
            out = m(given)
            out.square().sum().backward()
            results.append([out, given.grad, *(p.grad for p in m.parameters())])
        assert all((a is None and b is None) or torch.equal(a, b) for a, b in zip(*results))
    first = graphs(tracked)
    assert 1 < first.made <= len(inputs), "inputs that were seen need no new graph"


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("transform", [unit_scale, lambda m: simulate_format(unit_scale(m), "E4M3-RN", "E5M2-RN")], ids=["unit", "fp8"])
def test_the_transformed_graph_decides_not_the_module(name, transform):
    model, inputs = made(name)
    module = transform(model)
    alone = copy.deepcopy(module)
    alone(inputs[0])
    expected = []
    for x in inputs:
        expected.append(copy.deepcopy(alone)(x))  # a copy has no graphs yet
    for x, value in [*zip(inputs, expected), *zip(inputs, expected)]:
        assert torch.equal(module(x), value)
    before = graphs(module).made
    module(inputs[-1])
    assert graphs(module).made == before


class Writes(nn.Module):
    """Adds one to a tensor, and then chooses a path: a run of the graph of another path has written before it is given up."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.frozen = nn.Parameter(torch.zeros(4), requires_grad=False)
        self.hidden, self.kept = torch.zeros(4), {"table": torch.zeros(4)}
        self.register_buffer("grown", torch.zeros(0))
        self.what = None

    def forward(self, x):
        with torch.set_grad_enabled("input" in self.what):
            written = WRITES[self.what](self, x)
        y = self.layer(x) + written
        return y * 2 if y[0].sum() > y[1].sum() else y * 3


def grow(m, x):
    if m.grown.numel() == 0:
        m.grown.resize_(4).zero_()
    return m.grown.add_(1)


def assign(m, x):
    m.hidden = m.hidden + 1
    return m.hidden


WRITES = {
    "a parameter": lambda m, x: m.frozen.add_(1),
    "the data of a parameter": lambda m, x: m.frozen.data.copy_(m.frozen + 1),
    "a weight": lambda m, x: m.layer.weight.mul_(1.5)[0],
    "a buffer that grows": grow,
    "an attribute": lambda m, x: m.hidden.add_(1),
    "an attribute that is assigned": assign,
    "a tensor in a dict": lambda m, x: m.kept["table"].add_(1),
    "an input": lambda m, x: x.mul_(3).detach(),
}


@pytest.mark.parametrize("record", [False, True], ids=["tracked", "recorded"])
@pytest.mark.parametrize("what", WRITES)
def test_a_run_that_is_given_up_leaves_no_writes(what, record, tmp_path):
    torch.manual_seed(1)
    model = Writes()
    model.what = what
    other = copy.deepcopy(model) if record else track_scales(model)
    recorder = plumb.Recorder(other, 1, tmp_path / "run.history") if record else None
    paths = set()
    for x in torch.randn(8, 2, 4):
        results = []
        for m in (model, other):
            leaf = x.clone().requires_grad_()
            given = leaf * 1.0  # which has a history when it is written
            m.zero_grad()
            out = m(given)
            (out.sum() + given.square().sum()).backward()
            gradients = [leaf.grad, m.layer.weight.grad, m.layer.bias.grad]
            results.append((out.detach(), given.detach(), *gradients, *m.state_dict().values()))
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
        paths.add(bool(out[0].sum() > out[1].sum()))
    assert len(paths) == 2, "both paths are taken"
    if recorder:
        recorder.close()


def test_experts_under_stochastic_rounding_train():
    model, inputs = made("experts")
    module = simulate_fp8(unit_scale(model))
    optimizer = plumb.optim.AdamW(module.parameters(), 1e-2)
    for x in inputs:
        optimizer.zero_grad()
        module(x).square().mean().backward()
        optimizer.step()
    assert all(p.isfinite().all() for p in module.parameters())


def test_a_run_that_was_given_up_leaves_no_measurements(tmp_path):
    model, inputs = made("deep experts")
    with plumb.Recorder(model, 1, tmp_path / "run.history") as recorder:
        for x in inputs:
            model(x).square().sum().backward()
            recorder.step()
    history = plumb.read_history(tmp_path / "run.history")
    names = [(t["name"], t["operator"]) for t in history.tensors]
    (x_number,) = [i for i, (_, operator) in enumerate(names) if operator == "input"]
    mine = (history.columns["tensor"] == x_number) & ~history.columns["backward"].astype(bool)
    assert history.columns["numel"][mine].tolist() == [x.numel() for x in inputs]
    for value, x in zip(history.columns["abs_max"][mine], inputs):
        assert value == pytest.approx(x.abs().max().item())


def test_buffers_and_random_numbers_are_those_of_one_run():
    class Drops(Experts):
        def __init__(self):
            super().__init__()
            self.register_buffer("runs", torch.zeros(()))

        def forward(self, x):
            self.runs += 1
            return super().forward(nn.functional.dropout(x, 0.3))

    torch.manual_seed(0)
    model = Drops()
    tracked = track_scales(model)
    for i in range(6):
        x = torch.randn(3, 8)
        for m in (model, tracked):
            torch.manual_seed(i)
            m.result = m(x).detach()
        assert torch.equal(model.result, tracked.result) and torch.equal(model.runs, tracked.runs)


def test_ever_new_values_are_refused_with_the_line(monkeypatch):
    monkeypatch.setattr(_apply, "MAX_CAPTURES", 5)

    class Scaled(nn.Module):
        def forward(self, x):
            return x * x.abs().max().item()

    module = track_scales(Scaled())
    for n in range(1, 6):
        assert torch.equal(module(torch.full((2,), float(n))), torch.full((2,), float(n * n)))
    with pytest.raises(plumb.Error, match=r"5 graphs have been made.*the value . out of a tensor(.|\n)*test_capture_values.py"):
        module(torch.full((2,), 9.0))
    assert torch.equal(module(torch.full((2,), 5.0)), torch.full((2,), 25.0))


def test_nan_is_an_answer_like_any_other():
    class Scaled(nn.Module):
        def forward(self, x):
            return x * x.max().item()

    module = track_scales(Scaled())
    for value in (float("nan"), 2.0, float("nan")):
        x = torch.tensor([1.0, value])
        assert torch.equal(module(x).isnan(), (x * x.max().item()).isnan())
    assert graphs(module).made == 2


def test_one_graph_alone_still_refuses():
    model, (x, *_) = made("experts")
    with pytest.raises(plumb.Error, match="takes a value out of a tensor"):
        plumb.capture(model, x)
    model, (x, *_) = made("lists")
    with pytest.raises(plumb.Error, match="tolist.. takes values out of a tensor"):
        plumb.capture(model, x)


@pytest.mark.parametrize("name", ["Mixtral", "Qwen2-MoE"])
def test_mixtures_of_transformers(name):
    import transformers

    common = dict(
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, hidden_size=16, intermediate_size=32, vocab_size=50,
    )  # fmt: skip
    torch.manual_seed(0)
    if name == "Mixtral":
        model = transformers.MixtralForCausalLM(transformers.MixtralConfig(num_local_experts=4, **common))
    else:
        config = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=16)
        model = transformers.Qwen2MoeForCausalLM(transformers.Qwen2MoeConfig(**config, **common))
    tracked, scaled = track_scales(model), unit_scale(model)
    for _ in range(4):
        ids = zoo.ids(1, 2)
        given = dict(input_ids=ids, labels=ids, use_cache=False)
        results = []
        for m in (model, tracked):
            m.zero_grad()
            out = m(**given)
            out.loss.backward()
            results.append([out.loss, out.logits, *(p.grad for p in m.parameters())])
        assert all((a is None and b is None) or torch.equal(a, b) for a, b in zip(*results))
        assert scaled(**given).logits.isfinite().all()
    # transformers 5 stacks the experts, and has one path; 4 goes through those that were chosen.
    assert (graphs(tracked).made > 1) == transformers.__version__.startswith("4.")


def test_a_constants_value_on_the_meta_device_is_refused():
    class Counts(torch.nn.Module):
        def forward(self, x):
            return x * 2 if torch.arange(3, device=x.device).sum() > 1 else x

    x = torch.ones(2)
    assert torch.equal(plumb.capture(Counts(), x)(x), 2 * x)
    with pytest.raises(plumb.Error, match="takes a value out of a tensor") as caught:
        plumb.capture(Counts(), x.to("meta"))
    assert caught.value.kind is plumb.ErrorKind.DataDependent


def test_rows_that_a_mask_chooses_may_be_one_at_the_first_call():
    class Rows(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            chosen = x[:, 0] > 0
            out = torch.zeros_like(x)
            out[chosen] = self.layer(x[chosen])  # torch drops the rows' dimension where it has the size one
            return out

    model, x = Rows(), torch.ones(4, 4)
    module, graph = track_scales(model), None
    for rows in (1, 2, 0, 1, 4):
        x[:, 0] = torch.where(torch.arange(4) < rows, 1.0, -1.0)
        assert torch.equal(module(x), model(x))
        if graph is None:
            graph = plumb.capture(model, x)
    with pytest.raises(plumb.Error, match="a size that depends on the data"):
        graph(x)


def test_verifying_names_a_forward_that_takes_only_some_values():
    class Places(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(4, 3)

        def forward(self, patches):  # its first column is the place of a row
            return patches + self.table(patches[:, 0].long())

    model, x = Places(), torch.arange(4.0).repeat(9)[:, None].expand(36, 3)
    words = r"verify: the forward fails on other values of its inputs: IndexError: index out of range.*\n.*without verifying"
    with pytest.raises(plumb.Error, match=words):
        plumb.capture(model, x, plumb_verify=True)
    assert torch.equal(plumb.capture(model, x)(x), model(x))
