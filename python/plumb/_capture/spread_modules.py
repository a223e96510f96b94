"""Modules that torch replicates or shards over processes: which of them a graph cannot stand for."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from .._errors import Error, ErrorKind
from .._state import is_of, refuse_sharded


def _given_to(module: nn.Module) -> str:
    """Returns the function of torch's that was given this module and works in hooks around its forward; "" if none was."""
    if is_of(module, "torch.distributed._composable.replicate", "DDP"):
        return "replicate"
    if is_of(module, "torch.distributed.fsdp", "FSDPModule"):
        return "replicate" if type(module).__name__.startswith("Replicate") else "fully_shard"
    return ""


def refuse_spread_modules(module: nn.Module, with_root: bool) -> None:
    """Raises `plumb.Error` for modules around whose forward torch gathers parameters or reduces gradients, which a graph would leave
    out, and for sharded parameters. Without `with_root` the module itself may be one that fully_shard was given: its hooks run outside
    of its forward."""
    for name, sub in module.named_modules():
        what = f"module '{name}' ({type(sub).__name__})" if name else f"the model ({type(sub).__name__})"
        if isinstance(sub, DistributedDataParallel) or is_of(sub, "torch.distributed.fsdp", "FullyShardedDataParallel"):
            raise Error(
                f"{what} reduces gradients over ranks by work around the forward of the model inside, which a graph would leave out",
                kind=ErrorKind.Capture,
                remedy=f"wrap last: {type(sub).__name__}(plumb.transforms.simulate_fp8(model)), for example; what takes a model that is "
                "wrapped already (a Recorder, plumb.verdict, plumb.capture) takes the one inside, its .module",
            )
        given_to = _given_to(sub)
        if given_to and (with_root or sub is not module):
            raise Error(
                f"{what} was given to {given_to}, which gathers its parameters or reduces their gradients in hooks that a graph would "
                "leave out",
                kind=ErrorKind.Capture,
                remedy=f"call {given_to} last, on the whole of what a transform returned: "
                f"{given_to}(plumb.transforms.simulate_fp8(model)), for example; or transform each part by itself before its {given_to}",
            )
        if not getattr(sub, "_fsdp_use_orig_params", True):
            raise Error(
                f"{what} has its parameters in a flat one of FullyShardedDataParallel's, without names of their own",
                kind=ErrorKind.Unsupported,
                remedy="FullyShardedDataParallel(module, use_orig_params=True)",
            )
        for key, tensor in [*sub._parameters.items(), *sub._buffers.items()]:
            refuse_sharded(f"{name}.{key}" if name else key, tensor)


def spread_by(module: nn.Module) -> str:
    """Returns which function or class of torch's has made copies or shards of the parameters of a module that runs now, or runs it with
    other tensors in their place; "" if none."""
    replicated = DistributedDataParallel._active_ddp_module  # while its forward runs
    if replicated is not None and any(sub is module for sub in replicated.modules()):
        return "DistributedDataParallel"
    given_to = next(filter(None, map(_given_to, module.modules())), "")
    sharded = any(getattr(sub, "_is_fsdp_managed_module", False) for sub in module.modules())
    if given_to or sharded:
        return given_to or "fully_shard"
    python = (sub for sub in module.modules() if not isinstance(sub, torch.jit.ScriptModule))  # whose parameters are tensors always
    own = all(isinstance(p, nn.Parameter) for sub in python for p in sub._parameters.values() if p is not None)
    return "" if own else "torch.func.functional_call"
