"""Examples, tools, benchmarks and Python on pages use names that plumb has; the quick ones among them run."""

import ast
import importlib
import inspect
import multiprocessing
import os
import pathlib
import re
import runpy
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from pages import DOCUMENTS, ROOT, fences
from zoo import GPT

import plumb

BUILD = pathlib.Path(os.environ.get("PLUMB_BUILD_DIR", ROOT / "build"))
PROGRAMS = sorted(f for folder in ("examples", "tools", "benchmarks", "python/tests") for f in (ROOT / folder).rglob("*.py"))
ENGINE = {name for kind in vars(plumb._C).values() if inspect.isclass(kind) for name in dir(kind)}
# Programs, and a text that each prints once it has done its work. It is ended then.
RUNS = {
    "examples/learning_rates.py --runs fp32 --rates 0.01 --steps 2": "best: lr 0.01",
    "tools/diff_flips.py 1": "| optimizer state |",
    "tools/layouts_table.py --models convnet": "numbers of weights and buffers",
}


def resolved(node, names):
    """Returns the object that a dotted name stands for, None if it is not known. Raises AttributeError for a missing one."""
    if isinstance(node, ast.Name):
        return names.get(node.id)
    holder = resolved(node.value, names) if isinstance(node, ast.Attribute) else None
    return getattr(holder, node.attr) if inspect.ismodule(holder) or inspect.isclass(holder) else None


def wrong_names(text):
    """Returns the names of plumb and of its engine's objects, and the arguments of its functions, that there are none of."""
    tree, names, wrong = ast.parse(text), {}, []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] == "plumb":
                    module = importlib.import_module(alias.name)
                    names[alias.asname or "plumb"] = module if alias.asname else plumb
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "plumb" and not node.level:
            module = importlib.import_module(node.module)
            for alias in node.names:
                if not hasattr(module, alias.name):
                    wrong.append(f"{node.module}.{alias.name}")
                names[alias.asname or alias.name] = getattr(module, alias.name, None)
    for node in ast.walk(tree):
        try:
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                resolved(node, names)
                of_engine = isinstance(node.value, ast.Attribute) and node.value.attr == "_engine"
                if of_engine and node.attr not in ENGINE:
                    wrong.append(f"_engine.{node.attr}")
            elif isinstance(node, ast.Call) and inspect.isfunction(function := resolved(node.func, names)):
                known = inspect.signature(function).parameters
                if not any(p.kind is p.VAR_KEYWORD for p in known.values()):
                    wrong += [f"{function.__name__}({k.arg}=)" for k in node.keywords if k.arg and k.arg not in known]
        except AttributeError as error:
            wrong.append(str(error))
    return wrong


def test_programs_and_pages_use_names_and_arguments_that_plumb_has():
    texts = [(file.name, file.read_text()) for file in PROGRAMS]
    texts += [(page.name, body) for page in DOCUMENTS for language, _, body in fences(page.read_text()) if language == "python"]
    found = {(name, wrong) for name, text in texts for wrong in wrong_names(text)}
    assert len(texts) > 250 and not found
    text = "import plumb\nfrom plumb.optim import Best\nplumb.nothing\nplumb.verdict(rate=1)\nhistory._engine.nothing()"
    assert len(wrong_names(text)) == 4


def program(words, output, folder):
    os.setsid()
    os.chdir(ROOT)
    os.environ.pop("PLUMB_BUILD_DIR", None)  # a user has not set it
    os.environ["TMPDIR"] = str(folder)
    os.environ["PATH"] = os.pathsep.join([str(ROOT / "build" / "bin"), os.environ["PATH"]])
    for stream in (1, 2):
        os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    sys.stdout.reconfigure(line_buffering=True)
    sys.argv = words
    sys.path[0] = os.path.dirname(words[0])
    runpy.run_path(words[0], run_name="__main__")


