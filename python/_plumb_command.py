"""The installed command `plumb`: runs the program in the package, with this environment's torch. Imports neither."""

import importlib.util
import os
import runpy
import sys


def main():
    package = os.path.dirname(importlib.util.find_spec("plumb").origin)
    program = os.path.join(package, "bin", "plumb")
    if not os.access(program, os.X_OK):
        sys.exit(f"plumb: the program {program} is missing: install the package again with `pip install .`")
    torch = importlib.util.find_spec("torch")
    if torch is None:
        sys.exit("plumb: this Python environment has no torch; install torch 2.11 or newer in it.")
    folder = os.path.dirname(torch.origin)
    version = runpy.run_path(os.path.join(folder, "version.py"))["__version__"]
    if refusal := runpy.run_path(os.path.join(package, "_torch_check.py"))["refusal"](version, folder):
        sys.exit("plumb: " + refusal)
    paths = [os.path.join(folder, "lib"), os.environ.get("LD_LIBRARY_PATH", "")]
    os.environ["LD_LIBRARY_PATH"] = os.pathsep.join(p for p in paths if p)
    os.environ.setdefault("PLUMB_PYTHON", sys.executable)  # `plumb import` reads folders of transformers with it
    os.execv(program, ["plumb", *sys.argv[1:]])
