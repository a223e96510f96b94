"""A model of transformers from a folder's config: built without memory for its weights, and captured so."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import itertools
import json
import os
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any, ContextManager

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._device import _device_constructors

from .. import _C
from .._capture.forward import capture
from .._capture.torch_patches import patched
from .._errors import Error, ErrorKind
from .._graph_module import GraphModule
from .._state import BUFFER, CONSTANT, PARAMETER
from ._elsewhere import refuse_names

# Limits for a config that may come from anywhere:
_MOST_LAYERS = 1024
_MOST_PARAMETERS = 1 << 17  # tensors; the most known are some 70,000, of a model with an expert each
MOST_CONFIG_BYTES = 1 << 24
_patch_lock = threading.Lock()


def transformers() -> Any:
    """Returns the package. Raises `plumb.Error` where there is none, or an older one than is known."""
    try:
        import transformers as package
    except ImportError as error:
        raise Error(
            f"the package transformers cannot be imported: {error}",
            kind=ErrorKind.InvalidState,
            remedy="pip install 'transformers>=4.57,<6'",
        ) from error
    version = tuple(int(part) for part in package.__version__.split(".")[:2])
    if not (4, 57) <= version < (6, 0):
        raise Error(
            f"transformers {package.__version__} is installed: folders are read with 4.57 to 5.x",
            kind=ErrorKind.InvalidState,
            remedy="pip install 'transformers>=4.57,<6'",
        )
    return package


def read_values(folder: str) -> Any:
    """Returns the content of the config.json of a local folder, which names nothing elsewhere."""
    path = os.path.join(folder, "config.json")
    if not os.path.lexists(path):
        raise Error(
            f"{folder}: holds no config.json",
            kind=ErrorKind.BadFile,
            remedy="a folder that save_pretrained of transformers wrote, or a download of one (hf download NAME --local-dir FOLDER)",
        )
    with _told(f"{path}: plumb cannot read it", ErrorKind.BadFile, "a config.json as save_pretrained of transformers writes it"):
        values = json.loads(_C.read_file_of_folder(os.fsencode(folder), "config.json", MOST_CONFIG_BYTES))
    refuse_names(path, values)
    return values


def read_config(folder: str) -> Any:
    """Returns the config of a local folder."""
    path, package = os.path.join(folder, "config.json"), transformers()
    remedy = "a config.json as AutoConfig reads it, of a model that transformers itself has; code that lies in folders is never run"
    with _told(f"{path}: transformers {package.__version__} cannot read it", ErrorKind.BadFile, remedy):
        config = package.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    for key in vars(config):
        if callable(getattr(type(config), key, None)):
            raise Error(f"{path}: '{key}' is a function of {type(config).__name__}, and no value", kind=ErrorKind.BadFile)
    for part in (config, config.get_text_config()):
        layers = getattr(part, "num_hidden_layers", None)
        if isinstance(layers, int) and not 0 <= layers <= _MOST_LAYERS:
            raise Error(f"{path}: has {layers} layers; {_MOST_LAYERS} are the most", kind=ErrorKind.BadFile)
    return config


@contextlib.contextmanager
def _told(message: str, kind: ErrorKind, remedy: str) -> Iterator[None]:
    """Turns errors of transformers and torch into a `plumb.Error`, with the first lines of their messages, to one without a colon."""
    try:
        yield
    except Error:
        raise
    except Exception as error:
        lines = f"{type(error).__name__}: {error}".splitlines() if isinstance(error, KeyError) else str(error).strip().splitlines()
        end = next((i for i, line in enumerate(lines) if not line.rstrip().endswith(":")), len(lines))
        said = " ".join(map(str.strip, lines[: end + 1])) or type(error).__name__
        raise Error(f"{message}: {said[:300]}", kind=kind, remedy=remedy) from error


def model_class(config: Any) -> Any:
    """The class that the config names, of those that transformers itself has; else that of its causal models."""
    package = transformers()
    named = config.architectures
    for name in named if isinstance(named, (list, tuple)) else []:
        found = getattr(package, name, None) if isinstance(name, str) and name.isidentifier() else None
        if isinstance(found, type) and issubclass(found, package.PreTrainedModel):
            return found
    with contextlib.suppress(KeyError):
        return package.AutoModelForCausalLM._model_mapping[type(config)]
    raise Error(
        f"the config names no class of transformers {package.__version__} ({config.architectures}), and its kind "
        f"'{config.model_type}' has no causal language model",
        kind=ErrorKind.Unsupported,
        remedy='"architectures": ["CLASS"] in config.json',
    )


@contextlib.contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Parameters have no memory; buffers do, for their values come from the config."""
    original, count = nn.Module.register_parameter, itertools.count(1)

    def register(self: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if next(count) > _MOST_PARAMETERS:
            raise Error(f"config.json: the model has more than {_MOST_PARAMETERS} parameters", kind=ErrorKind.BadFile)
        original(self, name, parameter)
        if parameter is not None and not parameter.is_meta:
            self._parameters[name] = type(parameter)(parameter.to("meta"), requires_grad=parameter.requires_grad)

    with _patch_lock, patched(nn.Module, register_parameter=register):
        yield


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    logger = transformers().utils.logging
    before = logger.get_verbosity()
    logger.set_verbosity_error()
    try:
        yield
    finally:
        logger.set_verbosity(before)


def build(config: Any, dtype: torch.dtype, training: bool, seed: int | None = None) -> nn.Module:
    """Returns the config's model. Without a `seed` its parameters are on the meta device; with one they are fresh, as
    the class makes them from that seed. Buffers have their values."""
    cls = model_class(config)
    config = copy.deepcopy(config)
    for part in {id(p): p for p in (config, config.get_text_config())}.values():
        if hasattr(part, "use_cache"):
            part.use_cache = False  # what a cache holds is no output of a training step
    message, remedy = f"transformers cannot build {cls.__name__} from the config", f"look whether {cls.__name__}(config) works in Python"
    with _told(message, ErrorKind.ExecutionFailed, remedy), _quiet(), contextlib.ExitStack() as stack:
        if seed is None:
            stack.enter_context(_parameters_on_meta())
        else:
            stack.enter_context(torch.random.fork_rng(devices=[]))
            torch.manual_seed(seed)
        model = cls._from_config(config, dtype=dtype)
        if seed is None:
            _make_buffers(model)
    _keep_float32(model, dtype)
    return model.train(training)


def _make_buffers(model: nn.Module) -> None:
    """Gives buffers their values as from_pretrained of transformers 5 does: their class makes them again in torch's default dtype.
    While a model of narrow weights is made, that is the narrow one (GPT-J's table of positions is rounded then)."""
    if transformers().__version__.startswith("4."):
        return
    for module in model.modules():
        module._is_hf_initialized = False
    model.initialize_weights()


def _keep_float32(model: nn.Module, dtype: torch.dtype) -> None:
    """Gives those tensors float32 that from_pretrained keeps in it, as the model's class says, beside narrow weights."""
    kept = [*(model._keep_in_fp32_modules or ())] if dtype == torch.float16 else []
    kept += (model._keep_in_fp32_modules_strict or ()) if dtype in (torch.float16, torch.bfloat16) else ()
    if not kept:
        return
    is_four = transformers().__version__.startswith("4.")  # which takes names of whole modules, and 5 patterns
    pattern = re.compile("|".join(rf"(^|\.){each}($|\.)" if is_four else each.replace("*", ".*") for each in kept))
    for name, tensor in model.state_dict(keep_vars=True).items():
        if tensor.is_floating_point() and pattern.search(name):
            tensor.data = tensor.data.float()


def example_inputs(model: nn.Module, batch: int, length: int | None) -> dict[str, Tensor]:
    """Inputs of a forward as training gives them, without values: token ids, or pixels of the config's size."""
    config, name = model.config, model.main_input_name
    message = f"no inputs of {type(model).__name__} can be made for a batch of {batch} and its config"
    with _told(message, ErrorKind.InvalidArgument, "sizes as torch.zeros takes them"):
        ids = torch.zeros(batch, length or _default_length(config), dtype=torch.long, device="meta")
        if name == "input_ids":
            return {name: ids, **({"decoder_input_ids": ids} if config.is_encoder_decoder else {})}
        if name == "pixel_values" and hasattr(config, "image_size"):
            size = config.image_size
            height, width = (size, size) if isinstance(size, int) else tuple(size)
            channels = getattr(config, "num_channels", 3)
            return {name: torch.zeros(batch, channels, height, width, dtype=model.dtype, device="meta")}
    raise Error(
        f"what {type(model).__name__} takes ('{name}') does not follow from its config",
        kind=ErrorKind.Unsupported,
        remedy="plumb.hf.load(folder, inputs={...}) with an example of its inputs",
    )


def _default_length(config: Any) -> int:
    known = getattr(config.get_text_config(), "max_position_embeddings", None)
    return min(known, 2048) if isinstance(known, int) and known > 0 else 2048


_DEVICE = torch.Tensor.device.__get__  # type: ignore[attr-defined]


_OF_VALUES = (torch.tensor, torch.scalar_tensor)
_BY_INDEX = (torch.Tensor.__getitem__, torch.Tensor.__setitem__)


class _SaysCpu(TorchFunctionMode):
    """Tensors of the meta device say that they are on the CPU, and what is asked for on the CPU is made on the meta device:
    models take other ways on other devices."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func == _DEVICE:
            found = args[0].device
            return torch.device("cpu") if found.type == "meta" else found
        if func in _OF_VALUES:  # they have their values, which become constants of the graph
            made = func(*args, **{**(kwargs or {}), "device": "cpu"})
            return made if made.dim() == 0 else made.to("meta")
        if func in _BY_INDEX and len(args) > 1:
            args = (args[0], _of_lists(args[1]), *args[2:])
        kwargs = {name: _on_meta(value) for name, value in (kwargs or {}).items()}
        if func is torch.rand and args in (([],), ((),)):
            return func(*args, **kwargs)  # whether a layer is left out, compared with a probability: on the CPU it has a value
        if func in _device_constructors() and kwargs.get("device") is None:
            kwargs["device"] = torch.device("meta")
        return func(*map(_on_meta, args), **kwargs)


def _of_lists(index: Any) -> Any:
    """Returns an index whose lists are tensors with values; torch would make them on the meta device, without."""
    if isinstance(index, tuple):
        return tuple(map(_of_lists, index))
    return torch.tensor(index).to("meta") if isinstance(index, list) and index and type(index[0]) is int else index


def _on_meta(value: Any) -> Any:
    is_cpu = value == "cpu" if isinstance(value, str) else isinstance(value, torch.device) and value.type == "cpu"
    return torch.device("meta") if is_cpu else value


def _positions_in_order(inputs: dict) -> ContextManager:
    """transformers 5 looks whether position ids begin anew within a row. Those that it counts itself do not."""
    masks = getattr(transformers(), "masking_utils", None)
    asks = hasattr(masks, "find_packed_sequence_indices") and not transformers().__version__.startswith("4.")
    if not asks or "position_ids" in inputs:
        return contextlib.nullcontext()
    return patched(masks, find_packed_sequence_indices=lambda position_ids: None)


def _grouped_products() -> ContextManager:
    """torch's shapes of products of experts refuse what the CPU's kernel takes, dtypes other than bfloat16."""
    shapes = torch._meta_registrations
    original, sizes = (getattr(shapes, f"_{name}", None) for name in ("meta_grouped_mm_common", "create_grouped_mm_output_tensor"))
    if original is None or sizes is None:
        return contextlib.nullcontext()

    def common(a: Tensor, b: Tensor, scale_a: Any, scale_b: Any, offs: Any = None, *rest: Any, out_dtype: Any = None, **more: Any) -> Tensor:
        if scale_a is not None or scale_b is not None:
            return original(a, b, scale_a, scale_b, offs, *rest, out_dtype=out_dtype, **more)
        return a.new_empty(sizes(a, b, offs, out_dtype).shape, dtype=out_dtype or a.dtype)

    return patched(shapes, _meta_grouped_mm_common=common)


@contextlib.contextmanager
def _nothing_remembered() -> Iterator[None]:
    """Empties each functools.lru_cache that took something in: a tensor without values that a library keeps would be handed
    to the next model, which computes with whatever its memory holds. Those of transformers' methods (BEiT's table of positions)
    are not asked, as in torch.compile: a capture that tries a second call would find another path there."""

    def caches() -> dict[int, Any]:
        return {id(x): x for x in gc.get_objects() if type(x) is functools._lru_cache_wrapper}

    before = {key: cache.cache_info().misses for key, cache in caches().items()}
    try:
        with patched(transformers().pytorch_utils, is_torchdynamo_compiling=lambda: True):
            yield
    finally:
        for key, cache in caches().items():
            if cache.cache_info().misses > before.get(key, 0):
                cache.cache_clear()


def captured(model: nn.Module, inputs: dict[str, Any], stored: Callable[[str], bool] | None) -> GraphModule:
    """Returns the forward of a model without weights as a graph for the CPU. Its parameters are on the meta device, and
    so are buffers that are `stored` with them; other buffers have the model's values."""
    on_meta = copy.deepcopy(model).to("meta")
    inputs = pytree.tree_map_only(Tensor, lambda x: x.detach().to("meta"), inputs)
    alone = list(inputs) == [model.main_input_name]  # by position, where raw tokens and `plumb run --input` find it
    remedy = (
        f"inputs={{...}} where the model takes more than '{', '.join(inputs)}'; transformers 5 for a mixture of experts; "
        "else load it with from_pretrained, and plumb.capture it with its weights"
    )
    with (
        _told(f"{type(model).__name__} cannot be captured without weights", ErrorKind.Capture, remedy),
        _quiet(), _nothing_remembered(), _positions_in_order(inputs), _grouped_products(), _SaysCpu(),
    ):  # fmt: skip
        graph = capture(on_meta, *inputs.values()) if alone else capture(on_meta, **inputs)
    engine, buffers = graph._engine, dict(model.named_buffers(remove_duplicate=False))
    _C.rewrite_devices(engine, torch.device("cpu"))
    values = []
    for name, kind, tensor, _ in engine.state():
        if kind == BUFFER and not (stored and stored(name)):
            values.append((name, buffers[name]))
        elif kind == CONSTANT and tensor.is_meta:
            raise Error(
                f"the forward of {type(model).__name__} takes a tensor that is neither parameter nor buffer ('{name}'), whose "
                "values are not known without weights",
                kind=ErrorKind.Capture,
                remedy="load the model with from_pretrained and plumb.capture it",
            )
    engine.set_state(values)
    return graph.on(engine).train(model.training)


def make(graph: GraphModule, model: nn.Module, names: list[str]) -> None:
    """Gives the graph the values of parameters that no folder has, as their class makes them."""
    values = []
    for name in names:
        owner, _, leaf = name.rpartition(".")
        module = copy.deepcopy(model.get_submodule(owner)).to_empty(device="cpu")
        with torch.no_grad(), _quiet():
            model._init_weights(module)
        values.append((name, module._parameters[leaf]))
    graph._engine.set_state(values)
    graph.take_state()


def fill(graph: GraphModule, model: nn.Module) -> None:
    """Gives the graph the parameters of a model that has values."""
    own = dict(model.named_parameters(remove_duplicate=False))
    graph._engine.set_state([(name, own[name]) for name, kind, *_ in graph._engine.state() if kind == PARAMETER])
    graph.take_state()
