"""Calls operators with arguments nobody would give: `python hostile_arguments.py CALLS [OPERATOR...]`. Without names it calls all of
plumb's; `files` stands for all that a file may name, torch's too.

Every call ends in a result or a Python exception that is no failed assertion of torch. Each operator has a process of its own: one
that ends by a signal, or takes longer than LIMIT seconds, is reported with the call it was in.
"""

import contextlib
import os
import random
import resource
import signal
import sys
import tempfile

import torch

from plumb import _C

LIMIT = 300  # seconds for the calls of one operator, on any machine
MEMORY = 4 << 30  # more than a process has at its start
NUMBERS = [-(2**63), -(2**31) - 1, -2, -1, 0, 1, 2, 3, 4, 5, 300, 2**31, 2**40, 2**62, 2**63 - 1]
FLOATS = [float("nan"), float("inf"), -float("inf"), -1.0, 0.0, 0.5, 1.0, 2.0, 1e308, -1e-320]
TEXTS = [
    "",
    "none",
    "tanh",
    "E4M3",
    "E5M2-SR",
    "E99M1",
    "to_output_scale",
    "hmean",
    "nearest",
    "x" * 5000,
    "\0%s%n",
    "0 1 2",
]
SHAPES = [
    (),
    (0,),
    (1,),
    (3,),
    (2, 3),
    (3, 2),
    (3, 3),
    (2, 0, 3),
    (2, 3, 4),
    (1, 2, 3, 4),
    (2, 3, 4, 5),
    (1, 1, 2, 3, 4),
    (1,) * 7,
]
DTYPES = [torch.float32] * 6 + [
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
]


def tensor(pick: random.Random, device: str) -> torch.Tensor:
    shape, dtype = pick.choice(SHAPES), pick.choice(DTYPES)
    if dtype == torch.int64 and pick.random() < 0.5:
        made = torch.randint(-2, 5, shape)
    else:
        made = torch.randn(shape).to(dtype)
    if pick.random() < 0.1:
        made = made.expand((2,) + tuple(shape))
    if made.dim() > 1 and pick.random() < 0.2:
        made = made.transpose(0, -1)
    made = made.to(device)
    if made.is_floating_point() and pick.random() < 0.5:
        made.requires_grad_()
    return made


def argument(kind: str, pick: random.Random, device: str):
    if kind.endswith("?"):
        return None if pick.random() < 0.3 else argument(kind[:-1], pick, device)
    if kind.startswith("Optional["):
        return None if pick.random() < 0.3 else argument(kind[9:-1], pick, device)
    if kind.startswith("List["):
        inner = kind[5:-1]
        return [argument(inner, pick, device) for _ in range(pick.choice([0, 1, 1, 2, 2, 3, 4, 9]))]
    if kind == "Tensor":
        return tensor(pick, device)
    if kind == "int":
        return pick.choice(NUMBERS)
    if kind == "float":
        return pick.choice(FLOATS)
    if kind == "number":
        return pick.choice([pick.choice(NUMBERS), pick.choice(FLOATS), True])
    if kind == "complex":
        return complex(pick.choice(FLOATS), pick.choice(FLOATS))
    if kind == "bool":
        return pick.random() < 0.5
    if kind == "str":
        return pick.choice(TEXTS)
    if kind in ("Device", "Layout", "MemoryFormat"):
        return {"Device": torch.device(device), "Layout": torch.strided, "MemoryFormat": torch.contiguous_format}[kind]
    if kind == "Generator":
        return torch.default_generator
    raise ValueError(f"no arguments of type {kind} are made here")


def plausible(schema, pick: random.Random, device: str):
    """Mostly what fits, so that calls come further than the first check: one shape, defaults."""
    like = tensor(pick, device)
    given = {}
    for a in schema.arguments:
        kind = str(a.type)
        if a.has_default_value() and pick.random() < 0.7:
            continue
        if kind == "Tensor" and pick.random() < 0.7:
            given[a.name] = torch.randn(like.shape).to(like.dtype).to(device)
        else:
            given[a.name] = argument(kind, pick, device)
    return given


def shown(value):
    if isinstance(value, list):
        return [shown(each) for each in value]
    return (tuple(value.shape), value.dtype, value.stride()) if isinstance(value, torch.Tensor) else value


def overloads(name: str):
    namespace, _, short = name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), short)
    return [getattr(packet, overload) for overload in packet.overloads()]


def call_often(name: str, calls: int) -> None:
    pick = random.Random(name)
    torch.manual_seed(0)
    ops = overloads(name)
    for k in range(calls):
        op, device = pick.choice(ops), pick.choice(["cpu", "cpu", "meta"])
        schema = op._schema
        if pick.random() < 0.5:
            given = {a.name: argument(str(a.type), pick, device) for a in schema.arguments}
        else:
            given = plausible(schema, pick, device)
        call = f"{op} on {device} with { {name: shown(value) for name, value in given.items()} }"[:2000]
        print(f"call {k}: {call}", flush=True)
        try:
            result = op(**given)
            results = (
                [result] if isinstance(result, torch.Tensor) else result if isinstance(result, (tuple, list)) else []
            )
            wanted = [r for r in results if isinstance(r, torch.Tensor) and r.requires_grad]
            if wanted:
                sum(r.sum().real for r in wanted).backward()
        except Exception as error:  # noqa: BLE001  (any other exception will do)
            if "INTERNAL ASSERT" in str(error):
                print(f"{call}: {error}"[:2000], flush=True)
                os._exit(4)
            print(f"  {type(error).__name__}: {str(error)[:200]}", flush=True)


def in_a_process(name: str, calls: int) -> str:
    """Returns the fault of the operator's process; empty if all went well."""
    with tempfile.TemporaryFile("w+") as output:
        child = os.fork()
        if child == 0:
            os.dup2(output.fileno(), 1)
            signal.alarm(LIMIT)
            has = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (has + MEMORY, has + MEMORY))
            try:
                call_often(name, calls)
            except BaseException as error:  # noqa: BLE001
                print(f"the fuzzer itself failed: {error!r}", flush=True)
                os._exit(3)
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        if status == 0:
            return ""
        output.seek(0)
        last = output.read().splitlines()[-1:] or ["nothing was called"]
        ended = (
            signal.Signals(os.WTERMSIG(status)).name
            if os.WIFSIGNALED(status)
            else f"exit code {os.WEXITSTATUS(status)}"
        )
        return f"{name} ended by {ended} in {last[0]}"


def main(calls: int, names: list[str]) -> int:
    torch.set_num_threads(1)
    # torch imports what its meta kernels need when one is called, and when one refuses: for two seconds in every process.
    meta = torch.ones(2, 3, device="meta")
    for other in (meta, torch.ones(4, device="meta")):
        with contextlib.suppress(RuntimeError):
            torch.ops.aten.add(meta, other)
    registered = torch._C._dispatch_get_all_op_names()
    if names in ([], ["files"]):
        wanted = (n.startswith("plumb::") if not names else _C.refused_in_files(n) is None for n in registered)
        names = sorted({name.split(".")[0] for name, is_wanted in zip(registered, wanted) if is_wanted})
    failed = 0
    for name in names:
        if failure := in_a_process(name, calls):
            failed += 1
            print(failure, flush=True)
    print(f"{len(names)} operators, {calls} calls each: {f'{failed} failed' if failed else 'all well'}")
    return failed > 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
