"""A stage at work microbatch by microbatch: as the engine calls it, and for those who drive it from Python (functions in
the place of actions, stages with methods of their own, stages run by hand). The engine does the work."""

from __future__ import annotations

import inspect
import itertools
import json
import weakref
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from .. import _C
from .._errors import Error, ErrorKind
from .._state import is_of
from .._trees import load_spec, unflatten
from ._stage_module import Sizes, sizes_of
from ._utils import InvalidSchedule, PipeliningMetadataError

Values = list["torch.Tensor | None"]

_PLAIN = (str, int, float, bool, type(None))  # what travels in a text beside the tensors; classes made of these would become them


def detached(value: Any) -> Any:
    return pytree.tree_map(lambda v: v.detach() if isinstance(v, torch.Tensor) else v, value)


def flat_output(output: Any) -> list[torch.Tensor | None]:
    """Returns the tensors that a stage returned, in order."""
    return [v for v in pytree.tree_leaves(output) if isinstance(v, torch.Tensor)]


def meta_of(value: Any) -> dict[str, Any] | None:
    return dict(shape=value.shape, dtype=value.dtype, stride=value.stride()) if isinstance(value, torch.Tensor) else None


def check_alike(where: str, expected: list, actual: list) -> None:
    """Raises `PipeliningMetadataError` that names what differs between the tensors that `meta_of` described."""
    diffs = [] if len(expected) == len(actual) else [f"{len(actual)} values where {len(expected)} are expected"]
    for i, (before, now) in enumerate(zip(expected, actual)):
        before, now = before or {}, now or {}
        differ = [key for key in before.keys() | now.keys() if before.get(key) != now.get(key)]
        diffs += [f"value {i}: {key} mismatch: {before.get(key)} vs {now.get(key)}" for key in sorted(differ)]
    if diffs:
        raise PipeliningMetadataError(f"{where}: {'; '.join(diffs)}")


def pack(output) -> list[torch.Tensor | None]:
    """Returns a stage's output as flat tensors. Unless it is a tensor or a tuple or list of them, None and the
    structure (as text in a tensor) come first."""
    if isinstance(output, torch.Tensor):
        return [output]
    if isinstance(output, (tuple, list)) and all(isinstance(v, torch.Tensor) for v in output):
        return list(output)
    leaves, spec = pytree.tree_flatten(output)
    places = [None if isinstance(leaf, torch.Tensor) else [leaf] for leaf in leaves]
    odd = [leaf for leaf in leaves if not isinstance(leaf, torch.Tensor) and type(leaf) not in _PLAIN]
    try:
        shape = pytree.treespec_dumps(spec)
        text = None if odd or load_spec(shape) != spec else json.dumps([shape, places])  # keys of a dict may have become others
    except Exception:  # classes and keys that a text cannot say
        text = None
    if text is None:
        what = type(odd[0]) if odd else type(output)
        raise Error(
            f"a stage returns a {what.__module__}.{what.__qualname__}{'' if odd else ' of a structure'} that it cannot hand on to the next one",
            kind=ErrorKind.Unsupported,
            remedy="return tensors, numbers, texts and None, in tuples, lists and dicts; the next stage may have its own keyword argument",
        )
    structure = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    return [None, structure, *(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))]


def unpack(values: list[torch.Tensor | None]) -> tuple:
    """Returns the positional arguments that `pack` made flat."""
    if not values or values[0] is not None:
        return tuple(values)
    try:
        spec, places = json.loads(bytes(values[1].cpu().numpy()).decode())
        tensors = iter(values[2:])
        leaves = [next(tensors) if place is None else place[0] for place in places]
        output = unflatten(leaves, load_spec(spec))
    except Exception as error:
        raise Error(f"another stage handed on what has no structure: {type(error).__name__}: {error}") from None
    return tuple(output) if type(output) in (tuple, list) else (output,)


def accepted(module, kwargs: dict[str, Any]) -> set[str]:
    """Returns the names among `kwargs` that a module's forward takes."""
    try:
        parameters = inspect.signature(module.forward if isinstance(module, torch.nn.Module) else module).parameters
    except (TypeError, ValueError):
        return set(kwargs)
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return set(kwargs)
    return kwargs.keys() & parameters.keys()


