"""plumb.verdict: in which number formats a module will train, and what stands in the way."""

import copy
import json
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import prune

import plumb
from plumb.transforms import report, simulate_format, simulate_fp8, unit_scale, use_fp8


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Linear(32, 4)

    def forward(self, x):
        return self.head(F.dropout(F.gelu(self.norm(self.body(x))), 0.1, self.training))


def batches(number, scale=1.0):
    generator = torch.Generator().manual_seed(0)
    for _ in range(number):
        yield torch.randn(64, 16, generator=generator) * scale, torch.randint(4, (64,), generator=generator)


@pytest.fixture
def net():
    torch.manual_seed(0)
    return Net()


def test_a_verdict_tells_recipes_apart_by_direction(net):
    found = plumb.verdict(
        net, batches(4), F.cross_entropy, recipes=["fp32", "none/e5m2", "e4m3fn/none", "mxfp4", "bf16"]
    )
    by = found.recipes
    assert by["fp32"]["score"] == 0 and by["bf16"]["verdict"] == "ok"
    assert by["none/e5m2"]["forward"] == 0 < by["none/e5m2"]["backward"]
    assert by["e4m3fn/none"]["backward"] == 0 < by["e4m3fn/none"]["forward"]
    assert by["mxfp4"]["score"] > by["bf16"]["score"]
    assert str(found).startswith(found.conclusion) and "mxfp4" in repr(found)


def test_nothing_of_a_module_changes_by_its_verdict(net):
    before, random = copy.deepcopy(net.state_dict()), torch.get_rng_state()
    plumb.verdict(net, batches(4), F.cross_entropy, recipes=["mxfp4-SR", "unit-fp8", "tensorwise"], warmup=1)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    assert all(p.grad is None and not hasattr(p, "mup_type") for p in net.parameters())


def test_every_usual_recipe_is_measured(net):
    found = plumb.verdict(net, batches(2), F.cross_entropy, steps=2, explain=False)
    assert set(found.recipes) == {
        "fp16",
        "bf16",
        "fp8",
        "unit-fp8",
        "tensorwise",
        "rowwise",
        "blocks128",
        "mxfp8",
        "nvfp4",
        "mxfp4",
    }
    assert all("problem" not in one and one["score"] > 0 for one in found.recipes.values())


class Tiny(nn.Module):
    """Returns its loss, whose gradients are far below e5m2's range."""

    def __init__(self):
        super().__init__()
        self.net = Net()

    def forward(self, x, y):
        return F.cross_entropy(self.net(x), y) * 2.0**-30


def test_the_recommended_recipe_does_what_the_verdict_says(net, tmp_path):
    module = Tiny()
    found = plumb.verdict(module, batches(2), recipes=["fp8"], steps=2)
    assert found.recipes["fp8"]["verdict"] == "no" and "loss-scale = " in found.recipe, found
    assert found.recipes["fp8"]["remedied"]["verdict"] == "ok"
    file = tmp_path / "recipe.toml"
    file.write_text(found.recipe)
    x, y = next(batches(1))

    def gradient(model):
        torch.manual_seed(0)
        return torch.cat([g.flatten() for g in torch.autograd.grad(model(x, y), list(model.parameters()))])

    full = gradient(module)

    def error(model):
        return float((gradient(model) - full).norm() / full.norm())

    assert error(simulate_format(module, "e4m3fn-RN", "e5m2-RN")) > 0.5
    for recipe in (file, found.recipe):
        assert error(simulate_format(module, recipe=recipe)) < 0.15
    fp8 = use_fp8(module, recipe=file, kernel="decoded")
    assert error(fp8) < 0.15
    assert "plumb::fp8_linear" in str(report(fp8)[-1])


def test_a_page_has_the_conclusion_and_the_recipe(net, tmp_path):
    found = plumb.verdict(net, batches(2), F.cross_entropy, steps=2, recipes=["mxfp4"])
    found.page(tmp_path / "page.html", "a net")
    text = (tmp_path / "page.html").read_text()
    assert "Number formats of a net" in text and "The recipe" in text
    with pytest.raises(TypeError):
        found.page(tmp_path / "page.html", 3)
    assert (tmp_path / "page.html").read_text() == text


