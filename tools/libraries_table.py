#!/usr/bin/env python3
"""Tables of docs/zoo.md on models of other libraries: libraries_table.py vision [--results FILE] [MODEL...].

Run it from the repository's root with plumb and the libraries on the path. `library_models/vision.py` has the models and says how to
install the libraries. Each model is tried in a process of its own, so that one that crashes or hangs is a cell and not the end. A cell
says what holds in training and in evaluation, or the first words of the error; the whole errors go to standard error.
"""

import argparse
import importlib
import json
import multiprocessing
import os
import random
import re
import sys
import tempfile
import time
import traceback
import warnings

sys.path[:0] = ["tools/library_models"]

import numpy  # noqa: E402
import torch  # noqa: E402
import torch._dynamo  # noqa: E402, F401 (children need not load it again)
from compared import run, same  # noqa: E402
from library_checks import CHECKS, SAME  # noqa: E402
from tables import table  # noqa: E402

import plumb  # noqa: E402


def try_model(models, name, checks, modes, file):
    """Returns a line of JSON for each mode and check."""
    for mode in modes:

        def make(mode=mode):
            for seed in (torch.manual_seed, random.seed, numpy.random.seed):
                seed(0)
            model, args, kwargs = models[name]()
            torch.manual_seed(3)
            return model.train(mode == "train"), args, kwargs

        for check in ["itself", *checks]:
            start = time.time()
            try:
                word = same(run(*make()), run(*make())) if check == "itself" else CHECKS[check](make)
            except Exception as error:  # noqa: BLE001
                print(f"\n=== {name}, {mode}, {check}", file=sys.stderr)
                traceback.print_exc(limit=-12)
                text = str(error).split("\n")[0]
                word = ("refused: " if isinstance(error, plumb.Error) else f"fails: {type(error).__name__}: ") + text[:200]
            print(json.dumps([name, mode, check, word, round(time.time() - start, 1)]), file=file, flush=True)
            if check == "itself" and word != SAME:
                break


def results(models, name, checks, modes, seconds=300):
    """Tried in a child of this process, which has the libraries already, so that a crash or a hang is only one model's."""
    with tempfile.NamedTemporaryFile("w+") as file:
        child = multiprocessing.get_context("fork").Process(target=try_model, args=(models, name, checks, modes, file))
        child.start()
        child.join(seconds)
        late = child.is_alive()
        if late:
            child.kill()
            child.join()
        file.seek(0)
        found = [json.loads(line) for line in file]
    if late or child.exitcode:
        found.append([name, "", "process", f"not ready after {seconds} s" if late else f"ended with {child.exitcode}", 0])
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("library")
    parser.add_argument("models", nargs="*", help="parts of names; all without")
    parser.add_argument("--check", default=",".join(CHECKS))
    parser.add_argument("--modes", default="train,eval")
    parser.add_argument("--results", help="a file of what was found: models that are in it are not tried again")
    parser.add_argument("--print", action="store_true", help="only what is in that file")
    options = parser.parse_intermixed_args()
    checks, modes = options.check.split(","), options.modes.split(",")
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    models = importlib.import_module(options.library).MODELS
    known = []
    if options.results and os.path.exists(options.results):
        with open(options.results) as file:
            known = [json.loads(line) for line in file]
    rows = {}  # models by what was found
    for name in [n for n in models if not options.models or any(m in n for m in options.models)]:
        if options.print and not any(f[0] == name for f in known):
            continue
        missing = [] if options.print else [m for m in modes if not any(f[0] == name and f[1] in (m, "") for f in known)]
        found = results(models, name, checks, missing) if missing else []
        if options.results:
            with open(options.results, "a") as file:
                file.writelines(json.dumps(f) + "\n" for f in found)
        cells = tuple(cell([f for f in [*known, *found] if f[0] == name], c) for c in checks)
        rows.setdefault(cells, []).append(name)
    print(table(["models", *checks], [[", ".join(names), *cells] for cells, names in rows.items()]))


def cell(found, check):
    """Returns the two modes in one cell; what goes wrong with the model itself or its process stands in every cell."""
    words = [f[3] for f in found if f[2] == check or f[2] in ("itself", "process") and f[3] != SAME]
    return " / ".join(dict.fromkeys(re.sub(r"\[[\d, ]*\]|\d+F\d+", "...", w)[:100].replace("|", "/") for w in words)) or "not run"


if __name__ == "__main__":
    main()
