"""The names and stored forms of a model's tensors in its folder, as transformers itself knows them."""

from __future__ import annotations

import copy
import re
from typing import Any

import torch
from torch import Tensor, nn

from .. import _C
from .._capture.forward import capture
from .._errors import Error, ErrorKind
from .._state import CONSTANT


class _Converts(nn.Module):
    """A conversion of transformers as a module that can be captured: tensors in, tensors out, in the order of `to`."""

    def __init__(self, function: Any, given: list[str], to: list[str]):
        super().__init__()
        self.function, self.given, self.to_names = [function], given, to

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        results = self.function[0](dict(zip(self.given, tensors)))
        results = {name: value[0] if isinstance(value, list) else value for name, value in results.items()}
        if set(results) != set(self.to_names):
            raise Error(
                f"transformers' conversion of {self.given[0]} does not lead back to it: {sorted(results)[:3]}",
                kind=ErrorKind.Unsupported,
            )
        return tuple(results[name] for name in self.to_names)


def _graph_text(convert: _Converts, shapes: list[torch.Size], dtype: torch.dtype) -> str:
    engine = capture(convert, *[torch.empty(shape, dtype=dtype, device="meta") for shape in shapes])._engine
    if any(kind == CONSTANT for _, kind, *_ in engine.state()):
        raise Error(f"the conversion of {convert.given[0]} holds constants", kind=ErrorKind.Unsupported)
    _C.rewrite_devices(engine, torch.device("cpu"))
    return engine.graph.to_string()


