"""Loaded by every Python process of a run of torch's tests: `torch.distributed.pipelining.X` is `plumb.pipelining.X`.

Without an accelerator, tests that ask for several run on the CPU over Gloo.
"""

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import pathlib
import sys

TORCHS, OURS = "torch.distributed.pipelining", "plumb.pipelining"


def _found(name):
    return importlib.util.find_spec(name) is not None


def _with_names(relative):
    """plumb's module of that name with the private names of `torch_names`; those alone where plumb has none."""
    own, private = f"{OURS}.{relative}", f"torch_names.{relative}"
    names = importlib.import_module(private) if _found(private) else None
    if not _found(own):
        return names
    ours = importlib.import_module(own)
    for name, value in vars(names).items() if names is not None else ():
        if not name.startswith("__") and not hasattr(ours, name):
            setattr(ours, name, value)
    return ours


class Alias(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name == TORCHS or name.startswith(TORCHS + "."):
            return importlib.machinery.ModuleSpec(name, self, is_package=name == TORCHS)
        return None

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        relative = module.__name__[len(TORCHS) + 1 :]
        if relative:
            sys.modules[module.__name__] = _with_names(relative)
            return
        ours = importlib.import_module(OURS)
        # Modules may be had as attributes of the package, without another import.
        for path in sorted(pathlib.Path(importlib.import_module("torch_names").__path__[0]).glob("*.py")):
            if path.stem != "__init__":
                setattr(ours, path.stem, _with_names(path.stem))
        sys.modules[module.__name__] = ours


class OnTheCpu(importlib.abc.MetaPathFinder):
    """Takes the conditions off as soon as torch's helpers for tests are loaded."""

    def find_spec(self, name, path=None, target=None):
        if name != "torch.testing._internal.common_distributed":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            import torch
            import torch.distributed as dist
            from torch.testing._internal import common_utils

            if torch.accelerator.is_available():
                return
            for condition in ("requires_accelerator_dist_backend", "requires_nccl", "skip_if_lt_x_gpu"):
                setattr(module, condition, lambda *args, **kwargs: lambda test: test)
            common_utils.TEST_MULTIACCELERATOR = True
            torch.cpu.device_count = lambda: 2  # tests start a process for each
            barrier = dist.barrier
            dist.barrier = lambda group=None, async_op=False, device_ids=None: barrier(group, async_op)

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path[:0] = [Alias(), OnTheCpu()]
