#!/usr/bin/env python3
"""Counts the files of plumb that a debugger enters, step by step, in one call from Python: a measure of how many layers a
reader goes through.

    files_entered.py [unit_scale | 1f1b ...] [--list]       needs gdb and ctags

Python's are those in which a function is called, as sys.settrace sees them. C++'s and the bindings' are those whose functions
gdb stops in: a breakpoint at every function of the two libraries, taken out when it is met. Functions that the compiler
has put into their callers count for these, and one whose name stands in several files for none of them.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def unit_scale():
    import torch
    from torch import nn

    from plumb.transforms import unit_scale

    x = torch.randn(2, 4)
    return lambda: unit_scale(nn.Linear(4, 4))(x)


def one_f_one_b():
    """One forward of a stage in a step of 1F1B, and the rest of the step."""
    import torch
    from plumb.pipelining import Schedule1F1B, pipeline
    from torch import nn

    model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.randn(2, 4)
    pipe = pipeline(model, (x,), num_stages=1)
    schedule = Schedule1F1B(pipe.build_stage(0, "cpu"), 1, nn.functional.mse_loss)
    return lambda: schedule.step(x, target=x)


CALLS = {"unit_scale": unit_scale, "1f1b": one_f_one_b}


def run(name: str, under_gdb: bool) -> None:
    """Prepares a call; then makes it and prints Python's files, or makes it between two stops for gdb."""
    call = CALLS[name]()
    if under_gdb:
        os.kill(os.getpid(), signal.SIGTRAP)
        call()
        os.kill(os.getpid(), signal.SIGTRAP)
        return
    found: set[str] = set()
    package = str(ROOT / "python" / "plumb")

    def trace(frame, event, argument):
        if frame.f_code.co_filename.startswith(package):
            found.add(str(Path(frame.f_code.co_filename).relative_to(ROOT)))

    sys.settrace(trace)
    call()
    sys.settrace(None)
    print("\n".join(sorted(found)))


GDB = r"""
import gdb, subprocess
gdb.execute("set pagination off"); gdb.execute("set confirm off"); gdb.execute("set breakpoint always-inserted on")
gdb.execute("handle SIGTRAP stop nopass", to_string=True)
gdb.execute("run", to_string=True)
places = {}
for line in gdb.execute("info proc mappings", to_string=True).splitlines():
    parts = line.split()
    if len(parts) > 4 and (parts[-1].endswith("libplumb.so") or "/plumb/_C." in parts[-1]):
        places.setdefault(parts[-1], int(parts[0], 16) - int(parts[3], 16))
at = {}
for library, base in places.items():
    for line in subprocess.run(["nm", "-C", "--defined-only", library], capture_output=True, text=True).stdout.splitlines():
        address, kind, name = line.split(" ", 2)
        if kind in "tTwW" and "plumb::" in name.split("(")[0]:
            at.setdefault(base + int(address, 16), name)
for address in at:
    gdb.execute(f"tbreak *{address}", to_string=True)
while True:
    gdb.execute("continue", to_string=True)
    try:
        address = int(gdb.parse_and_eval("(unsigned long)$pc"))
    except gdb.error:
        break
    if address not in at:
        break
    print("ENTERED", at[address], flush=True)
gdb.execute("kill", to_string=True)
"""


def entered_in_cpp(name: str) -> set[str]:
    with tempfile.NamedTemporaryFile("w", suffix=".py") as script:
        script.write(GDB)
        script.flush()
        command = ["gdb", "--batch", "-x", script.name, "--args", sys.executable, __file__, name, "--under-gdb"]
        env = dict(os.environ, OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE")
        out = subprocess.run(command, capture_output=True, text=True, env=env).stdout
    homes = homes_of_functions()
    found = set()
    for function in re.findall(r"^ENTERED (.*)$", out, re.M):
        files = homes.get(plain(function), set())
        if len(files) == 1:
            found |= files
    if not found:
        sys.exit(f"gdb met no function of plumb:\n{out}")
    return found


def plain(name: str) -> str:
    """Returns a function's class and name, or its name alone: "StageRunner::forward"."""
    name = name.replace("(anonymous namespace)::", "").split("::{lambda")[0]
    while (shorter := re.sub(r"<[^<>]*>", "", name)) != name:
        name = shorter
    path = name.split("(")[0].split(" ")[-1].split("::")
    return "::".join(part for part in path[-2:] if part != "plumb")


def homes_of_functions() -> dict[str, set[str]]:
    files = [f for room in ("plumb", "python/bindings") for f in (ROOT / room).rglob("*") if f.suffix in (".h", ".cpp")]
    files = [str(f.relative_to(ROOT)) for f in files if not re.search(r"_test\.cpp$|_testing\.h$", f.name)]
    tags = subprocess.run(
        ["ctags", "-f", "-", "--languages=C++", "--langmap=C++:.h.cpp", "--c++-kinds=f", "--fields=s", "--fields=+Z", *files],
        capture_output=True, text=True, cwd=ROOT, check=True,
    ).stdout  # fmt: skip
    homes: dict[str, set[str]] = {}
    for line in tags.splitlines():
        name, file, *rest = line.split("\t")
        scope = next((r.split(":", 2)[-1] for r in rest if r.startswith(("scope:", "class:", "struct:", "namespace:"))), "")
        owner = scope.split("::")[-1]
        own = owner and owner != "plumb" and not owner.startswith("__anon")
        homes.setdefault(f"{owner}::{name}" if own else name, set()).add(file)
    return homes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("calls", nargs="*", default=list(CALLS), help=", ".join(CALLS))
    parser.add_argument("--list", action="store_true", help="names the files")
    parser.add_argument("--under-gdb", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--python", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.under_gdb or options.python:
        return run(options.calls[0], options.under_gdb)
    for name in options.calls:
        ours = subprocess.run([sys.executable, __file__, name, "--python"], capture_output=True, text=True, check=True).stdout
        cpp = entered_in_cpp(name)
        bindings = {f for f in cpp if f.startswith("python/")}
        files = {*ours.split(), *bindings}
        print(f"{name}: {len(files)} Python and binding files, {len(cpp - bindings)} C++ files")
        if options.list:
            print("\n".join(f"  {f}" for f in sorted(files) + sorted(cpp - bindings)))


if __name__ == "__main__":
    main()
