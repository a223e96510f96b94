"""The installed command `plumb`: runs the program in the package, with this environment's torch. Imports neither."""

import importlib.util
import os
import sys


def main():
    package = os.path.dirname(importlib.util.find_spec("plumb").origin)
    program = os.path.join(package, "bin", "plumb")
    if not os.access(program, os.X_OK):
        sys.exit(f"plumb: the program {program} is missing: install the package again with `pip install .`")
    torch = importlib.util.find_spec("torch")
    if torch is None:
        sys.exit("plumb: this Python environment has no torch; install torch 2.11 or newer in it.")
    paths = [os.path.join(os.path.dirname(torch.origin), "lib"), os.environ.get("LD_LIBRARY_PATH", "")]
    os.environ["LD_LIBRARY_PATH"] = os.pathsep.join(p for p in paths if p)
    os.execv(program, ["plumb", *sys.argv[1:]])
