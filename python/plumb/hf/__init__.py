"""Folders of the package transformers: programs from them, their weights stage by stage, and such folders from programs.

``load`` and ``import_folder`` build the model of ``config.json`` without memory for its weights and capture it; weights come
straight from the folder's safetensors, on every rank those of its stages alone. ``save`` writes a folder that
``from_pretrained`` reads: names, dtypes, ties, config and tokenizer are the folder's. No code of a folder is run, and
nothing is fetched.
"""

from __future__ import annotations

import functools
import json
import os
from typing import Any, overload

import torch

from .. import _C
from .._errors import Error, ErrorKind
from .._exported import save_pt2
from .._graph_module import GraphModule
from .._state import sync_state
from .._trees import in_utf8
from ..pipelining import SplitPoint, pipeline
from ..pipelining._IR import CutPipe
from . import _model
from ._elsewhere import only_folder
from ._names import Names, stored_by_default

__all__ = ["Weights", "import_folder", "load", "save"]


class Weights:
    """The weights of an imported program: where they are, and how its tensors are called and stored there.

    ``bytes_read``: of tensors, by this process so far.
    """

    def __init__(self, record: str, folder: str):
        _C.check_pretrained(record)
        self.record, self.folder, self.bytes_read = record, folder, 0

    def read_into(self, module: GraphModule) -> None:
        """Gives a program, or a stage of it, the values that its tensors do not have yet. Raises `plumb.Error` naming the
        tensor or file."""
        self.bytes_read += _C.load_weights(module._engine, self.record, os.fsencode(self.folder))
        module.take_state()


