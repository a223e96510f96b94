"""`plan`, which chooses a model's cut, ranks and schedule, and its result, `Plan`."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from numbers import Real
from typing import TYPE_CHECKING, Any

import torch

from .. import _C
from .._arguments import checked
from .._errors import Error, ErrorKind
from ._sources import Source, SplitPolicy, make_source, multi_use_arguments, refuse_no_parameters

if TYPE_CHECKING:
    from ._IR import CutPipe
    from ._sources import MultiUseParamSpec


class Plan(SplitPolicy):
    """A cut, the rank of each stage, the order of the work, and what is computed again. Made by `plan`, or read from a file
    of `plumb plan -o`.

    ::

        best = plumb.pipelining.plan(model, (x,), ranks=4)
        pipe = pipeline(model, (x,), split_policy=best)
        schedule = ScheduleTable(best.build_stages(pipe, rank, "cpu"), best.microbatches, loss_fn, table=best.schedule)

    Attributes: ``schedule``, the time table; ``cut``, for each stage but the first the value that its first operator
    makes; ``recompute``, by stage; ``transmit``, shared parameters that are sent; ``ranks``, ``microbatches``, ``replicas``;
    ``seconds`` and ``memory``, the predicted time of a step and bytes by rank. After `plan` also ``rows``, a dict for every
    schedule that was compared; ``conclusion``, a sentence; ``spread``, how far the mean of the measured times is above the
    least.
    """

    def __init__(self, plan: str | os.PathLike | _C.Plan):
        if not isinstance(plan, (str, os.PathLike, _C.Plan)):
            raise Error(f"the plan is a {type(plan).__name__}", remedy="the path of a file of plumb plan -o, or plan(model, ...)")
        self._plan = plan if isinstance(plan, _C.Plan) else _C.read_plan(os.fspath(plan))
        self._planned: Any = None
        self._name = ""
        self.rows: list[dict[str, Any]] = []
        self.conclusion, self.spread = "", 0.0

    schedule = property(lambda self: self._plan.schedule)
    cut = property(lambda self: self._plan.cut)
    recompute = property(lambda self: self._plan.recompute)
    transmit = property(lambda self: self._plan.transmit)
    replicas = property(lambda self: self._plan.replicas)
    seconds = property(lambda self: self._plan.seconds)
    memory = property(lambda self: self._plan.memory)
    ranks = property(lambda self: self._plan.schedule.num_ranks)
    microbatches = property(lambda self: self._plan.schedule.num_microbatches)

    def cuts(self, source: Source) -> dict[str, Any]:
        _C.check_plan_fits(self._plan.operators, source.engine)
        sent = self._plan.transmit
        by_name = {name: True for name in sent if name != "all"}
        refuse_no_parameters(by_name, source, "the plan's transmit")
        return {"before_values": self.cut, "transmit": "all" in sent, "transmit_by_name": by_name}

    @checked
    def build_stages(self, pipe: CutPipe, rank: int, device: torch.device | str, group: Any = None) -> list[Any]:
        """Returns the stages of a rank, for a schedule to run."""
        if not hasattr(pipe, "build_stage"):
            raise Error(f"the pipe is a {type(pipe).__name__}", remedy="pipeline(model, inputs, split_policy=plan)")
        if pipe.num_stages != self.schedule.num_stages:
            raise Error(
                f"the pipe has {pipe.num_stages} stages, and the plan {self.schedule.num_stages}",
                kind=ErrorKind.StructureMismatch,
                remedy="pipeline(model, inputs, split_policy=plan), with the model that was planned; else plan again",
            )
        if not 0 <= rank < self.ranks:
            raise Error(f"there is no rank {rank}: the plan is for {self.ranks}", remedy=f"a rank from 0 to {self.ranks - 1}")
        here = self.schedule.stages_of(rank)
        return [pipe.build_stage(s, device, group, recompute=self.recompute[s]) for s in here]

    def save(self, path: str | os.PathLike) -> None:
        """Writes the file that `plumb train --plan` takes."""
        self._plan.save(os.fspath(path))

    def page(self, path: str | os.PathLike, model: str = "the model") -> None:
        """Writes an HTML page: the time line beside the best named schedule's, memory by rank, all schedules. For a plan
        that `plan` made."""
        if self._planned is None:
            raise Error(
                "a plan from a file, and a copy of a plan, have no costs to show",
                kind=ErrorKind.InvalidState,
                remedy="plumb.pipelining.plan(model, ...)",
            )
        self._planned.page(self._name, model, os.fspath(path))

    def __getstate__(self) -> dict[str, Any]:
        """Returns the plan without the costs, which a copy does not have."""
        return {**self.__dict__, "_planned": None}

    def __repr__(self) -> str:
        table = self.schedule
        return f"<Plan: {table.name}, {table.num_stages} stages on {self.ranks} ranks, {self.microbatches} microbatches>"


@checked
def plan(
    module: Any,
    mb_args: tuple[Any, ...] = (),
    mb_kwargs: dict[str, Any] | None = None,
    *,
    ranks: int,
    microbatches: int | None = None,
    replicas: int = 1,
    memory: float | None = None,
    link: tuple[float, float] = (2.0, 50.0),
    multi_use_param_spec: MultiUseParamSpec | None = None,
    loss: str | Callable[..., torch.Tensor] | None = None,
    stages_per_rank: Sequence[int] = (1, 2, 3),
    schedules: Sequence[str] = (),
    take: str = "",
    estimate: bool = False,
    tables: int = 0,
) -> Plan:
    """Measures a model's costs in this process, and returns the quickest plan for `ranks` processes.

    Args:
        module, mb_args, mb_kwargs: as for `pipeline`: the model, and example inputs of one microbatch.
        microbatches: parts of a batch. Default: twice the ranks.
        replicas: equal pipelines beside each other.
        memory: bytes that a rank may take, AdamW's state among them. Default: what the quickest named schedule takes.
        link: between ranks: GB a second, and microseconds that a message takes whatever its size. Plan for the slowest.
        multi_use_param_spec: as for `pipeline`, which takes it from the plan. TRANSMIT keeps the bits of one process where
            stages share a parameter, and takes its messages.
        loss: of the outputs: a function, "cross_entropy", "mse", "output" (the model returns it) or "none". Default: the
            model's own, else cross_entropy.
        stages_per_rank, schedules: what is compared; see `plumb plan --help`.
        take: the name of one that was compared, in the place of the quickest.
        estimate: do not run the model; costs from shapes.
        tables: so many are compared by the search at most. 0: the default, half a minute for 16 ranks.

    Costs are processor time, the mean of several runs with as many cores at work as there are ranks. Raises
    `plumb.Error`, for a limit that no schedule keeps also.
    """
    if not (isinstance(link, (tuple, list)) and len(link) == 2 and all(isinstance(number, Real) for number in link)):
        raise Error(f"link is {link!r}", remedy="GB a second, and microseconds a message: link=(2.0, 50.0)")
    for name, number in (("ranks", ranks), ("microbatches", microbatches), ("replicas", replicas), ("tables", tables)):
        if number is not None and abs(number) >= 2**31:
            raise Error(f"{name} is {number}", remedy="as many as there can be")
    for name, given, kind in (("stages_per_rank", stages_per_rank, int), ("schedules", schedules, str)):
        if not isinstance(given, Sequence) or isinstance(given, str) or not all(isinstance(one, kind) for one in given):
            raise Error(f"{name} is {given!r}", remedy="a list: stages_per_rank=[1, 2], schedules=['1F1B']")
    if not (loss is None or isinstance(loss, str) or callable(loss)):
        raise Error(f"loss is a {type(loss).__name__}", remedy="a function of the outputs, or the name of a loss")
    source, _ = make_source(module, mb_args, mb_kwargs)
    sent = multi_use_arguments(multi_use_param_spec, source)
    transmit = [name for name, whether in sent.get("transmit_by_name", {}).items() if whether]
    transmit += ["all"] if sent.get("transmit") else []
    planned = _C.plan_model(
        source.engine, source.example, ranks=ranks, microbatches=2 * ranks if microbatches is None else microbatches,
        replicas=replicas, memory=memory, loss=loss, link=link, stages_per_rank=list(stages_per_rank),
        names=list(schedules), transmit=transmit, estimate=estimate, tables=tables,
    )  # fmt: skip
    made = Plan(planned.plan(take))
    made._planned, made._name = planned, take
    made.rows, made.conclusion, made.spread = planned.rows, planned.conclusion(take), planned.spread
    return made