@pytest.mark.skipif(not (ROOT / "build/bin/plumb_demo").exists(), reason="the programs take what is built in build/")
@pytest.mark.parametrize("command", RUNS)
def test_the_program_runs_as_its_page_says(command, tmp_path):
    output, words = tmp_path / "output", [str(ROOT / command.split()[0]), *command.split()[1:]]
    process = multiprocessing.get_context("forkserver").Process(target=program, args=(words, output, tmp_path))
    process.start()
    end = time.monotonic() + 300
    while process.is_alive() and time.monotonic() < end and not (output.exists() and RUNS[command] in output.read_text()):
        time.sleep(0.05)
    if process.is_alive():
        os.killpg(process.pid, signal.SIGKILL)
    process.join()
    assert RUNS[command] in output.read_text() and process.exitcode in (0, -signal.SIGKILL), output.read_text()


def plumb_says(folder, line):
    env = {**os.environ, "PATH": os.pathsep.join([str(BUILD / "bin"), os.environ["PATH"]])}
    done = subprocess.run(["bash", "-c", line], cwd=folder, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{line}\n{done.stderr}"
    return done.stdout


def command_lines(folder):
    """Returns the command's lines on pages and in its help, but those that take long or a folder of transformers."""
    commands = plumb_says(folder, "plumb --help").partition("Subcommands:")[2].partition("Example")[0]
    helps = [plumb_says(folder, f"plumb help {line.split()[0]}").rpartition("\nExample")[2] for line in commands.split("\n") if line]
    pages = [ROOT / page for page in ("docs/history.md", "docs/howto/command.md", "README.md", "examples/README.md")]
    first, *others = ["".join(body for _, _, body in fences(page.read_text())) for page in pages]  # some help is on its history
    lines = [line.partition(" #")[0].strip() for text in (first, *helps, *others) for line in text.splitlines()]
    left_out = re.compile(r"FOLDER|lama|tuned|plumb plan|--plan|best.csv|head.pt2|[|]")
    return dict.fromkeys(line for line in lines if line.startswith("plumb ") and not left_out.search(line))


class Net(torch.nn.Sequential):
    def forward(self, x):
        return super().forward(x)


def test_the_commands_on_pages_and_in_the_help_run(tmp_path):
    gpt = plumb.transforms.unit_scale(GPT(vocab=256, d=8, h=2, layers=4))
    gpt = plumb.capture(gpt, torch.zeros(2, 8, dtype=torch.long))
    for name in ("gpt.pt2", "trained.pt2"):
        plumb.save_pt2(gpt, tmp_path / name)
    x, net = torch.randn(4, 16), Net(torch.nn.Linear(16, 8), torch.nn.GELU(), torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 4))
    plumb.save_pt2(plumb.capture(net, x), tmp_path / "model.pt2")
    torch.save(x, tmp_path / "x.pt")
    np.save(tmp_path / "batch.npy", x.numpy())
    for name in ("text.bin", "held.bin"):
        (tmp_path / name).write_bytes(pathlib.Path(__file__).read_bytes())
    (tmp_path / "rules.toml").write_text('[[rule]]\noperator = "parameter"\nevery = 1\n')
    shutil.copy(ROOT / "examples/hand_written.csv", tmp_path)
    with plumb.Recorder(net, 1, tmp_path / "other.history") as recorder:
        net(x).sum().backward()
        recorder.step()
    lines = command_lines(tmp_path)
    for line in lines:
        short = re.sub(r" --steps \d+", "", line)
        lines[line] = plumb_says(tmp_path, short + " --steps 2" if line.startswith("plumb train") else short)
    assert len(lines) > 20
    assert lines["plumb diff a.history b.history"].startswith("Equal to step 2.")


def test_tools_find_the_command_from_every_folder():
    code = "import real_run, command; print(real_run.COMMAND, command.COMMAND)"
    env = {key: value for key, value in os.environ.items() if key != "PLUMB_BUILD_DIR"}
    env["PYTHONPATH"] = os.pathsep.join(str(ROOT / folder) for folder in ("tools", "python/tests"))
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True)
    assert found.stdout.split() == 2 * [str(ROOT / "build/bin/plumb")], found.stderr
