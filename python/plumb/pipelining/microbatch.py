"""Batches to microbatches and back."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from .._state import is_distributed, is_of
from ._utils import InvalidSchedule, InvalidType, InvalidValue

__all__ = ["TensorChunkSpec", "merge_chunks", "split_args_kwargs_into_chunks"]

DEFAULT_CHUNK_DIM = 0


@dataclass(unsafe_hash=True, repr=False)
class TensorChunkSpec:
    """A tensor that is cut along a dimension."""

    split_dim: int

    def __repr__(self):
        return f"{type(self).__module__}.{type(self).__name__}({self.split_dim})"

    def __str__(self):
        return f"TensorChunkSpec({self.split_dim})"

    @staticmethod
    def from_tuple(chunk_dims: tuple[int, ...]) -> Any:
        """``(0, 1)``: the first argument is cut along dimension 0, the second along 1. May be nested."""
        return pytree.tree_map(TensorChunkSpec, chunk_dims)

    @staticmethod
    def from_dict(chunk_dims: dict[str, int]) -> Any:
        """Returns the specs by the arguments' names."""
        return pytree.tree_map(TensorChunkSpec, chunk_dims)


class _Replicate:
    """A value that every microbatch gets whole."""


@dataclass
class _CustomReducer:
    """Merges the values of all microbatches: ``reduce_fn(reduce_fn(init_value, first), second)`` and so on."""

    init_value: Any
    reduce_fn: Callable[[Any, Any], Any]


class _LossReducer(_CustomReducer):
    pass


sum_reducer = _LossReducer(torch.tensor(0.0), operator.add)


def _is_block_mask(value) -> bool:
    return is_of(value, "torch.nn.attention.flex_attention", "BlockMask")


def _is_replicated(spec) -> bool:
    return spec is _Replicate or isinstance(spec, _Replicate)


def _default_spec(value):
    cut = _is_block_mask(value) or (isinstance(value, torch.Tensor) and value.dim() > 0)
    return TensorChunkSpec(DEFAULT_CHUNK_DIM) if cut else _Replicate()


def bounds(length: int, chunks: int) -> list[tuple[int, int]]:
    """Returns the bounds of `chunks` parts of a length; the first ones are one longer if it does not divide."""
    quotient, rest = divmod(length, chunks)
    starts = [i * quotient + min(i, rest) for i in range(chunks + 1)]
    return list(zip(starts, starts[1:]))


def _distributed_like(first, local: torch.Tensor, dim: int, length: int) -> torch.Tensor:
    """Returns a DTensor of this length along `dim`, of which this rank holds `local`."""
    shape = list(first.shape)
    shape[dim] = length
    how = {"run_check": False, "shape": torch.Size(shape), "stride": first.stride()}
    return type(first).from_local(local, first.device_mesh, first.placements, **how)


def _split_tensor(tensor: torch.Tensor, spec: TensorChunkSpec, num_chunks: int) -> list[torch.Tensor]:
    """Views of a tensor. A leaf's parts keep their own gradients too, as parts of a batch are inputs of a stage."""
    dim = spec.split_dim
    if not -tensor.dim() <= dim < tensor.dim():
        raise InvalidSchedule(f"a tensor of sizes {list(tensor.shape)} cannot be cut along dimension {dim}")
    if tensor.shape[dim] < num_chunks:
        raise InvalidSchedule(
            f"a tensor of sizes {list(tensor.shape)} cannot be cut into {num_chunks} microbatches along dimension {dim}"
        )
    if tensor.layout not in (torch.strided, torch.jagged):
        raise InvalidType(
            f"a tensor of layout {tensor.layout} cannot be cut into microbatches",
            remedy="tensor.to_dense(), or parts cut by yourself as arg_mbs, kwarg_mbs and target_mbs",
        )
    if is_distributed(tensor):
        # Every rank cuts what it holds: no communication, and the placements stay.
        locals_and_bounds = zip(torch.tensor_split(tensor.to_local(), num_chunks, dim), bounds(tensor.shape[dim], num_chunks))
        return [_distributed_like(tensor, local, dim, end - start) for local, (start, end) in locals_and_bounds]
    parts = list(torch.tensor_split(tensor, num_chunks, dim))
    if tensor.requires_grad and tensor.is_leaf:
        for part in parts:
            part.retain_grad()
    return parts


def _split_block_mask(block_mask, num_chunks: int) -> list:
    batch = block_mask.kv_num_blocks.size(0)
    if batch == 1:  # holds for any batch
        return [block_mask] * num_chunks
    if batch < num_chunks:
        raise InvalidSchedule(f"a block mask for a batch of {batch} cannot be cut into {num_chunks} microbatches")

    def shifted(by: int):
        return lambda b, h, q, kv: block_mask.mask_mod(b + by, h, q, kv)

    parts = []
    for start, end in bounds(batch, num_chunks):
        parts.append(block_mask[start:end])
        parts[-1].mask_mod = shifted(start)
    return parts


def _length(value, spec) -> int | None:
    """Returns how many rows there are to cut; None for what goes to every microbatch whole."""
    if _is_replicated(spec):
        return None
    if not isinstance(spec, TensorChunkSpec) or not (isinstance(value, torch.Tensor) or _is_block_mask(value)):
        raise InvalidValue(f"a value of type {type(value).__name__} cannot be cut as {spec} says")
    if isinstance(value, torch.Tensor):
        return value.size(spec.split_dim)
    if spec.split_dim != 0:
        raise InvalidSchedule("a block mask is cut along dimension 0")
    return None if value.kv_num_blocks.size(0) == 1 else value.kv_num_blocks.size(0)


