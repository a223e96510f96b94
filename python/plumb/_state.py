"""The tensors of a module, by name and kind, and how an engine is kept on them."""

from __future__ import annotations

import contextlib
import sys
from typing import Any, Iterable, Iterator, Sequence

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ._errors import Error, ErrorKind
from ._trees import in_utf8
from .parameter import made_from

PARAMETER, BUFFER, CONSTANT = 0, 1, 2  # as the engine counts them


def state_of(module: nn.Module) -> list[tuple[str, int, Tensor, bool]]:
    """Parameters and buffers by full name, in the order of ``state_dict()``; a tied tensor under each of its names."""
    state: list[tuple[str, int, Tensor, bool]] = []
    for prefix, sub in module.named_modules(remove_duplicate=False):
        _check_name(prefix)
        at = f"{prefix}." if prefix else ""
        state += [(at + n, PARAMETER, p, True) for n, p in sub._parameters.items() if p is not None]
        for name, buffer in sub._buffers.items():
            if buffer is not None:
                state.append((at + name, BUFFER, buffer, name not in sub._non_persistent_buffers_set))
    for name, *_ in state:
        _check_name(name)
    seen: set[str] = set()
    return [s for s in state if not (s[0] in seen or seen.add(s[0]))]


def is_compiled(module: Any) -> bool:
    """Returns whether this is a result of torch.compile."""
    dynamo = sys.modules.get("torch._dynamo")  # loaded once something was compiled
    return dynamo is not None and isinstance(module, dynamo.OptimizedModule)


def is_of(value: Any, module: str, name: str) -> bool:
    """Returns whether a value is of a class whose module takes long to import: there is none before somebody has."""
    loaded = sys.modules.get(module)
    return loaded is not None and isinstance(value, getattr(loaded, name, ()))


_TRANSFORM_FIRST = (
    "transform the model first and give the whole of it to fully_shard, which gathers its parameters for each call of it; a model under "
    "parallelize_module or distribute_module is not captured"
)
FULL = "full tensors: get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)) of torch.distributed.checkpoint.state_dict"


def is_distributed(value: Any) -> bool:
    """Returns whether a value is a DTensor, of which each rank holds a part."""
    return is_of(value, "torch.distributed.tensor", "DTensor")


def refuse_sharded(name: str, tensor: Any, takes: str = "a graph computes with", remedy: str = _TRANSFORM_FIRST) -> None:
    """Raises `plumb.Error` for a DTensor. `takes`: begins the sentence "... whole tensors"."""
    if is_distributed(tensor):
        raise Error(
            f"'{name}' is sharded over ranks (DTensor), and {takes} whole tensors", kind=ErrorKind.Unsupported, remedy=remedy
        )


def unwrapped(module: Any) -> Any:
    """Returns the module that DistributedDataParallel or torch.compile was given: its state has its own names."""
    while (replicated := isinstance(module, DistributedDataParallel)) or is_compiled(module):
        module = module.module if replicated else module._orig_mod
    return module


def constants_of(engine: Any) -> dict[str, Tensor]:
    """Returns an engine's tensors that are neither parameters nor buffers."""
    return {name: tensor for name, kind, tensor, _ in engine.state() if kind == CONSTANT}


def _check_name(name: str) -> None:
    """Raises `plumb.Error` for a name with a lone surrogate: no graph, file or checkpoint could hold it."""
    if not in_utf8(name):
        raise Error(
            f"the model has a module, parameter or buffer of the name '{name}', which is no text in UTF-8",
            kind=ErrorKind.Unsupported,
            remedy="give it another name",
        )


def own_parameters(engine: Any) -> None:
    """Parameters that were made in C++ (copies, those of files) become ``nn.Parameter``; tied ones stay tied."""
    made: dict[int, nn.Parameter] = {}
    changed = []
    state = engine.state()  # held, so that no id is used twice
    for name, kind, tensor, _ in state:
        if kind == PARAMETER and not isinstance(tensor, nn.Parameter):
            if id(tensor) not in made:
                made[id(tensor)] = made_from(tensor)
            changed.append((name, made[id(tensor)]))
    if changed:
        engine.set_state(changed)


