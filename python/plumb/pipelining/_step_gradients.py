"""The gradients of a step that runs in Python, with the sums of the engine's steps: microbatches in their order, copies of
a parameter from the last stage to the first, and what was there before the step at last."""

from __future__ import annotations

import contextlib
import hashlib
from collections import deque
from collections.abc import Collection, Iterator
from typing import Any

import torch
import torch.distributed as dist

from .._C import Error
from ._messages import TAG_OF_COPIES, Receive, Send, Values, _batch_p2p, _wait_batch_p2p

Gradients = dict[str, "torch.Tensor | None"]


def names_of(stages: list) -> dict[int, str]:
    """By id of a parameter: the name under which copies of it are known in the whole pipeline."""
    names: dict[int, str] = {}
    for stage in stages:
        for name, parameter in stage.named_parameters():
            own = name if stage.layout is not None else f"stage {stage.stage_index}: {name}"
            names.setdefault(id(parameter), getattr(stage, "tied", {}).get(name, own))
    return names


def _sum(a: torch.Tensor | None, b: torch.Tensor | None) -> torch.Tensor | None:
    return b if a is None else a if b is None else a.add_(b)


class StageGradients:
    """Of one stage. While a step runs, `.grad` is the step's own within `adding` and `complete`, and else unset."""

    def __init__(self, stage: Any, order: list[int]):
        self.parameters = {name: p for name, p in stage.summed_parameters() if p.requires_grad}
        self._order = deque(sorted(order))  # microbatches still to come, as they are added up
        self.own: Gradients = dict.fromkeys(self.parameters)
        self._before = {name: p.grad for name, p in self.parameters.items()}
        self._early: dict[int, Gradients] = {}
        self._put({})

    def _put(self, gradients: Gradients) -> None:
        for name, parameter in self.parameters.items():
            parameter.grad = gradients.get(name)

    def _take(self) -> Gradients:
        taken: Gradients = {name: p.grad for name, p in self.parameters.items()}
        self._put({})
        return taken

    def _add(self, gradients: Gradients) -> None:
        with torch.no_grad():
            for name, gradient in gradients.items():
                self.own[name] = _sum(self.own[name], gradient)

    @contextlib.contextmanager
    def adding(self, microbatch: int) -> Iterator[None]:
        """Around what adds a microbatch's gradients. One that comes before its turn is set aside until then."""
        self._add(self._take())  # what came between actions
        in_turn = not self._order or microbatch <= self._order[0]
        if in_turn:
            self._put(self.own)
        yield
        if not in_turn:
            self._early[microbatch] = self._take()
            return
        self.own = self._take()
        if self._order and self._order[0] == microbatch:
            self._order.popleft()
        while self._order and self._order[0] in self._early:
            self._add(self._early.pop(self._order.popleft()))

    @contextlib.contextmanager
    def complete(self) -> Iterator[None]:
        """Around what is done once all are there."""
        for microbatch in sorted(self._early):
            self._add(self._early.pop(microbatch))
        self._add(self._take())
        self._put(self.own)
        yield
        self.own = self._take()

    def finish(self) -> None:
        """`.grad` is what it was before, and the step's."""
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                before = self._before.pop(name)
                # Stages that hold the very same tensor come here with equal gradients; the first one's stays.
                if before is not None or parameter.grad is None:
                    parameter.grad = _sum(before, self.own[name])


def give_up(stages: Collection[StageGradients]) -> None:
    """After a step that failed: every `.grad` is what it was before."""
    for stage in stages:
        stage._put({})
    for stage in stages:
        for name, before in stage._before.items():
            if before is not None:
                stage.parameters[name].grad = before


