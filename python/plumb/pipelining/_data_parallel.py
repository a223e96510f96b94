"""Stages whose modules are replicated or sharded over other ranks by torch: their gradients are reduced once a step."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from .._errors import Error, ErrorKind

try:
    from torch.distributed.fsdp import FSDPModule
except ImportError:  # torch without c10d
    FSDPModule = ()


def reduction_of(module: Any) -> Replicated | Sharded | None:
    """How the gradients of a stage's module become means over its replicas; None: it has none."""
    if isinstance(module, DistributedDataParallel):
        return Replicated(module)
    if isinstance(module, nn.Module) and any(isinstance(m, FSDPModule) for m in module.modules()):
        return Sharded(module)
    return None


def replicas_of(stages: list) -> dist.ProcessGroup | None:
    """The ranks over which the engine takes means of gradients, stage by stage while others go on: those of the
    `DistributedDataParallel` modules if all stages are such, over the same ranks, on the CPU. None: `Replicated` does it
    after the step."""
    if not all(isinstance(stage.submod, DistributedDataParallel) for stage in stages):
        return None
    groups = {id(stage.submod.process_group): stage.submod.process_group for stage in stages}
    (group, *others) = groups.values()
    on_cpu = all(p.device.type == "cpu" for stage in stages for p in stage.submod.parameters())
    if others or not on_cpu or dist.get_world_size(group) == 1 or "gloo" not in dist.get_backend(group):
        return None
    return group


class Replicated:
    """`DistributedDataParallel`: every rank holds all parameters."""

    def __init__(self, module: DistributedDataParallel):
        self._module = module

    def owned(self) -> set[int]:
        return set()

    def begin(self) -> None:
        pass  # forwards run under no_sync

    def finish(self, divisor: int) -> None:
        """Means over the replicas. The engine has divided by the microbatches."""
        group = self._module.process_group
        grads = [parameter.grad for parameter in self._module.parameters() if parameter.grad is not None]
        try:
            for work in [dist.all_reduce(grad, group=group, async_op=True) for grad in grads]:
                work.wait()
            for grad in grads:
                grad.div_(dist.get_world_size(group))
        except RuntimeError as error:
            others = [rank for rank in dist.get_process_group_ranks(group) if rank != dist.get_rank()]
            who = f"rank {others[0]}" if len(others) == 1 else f"one of the ranks {others}"
            said = str(error).splitlines()[0]
            raise Error(
                f"the mean of gradients over replicas: {who} is gone or late ({said})",
                kind=ErrorKind.Communication,
                remedy="look at what it printed",
            ) from error

    def end(self) -> None:
        pass


class Sharded:
    """`fully_shard` and `replicate`: parameters are gathered for the step's first forward and kept until its last
    gradient, which goes to the parameters' gathered copies. Microbatches add up there, in the halves of a backward as in
    a whole one; torch's own hooks would reduce after every backward, and after an input half there is nothing yet.
    """

    def __init__(self, module: nn.Module):
        self._module = module
        self._options: list[tuple[Any, bool]] | None = None

    def _roots(self) -> list[FSDPModule]:
        """The outermost sharded modules: their settings reach all within."""
        roots: list[FSDPModule] = []

        def visit(module: nn.Module) -> None:
            if isinstance(module, FSDPModule):
                roots.append(module)
            else:
                for child in module.children():
                    visit(child)

        visit(self._module)
        return roots

    def _groups(self, root: FSDPModule) -> list[Any]:
        return [group for m in root.modules() if isinstance(m, FSDPModule) for group in _groups_of(m._get_fsdp_state())]

    def begin(self) -> None:
        if self._options is None:
            self._options = [(g, g.reshard_after_backward) for root in self._roots() for g in self._groups(root)]
        for root in self._roots():
            root.set_is_last_backward(False)
            root.set_requires_gradient_sync(False)
            root.set_reshard_after_backward(False)

    def _parameters(self) -> list[Any]:
        return [p for root in self._roots() for group in self._groups(root) for p in group.fsdp_params]

    def owned(self) -> set[int]:
        """Ids of the parameters, in shards and gathered, whose gradients are for `finish` to scale."""
        both = [(p.sharded_param, getattr(p, "_unsharded_param", None)) for p in self._parameters()]
        return {id(tensor) for pair in both for tensor in pair}

    def finish(self, divisor: int) -> None:
        """Reduces what the step has accumulated, divided by the microbatches; gradients from before are added to."""
        self.end()
        shards = [p.sharded_param for p in self._parameters()]
        before = [shard.grad for shard in shards]
        for shard in shards:
            shard.grad = None
        for root in self._roots():
            for group in self._groups(root):
                group.post_backward()
            root._get_fsdp_state()._root_post_backward_final_callback()
        for shard, old in zip(shards, before):
            if shard.grad is not None and divisor > 1:
                shard.grad.div_(divisor)
            if old is not None:
                shard.grad = old if shard.grad is None else old.add_(shard.grad)

    def end(self) -> None:
        """The modules' settings as they were, whether the step went well or not."""
        for root in self._roots() if self._options is not None else ():
            root.set_is_last_backward(True)
            root.set_requires_gradient_sync(True)
        for group, reshard in self._options or ():
            group.reshard_after_backward = reshard
        self._options = None


def _groups_of(state: Any) -> list[Any]:
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]  # torch before 2.13
