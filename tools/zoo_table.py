#!/usr/bin/env python3
"""docs/zoo.md's tables from the tests' own output: zoo_table.py LOG... (of plumb_capture_test, plumb_exported_test, pytest -v).

A cell says "bit for bit" if the test that compares so has passed in these logs, "fails" if it failed, "not run" otherwise.
"""

import re
import sys

sys.path.insert(0, "python/tests")

from tables import table  # noqa: E402
from zoo import NOT_EXPORTED  # noqa: E402

CPP = [
    "GPTUntied", "GPTTied", "GPTWithDropout", "TransformerEncoderLayer", "TransformerEncoderLayerEval", "MultiheadAttention",
    "LlamaBlock", "ViT", "ConvNetWithBatchNormTraining", "ConvNetWithBatchNormEval", "UNet", "LSTM", "GRU",
    "MixtureOfExpertsWithDictOutput", "InPlaceAndViewWrites", "SharedModuleCalledTwice", "Autocast", "BFloat16",
]  # fmt: skip

# Models of python/tests/zoo.py.
PYTHON = [
    "GPT", "GPT tied", "GPT with dropout", "TransformerEncoderLayer", "TransformerEncoderLayer eval", "TransformerDecoderLayer",
    "Transformer", "MultiheadAttention", "Llama", "ViT", "ConvNet training", "ConvNet eval", "U-net", "LSTM", "GRU", "MoE", "in place",
    "keywords", "shared", "autocast", "bf16", "spectral norm", "weight norm", "group and instance norm", "transformers GPT-2",
    "transformers Llama", "transformers BERT",
]  # fmt: skip

def results(paths):
    found = {}
    for path in paths:
        text = open(path, encoding="utf-8", errors="replace").read()
        for state, name in re.findall(r"^\[ +(OK|FAILED) +\] ([^\s,]+)", text, re.M):
            found[name] = state == "OK"
        for name, state in re.findall(r"::(test_\w+\[[^\]]+\]) (PASSED|FAILED)", text):
            found[name] = state == "PASSED"
    return found


def cell(found, *names):
    if not all(n in found for n in names):
        return "not run"
    return "bit for bit" if all(found[n] for n in names) else "fails"


def main():
    found = results(sys.argv[1:])
    print("<!-- tools/zoo_table.py: C++ -->")
    rows = [[m, *[cell(found, f"Zoo.{m}")] * 3, cell(found, f"ZooFiles.{m}")] for m in CPP]
    print(table(["C++ model", "outputs", "gradients", "buffers", "captured, `.pt2`, there and back"], rows))
    print("\n<!-- tools/zoo_table.py: Python -->")
    rows = []
    for model in PYTHON:
        name = model.removeprefix("transformers ")
        test = f"test_models_of_transformers[{name}]" if model.startswith("transformers ") else f"test_zoo[{model}]"
        there = cell(found, f"test_exported_by_torch_runs_in_plumb[{model}]")
        if model in NOT_EXPORTED:
            there = f"torch refuses: {NOT_EXPORTED[model]}"
        rows.append([model, *[cell(found, test)] * 3, cell(found, f"test_captured_and_saved_runs_in_torch[{model}]"), there])
    head = ["Python model", "outputs", "gradients", "buffers", "captured, saved, run by torch and plumb", "`torch.export`'s file, run by plumb"]
    print(table(head, rows))


if __name__ == "__main__":
    main()