class Copies:
    """The parameters that several stages, or one stage on several ranks, hold a copy of. All ranks must make theirs.

    Raises `plumb.Error` if copies differ in shape, type or value.
    """

    def __init__(self, stages: list):
        self._stage = stages[0]
        self._rank, self._size = self._stage.group_rank, self._stage.group_size
        parameters = {
            (s.stage_index, name): p for s in stages for name, p in s.named_parameters() if p.requires_grad
        }
        names = names_of(stages)
        mine = [
            (*place, names[id(p)], str(p.dtype), tuple(p.shape), p.is_meta) for place, p in parameters.items()
        ]
        known = {
            (rank, stage, name): (group, like)
            for rank, theirs in enumerate(self._gather(mine))
            for stage, name, group, *like in theirs
        }
        groups: dict[str, list[tuple[int, int, str]]] = {}
        for place, (group, _) in known.items():
            groups.setdefault(self._name(stages, place, group), []).append(place)
        # From the last stage to the first, as the engine adds.
        self.groups = [sorted(g, key=lambda c: (-c[1], c[0], c[2])) for g in groups.values() if len(g) > 1]
        digests = {
            (self._rank, stage, name): _digest(parameters[stage, name])
            for group in self.groups
            for rank, stage, name in group
            if rank == self._rank
        }
        found = {place: d for theirs in self._gather(digests) for place, d in theirs.items()} if self.groups else {}
        for first, *others in self.groups:
            for other in others:
                if known[first][1] != known[other][1] or found[first] != found[other]:
                    places = " and ".join(f"'{n}' of stage {s} on rank {r}" for r, s, n in (first, other))
                    raise Error(f"copies of one parameter hold different values: {places}\n"
                                "  try: initialise them alike on every rank, or load the same weights")
        self.groups = [g for g in self.groups if any(rank == self._rank for rank, *_ in g)]
        self._like = {place: parameters[place[1:]] for g in self.groups for place in g if place[0] == self._rank}
        self.stages = {stage for rank, stage, _ in self._like}

    @staticmethod
    def _name(stages: list, place: tuple[int, int, str], group: str) -> str:
        """Parameters of a cut model are copies of each other as its table says."""
        _, stage, name = place
        tables = [s.pipe_info.table.replicated for s in stages if s.layout is not None][:1]
        for number, copies in enumerate(tables[0] if tables else ()):
            if copies.get(stage) == name:
                return f"replicated {number}"
        return group

    def _gather(self, value: Any) -> list[Any]:
        if self._size == 1 or dist.get_backend(self._stage.group) == "fake":
            return [value if rank == self._rank else type(value)() for rank in range(self._size)]
        values: list[Any] = [None] * self._size
        dist.all_gather_object(values, value, group=self._stage.group)
        return values

    def _held(self, holder: int, other: int) -> list[tuple[int, int, str]]:
        """The copies of one rank that another holds copies of as well."""
        shared = [g for g in self.groups if any(rank == other for rank, *_ in g)]
        return [place for g in shared for place in g if place[0] == holder]

    def _tag(self, source: int, target: int) -> int:
        return TAG_OF_COPIES + source * self._size + target

    def sum(self, stages: dict[int, StageGradients]) -> None:
        """Gives every copy the sum of all."""
        gradients: dict[tuple[int, int, str], torch.Tensor | None] = {
            place: stages[place[1]].own.get(place[2]) for place in self._like
        }
        group, device = self._stage.group, self._stage.device
        peers = [r for r in range(self._size) if r != self._rank and self._held(self._rank, r)]
        sends = [
            Send(_packed([gradients[c] for c in self._held(self._rank, r)]), r, self._tag(self._rank, r), group, device)
            for r in peers
        ]
        receives = []
        for peer in peers:
            def take(values: Values, copies=self._held(peer, self._rank)) -> None:
                like = [self._like[next(p for p in self._group_of(c) if p in self._like)] for c in copies]
                gradients.update(zip(copies, _unpacked(values, like)))

            receives.append(Receive(peer, self._tag(peer, self._rank), group, device, take))
        works = [_batch_p2p([op]) for op in (*receives, *sends)]
        for work in works:
            _wait_batch_p2p(work)
        with torch.no_grad():
            for copies in self.groups:
                total = None
                for copy in copies:
                    gradient = gradients[copy]
                    if gradient is not None:
                        total = gradient.clone() if total is None else total.add_(gradient)
                for rank, stage, name in copies:
                    if rank == self._rank and name in stages[stage].own:  # not frozen meanwhile
                        stages[stage].own[name] = None if total is None else total.clone()

    def _group_of(self, place: tuple[int, int, str]) -> list[tuple[int, int, str]]:
        return next(g for g in self.groups if place in g)


def _digest(parameter: torch.Tensor) -> str:
    if parameter.is_meta:
        return ""
    data = parameter.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.blake2b(data.numpy().tobytes(), digest_size=16).hexdigest()


def _packed(gradients: list[torch.Tensor | None]) -> Values:
    """Which there are, and their values by dtype: few tensors, however many gradients."""
    there = torch.tensor([g is not None for g in gradients])
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for gradient in gradients:
        if gradient is not None:
            by_dtype.setdefault(gradient.dtype, []).append(gradient.reshape(-1))
    return [there, *(torch.cat(parts) for parts in by_dtype.values())]


def _unpacked(values: Values, like: list[torch.Tensor]) -> list[torch.Tensor | None]:
    there, *flat = values
    rest = {part.dtype: part for part in flat}
    found: list[torch.Tensor | None] = []
    for is_there, parameter in zip(there.tolist(), like):
        if not is_there:
            found.append(None)
            continue
        part = rest[parameter.dtype]
        found.append(part[: parameter.numel()].view(parameter.shape))
        rest[parameter.dtype] = part[parameter.numel() :]
    return found