def own_arguments(stage: Any, stages: list, kwargs: dict[str, Any]) -> dict[str, Any]:
    """With several stages on a rank each gets those keyword arguments that it takes; stages of a cut model get all."""
    if not kwargs or len(stages) == 1 or stage.layout is not None:
        return kwargs
    unknown = kwargs.keys() - set().union(*(accepted(other.submod, kwargs) for other in stages))
    own = accepted(stage.submod, kwargs) | unknown  # the module's own error says what is wrong
    return {name: value for name, value in kwargs.items() if name in own}


def names_of(stages: list) -> dict[int, str]:
    """By id of a parameter: the name under which copies of it are known in the whole pipeline."""
    names: dict[int, str] = {}
    for stage in stages:
        for name, parameter in stage.named_parameters():
            own = name if stage.layout is not None else f"stage {stage.stage_index}: {name}"
            names.setdefault(id(parameter), getattr(stage, "tied", {}).get(name, own))
    return names


class EngineStage:
    """A stage as the engine calls it. `stages`: all stages of this rank; None: the stage alone."""

    graph: Any = None  # in a step: the `_C.GraphStage` that the engine runs in place of `run`, if Python has no part in the forward

    _first_names: list[str] | None = None  # names of the parameters when the engine asked first

    def __init__(self, stage: Any, stages: list | None = None):
        self._stage, self._stages = stage, stages or [stage]
        self.weight_work, self.recompute, self.is_last = stage.dw_builder, stage.recompute, stage.is_last

    @property
    def device(self) -> torch.device:
        """The device of the stage's tensors; values handed over are moved there."""
        module = self._stage.submod
        own = itertools.chain(module.parameters(), module.buffers()) if isinstance(module, torch.nn.Module) else ()
        return next((t.device for t in own), self._stage.device)

    def parameters(self) -> list[tuple[str, torch.Tensor]]:
        """Returns the parameters by their names in the whole pipeline. Raises `plumb.Error` for others than at first where the engine
        knows places among them: of tied ones, and of those of replicas."""
        names = names_of(self._stages) if self._stage._step is None else self._stage._step.names
        found = [(names[id(parameter)], parameter) for _, parameter in self._stage.summed_parameters()]
        now, first = [name for name, _ in found], self._first_names
        self._first_names = now if first is None else first
        if first not in (None, now) and self._has_places(names, [*first, *now]):
            news = ", ".join(sorted(set(now) ^ set(first))) or "another order"
            raise Error(
                f"stage {self._stage.stage_index} has other parameters than in the schedule's first step ({news})",
                kind=ErrorKind.InvalidState,
                remedy="make a new schedule on every rank",
            )
        return found

    def written_state(self) -> list[tuple[str, torch.Tensor]]:
        """Returns the buffers and parameters that forwards write, as far as they are known."""
        return self._stage.written_state()

    def _has_places(self, names: dict[int, str], own: list[str]) -> bool:
        """Returns whether the engine knows places among parameters of these names: `names` are those of all stages, by id."""
        others = {names[id(p)] for other in self._stages if other is not self._stage for _, p in other.named_parameters()}
        here = f"stage {self._stage.stage_index}: "
        replicated = is_of(self._stage.submod, "torch.nn.parallel", "DistributedDataParallel")
        return replicated or any(name in others or not name.startswith(here) for name in own)

    def run(self, inputs: Values, microbatch: int, sizes: Sizes) -> Values:
        return self._stage._run_function(inputs, microbatch, sizes)

    def finish(self, values: Values, microbatch: int) -> Values:
        """Hands over what the graph of the last stage returned. Returns the microbatch's loss, if there is one."""
        return self._stage._step.finish(values[0] if len(values) == 1 else tuple(values), microbatch)

    def note(self, error: Exception) -> None:
        """Keeps the first exception of a step, which becomes the cause of the step's error."""
        caller = self._stage._step or self._stage
        caller.failure = caller.failure or error