def test_recipes_and_verdicts_are_refused_by_name(net):
    def refused(match, call):
        with pytest.raises(plumb.Error, match=match):
            call()

    refused("'fp9' is no recipe", lambda: plumb.verdict(net, batches(2), F.cross_entropy, recipes=["fp9"]))
    refused("the data ended after 2 batches, and 4 are needed", lambda: plumb.verdict(net, batches(2), F.cross_entropy))
    refused("at least one step", lambda: plumb.verdict(net, batches(2), F.cross_entropy, steps=0))
    refused("no number with a gradient", lambda: plumb.verdict(net, [(torch.randn(64, 16),)] * 4))
    refused("a recipe says all formats", lambda: simulate_format(net, "e4m3fn", recipe="fp8"))
    refused("needs two formats, or a recipe", lambda: simulate_format(net, "e4m3fn"))
    refused("no other option goes with it", lambda: use_fp8(net, recipe="x.toml", exclude=["head"]))
    x = torch.randn(64, 16)
    named = simulate_format(net, recipe='fwd = "mxfp4"\n[[product]]\nname = "tail"\nfwd = "none"\n')
    refused("the recipe names the product 'tail'", lambda: named(x))
    refused("the recipe is for a unit-scaled model", lambda: simulate_format(net, recipe="unit-fp8")(x))
    simulate_format(unit_scale(net), recipe="unit-fp8")(x)


def test_a_verdict_from_a_training_changes_no_bit_of_it(net, tmp_path):
    class Hooks:
        def __init__(self):
            self.losses, self.events = [], []

        def on_step(self, event):
            self.losses.append(event["loss"])

        def on_event(self, event):
            self.events.append(event)

    data = list(batches(6))
    runs = []
    for options in (
        {},
        {"verdict": ["fp8", "mxfp4"], "verdict_page": tmp_path / "v.html", "verdict_recipe": tmp_path / "v.toml"},
    ):
        graph = plumb.capture(copy.deepcopy(net), data[0][0])
        hooks = Hooks()
        plumb.Trainer(graph, data, hooks=hooks, steps=6, lr=0.01, warmup=2, threads=1, **options).run()
        runs.append((hooks, graph.state_dict()))
    (plain, plain_state), (judged, judged_state) = runs
    assert judged.losses == plain.losses
    assert all(torch.equal(value, plain_state[name]) for name, value in judged_state.items())
    (event,) = [e for e in judged.events if "verdict" in e]
    assert event["at_step"] == 4 and event["verdict"]["batches"] == 4
    assert json.dumps(event["verdict"]) and (tmp_path / "v.toml").read_text() == event["verdict"]["file"]
    assert event["verdict"]["conclusion"].split(":")[0] in (tmp_path / "v.html").read_text()


class WithUnusedInput(Net):
    def forward(self, unused, x):
        return super().forward(x)


def test_a_training_says_its_verdict_on_a_model_that_leaves_an_input_unused():
    net = WithUnusedInput()
    data = [((torch.zeros(64, 1), x), y) for x, y in batches(4)]
    events = SimpleNamespace(on_event=lambda event: found.append(event))
    found = []
    plumb.Trainer(plumb.capture(net, *data[0][0]), data, hooks=events, steps=4, verdict=["fp8"], threads=1).run()
    assert [event["verdict"]["batches"] for event in found if "verdict" in event] == [4]


def test_random_numbers_of_the_loss_are_the_same_in_every_gradient(net):
    def loss(out, target):
        return F.cross_entropy(F.dropout(out, 0.5), target)

    recipes = plumb.verdict(net, batches(4), loss, recipes=["fp32", "bf16"]).recipes
    assert recipes["fp32"]["score"] == 0 and recipes["bf16"]["verdict"] == "ok"


def test_a_recipe_that_rounds_nothing_is_not_called_ok(net):
    for module, why in ((nn.BatchNorm1d(16), "has no product"), (use_fp8(net, kernel="decoded"), "is rounded already")):
        with pytest.raises(plumb.Error, match=f"the model {why}"):
            plumb.verdict(module, batches(2), F.cross_entropy, recipes=["mxfp4"], steps=2)


