"""Keeps a folder's config from running code, and from fetching or reading what lies elsewhere.

Two guards stand beside each other. `refuse_names` reads config.json before anything is built, and names the key. `only_folder` holds for
whatever transformers does meanwhile, with keys that nobody knows yet too.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
from types import CodeType, FunctionType, ModuleType
from typing import Any, Iterator, NoReturn

from .._capture.cpython import calls_go_to
from .._errors import Error, ErrorKind

_COUNTS = re.compile("layer|depth|label|block|stage|expert")  # what transformers makes lists of, while it reads
_MOST_COUNTED = 1 << 20
_DEEPEST = 64  # levels of a config; transformers copies them by recursion
_REACHES_OUT = {"socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto", "socket.sendmsg"}

_NAME_OF_TIMM = re.compile(r"[\w.-]+")

_local = threading.local()
_one_at_a_time = threading.RLock()
_hook_is_there = False


def _what_is_wrong(place: str, key: str, value: Any, timm: bool) -> tuple[str, str] | None:
    """Returns a sentence and its remedy."""
    text = isinstance(value, str)
    if isinstance(value, int) and value > _MOST_COUNTED and _COUNTS.search(key):
        return f"'{key}' is {str(value)[:20]}; {_MOST_COUNTED} is the most", ""
    if key == "trust_remote_code" and value is True:
        return f"'{place}' is true: code that lies elsewhere is never run", "a model that transformers itself has"
    if text and key in ("backbone", "backbone_config") and not (timm and _NAME_OF_TIMM.fullmatch(value)):
        described = '"backbone_config": {...} that describes it, as save_pretrained of transformers 5 writes it'
        return f"'{place}' names '{value[:100]}', a model that lies elsewhere: it is not fetched", described
    if text and "implementation" in place and "/" in value:
        return (
            f"'{place}' names '{value[:100]}', a kernel that lies elsewhere: it is not fetched",
            f"a config without '{place}'",
        )
    if key == "transformers_weights" and value is not None:
        return (
            f"'{place}' names '{str(value)[:100]}': weights are read from model.safetensors or its shards alone",
            f"the file under that name, and a config without '{place}'",
        )
    if key == "quantization_config" and value is not None:
        return (
            "its weights are quantized, and cannot be trained as they are",
            "the folder of the model before it was quantized",
        )
    return None


def refuse_names(path: str, values: Any) -> None:
    """Refuses a config that names code, a kernel or a model elsewhere, whatever reads it, quantized weights, numbers that
    transformers would make lists of as long, and levels without end."""
    left = [("", "", values, False, 0)]
    while left:
        place, key, value, timm, level = left.pop()
        if level > _DEEPEST:
            top = place.partition(".")[0][:100]
            deep = f"{path}: '{top}' is nested more than {_DEEPEST} levels deep"
            raise Error(deep, kind=ErrorKind.BadFile, remedy=f"a config without '{top}'")
        if wrong := _what_is_wrong(place, key, value, timm):
            kind = ErrorKind.Unsupported if key == "quantization_config" else ErrorKind.BadFile
            raise Error(f"{path}: {wrong[0]}", kind=kind, remedy=wrong[1])
        if isinstance(value, dict):
            timm = value.get("use_timm_backbone") is True or value.get("model_type") == "timm_backbone"
            left.extend((f"{place}.{key}" if place else key, key, each, timm, level + 1) for key, each in value.items())
        elif isinstance(value, list):
            left.extend((place, key, each, timm, level + 1) for each in value)


def _place_of(name: str, values: Any, place: str = "") -> str:
    """Returns the key of a config that has this text as its value, "backbone_config.model_name"; "" if none has."""
    if isinstance(values, (dict, list)):
        parts = values.items() if isinstance(values, dict) else ((place, each) for each in values)
        found = (
            _place_of(name, each, f"{place}.{key}" if place and isinstance(values, dict) else key)
            for key, each in parts
        )
        return next(filter(None, found), "")
    return place if name and values == name else ""


def _roots(folder: str) -> list[tuple[str, bool]]:
    """Returns folders, longest names first, and whether code in them is installed (False first if it is both)."""
    from huggingface_hub import constants

    modules = [m for name, m in list(sys.modules.items()) if "." not in name and isinstance(m, ModuleType)]
    packages = {os.path.dirname(path) for m in modules for path in m.__dict__.get("__path__") or ()}
    caches = [
        constants.HF_HOME,
        constants.HF_HUB_CACHE,
        os.environ.get("HF_MODULES_CACHE"),
        os.environ.get("KERNELS_CACHE"),
    ]
    found = {(os.path.realpath(p), True) for p in {*sys.path, *packages} if isinstance(p, str)}
    found |= {(os.path.realpath(p), False) for p in (folder, *filter(None, caches))}
    return sorted(found, key=lambda root: (-len(root[0]), root[1]))


class _Watch:
    """Restricts a thread while it imports a folder."""

    def __init__(self, folder: str, values: Any):
        self.folder, self.values, self.problem = os.path.realpath(folder), values, None
        self.roots = _roots(folder)

    def refuse(self, what: str, name: str) -> NoReturn:
        place = _place_of(name, self.values)
        by = f"'{place}' of config.json names" if place else "config.json makes transformers look for"
        error = Error(
            f"{self.folder}: {by} {what}: nothing is fetched, and no code of a folder is run",
            kind=ErrorKind.BadFile,
            remedy="a config.json that describes all parts of its model, of those that transformers itself has",
        )
        self.problem = self.problem or error
        raise error

    def find(self, original: Any, args: tuple, kwargs: dict) -> Any:
        """In the place of `cached_files`, through which transformers finds each file of a model."""
        if getattr(_local, "watch", None) is not self:
            return original(*args, **kwargs)
        name = os.fspath(args[0] if args else kwargs["path_or_repo_id"])
        files = args[1] if len(args) > 1 else kwargs["filenames"]
        if os.path.realpath(name) != self.folder or not os.path.isdir(name):
            self.refuse(f"'{name}', which lies elsewhere", name)
        if code := [file for file in files if str(file).endswith(".py")]:
            self.refuse(f"code, '{code[0]}'", name)
        return original(*args, **kwargs)

    def get_kernel(self, original: Any, args: tuple, kwargs: dict) -> Any:
        """In the place of `kernels.get_kernel`, which runs code that it fetches, or has fetched before."""
        if getattr(_local, "watch", None) is not self:
            return original(*args, **kwargs)
        name = str(args[0] if args else kwargs.get("repo_id"))
        self.refuse(f"a kernel, '{name}', which lies elsewhere", name)

    def see(self, event: str, args: tuple) -> None:
        if event in _REACHES_OUT:
            self.refuse(f"something elsewhere ({event}{args[1:2] if event == 'socket.connect' else args[:1]})", "")
        elif event == "exec" and isinstance(args[0], CodeType):
            self._check_code(args[0].co_filename)
        elif event == "import" and isinstance(args[1], str):
            self._check_code(args[1])

    def _check_code(self, file: str) -> None:
        if file.startswith("<"):
            return
        real = os.path.realpath(file)
        if not next((installed for root, installed in self.roots if os.path.commonpath((root, real)) == root), False):
            self.refuse(f"code, '{file}'", "")


def _hook(event: str, args: tuple) -> None:
    watch = getattr(_local, "watch", None)
    if watch is not None:
        watch.see(event, args)


@contextlib.contextmanager
def only_folder(folder: str, values: Any) -> Iterator[None]:
    """Context manager in which this thread finds files of a model in the folder alone, opens no connection, and runs no code but that of
    installed packages. Raises plumb.Error(BadFile), also if a library passed over the refusal."""
    global _hook_is_there
    from transformers.integrations import hub_kernels  # noqa: F401, it imports the package kernels where there is one
    from transformers.utils import hub

    watch = _Watch(folder, values)
    with contextlib.ExitStack() as while_it_lasts:
        while_it_lasts.enter_context(_one_at_a_time)
        while_it_lasts.enter_context(calls_go_to(hub.cached_files, watch.find))
        get_kernel = getattr(sys.modules.get("kernels"), "get_kernel", None)
        if isinstance(get_kernel, FunctionType):
            while_it_lasts.enter_context(calls_go_to(get_kernel, watch.get_kernel))
        if not _hook_is_there:  # Python cannot take such a hook away again
            sys.addaudithook(_hook)
            _hook_is_there = True
        _local.watch = watch
        try:
            yield
        except Exception as error:
            if watch.problem is not None and error is not watch.problem:
                raise watch.problem from error
            raise
        finally:
            _local.watch = None
    if watch.problem is not None:
        raise watch.problem
