#!/usr/bin/env python3
"""docs/zoo.md's tables from the tests' own output: zoo_table.py LOG... (of plumb_capture_test, plumb_exported_test, pytest -v).

A cell says "bit for bit" if the test that compares so has passed in these logs, "fails" if it failed, "not run" otherwise.
"""

import re
import sys

CPP = [
    "GPTUntied", "GPTTied", "GPTWithDropout", "TransformerEncoderLayer", "TransformerEncoderLayerEval", "MultiheadAttention",
    "LlamaBlock", "ViT", "ConvNetWithBatchNormTraining", "ConvNetWithBatchNormEval", "UNet", "LSTM", "GRU",
    "MixtureOfExpertsWithDictOutput", "InPlaceAndViewWrites", "SharedModuleCalledTwice", "Autocast", "BFloat16",
]  # fmt: skip

# Model of python/tests/zoo.py -> the program of plumb/exported/testdata/make_programs.py that is like it.
PYTHON = {
    "GPT": "gpt", "GPT tied": "gpt_tied", "GPT with dropout": "gpt_dropout", "TransformerEncoderLayer": "encoder_layer",
    "TransformerEncoderLayer eval": None, "TransformerDecoderLayer": None, "Transformer": None, "MultiheadAttention": "attention",
    "Llama": "llama", "ViT": "vit", "ConvNet training": "convnet_train", "ConvNet eval": "convnet_eval", "U-net": "unet",
    "LSTM": "recurrent", "GRU": "recurrent", "MoE": "experts", "in place": "in_place", "keywords": "values", "shared": "twice",
    "autocast": "autocast", "bf16": "bfloat16", "spectral norm": None, "weight norm": None, "group and instance norm": None,
    "transformers GPT-2": "gpt2", "transformers Llama": "llama_hf", "transformers BERT": "bert",
}  # fmt: skip


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


def table(head, rows):
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main():
    found = results(sys.argv[1:])
    print("<!-- tools/zoo_table.py: C++ -->")
    rows = [[m, *[cell(found, f"Zoo.{m}")] * 3, cell(found, f"ZooFiles.{m}")] for m in CPP]
    print(table(["C++ model", "outputs", "gradients", "buffers", "captured, `.pt2`, there and back"], rows))
    print("\n<!-- tools/zoo_table.py: Python -->")
    rows = []
    for model, program in PYTHON.items():
        kind, _, name = model.rpartition("transformers ")
        test = f"test_models_of_transformers[{name}]" if kind or model.startswith("transformers ") else f"test_zoo[{model}]"
        there = back = "no program"
        if program:
            there = cell(found, f"Zoo/Programs.ComputeWhatPythonComputes/{program}") + f" (`{program}`)"
            names = ["ComputeTheSameAfterSavingAndLoading", "HaveTheSameGraphAndStateAfterSavingAndLoading"]
            back = cell(found, *[f"Zoo/Programs.{n}/{program}" for n in names], "Exported.PythonLoadsAndRunsWhatPlumbWrote")
        rows.append([model, *[cell(found, test)] * 3, there, back])
    head = ["Python model", "outputs", "gradients", "buffers", "`torch.export`'s file run in C++", "written by plumb, run in C++ and Python"]
    print(table(head, rows))


if __name__ == "__main__":
    main()
