"""plumb.formats, plumb.analysis and plumb.utils."""

import copy
import math
import pickle
from collections import OrderedDict

import matplotlib
import pytest
import torch
from plumb.formats import FPFormat, format_to_tuple, standard_format_names, tuple_to_format
from torch import nn

import plumb
from plumb.transforms import simulate_format, track_scales

matplotlib.use("Agg")


def test_the_plain_family_and_the_standard_formats_differ():
    assert FPFormat(4, 3).max_absolute_value == 240 and FPFormat.named("e4m3fn").max_absolute_value == 448
    assert FPFormat(4, 3).min_absolute_normal == 2**-7 and FPFormat.named("e4m3fn").min_absolute_normal == 2**-6
    assert str(FPFormat(5, 2, "nearest")) == "E5M2-RN" and FPFormat(5, 2).bits == 8
    for name in standard_format_names():
        assert FPFormat.named(name, "nearest").name == name


@pytest.mark.parametrize("text", ["E4M3-SR", "E4M3-SR8", "e5m2-RN", "fp16-RZ", "e2m1fn-RN"])
def test_text_there_and_back(text):
    assert FPFormat.parse(text).spec == text == str(FPFormat.parse(text))


def test_what_lies_beyond_the_range_is_what_the_text_says():
    far = torch.tensor([1e30, -1e30, 1.0])
    for text, largest in (("e5m2-RN-inf", math.inf), ("e5m2-RN", 57344), ("fp16-RN-sat", 65504), ("fp16-RN", math.inf)):
        format = FPFormat.parse(text)
        assert format.spec == text and FPFormat.parse(format.spec) == format
        assert format.quantise(far).tolist() == [largest, -largest, 1.0]
    assert str(FPFormat.parse("e5m2-RN-inf")) == "e5m2-RN-inf" and not FPFormat.parse("e5m2-RN-inf").saturate
    assert FPFormat.named("e5m2", "nearest", saturate=False) == FPFormat.parse("e5m2-RN-inf")
    assert FPFormat.named("e5m2", "nearest") == FPFormat.parse("e5m2-RN-sat") != FPFormat.parse("e5m2-RN-inf")


def test_tuples_there_and_back():
    assert format_to_tuple(tuple_to_format((4, 3))) == (4, 3) and tuple_to_format((4, 3)) == FPFormat(4, 3)


@pytest.mark.parametrize(
    "wrong", [(1, 3), (9, 3), (4, 24), (4, 3, "up"), (4, 3, "nearest", 3), (4, 3, "nearest", 0, "e5m2"), (4, 3, "nearest", 0, "", "yes")]
)
def test_wrong_formats_are_refused(wrong):
    with pytest.raises(plumb.Error):
        FPFormat(*wrong)


def test_a_format_is_not_changed_after_it_was_made():
    format = FPFormat(4, 3)
    for name, value in (("rounding", "nearest"), ("mantissa_bits", 2), ("saturate", False)):
        with pytest.raises(plumb.Error, match=f"{name} of E4M3-SR is not set to {value!r}\n.*FPFormat.parse"):
            setattr(format, name, value)
    assert format == FPFormat(4, 3)
    assert copy.deepcopy(format) == pickle.loads(pickle.dumps(format)) == format


def test_a_name_with_a_rounding_is_refused_where_the_rounding_would_be_another():
    for text in ("e4m3fn-RN", "E4M3-RZ", "e5m2-inf"):
        with pytest.raises(plumb.Error, match=f"'{text}' is a format with its rounding.*\n.*FPFormat.parse"):
            FPFormat.named(text)
    for read in (FPFormat.named, FPFormat.parse):
        with pytest.raises(plumb.Error, match="is 3, not a text"):
            read(3)
    with pytest.raises(plumb.Error, match="seed is 1.5, not a whole number"):
        FPFormat(4, 3).quantise(torch.ones(2), seed=1.5)


def test_names_have_torchs_spelling_too():
    from plumb import analysis

    for name in ("quantise", "quantise_fwd", "quantise_bwd"):
        assert getattr(FPFormat, name.replace("quantise", "quantize")) is getattr(FPFormat, name)
    assert analysis.visualizer is analysis.visualiser


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_quantise_keeps_dtype_and_shape(dtype):
    x = torch.linspace(-300, 300, 40, dtype=dtype).view(5, 8)
    y = FPFormat(4, 3, "nearest").quantise(x)
    assert y.dtype == dtype and y.shape == x.shape and y.abs().max() == 240 and not y.requires_grad


def test_a_seed_repeats_stochastic_rounding():
    f, x = FPFormat(3, 1), torch.randn(1000)
    assert torch.equal(f.quantise(x, seed=3), f.quantise(x, seed=3))
    assert not torch.equal(f.quantise(x, seed=3), f.quantise(x, seed=4))


