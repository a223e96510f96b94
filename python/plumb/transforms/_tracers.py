"""Transformed modules under torch's own tracers and compilers.

Under ``torch.compile`` the captured graph becomes a part of the compiled one. Dynamo cannot follow a capture, so it sees one
call, :func:`run`, with the module's state and inputs as arguments. It is made of torch operators alone once the compiler traces
it further. ``torch.jit.script`` and ``torch.fx`` are refused, and so are their results, and ``torch.compile``'s, by a transform.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from typing import Any, Iterator

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from .. import _C
from .._errors import Error, ErrorKind
from .._fx import engine_to_fx
from .._graph_module import by_handle, constant_result
from .._state import CONSTANT, is_compiled, member, state_of
from .._trees import children


@contextlib.contextmanager
def _outside_of_tracing() -> Iterator[None]:
    """Runs a forward as if nobody traced: no fake tensors, and libraries do not see a compiler at work."""
    flag = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = False
    try:
        with (
            torch.utils._python_dispatch._disable_current_modes(),
            torch._C._DisableTorchDispatch(),
            torch._C.DisableTorchFunction(),
            torch.enable_grad() if torch.is_grad_enabled() else torch.no_grad(),
        ):
            yield
    finally:
        torch.compiler._is_compiling_flag = flag


def _stand_in(x: Tensor) -> Tensor:
    """A real tensor like this one of the tracer's. int() of a size makes the compiled code one for this size."""
    sizes = [int(s) for s in x.shape]
    with _outside_of_tracing():
        if x.dtype.is_floating_point:
            made = torch.rand(sizes, dtype=x.dtype, device=x.device)
        else:
            made = torch.zeros(sizes, dtype=x.dtype, device=x.device)
        if not x.is_contiguous():
            made = torch.empty_strided(sizes, [int(s) for s in x.stride()], dtype=x.dtype, device=x.device).copy_(made)
        return made.requires_grad_(x.requires_grad)


def _graph_for(handle: str, args: tuple, kwargs: dict) -> Any:
    forward = by_handle[handle]
    leaves, spec = pytree.tree_flatten((args, kwargs))
    if forward.compiled and any(isinstance(x, torch._subclasses.functional_tensor.FunctionalTensor) for x in leaves):
        return forward.compiled
    with torch.random.fork_rng(devices=[]):
        given = [_stand_in(x) if isinstance(x, Tensor) else x for x in leaves]
    a, k = pytree.tree_unflatten(given, spec)
    with _outside_of_tracing():
        captured = forward.known_for(a, k)
        if captured is None and any(isinstance(p, FakeTensor) for p in forward.module.parameters()):
            raise Error(
                "the transformed module has no graph for these inputs yet, and torch.export has taken its weights away",
                kind=ErrorKind.InvalidState,
                remedy="call the module once on inputs like these before exporting it, or export it with strict=True",
            )
        captured = captured or forward.prepare(a, k)[0]
        if captured.gm is None:
            captured.gm, captured.attributes = engine_to_fx(captured.engine, forward.module.training, lift_constants=True)
        if not captured.is_tensor:
            output = captured.engine.graph.nodes[-1]
            captured.is_tensor = [isinstance(a, tuple) and a[:1] == ("value",) for a in output.args]
        _refuse_sizes_from_values(captured.engine)
    forward.compiled = captured
    return captured


def _refuse_sizes_from_values(engine: Any) -> None:
    for node in engine.graph.nodes:
        facts = _C.operator_facts(node.target) if node.op == "call_function" else None
        if facts and facts["sizes_from_values"]:
            raise _sizes_from_values(f"{node.target} returns")


def _sizes_from_values(what: str) -> Error:
    return Error(
        f"sizes of what {what} are values of a tensor, which torch.compile does not know while it compiles",
        kind=ErrorKind.DataDependent,
        remedy="call the transformed module as it is, without torch.compile, or pad the sequences and mask the result",
    )


_allowed_rnn: list[bool] = []  # the user's setting, while a module is followed


def _open_recurrent_modules() -> None:
    """Dynamo refuses modules that hold an LSTM or the like, even to read their parameters, which is all it does here."""
    if not _allowed_rnn:
        _allowed_rnn.append(torch._dynamo.config.allow_rnn)
        torch._dynamo.config.allow_rnn = True


def _close_recurrent_modules() -> None:
    if _allowed_rnn:
        torch._dynamo.config.allow_rnn = _allowed_rnn.pop()


def run(handle: str, names: tuple, state: list, modes: list, args: tuple, kwargs: dict) -> tuple:
    # Dynamo runs this function as it is if it gives a graph up, and would compile what that calls.
    return torch._dynamo.disable(_run)(handle, names, state, args, kwargs)


