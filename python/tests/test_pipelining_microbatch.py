"""Batches to microbatches and back, beside torch's."""

import operator

import pytest
import torch
from pipelines import same
from plumb.pipelining import TensorChunkSpec
from plumb.pipelining.microbatch import (
    _CustomReducer,
    _Replicate,
    merge_chunks,
    split_args_kwargs_into_chunks,
    sum_reducer,
)
from torch.distributed.pipelining import microbatch as torchs
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils import _pytree as pytree

import plumb


def equal(a, b):
    a, b = pytree.tree_leaves(a), pytree.tree_leaves(b)
    return len(a) == len(b) and all(torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y for x, y in zip(a, b))


@pytest.mark.parametrize("chunks", [1, 2, 3, 5])
def test_splitting_is_torchs_and_merging_undoes_it(chunks):
    args = (torch.randn(10, 3), [torch.randn(20), {"a": torch.randn(11, 2)}], 5)
    kwargs = {"x": torch.arange(10), "flag": True, "none": None}
    ours = split_args_kwargs_into_chunks(args, kwargs, chunks)
    theirs = torchs.split_args_kwargs_into_chunks(args, kwargs, chunks)
    assert equal(ours, theirs) and len(ours[0]) == len(ours[1]) == chunks
    assert ours[0][0][2] == 5 and ours[1][0]["flag"] is True
    assert equal(merge_chunks(ours[0], None), args)
    assert equal(merge_chunks(ours[1], None), kwargs)
    assert ours[0][0][0].data_ptr() == args[0].data_ptr()  # parts are views


def test_specs_say_how():
    x, y, mask = torch.randn(4, 6), torch.randn(6), torch.randn(2)
    spec, named = TensorChunkSpec.from_tuple((1,)), TensorChunkSpec.from_dict({"y": 0}) | {"mask": _Replicate()}
    args, kwargs = split_args_kwargs_into_chunks((x,), {"mask": mask, "y": y}, 3, spec, named)
    assert [a[0].shape for a in args] == [(4, 2)] * 3 and all(k["mask"] is mask for k in kwargs)
    assert torch.equal(merge_chunks(args, spec)[0], x)
    assert str(spec[0]) == "TensorChunkSpec(1)" and repr(spec[0]).endswith("TensorChunkSpec(1)")
    args, kwargs = split_args_kwargs_into_chunks((), {"y": y}, 2, spec, None)
    assert args == [(), ()] and same([k["y"] for k in kwargs], y.chunk(2))
    assert split_args_kwargs_into_chunks((3,), None, 2) == ([(3,), (3,)], [{}, {}])


def test_reducers_go_through_microbatches_in_order():
    chunks = [(torch.tensor(float(i)), torch.full((2,), float(i))) for i in range(1, 4)]
    total, joined = merge_chunks(chunks, (sum_reducer, _CustomReducer("", lambda text, t: f"{text}{int(t[0])}")))
    assert total == 6 and joined == "123"
    assert torch.equal(merge_chunks([c[0] for c in chunks], None), torch.tensor([1.0, 2.0, 3.0]))
    assert _CustomReducer(0, operator.add).init_value == 0


@pytest.mark.parametrize(
    "call",
    [
        lambda: split_args_kwargs_into_chunks((torch.ones(4),), None, 2, ()),
        lambda: split_args_kwargs_into_chunks((torch.ones(4),), None, 2, (TensorChunkSpec(1),)),
        lambda: split_args_kwargs_into_chunks((3,), None, 2, (TensorChunkSpec(0),)),
        lambda: split_args_kwargs_into_chunks((), {"a": torch.ones(4)}, 2, None, {"b": TensorChunkSpec(0)}),
        lambda: split_args_kwargs_into_chunks((torch.ones(0, 3),), None, 2),
        lambda: merge_chunks([(1, 2), (1,)], None),
        lambda: merge_chunks([1, 2], None),
        lambda: merge_chunks([torch.ones(2), torch.ones(2)], (TensorChunkSpec(0), TensorChunkSpec(0))),
    ],
)
def test_what_does_not_fit_is_refused(call):
    with pytest.raises((plumb.Error, IndexError)):
        call()


def test_fewer_rows_than_microbatches_make_fewer_microbatches():
    args, kwargs = split_args_kwargs_into_chunks((torch.ones(2, 2),), {"a": torch.ones(8)}, 4)
    assert len(args) == len(kwargs) == 2 and kwargs[0]["a"].shape == (4,)


def test_parts_of_a_leaf_keep_their_gradients():
    x = torch.ones(4, requires_grad=True)
    (args, _) = split_args_kwargs_into_chunks((x,), None, 2)
    (args[0][0] * 3).sum().backward()
    assert torch.equal(args[0][0].grad, torch.full((2,), 3.0)) and args[1][0].grad is None


def test_block_masks_are_cut_along_the_batch():
    def allowed(b, h, q, kv):
        return q * (b + 1) >= kv

    for batch, parts in ((4, 2), (1, 2)):
        mask = create_block_mask(allowed, batch, 1, 64, 64, device="cpu", BLOCK_SIZE=16)
        ours, _ = split_args_kwargs_into_chunks((mask,), None, parts)
        theirs, _ = torchs.split_args_kwargs_into_chunks((mask,), None, parts)
        for (a,), (b,) in zip(ours, theirs):
            assert torch.equal(a.to_dense(), b.to_dense())
            at = [torch.tensor(i) for i in (a.shape[0] - 1, 0, 10, 30)]
            assert torch.equal(torch.as_tensor(a.mask_mod(*at)), torch.as_tensor(b.mask_mod(*at)))


def test_a_sparse_tensor_is_refused_with_what_to_do():
    with pytest.raises(TypeError, match="layout torch.sparse_coo cannot be cut into microbatches\n  try: tensor.to_dense"):
        split_args_kwargs_into_chunks((torch.eye(4).to_sparse(),), None, 2)


def test_distributed_tensors_are_cut_where_they_are(tmp_path):
    import torch.distributed as dist
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = dist.init_device_mesh("cpu", (1,))
        x = distribute_tensor(torch.randn(5, 4), mesh, [Shard(1)])
        args, _ = split_args_kwargs_into_chunks((x,), None, 2)
        assert [a[0].shape for a in args] == [(3, 4), (2, 4)] and args[0][0].placements == (Shard(1),)
        merged = merge_chunks([a[0] for a in args], None)
        assert merged.placements == (Shard(1),) and torch.equal(merged.to_local(), x.to_local())
        other = distribute_tensor(torch.randn(2, 4), mesh, [Replicate()])
        for mixed in (other, torch.randn(2, 4)):
            with pytest.raises(AssertionError, match="different ways"):
                merge_chunks([args[0][0], mixed], None)
    finally:
        dist.destroy_process_group()