def test_forward_and_backward_are_rounded_apart():
    f = FPFormat(2, 1, "nearest")
    x = torch.randn(100, requires_grad=True)
    gradient = torch.randn(100)
    f.quantise_fwd(x).backward(gradient)
    assert torch.equal(x.grad, gradient)
    x.grad = None
    y = f.quantise_bwd(x)
    y.backward(gradient)
    assert torch.equal(y, x) and torch.equal(x.grad, f.quantise(gradient))


def test_simulate_format_honors_rounding_and_random_bits():
    x, model = torch.randn(4, 8), nn.Linear(8, 8, bias=False)
    for f in (FPFormat(4, 3, "nearest"), FPFormat(4, 3, "toward_zero")):
        y = simulate_format(model, f, "none")(x)
        assert torch.equal(y, nn.functional.linear(f.quantise(x), f.quantise(model.weight)))
    entries = {}
    for srbits in (2, 0):
        m = simulate_format(model, FPFormat(4, 3, srbits=srbits), "none")
        m(x)
        entries[srbits] = str(plumb.report(m))
    assert "SR2" in entries[2] and "SR2" not in entries[0]
    with pytest.raises(TypeError):
        simulate_format(model, 8, "none")


# --- formats with shared scales, against OCP Microscaling Formats 1.0 value by value

# exponent bits, mantissa bits, codes that are no numbers, exponent of the largest value (tables 2 to 5 of the specification)
ELEMENTS = {
    "mxfp8e4m3": (4, 3, {0x7F}, 8),
    "mxfp8e5m2": (5, 2, {0x7C, 0x7D, 0x7E, 0x7F}, 15),
    "mxfp6e2m3": (2, 3, set(), 2),
    "mxfp6e3m2": (3, 2, set(), 4),
    "mxfp4": (2, 1, set(), 2),
}


def element_values(name):
    """Magnitudes, by code."""
    exponent_bits, mantissa_bits, excluded, _ = ELEMENTS[name]
    bias = 2 ** (exponent_bits - 1) - 1
    out = []
    for code in range(2 ** (exponent_bits + mantissa_bits)):
        exponent, mantissa = code >> mantissa_bits, (code & (2**mantissa_bits - 1)) / 2**mantissa_bits
        if code not in excluded:
            out.append(math.ldexp(mantissa, 1 - bias) if exponent == 0 else math.ldexp(1 + mantissa, exponent - bias))
    return out


def nearest(x, values):
    """Ties go to the even code; beyond the last is the last."""
    code = min(range(len(values)), key=lambda c: (abs(values[c] - x), c % 2)) if x < values[-1] else len(values) - 1
    return values[code]


def by_specification(row, name, largest):
    values, out = element_values(name), []
    for start in range(0, len(row), 32):
        block = row[start : start + 32]
        most = max((min(abs(x), largest) for x in block if not math.isnan(x)), default=0.0)
        exponent = -127 if most == 0 else min(127, max(-127, math.frexp(most)[1] - 1 - ELEMENTS[name][3]))
        for x in block:
            y = x if math.isnan(x) else math.ldexp(nearest(math.ldexp(abs(x), -exponent), values), exponent)
            out.append(math.copysign(y, x))
    return out