def _dtype(config: Any, dtype: torch.dtype | str | None, stored: list[tuple[str, torch.dtype, Any]]) -> torch.dtype:
    """Returns the dtype that is asked for; "auto" is the config's, else that of the first stored floats, as for from_pretrained."""
    if isinstance(dtype, torch.dtype):
        return dtype
    floats = (kind for _, kind, _ in stored if kind.is_floating_point and kind.itemsize > 1)
    stated = getattr(config, "dtype", None) or next(floats, torch.float32)  # (4.57 too: torch_dtype is its old name)
    found = getattr(torch, str(stated).removeprefix("torch."), None) if dtype in ("auto", None) else getattr(torch, str(dtype), None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point or found.itemsize == 1:
        raise Error(f"'{dtype if dtype != 'auto' else stated}' is no dtype of weights", remedy="auto, float32, bfloat16 or float16")
    return found


def import_folder(
    folder: str | os.PathLike,
    path: str | os.PathLike | None = None,
    *,
    batch: int = 1,
    length: int | None = None,
    dtype: torch.dtype | str = "auto",
    training: bool = True,
    fresh: int | None = None,
    inputs: dict[str, Any] | None = None,
) -> GraphModule:
    """Returns the model of a folder as a program without weights; with `path` it is written there as a ``.pt2`` file.

    Its parameters are on the meta device until ``Weights.read_into``, ``load`` or ``plumb train --weights`` reads them.

    Args:
        folder: with ``config.json``, and ``model.safetensors`` or its shards and index. Without weights (a config alone)
            the program knows what they would be called.
        batch, length: of the token ids that it takes. Default: the config's longest, at most 2048.
        dtype: of the weights; "auto": the config's, or that of the stored tensors where the config has none.
        training: the mode of dropout and the like.
        fresh: a seed: weights as the model's class makes them anew, which are part of the program.
        inputs: an example of other inputs, by the names of the forward's parameters. Values do not matter.

    Raises `plumb.Error` naming the file, the parameter, or the operator that a graph cannot hold.
    """
    folder = os.fspath(folder)
    if not in_utf8(os.path.abspath(folder)):
        raise Error(f"{os.path.abspath(folder)!r}: its name is no UTF-8, in which a program names its folder", remedy="another name")
    _model.transformers()
    values = _model.read_values(folder)
    with only_folder(folder, values):
        graph = _imported(folder, batch, length, dtype, training, fresh, inputs)
    if path is not None:
        save_pt2(graph, path)
    return graph


def _imported(
    folder: str, batch: int, length: int | None, dtype: Any, training: bool, fresh: int | None, inputs: dict[str, Any] | None
) -> GraphModule:
    has_weights = fresh is None and _has_weights(folder)
    if has_weights:
        _C.refuse_unit_scaled(os.fsencode(folder))
    config = _model.read_config(folder)
    stored = _C.stored_tensors(folder) if has_weights else []
    kind = _dtype(config, dtype, stored)
    model = _model.build(config, kind, training)
    given = inputs or _model.example_inputs(model, batch, length)
    names = Names(model, {n: torch.Size(s) for n, _, s in stored} if has_weights else stored_by_default(model))
    if has_weights:
        names.check_ties(folder)
    graph = _model.captured(model, given, names.has if has_weights else None)
    _model.make(graph, model, names.made)
    files = {name: _text(folder, name) for name in _C.kept_files() if os.path.isfile(os.path.join(folder, name))}
    files["config.json"] = _with_dtype(files["config.json"], kind, _dtype(config, "auto", stored))
    program = _C.ExportedProgram()
    record = {"folder": os.path.abspath(folder), "files": files, **names.record()}
    program.pretrained = json.dumps(record, ensure_ascii=False)
    graph._program = program
    if has_weights and names.unexpected:
        graph.notes.append(f"{len(names.unexpected)} tensors of the folder are not the model's: {', '.join(names.unexpected[:3])}")
    if fresh is not None:
        _model.fill(graph, _model.build(config, kind, training, seed=fresh))
    return graph


def _has_weights(folder: str) -> bool:
    names = os.listdir(folder)
    if any(name.endswith(".safetensors") for name in names):
        return True
    if old := [name for name in names if name.endswith((".bin", ".pth", ".ckpt", ".h5", ".msgpack"))]:
        raise Error(
            f"{os.path.join(folder, old[0])}: weights are read from safetensors files alone",
            kind=ErrorKind.BadFile,
            remedy="from_pretrained(FOLDER).save_pretrained(NEW), in Python, writes them",
        )
    return False


def _text(folder: str, name: str) -> str:
    path = os.path.join(folder, name)
    if os.path.getsize(path) > _model.MOST_CONFIG_BYTES:
        raise Error(f"{path}: is larger than any config", kind=ErrorKind.BadFile)
    try:
        return _C.read_file_of_folder(os.fsencode(folder), name, _model.MOST_CONFIG_BYTES).decode("utf-8")
    except UnicodeDecodeError as error:
        raise Error(f"{path}: cannot be read: {error}", kind=ErrorKind.BadFile) from error


def _with_dtype(text: str, dtype: torch.dtype, before: torch.dtype) -> str:
    """Returns the config as it is, but for the dtype of the weights where they get another one."""
    if before == dtype:
        return text
    known = json.loads(text)
    key = "torch_dtype" if "torch_dtype" in known else "dtype"
    return json.dumps({**known, key: str(dtype).removeprefix("torch.")}, indent=2, ensure_ascii=False) + "\n"


@overload
def load(folder: str | os.PathLike[str], *, stages: None = None, **how: Any) -> GraphModule: ...
@overload
def load(folder: str | os.PathLike[str], *, stages: int | dict[str, SplitPoint], **how: Any) -> CutPipe: ...
def load(
    folder: str | os.PathLike[str], *, stages: int | dict[str, SplitPoint] | None = None, **how: Any
) -> GraphModule | CutPipe:
    """Returns the model of a folder, with its weights.

    Without `stages` a whole program. With a number of stages, or a dict from names of modules to where to cut there, a
    pipe as `plumb.pipelining.pipeline` makes it, cut by estimated cost: ``build_stage(i, device)`` then reads the tensors of
    stage i and no others. ``pipe.weights.bytes_read`` says how much that was. `how`: what `import_folder` takes.

    Raises `plumb.Error`.
    """
    graph = import_folder(folder, **how)
    weights = Weights(graph._program.pretrained, os.fspath(folder))
    if stages is None:
        weights.read_into(graph)
        return graph
    if isinstance(stages, int):
        pipe = pipeline(graph, split_policy="estimated", num_stages=stages) if stages > 1 else pipeline(graph)
    else:
        pipe = pipeline(graph, split_spec=stages)
    pipe.weights = weights
    return pipe


def save(model: GraphModule | CutPipe, out: str | os.PathLike, *, tokenizer: str | os.PathLike | None = None, group: Any = None) -> None:
    """Writes a folder that ``from_pretrained`` reads, from a program or pipe that was imported from one.

    Every rank of a pipe writes the stages that it built, into one folder that all of them see; all ranks of `group`
    (default: all there are) call this together.

    Args:
        out: a folder that is new or empty.
        tokenizer: the folder that the tokenizer's files are copied from. Default: the one that was imported.

    Raises `plumb.Error` for weights that are unit-scaled (fold them first), or a folder that cannot be written.
    """
    if not isinstance(model, (GraphModule, CutPipe)):
        raise TypeError(f"plumb.hf.save takes a program or pipe that plumb.hf imported, got {type(model).__name__}")
    program = model._source.module._program if isinstance(model, CutPipe) else model._program
    record = program.pretrained if program is not None else ""
    if not record:
        raise Error(
            "the program does not know a folder of transformers: it was not imported from one",
            kind=ErrorKind.InvalidState,
            remedy="plumb.hf.import_folder or plumb.hf.load, and train what they give",
        )
    path, together = os.fsencode(out), torch.distributed.is_initialized() and isinstance(model, CutPipe)
    wait = functools.partial(torch.distributed.barrier, group) if together else lambda: None
    if isinstance(model, CutPipe):
        model._sync()
        parts = [*(model._engine.stage(s) for s in range(model.num_stages)), model._source.engine]
        here = sorted(model._stages_here) or list(range(model.num_stages))
        here += [model.num_stages] if 0 in here else []  # what no stage uses
    else:
        sync_state(model._engine, model._slots)
        parts, here = [model._engine], [0]
    if 0 in here:
        _C.check_new_folder(path)
    wait()
    source = os.fsencode(json.loads(record)["folder"])
    for part in here:
        _C.write_weights(path, parts, part, record, source)
    wait()
    if 0 in here:
        _C.finish_weights_folder(path, parts, record, source if tokenizer is None else os.fsencode(tokenizer))
    wait()
