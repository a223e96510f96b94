"""The table of operator facts over everything that torch and plumb register, and which operators files may name."""

import pickle

import pytest
import torch
from torch import nn

import plumb
from plumb import _C


def registered():
    return sorted(torch._C._dispatch_get_all_op_names())


def base(name):
    return name.split(".")[0]


@torch.library.custom_op("facts_py::double", mutates_args=())
def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@double.register_fake
def _(x):
    return torch.empty_like(x)


class Doubles(nn.Module):
    def forward(self, x):
        return torch.ops.facts_py.double(x) + 1


SINCE_2_13 = ["_flash_attention_forward_no_dropout_inplace", "_foreach_clone", "_foreach_mm", "_upsample_lanczos2d_aa", "dim",
              "is_contiguous", "numel", "storage_offset"]  # fmt: skip


def test_every_operator_of_plumb_has_a_row_and_every_row_an_operator():
    rows = {row for row in _C.operator_table() if not row.endswith("::")}
    operators = {base(name) for name in registered()} | {"pippy::_pipe_split", "transformers::grouped_mm_fallback"}
    operators |= {"aten::cholesky", "aten::qr"}  # until torch 2.13
    if torch.__version__ < "2.13":
        operators |= {f"aten::{name}" for name in SINCE_2_13}
    assert sorted({name for name in operators if name.startswith("plumb::")} - rows) == []
    assert sorted(rows - operators) == []


def test_files_name_arithmetic_of_torch_and_plumb_only():
    allowed = {name for name in registered() if _C.refused_in_files(name) is None}
    assert {name.split("::")[0] for name in allowed} <= {"aten", "prims", "plumb", "pippy"}
    # Whatever is about files, raw memory, devices' streams, other processes or Python is not among them.
    for word in ("file", "print", "storage", "stream", "ptr", "prepack", "fbgemm", "cudnn", "miopen", "mkldnn", "quantize_per",
                 "sparse", "nested", "_test_", "set_data", "unsafe_tensor", "python", "pin_memory", "_dual", "batch_dim"):  # fmt: skip
        found = {name for name in allowed if word in name and not name.startswith("aten::fake_quantize")}
        found -= {"aten::storage_offset", "aten::sym_storage_offset", "aten::_scaled_dot_product_cudnn_attention"}
        assert found == set(), word


def test_a_row_says_why_where_files_may_not():
    for row in _C.operator_table():
        message = _C.refused_in_files(row)
        assert (message is None) == (_C.operator_facts(row)["refused"] == ""), row
        assert message is None or (message.startswith(row) and " may not stand in a file: " in message)


def test_operators_of_others_run_live_and_stand_in_files_once_allowed(tmp_path):
    x = torch.randn(3)
    graph = plumb.capture(Doubles(), x)
    assert torch.equal(graph(x), x * 2 + 1)
    assert torch.equal(pickle.loads(pickle.dumps(graph))(x), x * 2 + 1)  # a pickle runs code anyway
    path, torchs = tmp_path / "doubles.pt2", tmp_path / "torchs.pt2"
    torch.export.save(torch.export.export(Doubles(), (x,)), torchs)
    ways = [
        lambda: plumb.save_pt2(graph, path),
        lambda: plumb.load_pt2(torchs),
        lambda: plumb.parse_graph(str(graph.graph)),
    ]
    for way in ways:
        with pytest.raises(plumb.Error, match="facts_py::double may not stand in a file") as error:
            way()
        assert 'plumb.allow_operators("facts_py::double")' in str(error.value)
    assert not path.exists()
    plumb.allow_operators("facts_py::double")
    for way in ways:
        way()
    for file in (path, torchs):
        assert torch.equal(plumb.load_pt2(file)(x), x * 2 + 1)


# Each with the operator of its derivative that a file may name, or may not.
DERIVATIVES = {
    "gelu_backward": (nn.functional.gelu, True),
    "_softmax_backward_data": (lambda x: x.softmax(-1), True),
    "convolution_backward": (lambda x: nn.functional.conv2d(x, torch.ones(4, 4, 3, 3)), True),
    "max_pool2d_with_indices_backward": (lambda x: nn.functional.max_pool2d(x, 2), False),
    "native_layer_norm_backward": (lambda x: nn.functional.layer_norm(x, (8,)), False),
    "upsample_bilinear2d_backward": (lambda x: nn.functional.interpolate(x, scale_factor=2, mode="bilinear"), False),
    "_index_put_impl_": (lambda x: x[torch.tensor([0, 0])], False),
}


@pytest.mark.parametrize("name", DERIVATIVES)
def test_what_is_saved_can_be_loaded(name, tmp_path):
    function, may_stand = DERIVATIVES[name]

    class Derivative(nn.Module):
        def forward(self, x):
            x = x.detach().requires_grad_()
            return torch.autograd.grad(function(x).square().sum(), x, create_graph=True)[0]

    torch.manual_seed(0)
    x = torch.randn(2, 4, 8, 8)
    graph = plumb.capture(Derivative(), x)
    assert any(node.target.startswith(f"aten::{name}") for node in graph.graph.nodes)
    path = tmp_path / "derivative.pt2"
    if may_stand:
        plumb.save_pt2(graph, path)
        assert torch.equal(plumb.load_pt2(path)(x), Derivative()(x))
    else:
        with pytest.raises(plumb.Error, match=f"aten::{name} may not stand in a file") as error:
            plumb.save_pt2(graph, path)
        assert error.value.kind == plumb.ErrorKind.Unsupported and "allow_operators" in error.value.remedy
        assert not path.exists()


@pytest.mark.parametrize("name", ["aten", "plumb", "", "aten::", "facts_py::double.default", "a b"])
def test_allowing_takes_names_of_operators_or_of_others_namespaces(name):
    with pytest.raises(plumb.Error, match="allow_operators"):
        plumb.allow_operators(name)


def test_every_operator_has_a_kernel_for_any_device():
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    ours = [s for s in torch._C._jit_get_all_schemas() if s.name.startswith("plumb::")]
    names = {s.name + (f".{s.overload_name}" if s.overload_name else "") for s in ours}
    assert len(names) > 90
    composite = ("CompositeExplicitAutograd", "CompositeImplicitAutograd")
    assert [n for n in sorted(names) if not any(has(n, key) for key in composite)] == []