class Names:
    """The part of a program's record (plumb/checkpoint/pretrained.h) that says how its tensors are stored.

    Args:
        model: as `build` makes it.
        stored: name -> shape of the folder's tensors.
    """

    def __init__(self, model: nn.Module, stored: dict[str, torch.Size]):
        self.model, self.expected = model, model.state_dict()
        self.names: dict[str, str] = {}
        self.conversions: list[dict] = []
        self.graphs: list[dict[str, str]] = []
        self.unexpected: list[str] = []
        self.tied: list[tuple[str, str]] = []  # tensors of the folder that are one parameter
        self.made: list[str] = []  # parameters that no folder has: their class makes them, tables of positions say
        if hasattr(model, "_get_key_renaming_mapping"):
            self._as_in_4(list(stored))
        else:
            self._as_in_5(stored)
        self._tie()
        self._check(stored)

    def record(self) -> dict:
        return {"names": self.names, "conversions": self.conversions, "graphs": self.graphs}

    def has(self, name: str) -> bool:
        return name in self.names or any(name in c["state"] for c in self.conversions)

    # --- transformers 4: other names alone ---
    def _as_in_4(self, stored: list[str]) -> None:
        model, prefix = self.model, self.model.base_model_prefix
        has = bool(prefix) and any(name.startswith(prefix) for name in stored)
        wants = bool(prefix) and hasattr(model, prefix)
        found = model._get_key_renaming_mapping(stored, model._checkpoint_conversion_mapping, has and not wants, wants and not has)
        for old in stored:
            new = found.get(old)
            if new in self.expected:
                self.names[new] = old
            else:
                self.unexpected.append(old)

    # --- transformers 5: names, and conversions ---
    def _as_in_5(self, stored: dict[str, torch.Size]) -> None:
        from transformers import conversion_mapping
        from transformers import core_model_loading as loading

        model, expected = self.model, self.expected
        self._loading = loading
        self._transforms = conversion_mapping.get_model_conversion_mapping(model)
        renamings = [t for t in self._transforms if isinstance(t, loading.WeightRenaming)]
        converters = [t for t in self._transforms if isinstance(t, loading.WeightConverter)]
        groups: dict[str, list[tuple[str, str]]] = {}
        for name in sorted(stored, key=loading.dot_natural_key):
            new, pattern = loading.rename_source_key(name, renamings, converters, model.base_model_prefix, expected)
            if new not in expected and name in expected:
                new, pattern = loading.rename_source_key(name, [], [], model.base_model_prefix, expected)
            if new not in expected:
                self.unexpected.append(name)
            elif pattern is None:
                self.names[new] = name
            else:
                groups.setdefault(new, []).append((pattern, name))
        by_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
        used = [t for t in self._transforms if t.was_used()]
        texts: dict[tuple[str, str], int] = {}
        for first, parts in groups.items():
            self._convert(first, parts, by_pattern[parts[0][0]], stored, used, texts)

    def _convert(self, first: str, parts: list, converter: Any, stored: dict, used: list, texts: dict) -> None:
        model = self.model

        def load(tensors: dict[str, Tensor]) -> dict:
            own = copy.deepcopy(converter)
            for pattern, name in parts:
                own.add_tensor(first, name, pattern, tensors[name])
            return own.convert(first, model=model, config=model.config)

        def save(tensors: dict[str, Tensor]) -> dict:
            before, model._weight_conversions = getattr(model, "_weight_conversions", None), used
            try:
                return self._loading.revert_weight_conversion(model, tensors)
            finally:
                model._weight_conversions = before

        names, dtype = [name for _, name in parts], self.expected[first].dtype
        state = sorted(load({name: torch.empty(stored[name], dtype=dtype, device="meta") for name in names}))
        text = _graph_text(_Converts(load, names, state), [stored[name] for name in names], dtype)
        if missing := [name for name in state if name not in self.expected]:
            raise Error(f"the conversion of {names[0]} makes '{missing[0]}', which the model does not have", kind=ErrorKind.Unsupported)
        back = _graph_text(_Converts(save, state, names), [self.expected[name].shape for name in state], dtype)
        index = texts.setdefault((text, back), len(texts))
        if index == len(self.graphs):
            self.graphs.append({"load": text, "save": back})
        self.conversions.append({"state": state, "stored": names, "graphs": index})

    # --- both ---
    def _tie(self) -> None:
        """Every name of a tied tensor is stored as the one that the folder has."""
        ties: dict[int, list[str]] = {}
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            ties.setdefault(id(parameter), []).append(name)
        for names in ties.values():
            known = [name for name in names if name in self.names]
            if len(names) > 1 and known:
                self.tied += [(self.names[known[0]], self.names[other]) for other in known[1:]]
                self.names.update(dict.fromkeys(names, self.names[known[0]]))

    def check_ties(self, folder: str) -> None:
        """Raises plumb.Error(TensorMismatch) if the folder has two different tensors for one tied parameter."""
        for one, other in self.tied:
            if not _C.same_stored(folder, one, other):
                raise Error(
                    f"{folder}: by its config.json '{one}' and '{other}' are one tensor, and they differ in the folder",
                    kind=ErrorKind.TensorMismatch,
                    remedy='"tie_word_embeddings": false in config.json if both are meant, else a folder without the one that is not',
                )

    def _check(self, stored: dict[str, torch.Size]) -> None:
        ignored = [*(self.model._keys_to_ignore_on_save or ()), *(self.model._keys_to_ignore_on_load_missing or ())]
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            if not self.has(name):
                if any(re.search(pattern, name) for pattern in ignored):
                    self.made.append(name)
                    continue
                raise Error(
                    f"the folder has no tensor for parameter '{name}' of {type(self.model).__name__}",
                    kind=ErrorKind.UnknownName,
                    remedy='the "architectures" of config.json that the weights were saved from',
                )
            if name in self.names and stored[self.names[name]] != parameter.shape:
                raise Error(
                    f"'{self.names[name]}' is {list(stored[self.names[name]])} in the folder, and {list(parameter.shape)} in "
                    f"{type(self.model).__name__}",
                    kind=ErrorKind.TensorMismatch,
                    remedy="the config.json that the weights were saved with",
                )


def stored_by_default(model: nn.Module) -> dict[str, torch.Size]:
    """Returns names and shapes of the model's tensors as save_pretrained would store them."""
    state, seen = {}, set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            state[name] = tensor.detach().to("meta")
    if not hasattr(model, "_get_key_renaming_mapping"):
        from transformers.core_model_loading import revert_weight_conversion

        state = revert_weight_conversion(model, state)
    return {name: tensor.shape for name, tensor in state.items()}