class Attention(nn.Module):
    """Two products in one module, without a parameter; values have the names of these variables when it is transformed."""

    def __init__(self):
        super().__init__()
        self.qkv, self.head = nn.Linear(16, 48), nn.Linear(16, 4)

    def forward(self, x):
        q, k, v = self.qkv(x.unflatten(1, (2, 8)).repeat(1, 1, 2)).chunk(3, -1)
        scores = torch.matmul(q, k.transpose(-1, -2))
        mixed = torch.matmul(scores.softmax(-1), v)
        return self.head(mixed[:, -1])


def test_recipes_name_products_of_every_capture():
    module = Attention()
    found = plumb.verdict(module, batches(2), F.cross_entropy, recipes=["mxfp4", "unit-mxfp4"], steps=2)
    for name, one in found.recipes.items():
        assert {"#1", "#2", "qkv", "head"} == {p["product"] for p in one["products"]}, found
        text = 'fwd = "mxfp4"\nbwd = "mxfp4"\n[[product]]\nname = "#2"\nbwd = "none"\n'
        rounded = simulate_format(unit_scale(module) if "unit" in name else module, recipe=text)
        rounded(next(batches(1))[0])
        assert "mxfp4-RN forward, none backward" in str(report(rounded)[-1])


def test_gradients_may_be_sparse_or_complex():
    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.head = nn.Embedding(50, 16, sparse=True), nn.Linear(16, 4)
            self.filter = nn.Parameter(torch.randn(9, dtype=torch.complex64))

        def forward(self, i):
            x = self.embedding(i).mean(1)
            return self.head(torch.fft.irfft(torch.fft.rfft(x) * self.filter, n=16))

    data = [(torch.randint(50, (8, 6)), torch.randint(4, (8,)))] * 2
    found = plumb.verdict(Words(), data, F.cross_entropy, recipes=["fp8"], steps=1)
    assert 0 < found.recipes["fp8"]["score"] < 1


class WithSchedule:
    """An optimizer of a user's own: a step moves the rate, too."""

    def __init__(self, parameters):
        self.optimizer = torch.optim.SGD(parameters, lr=1.0)
        self.rate = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda i: 0.1 * min(i + 1, 2))
        self.zero_grad, self.steps = self.optimizer.zero_grad, 0

    def step(self):
        self.optimizer.step()
        self.rate.step()
        self.steps += 1


def test_an_optimizer_may_be_an_object_that_holds_the_schedule_of_the_rate_as_well(net):
    made = []
    found = plumb.verdict(
        net, batches(6), F.cross_entropy, recipes=["fp8"], warmup=4, optimizer=lambda p: made.append(WithSchedule(p)) or made[0]
    )
    assert found.recipes["fp8"]["verdict"] == "ok" and made[0].steps == 5 and made[0].rate.get_last_lr() == [0.2]


