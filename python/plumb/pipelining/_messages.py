"""Messages between ranks for a step that runs in Python: values of any number, shape and dtype, each with its header."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist

from .._C import Error

# Beyond the tags of plumb's own transport, and of whoever uses none.
_FIRST_TAG, _TAGS = 0x40300000, 0x3FC00000
_HEADER = 256
_DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip

Values = list["torch.Tensor | None"]


def tag_of(backward: bool, source: int, target: int, microbatch: int, num_stages: int, num_microbatches: int) -> int:
    """The tag of what one stage sends another for a microbatch, so that messages may arrive in any order."""
    number = ((int(backward) * num_stages + source) * num_stages + target) * num_microbatches + microbatch
    if number >= _TAGS:
        raise Error(f"{num_stages} stages and {num_microbatches} microbatches are too many for a step that runs in Python")
    return _FIRST_TAG + number


# For those of `Copies`, of which there is one between two ranks.
TAG_OF_COPIES = _FIRST_TAG + _TAGS


def _header(values: Values, device: torch.device) -> torch.Tensor:
    numbers = [len(values)]
    for value in values:
        if value is None:
            numbers.append(-1)
        elif value.dtype not in _DTYPES:
            raise Error(f"a tensor of {value.dtype} cannot be sent to another rank")
        else:
            numbers += [_DTYPES.index(value.dtype), int(value.requires_grad), value.dim(), *value.shape]
    if len(numbers) > _HEADER:
        raise Error(f"a stage hands on {len(values)} values at once, more than a message's header can describe")
    return torch.tensor(numbers + [0] * (_HEADER - len(numbers)), dtype=torch.int64, device=device)


def _empty(header: torch.Tensor, device: torch.device) -> Values:
    numbers = iter(header.tolist())
    values: Values = []
    for _ in range(next(numbers)):
        if (dtype := next(numbers)) < 0:
            values.append(None)
            continue
        wants_grad, dims = next(numbers), next(numbers)
        shape = [next(numbers) for _ in range(dims)]
        values.append(torch.empty(shape, dtype=_DTYPES[dtype], device=device).requires_grad_(bool(wants_grad)))
    return values


class Send:
    """Values on their way to a rank of the group. ``post()`` sends them, ``wait()`` ends when they have left."""

    def __init__(self, values: Values, peer: int, tag: int, group: Any, device: torch.device):
        self._peer, self._tag, self._group = peer, tag, group
        self._parts = [_header(values, device)]
        self._parts += [v.detach().contiguous() for v in values if v is not None and v.numel() > 0]
        self._works: list[Any] = []

    def post(self) -> Send:
        self._works = [dist.isend(p, group=self._group, tag=self._tag, group_dst=self._peer) for p in self._parts]
        return self

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        self._works, self._parts = [], []


class Receive:
    """Values that a rank of the group sends; ``wait()`` gives them to `take`."""

    def __init__(self, peer: int, tag: int, group: Any, device: torch.device, take: Callable[[Values], None]):
        self._peer, self._tag, self._group, self._device, self._take = peer, tag, group, device, take

    def _receive(self, tensor: torch.Tensor) -> Any:
        return dist.irecv(tensor, group=self._group, tag=self._tag, group_src=self._peer)

    def post(self) -> Receive:
        self._header = torch.zeros(_HEADER, dtype=torch.int64, device=self._device)
        self._work = self._receive(self._header)
        return self

    def wait(self) -> None:
        self._work.wait()
        values = _empty(self._header, self._device)
        for work in [self._receive(v.detach()) for v in values if v is not None and v.numel() > 0]:
            work.wait()
        self._take(values)


def _batch_p2p(p2p_ops: list, desc: str | None = None) -> list:
    """Starts messages (a stage's, or ``dist.P2POp``) and answers what to wait for. Where all of torch's go one way they
    are started one by one, so that none waits for another."""
    own = [op.post() for op in p2p_ops if isinstance(op, (Send, Receive))]
    ops = [op for op in p2p_ops if not isinstance(op, (Send, Receive))]
    kinds = {op.op for op in ops}
    if kinds == {dist.isend}:
        return own + [op.op(op.tensor, group=op.group, tag=op.tag, group_dst=op.group_peer) for op in ops]
    if kinds == {dist.irecv}:
        return own + [op.op(op.tensor, group=op.group, tag=op.tag, group_src=op.group_peer) for op in ops]
    return own + (dist.batch_isend_irecv(ops) if ops else [])


def _sorted_batch_p2p(p2p_ops: list, desc: str | None = None) -> dict[int, list]:
    """The same rank by rank, in ascending order."""
    by_peer: dict[int, list] = {}
    for op in p2p_ops:
        by_peer.setdefault(op.peer, []).append(op)
    return {peer: _batch_p2p(ops, desc) for peer, ops in sorted(by_peer.items())}


def _wait_batch_p2p(work: Iterable) -> None:
    for part in work:
        part.wait()