def _run(handle: str, names: tuple, state: list, args: tuple, kwargs: dict) -> tuple:
    _close_recurrent_modules()
    captured = _graph_for(handle, args, kwargs)
    by_name = dict(zip(names, state))
    leaves = pytree.tree_leaves((args, kwargs))
    out = captured.gm(*[by_name[n] for n in captured.attributes], *[x for x in leaves if isinstance(x, Tensor)])
    mode = torch._guards.detect_fake_mode(out)
    if mode is not None and mode.shape_env is not None and mode.shape_env.pending_fresh_unbacked_symbols:
        raise _sizes_from_values("some operators of the forward return")
    return tuple(o for o, is_tensor in zip(out, captured.is_tensor) if is_tensor)


@constant_result
def _names(handle: str) -> tuple:
    torch.compiler.allow_in_graph(run)  # here, where Dynamo is loaded
    _open_recurrent_modules()
    return tuple(name for name, kind, _, _ in state_of(by_handle[handle].module) if kind != CONSTANT)


# Classes among a module's outputs, by name: what Dynamo takes for a constant is made of literals alone.
_classes: dict[str, type] = {}


def _template(spec: Any, plain: Iterator[Any], tensors: Iterator[bool], number: Iterator[int]) -> tuple:
    """Returns the structure of an output as nested tuples of literals: (how to make it, its class, keys, parts)."""
    if spec.is_leaf():
        value = next(plain)
        return ("tensor", next(number)) if next(tensors) else ("value", value)
    parts = tuple(_template(c, plain, tensors, number) for c in children(spec))
    cls, context = spec.type, spec.context
    if cls in (tuple, list):
        return (cls.__name__, "", (), parts)
    how, keys = "mapping", ()
    if hasattr(context, "_fields") or cls.__name__ == "namedtuple":
        how, cls = "named", context
    elif cls.__module__ == "torch.return_types":
        how = "sequence"
    elif issubclass(cls, dict):  # also transformers' ModelOutput
        keys = context
    elif dataclasses.is_dataclass(cls):
        keys = context[0] if isinstance(context[0], list) else context
    else:
        raise Error(
            f"the module returns a {cls.__module__}.{cls.__qualname__}, which torch.compile cannot be told of",
            kind=ErrorKind.Unsupported,
            remedy="return tuples, lists and dicts of tensors",
        )
    name = f"{cls.__module__}.{cls.__qualname__}"
    if cls is not dict:
        _classes[name] = cls
    return (how, name, tuple(keys), parts)


@constant_result
def _structure(handle: str) -> tuple:
    captured = by_handle[handle].compiled
    return _template(captured.out_spec, iter(captured.plain), iter(captured.is_tensor), itertools.count())


def _build(template: tuple, out: tuple) -> Any:
    kind = template[0]
    if kind == "tensor":
        return out[template[1]]
    if kind == "value":
        return template[1]
    parts = [_build(t, out) for t in template[-1]]
    if kind == "tuple":
        return tuple(parts)
    if kind == "list":
        return parts
    if kind == "named":
        return _classes[template[1]](*parts)
    if kind == "sequence":
        return _classes[template[1]](parts)
    mapping = dict(zip(template[2], parts))
    return _classes[template[1]](**mapping) if template[1] in _classes else mapping


def call(handle: str, module: nn.Module, args: tuple, kwargs: dict) -> Any:
    """Returns the function that Dynamo follows."""
    names = _names(handle)
    # Read so that the compiled code is one for these modes and constants.
    modes = [m.training for m in module.modules()]
    modes += [str(x) for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, (bool, int, float, str))]
    out = run(handle, names, [member(module, n) for n in names], modes, args, kwargs)
    return _build(_structure(handle), out)


class NotScripted(Error, AttributeError):
    """Raised for what torch.jit.script asks of a function. Others that ask find that it is not there."""


def refuse_script(module: nn.Module) -> None:
    raise NotScripted(
        f"torch.jit.script compiles Python code, and this {type(module).__name__} was transformed: it runs a graph",
        kind=ErrorKind.Unsupported,
        remedy="torch.jit.trace(module, inputs), or script the model without the transform",
    )


def get_name(module: nn.Module) -> str:
    """Returns the name of the class, for which torch.fx's tracer asks before it follows the forward of the class."""
    if torch.fx._symbolic_trace.is_fx_symbolic_tracing():
        raise Error(
            f"torch.fx.symbolic_trace follows the forward of a class, and this {type(module).__name__} runs a graph instead",
            kind=ErrorKind.Unsupported,
            remedy="plumb.capture(module, *inputs).to_fx() is that graph in torch.fx's form",
        )
    return type(module)._get_name(module)


def refuse_compiled(module: nn.Module) -> None:
    """Raises `plumb.Error` for modules whose forward is no Python that a graph could be captured of."""
    if is_compiled(module):
        raise Error(
            "the module is a result of torch.compile, and a transform takes the model that was compiled",
            kind=ErrorKind.Unsupported,
            remedy="transform first, compile then: torch.compile(plumb.transforms.unit_scale(model)), for example",
        )
    if isinstance(module, torch.jit.ScriptModule):
        raise Error(
            "the module is scripted or traced (torch.jit), and a transform takes the Python module that it was made of",
            kind=ErrorKind.Unsupported,
            remedy="the module as it was before torch.jit.script or torch.jit.trace",
        )