@pytest.mark.parametrize("name", ELEMENTS)
def test_every_code_of_a_shared_scale_and_the_ties_between_them(name):
    format, values = FPFormat.named(name, "nearest"), element_values(name)
    between = [(a + b) / 2 for a, b in zip(values, values[1:])]
    near = [t * (1 + s * 2**-20) for t in between for s in (-1, 1)]
    for exponent in (-100, -3, 0, 60):
        for sign in (1, -1):
            x = torch.tensor([sign * v for v in values + between + near], dtype=torch.float64) * 2.0**exponent
            rows = torch.stack([x, torch.full_like(x, values[-1] * 2.0**exponent)], 1)  # its neighbor fixes the scale
            expected = torch.tensor([by_specification(r, name, 1e300) for r in rows.tolist()], dtype=torch.float64)
            assert torch.equal(format.quantise(rows.float()).double(), expected)
            codes = expected[: len(values), 0]
            assert torch.equal(codes, x[: len(values)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ELEMENTS)
def test_blocks_of_any_length_dimension_and_content(name, dtype):
    torch.manual_seed(2)
    format = FPFormat.named(name, "nearest")
    largest = float(torch.finfo(dtype).max)
    for length in (1, 31, 32, 33, 70):
        x = torch.randn(12, length, dtype=torch.float64) * torch.logspace(-3, 3, 12, dtype=torch.float64)[:, None]
        x[3] = 0
        x[4, :] = -0.0
        x[5, length // 2], x[6, 0], x[7, -1] = math.nan, math.inf, -math.inf
        x[8] = math.nan
        x[9, 0] = 1e-7
        x = x.to(dtype)
        expected = torch.tensor([by_specification(r, name, largest) for r in x.tolist()], dtype=torch.float64).to(dtype)
        y = format.quantise(x)
        assert y.dtype == dtype and torch.equal(torch.nan_to_num(y, nan=123.0), torch.nan_to_num(expected, nan=123.0))
        assert torch.equal(y.signbit()[~y.isnan()], x.signbit()[~x.isnan()])
        columns = format.quantise(x.t().contiguous(), dim=0)
        assert torch.equal(torch.nan_to_num(columns.t(), nan=123.0), torch.nan_to_num(y, nan=123.0))


def test_formats_with_shared_scales_have_names_and_blocks():
    assert FPFormat.named("mxfp8").spec == "mxfp8e4m3-SR" and FPFormat.parse("mxfp6").name == "mxfp6e2m3"
    assert {n: FPFormat.named(n).block_size for n in ("mxfp8", "mxfp6", "mxfp4", "nvfp4", "e4m3fn")} == {
        "mxfp8": 32, "mxfp6": 32, "mxfp4": 32, "nvfp4": 16, "e4m3fn": 0,
    }  # fmt: skip
    x = torch.randn(64, 64)
    f = FPFormat.named("mxfp4")
    assert torch.equal(f.quantise(x, seed=3, dim=0), f.quantise(x, seed=3, dim=0))
    assert not torch.equal(f.quantise(x, seed=3), f.quantise(x, seed=4))
    from plumb.analysis import plot

    with pytest.raises(ValueError, match="mxfp4"):
        plot(tracked_graph(), formats=("mxfp4",))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", [*ELEMENTS, "nvfp4"])
def test_simulate_format_takes_formats_with_shared_scales(name, dtype):
    torch.manual_seed(3)
    f, model = FPFormat.named(name, "nearest"), nn.Linear(40, 24, dtype=dtype)
    x = torch.randn(5, 40, dtype=dtype, requires_grad=True)
    gradient = torch.randn(5, 24, dtype=dtype)
    simulated = simulate_format(model, f, f"{name}-RN")
    y = simulated(x)
    y.backward(gradient)
    qx, qw = (f.quantise(t).requires_grad_() for t in (x, model.weight))
    expected = nn.functional.linear(qx, qw, model.bias.detach())
    expected.backward(f.quantise(gradient))
    assert torch.equal(y, expected) and torch.equal(x.grad, qx.grad) and torch.equal(simulated.weight.grad, qw.grad)


class Scores(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.table = nn.Parameter(torch.randn(64)), nn.Parameter(torch.randn(64, 8))

    def forward(self, x):
        return x @ self.query, self.query @ self.table


def test_blocks_of_an_einsum_run_along_what_it_sums_over():
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(2, 40, 48))

        def forward(self, x):
            return torch.einsum("bei,eio->ebo", torch.einsum("ebi->bei", x), self.w)

    torch.manual_seed(3)
    model, f, g = Experts(), FPFormat.named("mxfp4", "nearest"), FPFormat.named("mxfp6", "nearest")
    x = torch.randn(2, 3, 40, requires_grad=True)
    given = torch.randn(2, 3, 48)
    low = simulate_format(model, f, g)
    grads = torch.autograd.grad(low(x), [x, low.w], given)
    fx, fw, fg = f.quantise(x), f.quantise(model.w, dim=1), g.quantise(given)
    torch.testing.assert_close(low(x), fx @ fw)
    torch.testing.assert_close(grads, (fg @ fw.mT, fx.mT @ fg))


def test_a_vector_that_is_multiplied_has_its_blocks_along_its_one_dimension():
    torch.manual_seed(0)
    model, f = Scores(), FPFormat.named("mxfp4", "nearest")
    x = torch.randn(3, 5, 64)
    scores, row = simulate_format(model, f, f)(x)
    assert torch.equal(scores, f.quantise(x) @ f.quantise(model.query))
    assert torch.equal(row, f.quantise(model.query) @ f.quantise(model.table.T).T)
    (scores.sum() + row.sum()).backward()


# --- analysis


def tracked_graph(backward=True):
    torch.manual_seed(0)
    model = track_scales(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)))
    y = model(torch.randn(16, 8))
    if backward:
        y.sum().backward()
    return model.scales_graph()


