"""Checkpoints of a training run: :func:`save` and :func:`load`, and :class:`Writer` for saving in the background.

A checkpoint is a folder ``step-00000120`` of safetensors files and one ``checkpoint.json``; there is no pickle in it. Tensors
have the model's own names, the optimizer's state is ``exp_avg/NAME`` and the like. It is there whole or not at all, may be
loaded at another cut, and is read by ``transformers``, ``safetensors`` and ``torch.distributed.checkpoint``.
"""

from __future__ import annotations

import json
import os
import reprlib
import uuid
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Union

import torch
import torch.distributed as dist
from torch import Tensor, nn

from . import _C
from ._arguments import checked
from ._C import Checkpoint
from ._errors import Error, ErrorKind, InvalidType
from ._plain_state import from_plain, to_plain
from ._state import refuse_sharded, unwrapped
from ._unit_scaled import MARK
from .parameter import has_parameter_data

Model = Union[nn.Module, Mapping[str, Tensor], Iterable[Any], Any]

__all__ = ["Checkpoint", "Writer", "load", "newest", "save"]

_ABOUT_WEIGHTS = {"unit_scaled", "tagged"}  # keys of a checkpoint's document; older ones lack some


def _parts(model: Model) -> Iterator[Mapping[str, Any]]:
    if isinstance(model, Mapping):
        yield model
    elif isinstance(model, nn.Module):
        yield unwrapped(model).state_dict(keep_vars=True)
    elif hasattr(model, "submod"):  # a stage
        yield from _parts(model.submod)
    elif hasattr(model, "_stages"):  # a schedule of several
        yield from _parts(model._stages)
    elif hasattr(model, "_stage"):
        yield from _parts(model._stage)
    elif isinstance(model, (list, tuple)):
        for part in model:
            yield from _parts(part)
    else:
        raise Error(
            f"a checkpoint cannot be made of a {type(model).__name__}",
            remedy="give a module, a stage, a schedule, a dict of tensors, or a list of these",
        )


def _tensors(model: Model) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for part in _parts(model):
        for name, value in part.items():
            if not isinstance(value, Tensor):
                raise Error(
                    f"'{name}' of the model's state_dict is a {type(value).__name__}, no tensor",
                    kind=ErrorKind.Unsupported,
                    remedy="keep it in state=..., and give the tensors: {name: t for name, t in "
                    "model.state_dict(keep_vars=True).items() if isinstance(t, torch.Tensor)}",
                )
            remedy = "use torch.distributed.checkpoint for FSDP modules, or give a dict of full tensors"
            refuse_sharded(name, value, "a checkpoint holds", remedy)
            found.setdefault(name, value)
    return found


def _tags(tensors: Mapping[str, Tensor]) -> dict[str, bool]:
    """Returns for each parameter if it has the tag of unit-scaled weights, which stages' parameters have, too. A dict's plain
    tensors do not tell."""
    return {name: has_parameter_data(t) for name, t in tensors.items() if isinstance(t, nn.Parameter)}


def _is_marked(names: Iterable[str]) -> bool:
    return any(name.endswith(MARK) for name in names)


def _refuse_other_weights(checkpoint: Checkpoint, document: Any, model: Model, tensors: Mapping[str, Tensor]) -> None:
    """Refuses plain weights for a unit-scaled model and the reverse, before anything is changed."""
    document = document if isinstance(document, dict) else {}
    scaled, here = document.get("unit_scaled"), _tags(tensors)
    saved = document.get("tagged")  # older checkpoints do not say it
    saved = saved if isinstance(saved, dict) else {}
    other = next((name for name, tag in here.items() if saved.get(name, tag) != tag), None)
    of = f" ('{other}')" if other else ""
    if (other and here[other]) or (scaled is False and _is_marked(tensors)):
        raise Error(
            f"{checkpoint.folder}: its weights are plain, and the model is unit-scaled{of}",
            kind=ErrorKind.InvalidState,
            remedy="load it into the plain model, then plumb.transforms.unit_scale it (of a captured graph preserve=True keeps what it computes)",
        )
    if other or (scaled is True and isinstance(model, nn.Module) and not (any(here.values()) or _is_marked(tensors))):
        raise Error(
            f"{checkpoint.folder}: its weights are unit-scaled, and the model is not{of}",
            kind=ErrorKind.InvalidState,
            remedy="load it into the unit-scaled model, then plumb.transforms.fold",
        )


