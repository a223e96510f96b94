#!/usr/bin/env python3
"""The table of docs/howto/huggingface.md: models of python/tests/zoo_transformers.py through their folders.

    folders_table.py 5.json [NAME...]           runs them with the transformers that is installed, adds to the file
    folders_table.py --print 5.json 4.json      prints the table of such files side by side

Each model is written by save_pretrained, imported without weights and cut in two; each stage reads its tensors, both are trained
three steps beside the model itself, written by plumb.hf.save and read by from_pretrained. Run it from the repository's root.
"""

import copy
import json
import os
import pathlib
import sys
import tempfile
import warnings

sys.path[:0] = ["python/tests"]
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch  # noqa: E402
import transformers  # noqa: E402
from compared import equal, run, same, tensors, tried  # noqa: E402, F401
from tables import table  # noqa: E402
from transformers_table import made  # noqa: E402
from zoo_transformers import MODELS  # noqa: E402

from plumb import hf  # noqa: E402

STEPS = 3


def train(module, parameters, args, kwargs):
    """Returns the weights after `STEPS` steps, with the same dropout for every model."""
    optimizer = torch.optim.SGD(parameters, lr=0.01)
    torch.manual_seed(7)
    for _ in range(STEPS):
        optimizer.zero_grad()
        roots = [y for y in tensors(module(*args, **kwargs)) if y.requires_grad]
        torch.autograd.backward(roots, [torch.ones_like(y) for y in roots])
        optimizer.step()


def folder(name):
    """Cells: captured on meta and cut, bytes read a stage over those of its tensors, trained and written and loaded."""
    model, args, kwargs = made(name)
    given = kwargs
    if list(kwargs) == [model.main_input_name]:  # is taken by position
        args, kwargs = tuple(kwargs.values()), {}
    with tempfile.TemporaryDirectory() as place:
        source, out = pathlib.Path(place, "in"), pathlib.Path(place, "out")
        model.save_pretrained(source)
        # (Into memory of its own: that of a mapped file is aligned otherwise, and convolutions then take other ways.)
        frozen = {n for n, p in model.named_parameters() if not p.requires_grad}
        model = copy.deepcopy(type(model).from_pretrained(source).train(model.training))
        # (from_pretrained of transformers 5 forgets which ones the class has frozen: Whisper's positions.)
        for n in frozen:
            model.get_parameter(n).requires_grad_(False)
        pipe = hf.load(source, stages=2, inputs=given, training=model.training)
        shares = []
        for s in range(pipe.num_stages):
            before, stage = pipe.weights.bytes_read, pipe.get_stage_module(s)
            wanted = sum(t.nbytes for t in {id(t): t for t in stage.state_dict(keep_vars=True).values() if t.is_meta}.values())
            pipe.build_stage(s, torch.device("cpu"))
            shares.append((pipe.weights.bytes_read - before) / max(wanted, 1))
        first = same(run(pipe, args, kwargs, False), run(model, args, kwargs, False), state=False)
        trained = [p for p in {id(p): p for p in pipe.parameters()}.values() if p.requires_grad]
        train(pipe, trained, args, kwargs)
        train(model, [p for p in model.parameters() if p.requires_grad], args, kwargs)
        theirs = model.state_dict()
        ours = {n: value for n, value in pipe.merge_state_dict().items() if not value.is_meta}  # (unused: never read)
        steps = "bit for bit" if all(torch.equal(value, theirs[n]) for n, value in ours.items()) else "differs"
        hf.save(pipe, out)
        again = type(model).from_pretrained(out).state_dict()
        loaded = "equal" if all(torch.equal(value, again[n]) for n, value in {**theirs, **ours}.items()) else "differs"
        return [first, f"{max(shares):.3f}", steps, loaded]


def attempt(name):
    import plumb

    try:
        return folder(name)
    except Exception as error:  # noqa: BLE001
        text = str(error).split("\n")[0]
        if isinstance(error, AttributeError) and "module transformers has no attribute" in text:
            return ["not in this version", "", "", ""]
        why = "it takes values out of tensors" if "takes a value out of a tensor" in text else text[:100].replace("|", "/")
        return [("refused: " if isinstance(error, plumb.Error) else "fails: ") + why, "", "", ""]


def main():
    if sys.argv[1] == "--print":
        files = [json.loads(pathlib.Path(path).read_text()) for path in sys.argv[2:]]
        head = ["model"]
        for file in files:
            version = file["version"]
            head += [f"{version}: captured and cut", "bytes read", f"{STEPS} steps", "read again"]
        names = [n for n in MODELS if any(n in file["models"] for file in files)]
        print(table(head, [[n, *[cell for file in files for cell in file["models"].get(n, ["", "", "", ""])]] for n in names]))
        return
    warnings.filterwarnings("ignore")
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    path = pathlib.Path(sys.argv[1])
    done = json.loads(path.read_text()) if path.exists() else {"version": transformers.__version__, "models": {}}
    for name in sys.argv[2:] or [n for n in MODELS if n not in done["models"]]:
        done["models"][name] = attempt(name)
        print(name, done["models"][name], flush=True)
        path.write_text(json.dumps(done))


if __name__ == "__main__":
    main()