def _split_value(value, spec, chunks: int) -> list:
    if _is_replicated(spec):
        return [value] * chunks
    if _is_block_mask(value):
        return _split_block_mask(value, chunks)
    return _split_tensor(value, spec, chunks)


def split_args_kwargs_into_chunks(
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None,
    chunks: int,
    args_chunk_spec: tuple[Any, ...] | None = None,
    kwargs_chunk_spec: dict[str, Any] | None = None,
) -> tuple[list[tuple], list[dict]]:
    """Returns the arguments of every microbatch.

    Specs have the structure of the arguments: a `TensorChunkSpec`, or `_Replicate` for what every microbatch gets
    whole. Without specs tensors are cut along dimension 0 and everything else is replicated. Where the batch does not
    divide the first microbatches get one row more. Fewer than `chunks` microbatches come back where a tensor has fewer
    rows.
    """
    return split_into_chunks(args, kwargs, chunks, args_chunk_spec, kwargs_chunk_spec)[:2]


def check_lengths(lengths: list[int], chunks: int, names: list[str]) -> None:
    """Refuses rows of a batch that do not lie in the same microbatches: other lengths, unless microbatches divide each."""
    for length, name in zip(lengths, names):
        if length != lengths[0] and any(n % chunks for n in lengths):
            raise InvalidSchedule(
                f"{name} of {length} rows is not cut into {chunks} microbatches beside {names[0]} of {lengths[0]} rows",
                remedy="as many rows in all; for what every microbatch gets whole a chunk spec, _Replicate()",
            )


def split_into_chunks(
    args: tuple[Any, ...], kwargs: dict[str, Any] | None, chunks: int, args_chunk_spec=None, kwargs_chunk_spec=None
) -> tuple[list[tuple], list[dict], list[int]]:
    """Returns also the lengths of what was cut."""
    whole = (tuple(args), dict(kwargs or {}))
    given = (args_chunk_spec if whole[0] else None, kwargs_chunk_spec if whole[1] else None)
    specs = tuple(
        pytree.tree_map(_default_spec, values, is_leaf=_is_block_mask) if spec is None else spec
        for values, spec in zip(whole, given)
    )
    # Dicts are compared by their keys, not by the order in which these were written.
    specs = (tuple(specs[0]), {key: specs[1][key] for key in whole[1] if key in specs[1]} | dict(specs[1]))
    values, structure = pytree.tree_flatten(whole, is_leaf=_is_block_mask)
    flat_specs = pytree.tree_leaves(specs)
    if len(flat_specs) != len(values) or len(specs[0]) != len(whole[0]) or specs[1].keys() != whole[1].keys():
        raise InvalidSchedule(
            f"the chunk specs are for {len(specs[0])} positional arguments and {list(specs[1])}, and there are "
            f"{len(whole[0])} and {list(whole[1])}"
        )
    lengths = [length for value, spec in zip(values, flat_specs) if (length := _length(value, spec)) is not None]
    real = min([chunks, *lengths])
    if real < 1:
        raise InvalidSchedule("an argument with no rows cannot be cut into microbatches")
    parts = [_split_value(value, spec, real) for value, spec in zip(values, flat_specs)]
    split = [pytree.tree_unflatten([part[i] for part in parts], structure) for i in range(real)]
    return [args for args, _ in split], [kwargs for _, kwargs in split], lengths


def _concatenate(values: list, dim: int):
    first = values[0]
    if any(map(is_distributed, values)):
        if not all(map(is_distributed, values)) or any(value.placements != first.placements for value in values):
            raise InvalidSchedule("the microbatches' outputs are distributed in different ways and cannot be merged")
        local = torch.cat([value.to_local() for value in values], dim)
        return _distributed_like(first, local, dim, sum(value.shape[dim] for value in values))
    return torch.stack(values) if first.dim() == 0 else torch.cat(values, dim)


def merge_chunks(chunks: list[Any], chunk_spec) -> Any:
    """Returns the microbatches' values as one.

    `chunk_spec` has their structure: `TensorChunkSpec` concatenates (numbers are stacked), `_CustomReducer` reduces,
    anything else stands for values that are equal in all microbatches. None: tensors are concatenated along dimension
    0, and everything else has to be equal.
    """
    flat = [pytree.tree_flatten(chunk) for chunk in chunks]
    if chunk_spec is None:
        structure = flat[0][1]
        specs = [TensorChunkSpec(DEFAULT_CHUNK_DIM) if isinstance(v, torch.Tensor) else None for v in flat[0][0]]
        if other := next((i for i, (_, each) in enumerate(flat) if each != structure), None):
            raise InvalidValue(
                f"the outputs of microbatch {other} have another structure than those of microbatch 0: {flat[other][1]}, {structure}",
                remedy="step(..., return_outputs=False), or outputs of one structure",
            )
    else:
        specs, structure = pytree.tree_flatten(chunk_spec)
    for values, _ in flat:
        if len(values) != len(specs):
            raise InvalidValue(f"a microbatch's value {values} does not fit the chunk spec {chunk_spec}")
    merged = []
    for spec, values in zip(specs, zip(*(values for values, _ in flat))):
        if isinstance(spec, TensorChunkSpec):
            merged.append(_concatenate(list(values), spec.split_dim))
        elif isinstance(spec, _CustomReducer):
            merged.append(functools.reduce(spec.reduce_fn, values, spec.init_value))
        elif all(_equal(value, values[0]) for value in values):
            merged.append(values[0])
        else:
            raise InvalidSchedule(f"the microbatches' values differ and nothing says how to merge them: {values}")
    return pytree.tree_unflatten(merged, structure)


def _equal(a, b) -> bool:
    both = isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)
    return torch.equal(a, b) if both else bool(a == b)