class TwoLosses(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = Net()

    def forward(self, x, y):
        out = self.net(x)
        return F.cross_entropy(out, y), out.square().mean()


def test_wrong_arguments_of_a_verdict_are_refused_with_what_to_do(net, tmp_path):
    def refused(match, data=None, loss=F.cross_entropy, model=net, **options):
        with pytest.raises(plumb.Error, match=match):
            plumb.verdict(model, batches(4) if data is None else data, loss, **{"recipes": ["fp8"], **options})

    x = torch.randn(64, 16)
    refused("batch 1 is a Tensor", [x] * 4)
    refused("batch 1 is 3 parts", [(x, x, x)] * 4)
    whole = next(batches(1))
    smaller = [whole, (whole[0][:5], whole[1][:5])]
    refused(r"batch 2 are of other shapes .*: \[\(5, 16\)\], \[\(64, 16\)\]\n.*drop_last=True", smaller)
    refused("the data is a Tensor", x)
    refused("the loss is a float", loss=lambda out, target: 1.0)
    refused("loss is a str", loss="mse")
    refused("optimizer returns a NoneType", optimizer=lambda p: None)
    refused("a step of LBFGS takes several gradients", optimizer=torch.optim.LBFGS)
    refused("'0.weight' is on the meta device, without values", model=nn.Sequential(nn.Linear(16, 4, device="meta")))
    refused("the loss is no number with a gradient, but a complex one", loss=lambda out, target: out.sum() * 1j)
    refused("the optimizer has parameters that it was not given", optimizer=lambda p: torch.optim.SGD(net.parameters(), 0.1))
    refused("the recipe 8 is a int", recipes=[8])
    refused("recipes is a int", recipes=8)
    refused("no recipe is asked for", recipes=[])
    refused("the model is a str", model="net.pt2")
    refused("2 numbers that could be its loss", loss=None, model=TwoLosses())
    for options in ({"steps": 2.5}, {"steps": 10**12}, {"steps": 2**70}, {"warmup": 2**63 - 1}):
        refused("steps=", **options)
    (tmp_path / "mine.toml").write_text('fwd = "bf16"\nbwd = "bf16"\n')
    assert plumb.verdict(net, batches(1), F.cross_entropy, recipes="bf16", steps=1).recipes["bf16"]["verdict"] == "ok"
    plumb.verdict(net, batches(1), F.cross_entropy, recipes=[tmp_path / "mine.toml"], steps=1)


def test_a_sparse_input_is_refused_with_the_product_and_the_line():
    model = nn.Sequential(nn.Linear(16, 4))
    with pytest.raises(plumb.Error, match=r"node %\w+ \(plumb::simulate_format\): .* not strided\n  at: 0 \(.*test_verdict.py:"):
        plumb.verdict(model, [(torch.eye(16).to_sparse(), torch.randint(4, (16,)))], F.cross_entropy, recipes=["fp8"], steps=1)


def test_keys_of_too_many_parts_are_refused():
    for text in ("a" + ".a" * 200_000 + " = 1\n", "[a" + ".a" * 200_000 + "]\n"):
        with pytest.raises(plumb.Error, match="recipe:1: a key of more than 1000 parts"):
            simulate_format(nn.Linear(2, 2), recipe=text)


def test_dropout_between_recurrent_layers_is_no_error_of_a_format():
    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.layers = nn.Embedding(20, 8), nn.LSTM(8, 8, 2, batch_first=True, dropout=0.5)
            self.head = nn.Linear(8, 20)

        def forward(self, ids):
            return self.head(self.layers(self.table(ids))[0]).flatten(0, 1)

    torch.manual_seed(0)
    data = [(torch.randint(20, (4, 6)), torch.randint(20, (24,))) for _ in range(4)]
    found = plumb.verdict(Words(), data, nn.functional.cross_entropy, recipes=["bf16"], explain=False).recipes["bf16"]
    assert found["verdict"] == "ok" and found["backward"] < 0.03 and found["forward"] < 0.03, found


def test_a_verdict_is_measured_inside_of_inference_mode_too(net):
    data = [(torch.randn(8, 16), torch.randint(4, (8,))) for _ in range(4)]
    with torch.inference_mode():
        assert plumb.verdict(net, data, F.cross_entropy, recipes=["bf16"]).recipes["bf16"]["verdict"] == "ok"


def test_a_step_without_a_gradient_is_not_measured_and_the_training_goes_on():
    class Product(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x):
            return (self.layer(x) * x).mean()

    torch.manual_seed(0)
    data, events = [torch.zeros(4, 8)] + [torch.randn(4, 8) for _ in range(5)], []

    class Hooks:
        def on_event(self, event):
            events.append(event)

        def on_problem(self, event):
            events.append(event)

    def train(data, steps):
        graph = plumb.capture(Product(), data[0])
        plumb.Trainer(graph, data, hooks=Hooks(), steps=steps, lr=0.01, loss="output", verdict=["bf16"], threads=1).run()

    train(data, 6)
    (found,) = [e for e in events if "verdict" in e]
    assert found["at_step"] == 5 and found["verdict"]["batches"] == 4
    assert not [e for e in events if "problem" in e]
    train(data[:1], 2)
    assert any("the full-precision gradient of the batch is zero" in e.get("problem", "") for e in events), events


def test_batches_may_be_dicts_of_the_forwards_arguments(net):
    class WithLoss(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net

        def forward(self, x, labels=None):
            return {"loss": F.cross_entropy(self.net(x), labels)}

    class OfDict(WithLoss):
        def forward(self, batch):
            return super().forward(**batch)

    dicts = [{"labels": y, "x": x} for x, y in batches(1)]
    graph = plumb.capture(WithLoss(), **dicts[0])
    results = [plumb.verdict(model, dicts, recipes=["fp8"], steps=1) for model in (WithLoss(), OfDict(), graph)]
    results.append(plumb.verdict(net, [({"x": x}, y) for x, y in batches(1)], F.cross_entropy, recipes=["fp8"], steps=1))
    assert len({one.recipes["fp8"]["backward"] for one in results}) == 1


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_scripted_or_traced_module_has_its_verdict():
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh()), torch.randn(4, 8)
    data = [(x, x)] * 4
    expected = str(plumb.verdict(model, data, F.mse_loss, recipes="fp8", steps=2))
    for made in (torch.jit.script(model), torch.jit.trace(model, x)):
        before = [p.detach().clone() for p in made.parameters()]
        assert str(plumb.verdict(made, data, F.mse_loss, recipes="fp8", steps=2)).splitlines()[0] == expected.splitlines()[0]
        assert all(map(torch.equal, before, made.parameters()))


class Several(nn.Module):
    """Products in one operator, which nothing takes apart, and a linear layer."""

    def __init__(self):
        super().__init__()
        self.w, self.head = nn.Parameter(torch.randn(16, 16) / 4), nn.Linear(16, 4)

    def forward(self, x):
        return self.head(torch.linalg.multi_dot([x, self.w, self.w]))


def test_products_that_no_recipe_rounds_are_named():
    torch.manual_seed(0)
    batches = [(torch.randn(8, 16), torch.randn(8, 4))]
    found = plumb.verdict(Several(), batches, nn.functional.mse_loss, recipes=["bf16", "none/none"], steps=1)
    assert found.recipes["none/none"]["left"] == []
    assert found.recipes["bf16"]["left"][0].startswith("%linalg_multi_dot (aten::linalg_multi_dot): it multiplies several")
    assert "leaves in full precision: %linalg_multi_dot" in found.conclusion
    whole = plumb.verdict(nn.Linear(16, 4), batches, nn.functional.mse_loss, recipes=["bf16"], steps=1)
    assert whole.recipes["bf16"]["left"] == [] and "full precision" not in str(whole)


@pytest.mark.parametrize("transform", [simulate_fp8, use_fp8])
def test_a_model_that_is_rounded_already_is_refused(transform):
    batches = [(torch.randn(8, 16), torch.randn(8, 4))]
    with pytest.raises(plumb.Error, match="the model is rounded already.*\n(.*\n)?.*try: the model before simulate_format"):
        plumb.verdict(transform(nn.Linear(16, 4)), batches, nn.functional.mse_loss, steps=1)


class NoProduct(nn.Module):
    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return torch.sigmoid(x * self.gain)


def test_a_verdict_without_a_recipe_that_can_be_measured_is_refused():
    batches = [(torch.randn(8, 4), torch.rand(8, 4))]
    with pytest.raises(plumb.Error, match="no recipe could be measured: fp8 was not measured: the model has no product"):
        plumb.verdict(NoProduct(), batches, nn.functional.mse_loss, recipes=["fp8", "unit-fp8"], steps=1)


def test_modules_that_keep_what_torch_does_not_copy_are_judged():
    pruned = nn.Linear(4, 3)
    prune.l1_unstructured(pruned, "weight", 0.5)
    batches = [(torch.randn(8, 4), torch.randint(3, (8,)))] * 2
    found = plumb.verdict(pruned, batches, nn.functional.cross_entropy, recipes=["bf16"], steps=2)
    assert found.recipes["bf16"]["verdict"] == "ok"


@pytest.mark.parametrize(
    ("make", "wrong", "says"),
    [
        (lambda: nn.LazyLinear(4), {}, "'weight' of LazyLinear has no shape yet"),
        (lambda: nn.Linear(4, 4), {"explain": "no"}, "explain='no'"),
        (lambda: nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Linear(4, 4)), {}, "takes no sparse gradients"),
    ],
)
def test_what_a_verdict_cannot_take_is_refused_with_what_to_do(make, wrong, says):
    sparse = says.endswith("gradients")
    batches = [(torch.randint(9, (8,)) if sparse else torch.randn(8, 4), torch.randn(8, 4))] * 3
    with pytest.raises(plumb.Error, match=says) as caught:
        plumb.verdict(make(), batches, nn.functional.mse_loss, **{"recipes": ["fp8"], "steps": 2, **wrong})
    assert caught.value.remedy