def test_a_table_of_a_graph():
    from plumb.analysis import graph_to_dataframe
    from plumb.transforms import Metrics

    table = graph_to_dataframe(tracked_graph())
    assert list(table.columns) == ["layer", "weight tensor", "direction", "tensor type", *Metrics.full_names()]
    assert set(table["tensor type"]) == {"x", "w", "grad_x", "grad_w"}
    row = table[(table["layer"] == "relu") & (table["direction"] == "fwd")].iloc[0]
    assert row["number of elements"] == 128 and row["absolute minimum"] == 0


@pytest.mark.parametrize("backward", [True, False])
def test_a_picture_of_a_graph(backward):
    import matplotlib.pyplot as plt

    from plumb.analysis import plot

    axes = plot(tracked_graph(backward), "a title", "standard deviation", xmin=2**-10, xmax=2**10, formats=("e4m3fn-RN",))
    assert axes.get_title() == "a title" and axes.get_xscale() == "log" and axes.get_xlim() == (2**-10, 2**10)
    labels = [t.get_text() for t in axes.get_yticklabels()]
    assert "0.weight" in labels and "relu" in labels
    legend = [t.get_text() for t in axes.get_legend().get_texts()]
    assert ("backward pass" in legend) == backward
    assert any("e4m3fn max" in t.get_text() for t in axes.texts)
    plt.close("all")
    with pytest.raises(ValueError, match="mean_abs"):
        plot(tracked_graph(), metric="median")


class Words:
    """A tokenizer of characters."""

    pad_token = None
    eos_token = "\n"

    def __call__(self, seqs, max_length, truncation, padding, return_tensors):
        ids = torch.tensor([[ord(c) % 64 for c in s[:max_length]] for s in seqs])
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def test_an_example_batch_needs_no_network(tmp_path):
    from plumb.analysis import example_batch

    ids, mask, labels = example_batch(Words(), 3, 20)
    assert ids.shape == mask.shape == labels.shape == (3, 20)
    assert torch.equal(ids[:, 1:], labels[:, :-1])
    assert torch.equal(example_batch(Words(), 3, 20)[0], ids)
    (tmp_path / "text.txt").write_text("abcdefgh" * 200)
    assert example_batch(Words(), 2, 20, str(tmp_path))[0].shape == (2, 20)
    with pytest.raises(ValueError, match="ask for less"):
        example_batch(Words(), 2000, 20, str(tmp_path / "text.txt"))


def test_visualiser_draws_a_language_model():
    from plumb.analysis import visualiser

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.linear = nn.Embedding(64, 8), nn.Linear(8, 64)

        def forward(self, ids, labels):
            x = self.linear(self.embedding(ids))
            return x, nn.functional.cross_entropy(x.flatten(0, 1), labels.flatten())

    axes = visualiser(Model(), Words(), batch_size=2, seq_len=12)
    assert "embedding.weight" in [t.get_text() for t in axes.get_yticklabels()]


# --- utils


def test_analyse_module_writes_scales_beside_code():
    torch.manual_seed(0)
    x = torch.randn(256, 64, requires_grad=True)
    code = plumb.utils.analyse_module(
        plumb.MHSA(64, 4, is_causal=False), x.view(4, 64, 64), torch.randn(4, 64, 64), syntax_highlight=False
    )
    lines = code.splitlines()
    assert lines[0].startswith("def forward(self, input : Tensor)")
    assert any("U.scaled_dot_product_attention(" in line and "(-> 1." in line for line in lines)
    assert all("(->" in line for line in lines[1:-1] if "unbind" not in line)
    leaf = plumb.utils.analyse_module(
        nn.Sequential(nn.Linear(4, 4)),
        torch.randn(2, 4),
        torch.randn(2, 4),
        recurse_modules=False,
        syntax_highlight=False,
    )
    assert "weight" not in leaf


@pytest.mark.parametrize("title", ["", "a title"])
def test_a_saved_picture_holds_all_of_its_text(title, tmp_path):
    torch.manual_seed(0)
    names = {f"a_module_with_a_long_name_{i}": nn.Linear(8, 8) for i in range(3)}
    model = track_scales(nn.Sequential(OrderedDict(names)))
    model(torch.randn(16, 8)).sum().backward()
    axes = plumb.analysis.plot(model.scales_graph(), title)
    axes.figure.savefig(tmp_path / "scales.png")
    low, high = axes.get_xlim()
    marks = [t for t in axes.get_xticklabels() if low <= t.get_position()[0] <= high]
    texts = [t for t in (*axes.get_yticklabels(), *marks, *axes.texts, axes.title, axes.xaxis.label) if t.get_text()]
    assert len(texts) > 10
    whole = axes.figure.bbox.padded(1)
    for text in texts:
        box = text.get_window_extent()
        assert whole.x0 <= box.x0 and box.x1 <= whole.x1 and whole.y0 <= box.y0 and box.y1 <= whole.y1, text