class ChunkSteps:
    """The part of a stage that runs a microbatch's forward and backward, in the step of a schedule or by hand."""

    has_backward = False  # whether the schedule has one
    _runtime_validate = False  # compare every microbatch's values with the first one's
    _step: Any = None  # the step that runs
    failure: Exception | None = None  # exception of the stage's own code, when it is driven by hand

    def _begin_chunks(self) -> None:
        self.fwd_cache: dict[int, tuple] = {}  # by microbatch: flat outputs, flat inputs; in a step until an action ends
        self.bwd_cache: dict[int, tuple] = {}  # by microbatch: gradients for the stage before; likewise
        self._calls: dict[int, SimpleNamespace] = {}  # running calls of `forward_one_chunk`, by microbatch
        self._weights_due: set[int] = set()
        self._by_hand: Any = None  # _C.StepDriver

    @property
    def log_prefix(self) -> str:
        return f"[Stage {self.stage_index}]"

    def _check_chunk_id(self, chunk_id: int) -> None:
        if self.chunks is not None and not 0 <= chunk_id < self.chunks:
            raise InvalidSchedule(f"{self.log_prefix} microbatch {chunk_id} is none of the step's {self.chunks}")

    # --- before a step: shapes come with the messages, so that there is nothing to find out ---
    def _prepare_forward_infra(self, num_microbatches, *_, **__) -> tuple:
        return ()

    _prepare_backward_infra = _prepare_forward_infra

    def get_fwd_recv_ops(self, chunk_id: int) -> list:
        """Raises `plumb.Error`: the engine receives and sends."""
        raise Error(
            f"{self.log_prefix} has no messages to start by hand",
            kind=ErrorKind.Unsupported,
            remedy="run the stage in a schedule, whose engine receives before an action and sends after it",
        )

    get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = get_fwd_recv_ops

    # --- what the engine calls ---
    def graph_alone(self) -> Any:
        """Returns the `_C.GraphStage` that is this stage's whole forward now; None if Python has a part in it."""
        return None

    def written_state(self) -> list[tuple[str, torch.Tensor]]:
        """Returns the buffers and parameters that this stage's graph writes; nothing if Python has no graph of it."""
        return []

    def _run_function(self, inputs: Values, microbatch: int, sizes: Sizes) -> Values:
        call, step = self._calls.get(microbatch), self._step
        if self.layout is not None:
            self._validate("inputs", inputs)
            output = self.in_forward_context(microbatch, lambda: self.run_values(inputs, sizes))
            values = [output] if isinstance(output, torch.Tensor) else list(output)
        else:
            args, kwargs = (call.args, call.kwargs) if call else step.arguments(self, microbatch)
            args = args if self.is_first else unpack(inputs)
            self._validate("inputs", args)
            self.check_example("input", args)
            output = self.in_forward_context(microbatch, lambda: self.forward_maybe_with_nosync(*args, **kwargs))
            self.check_example("output", output)
            values = flat_output(output) if self.is_last else pack(output)
        if not self.is_last:
            self._validate("outputs", values)
        if call is None:
            return step.finish(output, microbatch) if self.is_last else values
        call.output = output
        self.fwd_cache[microbatch] = (tuple(values), inputs)
        return [] if self.is_last else values

    def check_example(self, what: str, values: Any) -> None:
        pass

    def _validate(self, what: str, values: Any) -> None:
        if not self._runtime_validate:
            return
        metas = list(map(meta_of, pytree.tree_leaves(values)))
        first = self.__dict__.setdefault("_metas", {}).setdefault(what, metas)
        check_alike(f"Stage {self.stage_index}: forward {what}", first, metas)

    # --- microbatch by microbatch ---
    def _drive(self, work: str, *args: Any) -> Any:
        """Has the engine do it: as a part of the step that runs, or by hand."""
        if self._step is not None:
            return getattr(self._step.driver, work)(*args)
        if self._by_hand is None:
            layout = self.layout or self.chain()
            self._by_hand = _C.StepDriver(layout, self.stage_index, EngineStage(weakref.proxy(self)))
        try:
            return getattr(self._by_hand, work)(*args)
        except Error as error:
            failure, self.failure = self.failure, None
            if failure is None and error.kind is not ErrorKind.InvalidState:
                raise
            raise failure or InvalidSchedule(f"{self.log_prefix} {error}") from None

    def forward_one_chunk(
        self, fwd_chunk_id: int, args: tuple, kwargs: dict[str, Any] | None = None, save_forward_output: bool = True
    ) -> Any:
        """Runs a microbatch's forward and returns what the module returned. `args` are the first stage's; the others
        take what has arrived from the stages before."""
        self._check_chunk_id(fwd_chunk_id)
        given = [] if self.layout is None else self.model_inputs(args, kwargs or {})
        call = self._calls[fwd_chunk_id] = SimpleNamespace(args=args, kwargs=kwargs or {}, output=None)
        try:
            if given:
                self._drive("take_model_inputs", self.stage_index, fwd_chunk_id, given)
            self._drive("forward", self.stage_index, fwd_chunk_id)
        finally:
            del self._calls[fwd_chunk_id]
        if self.is_last and save_forward_output:
            if self._step is None:
                self.output_chunks.append(detached(call.output))
            else:
                self._step.outputs[fwd_chunk_id] = detached(call.output)
        return call.output

    def set_local_fwd_input(self, prev_stage_outputs: Any, mb_index: int) -> None:
        """The previous stage's outputs for a microbatch, if that stage is on this rank."""
        before = self.stage_index - 1
        outputs = pack(prev_stage_outputs) if self.layout is None else flat_output(prev_stage_outputs)
        self._drive("take_outputs", self.stage_index, mb_index, before, outputs, sizes_of(outputs))

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """Runs a microbatch's backward: whole, or the half of the inputs, which `backward_weight_one_chunk` completes.
        The last stage begins with `loss`."""
        if not self.has_backward:
            return
        self._check_chunk_id(bwd_chunk_id)
        if self._step is None and bwd_chunk_id not in self.fwd_cache:
            raise InvalidSchedule(f"{self.log_prefix} microbatch {bwd_chunk_id} goes back without a forward_one_chunk")
        kind = "B" if full_backward else "I"
        self._drive("backward", kind, self.stage_index, bwd_chunk_id, loss if self.is_last else None)
        self.fwd_cache.pop(bwd_chunk_id, None)
        if not full_backward:
            self._weights_due.add(bwd_chunk_id)
        if not self.is_first:
            self.bwd_cache[bwd_chunk_id] = tuple(
                self._drive("input_gradients", self.stage_index, bwd_chunk_id, self.stage_index - 1)
            )

    def get_local_bwd_output(self, mb_index: int) -> tuple:
        """Returns the gradients of a microbatch's inputs that the stage before, on this rank, made."""
        if not self.has_backward:
            raise InvalidSchedule(f"{self.log_prefix} there are no gradients in a step without a backward")
        self._check_chunk_id(mb_index)
        return self.bwd_cache.pop(mb_index, ())

    def set_local_bwd_input(self, next_stage_bwd_outputs: tuple, mb_index: int) -> None:
        """The gradients of what this stage handed to the next one on this rank."""
        self._drive("take_gradients", self.stage_index, mb_index, self.stage_index + 1, list(next_stage_bwd_outputs))

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """Runs the half of the weights. Raises `plumb.Error` (an AssertionError too) unless the other half has run."""
        if self._step is None and bwd_chunk_id not in self._weights_due:
            raise InvalidSchedule(
                f"{self.log_prefix} microbatch {bwd_chunk_id} has no weight gradients to make",
                remedy="backward_one_chunk(..., full_backward=False) first",
            )
        self._weights_due.discard(bwd_chunk_id)
        self._drive("backward", "W", self.stage_index, bwd_chunk_id)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Finishes a stage's complete gradients: means over replicas, and the scaling."""
        self.reduce_gradients()
        self.scale_grads(grad_scale_factor)