def _names(tensors: dict[str, Tensor]) -> dict[int, str]:
    return {id(tensor): name for name, tensor in reversed(tensors.items())}  # the first of several


def _named(
    optimizer: torch.optim.Optimizer, names: Mapping[int, str]
) -> Iterator[tuple[dict, list[tuple[str, Tensor]]]]:
    """Groups with the names of their parameters."""
    for group in optimizer.param_groups:
        unknown = [tuple(p.shape) for p in group["params"] if id(p) not in names]
        if unknown:
            raise Error(
                f"the optimizer has a parameter of shape {unknown[0]} that is none of the model's",
                remedy="give the model whose parameters the optimizer steps",
            )
        yield group, [(names[id(p)], p) for p in group["params"]]


def _refuse_other_optimizers(optimizer: Any) -> None:
    if optimizer is not None and not (hasattr(optimizer, "param_groups") and hasattr(optimizer, "state")):
        raise InvalidType(
            f"the optimizer is a {type(optimizer).__name__}",
            remedy="one optimizer of torch's or plumb's; of several each in a folder of its own, with the model that it steps",
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise Error(
            "the state of LBFGS is lists of tensors, which a checkpoint does not hold",
            kind=ErrorKind.Unsupported,
            remedy="save and load without it, and keep its state_dict() by torch.save",
        )


def _plain(value: Any, what: str) -> Any:
    """Returns an option or state of an optimizer as JSON that comes back the same."""
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    plain = list(value) if isinstance(value, tuple) else value
    try:
        if json.loads(json.dumps(plain, allow_nan=False)) == plain:
            return plain
    except (TypeError, ValueError):
        pass
    raise Error(
        f"{what} is {reprlib.repr(value)}, which JSON cannot hold", kind=ErrorKind.Unsupported, remedy="set it after loading"
    )


def _optimizer_part(optimizer: Any, names: Mapping[int, str]) -> tuple[list[tuple[str, Tensor]], dict[str, Any]]:
    tensors: list[tuple[str, Tensor]] = []
    groups, values = [], {}
    for group, members in _named(optimizer, names):
        options = {
            k: _plain(v, f"the optimizer's '{k}'") for k, v in group.items() if k not in ("params", "param_names")
        }
        groups.append({"params": [name for name, _ in members], "options": options})
        for name, parameter in members:
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    tensors.append((f"{key}/{name}", value))
                elif value is not None:
                    values[f"{key}/{name}"] = _plain(value, f"the optimizer's '{key}' of '{name}'")
    return tensors, {"groups": groups, "values": values}


@checked
class Writer:
    """Writes checkpoints of a run into `folder`, by default while training goes on.

    With a process group (`group`, or the default one if there is one) every rank makes a writer and saves its part: its
    stages and its optimizer. A tensor that several ranks have is written by the first of them.

    No other writer may use the folder until this one is closed: by :meth:`close`, at the end of a ``with`` block, or
    when nothing refers to it any more.

    Args:
        folder: the run's; all ranks see the same.
        keep_last, keep_every: number of the newest that are kept (0: all), and those of steps that `keep_every` divides.
        background: :meth:`save` copies and returns; a thread writes. A save while that lasts waits for it.
        timeout: seconds that a rank waits for the others.
        group: the ranks that have the parts of the model.
    """

    def __init__(
        self,
        folder: str | os.PathLike,
        *,
        keep_last: int = 2,
        keep_every: int = 0,
        background: bool = True,
        timeout: float = 300.0,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self._together = dist.is_available() and dist.is_initialized()
        self._group = group
        self._rank = dist.get_rank(group) if self._together else 0
        self._size = dist.get_world_size(group) if self._together else 1
        # In order: rank 0 removes what dead runs have left before any rank saves.
        run = self._gather(uuid.uuid4().hex)[0]
        self._writer = _C.CheckpointWriter(
            os.fspath(folder), self._rank, self._size, run, keep_last, keep_every, background, timeout
        )
        self._gather(None)

    def _gather(self, value: Any) -> list[Any]:
        values = [value] * self._size
        if self._size > 1:
            dist.all_gather_object(values, value, group=self._group)
        return values

    def save(
        self, model: Model, optimizer: torch.optim.Optimizer | None = None, *, step: int, state: Any = None
    ) -> None:
        """Saves the model (a module, a stage, a schedule, a dict of tensors, or a list of these), the optimizer over its
        parameters, and `state`: numbers, texts, bytes, tensors, arrays, lists, tuples and dicts, as a schedule's state_dict()
        or a generator's get_state() is; that of rank 0 counts. All ranks call it.

        What befalls files and other ranks does not raise: see :meth:`problem`."""
        _refuse_other_optimizers(optimizer)
        tensors = _tensors(model)
        own: list[tuple[str, Tensor]] = []
        about: dict[str, Any] = {"groups": [], "values": {}}
        if optimizer is not None:
            own, about = _optimizer_part(optimizer, _names(tensors))
        of_ranks = self._gather((list(tensors), [name for name, _ in own], about, _tags(tensors)))
        marked = any(_is_marked(names) for names, *_ in of_ranks)
        tagged = {name: tag for *_, tags in of_ranks for name, tag in tags.items()}
        others = [set().union(*(rank[i] for rank in of_ranks[: self._rank])) for i in (0, 1)]
        document = {
            "plain_state": to_plain(state),
            "groups": [group for *_, about, _ in of_ranks for group in about["groups"]],
            "values": {name: value for *_, about, _ in of_ranks for name, value in about["values"].items()},
            "unit_scaled": True if marked else None if any(tagged.values()) else False,
            "tagged": tagged,
        }
        self._writer.save(
            step,
            [(name, tensor) for name, tensor in tensors.items() if name not in others[0]],
            [(name, tensor) for name, tensor in own if name not in others[1]],
            json.dumps(document, allow_nan=False),
            marked or any(tagged.values()),
        )

    def wait(self) -> None:
        """Returns when the last save is done on all ranks."""
        self._writer.wait()

    def problem(self) -> str | None:
        """Returns the error of the last finished save, None if it succeeded. The next save is tried all the same."""
        return self._writer.problem()

    def reports(self) -> list[dict[str, Any]]:
        """Returns the saves since the last call: step, folder, problem, bytes, and seconds waited, copied, written."""
        return self._writer.take_reports()

    def close(self) -> None:
        """Waits for the last save. Another writer may use the folder then, and this one no more; :meth:`problem` and
        :meth:`reports` still tell of its last save."""
        self._writer.close()

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@checked
def save(
    folder: str | os.PathLike,
    model: Model,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    step: int,
    state: Any = None,
    keep_last: int = 0,
    group: dist.ProcessGroup | None = None,
    timeout: float = 300.0,
) -> str:
    """Writes the checkpoint of a step into the run's folder and returns its own folder; see :class:`Writer`. Raises
    :class:`plumb.Error` if it could not be written."""
    with Writer(folder, keep_last=keep_last, background=False, group=group, timeout=timeout) as writer:
        writer.save(model, optimizer, step=step, state=state)
        if problem := writer.problem():
            raise Error(problem, kind=ErrorKind.CannotWrite)
        return writer.reports()[-1]["folder"]


def newest(folder: str | os.PathLike) -> tuple[Checkpoint | None, list[str]]:
    """Returns the newest checkpoint of a run whose every byte is as it was written, or None; and for each newer one a
    sentence that says what is wrong with it."""
    return _C.Checkpoint.newest(os.fspath(folder))


def _find(folder: str | os.PathLike) -> Checkpoint:
    path = os.fspath(folder)
    if os.path.exists(os.path.join(path, "checkpoint.json")):
        return _C.Checkpoint.open(path)
    found, problems = newest(path)
    if found is None:
        raise Error(
            f"{path} holds no checkpoint" + "".join(f"; {problem}" for problem in problems),
            kind=ErrorKind.BadFile,
            remedy="name a run's folder, or that of one checkpoint",
        )
    return found


class _OptimizerLoad:
    """The part of a checkpoint that is for an optimizer. All of it is checked before `write` changes anything."""

    def __init__(self, checkpoint: Checkpoint, about: Mapping[str, Any], optimizer: Any, names: Mapping[int, str]):
        self._checkpoint, self._values, self._optimizer = checkpoint, about["values"], optimizer
        options = {name: group["options"] for group in about["groups"] for name in group["params"]}
        ties = checkpoint.ties()
        self._groups = []
        for group, members in _named(optimizer, names):
            saved = [options.get(name, options.get(ties.get(name, ""))) for name, _ in members]
            if None in saved:
                raise Error(
                    f"{checkpoint.folder}: no optimizer's state of '{members[saved.index(None)][0]}' was saved",
                    kind=ErrorKind.UnknownName,
                    remedy="save with the optimizer, or load without",
                )
            if any(other != saved[0] for other in saved):
                raise Error(
                    f"{checkpoint.folder}: parameters of one group, '{members[0][0]}' among them, were saved with different"
                    " options",
                    kind=ErrorKind.TensorMismatch,
                    remedy="make the optimizer's groups as they were",
                )
            # Other versions of torch and schedulers of rates add options; another kind of optimizer lacks some, too.
            only_saved = set(saved[0] if saved else group) - set(group)
            only_now = set(group) - {"params", "param_names"} - set(saved[0] if saved else group)
            if only_saved and only_now:
                raise Error(
                    f"{checkpoint.folder}: was saved with an optimizer of the options {', '.join(sorted(only_saved))}, and"
                    f" {type(optimizer).__name__} has {', '.join(sorted(only_now))} instead",
                    kind=ErrorKind.TensorMismatch,
                    remedy="make an optimizer of the kind it was saved with, or load without one",
                )
            self._groups.append((group, members, saved[0] if saved else {}))

    def write(self) -> None:
        checkpoint = self._checkpoint
        stored = checkpoint.optimizer_names()
        keys = sorted({name.partition("/")[0] for name in [*stored, *self._values]})
        for group, members, saved in self._groups:
            for key, value in saved.items():
                now = group.get(key)
                if isinstance(now, Tensor):
                    now.fill_(value)
                else:
                    group[key] = tuple(value) if isinstance(now, tuple) else value
            on_device = group.get("capturable") or group.get("fused")
            for name, parameter in members:
                state: dict[str, Any] = {}
                for key in keys:
                    full = f"{key}/{name}"
                    if checkpoint.has_optimizer(full):
                        value = checkpoint.read_optimizer(full)
                        if key == "step" and not value.is_floating_point():  # C++ counts in whole numbers
                            value = value.to(torch.float32)
                        state[key] = value if key == "step" and not on_device else value.to(parameter.device)
                    elif full in self._values:
                        state[key] = self._values[full]
                if state:
                    self._optimizer.state[parameter] = state
                else:
                    self._optimizer.state.pop(parameter, None)


def load(
    folder: str | os.PathLike,
    model: Model,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    whole: bool | None = None,
) -> tuple[int, Any]:
    """Loads a checkpoint into a model that is there, in place, and returns its step and state.

    Args:
        folder: of one checkpoint, or of a run: then the newest that is whole.
        model: as for :func:`save`, cut in any way.
        optimizer: over the model's parameters; gets its state and the options of its groups.
        whole: tensors of the checkpoint that the model does not have are an error. By default so for a module or dict;
            stages and schedules are parts.

    Tensors are read one at a time. Names of the model that are missing or unexpected, other shapes and other dtypes raise
    :class:`plumb.Error` before anything is changed.
    """
    _refuse_other_optimizers(optimizer)
    checkpoint = _find(folder)
    names = set(checkpoint.names())
    all_tensors = _tensors(model)
    tensors = {n: t for n, t in all_tensors.items() if n in names or not n.endswith(MARK)}
    unexpected = sorted(names - set(tensors))
    if unexpected and (isinstance(model, (nn.Module, Mapping)) if whole is None else whole):
        raise Error(
            f"{checkpoint.folder}: holds {len(unexpected)} tensors that the model does not have: "
            + ", ".join(unexpected[:10])
            + (", ..." if len(unexpected) > 10 else ""),
            kind=ErrorKind.UnknownName,
            remedy="load it into the model that it was saved from, or say whole=False",
        )
    document = json.loads(checkpoint.state())
    by_python = isinstance(document, dict) and set(document) - _ABOUT_WEIGHTS == {"plain_state", "groups", "values"}
    state = from_plain(document["plain_state"], "state") if by_python else document
    _refuse_other_weights(checkpoint, document, model, all_tensors)
    if optimizer is not None and not by_python:
        raise Error(
            f"{checkpoint.folder}: was written by another trainer, which keeps the options of its optimizer itself",
            kind=ErrorKind.Unsupported,
            remedy="load without the optimizer; its state is in read_optimizer(name)",
        )
    of_optimizer = None if optimizer is None else _OptimizerLoad(checkpoint, document, optimizer, _names(tensors))
    checkpoint.load(list(tensors.items()))
    if of_optimizer is not None:
        of_optimizer.write()
    return checkpoint.step, state