def sync_state(engine: Any, slots: list[tuple[dict, str, str, Tensor]]) -> None:
    """Gives the engine the tensors that ``to()``, ``load_state_dict(assign=True)`` and the like have put in a module's
    tables. A slot is (table, key, full name, tensor that the engine has)."""
    # A scripted module's table has no get.
    found = [table[leaf] if leaf in table else None for table, leaf, _, _ in slots]
    changed = [(i, n) for i, (n, slot) in enumerate(zip(found, slots)) if n is not slot[3]]
    if changed:
        if lost := [slots[i][2] for i, now in changed if now is None]:
            raise Error(
                f"'{lost[0]}' is None or gone, and the graph was made with a tensor there",
                kind=ErrorKind.InvalidState,
                remedy="put a tensor there, or capture the model as it is now",
            )
        for i, now in changed:
            refuse_sharded(slots[i][2], now)
        first: dict[int, tuple[str, Any]] = {}  # a tied tensor's first name and what is there now
        for (_, _, name, tensor), now in zip(slots, found):
            known, at_first = first.setdefault(id(tensor), (name, now))
            if at_first is not now:
                raise Error(
                    f"'{known}' and '{name}' were one tensor when the graph was made, and are two now",
                    kind=ErrorKind.InvalidState,
                    remedy="put one tensor under both names, or capture the model as it is now",
                )
        engine.set_state([(slots[i][2], now) for i, now in changed])
        for i, now in changed:
            slots[i] = (*slots[i][:3], now)


@contextlib.contextmanager
def kept_ties(slots: list[tuple[dict, str, str, Tensor]]) -> Iterator[None]:
    """Context manager at whose end one tensor is again under all names that had one: torch makes a tensor anew for each name where the
    kind of memory changes, as to and from the meta device."""
    names: dict[int, list[tuple[dict, str]]] = {}
    for table, leaf, *_ in slots:
        if leaf in table:
            names.setdefault(id(table[leaf]), []).append((table, leaf))
    yield
    for (first, name), *others in names.values():
        for table, leaf in others:
            table[leaf] = first[name]


@contextlib.contextmanager
def in_modes(modules: Iterable[nn.Module], modes: Sequence[bool] = ()) -> Iterator[None]:
    """Context manager in which the modules are in these training modes, one for each, and afterwards in their own again."""
    before = [(sub, sub.training) for sub in modules]
    try:
        for (sub, _), mode in zip(before, modes):
            sub.training = mode
        yield
    finally:
        for sub, mode in before:
            sub.training = mode


def slot_of(module: nn.Module, name: str) -> tuple[dict, str]:
    """Returns the table that holds a parameter or buffer of this full name, and its key there."""
    *path, leaf = name.split(".")
    for part in path:
        module = module._modules[part]
    return module._parameters if leaf in module._parameters else module._buffers, leaf


def member(module: nn.Module, name: str) -> Tensor:
    table, leaf = slot_of(module, name)
    return table[leaf]


_ATTRIBUTES = frozenset(dir(nn.Module()))  # for which torch.nn.Module looks before it looks for tensors


class GraphPart(nn.Module):
    """A module that a graph has for the names of its tensors. The graph runs operators and calls no module."""

    _path = ""

    def _refuse_hook(self, *args: Any, **kwargs: Any) -> Any:
        raise Error(
            f"a hook on module '{self._path}' of a graph would never be called: a graph runs operators, and no modules",
            kind=ErrorKind.Unsupported,
            remedy="register it on the model and capture again, on the whole graph, or on parameters",
        )

    register_forward_pre_hook = register_forward_hook = _refuse_hook
    register_full_backward_pre_hook = register_full_backward_hook = register_backward_hook = _refuse_hook


def put_state(module: nn.Module, state: list[tuple[str, int, Tensor, bool]]) -> list[tuple[dict, str, str, Tensor]]:
    """Makes an engine's state parameters and buffers of `module`, and modules for the dots of their names. Returns
    their slots. Names may come from a file: raises `plumb.Error` for what no module can have."""
    slots: list[tuple[dict, str, str, Tensor]] = []
    for name, kind, tensor, persistent in state:
        if kind == CONSTANT:
            continue
        owner = module
        *path, leaf = name.split(".")
        for depth, part in enumerate(path, 1):
            if part in owner._parameters or part in owner._buffers:
                raise Error(f"'{name}' is in '{part}', which is a tensor and not a module", kind=ErrorKind.BadFile)
            if part not in owner._modules:
                owner._modules[part] = made = GraphPart()
                made._path = ".".join(path[:depth])
            owner = owner._modules[part]
        for part in (*path, leaf):
            if not part or part in _ATTRIBUTES:
                raise Error(
                    f"a parameter or buffer is called '{name}', and torch.nn.Module can have none called '{part}'",
                    kind=ErrorKind.BadFile,
                )
        if leaf in owner._modules:
            raise Error(f"'{name}' is a tensor and a module", kind=ErrorKind.BadFile)
        table = owner._parameters if kind == PARAMETER else owner._buffers
        table[leaf] = tensor
        if kind != PARAMETER and not persistent:
            owner._non_persistent_buffers_set.add(leaf)
        slots.append((table, leaf, name, tensor))
    return slots
