#!/usr/bin/env python3
"""A run as people have them: a Llama of ten million parameters learns Python's library and its documentation, in unit-scaled FP8.

    real_run.py FOLDER [--steps 1000] [--docs]      everything lies in FOLDER; run again, it goes on where it was

Two stages times two replicas, evaluations, checkpoints. On the way a rank is killed by a drill, another one by kill -9 from
outside; the launcher starts them again. At three quarters SIGTERM ends the run, and four stages without replicas go on with it to the
end. Then it says what the model's loss is and lets it write. --docs writes docs/real_run.md and its page from what happened. Run it
from the repository's root.
"""

import argparse
import hashlib
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import time

from tables import table

COMMAND = os.path.abspath(os.path.join(os.environ.get("PLUMB_BUILD_DIR", "build"), "bin", "plumb"))
LENGTH, ROWS, PARTS, RATE = 128, 2, 4, 0.25  # tokens of a window; windows of a microbatch; microbatches; learning rate
SIZES = dict(vocab=256, d=320, layers=8, h=5, ff=864)


def gather_text(folder):
    """text.bin and held.bin: the library's sources and the texts of its documentation; every twentieth file is held out."""
    library = pathlib.Path(sysconfig.get_paths()["stdlib"])
    found = [p for p in library.rglob("*.py") if not {"site-packages", "dist-packages", "test", "tests"} & set(p.parts)]
    documentation = pathlib.Path("/usr/share/doc")
    found += [p for p in documentation.glob("python3*/**/*") if p.suffix in (".txt", ".rst", ".html") and p.is_file()]
    texts = {"text.bin": [], "held.bin": []}
    for path in sorted(found):
        held = hashlib.sha256(path.name.encode()).digest()[0] < 13
        texts["held.bin" if held else "text.bin"].append(path.read_bytes())
    for name, parts in texts.items():
        (folder / name).write_bytes(b"\n".join(parts))
    held = (folder / "held.bin").read_bytes()[: 128 * LENGTH + 1]  # an evaluation takes seconds
    (folder / "held.bin").write_bytes(held)
    return len(found)


def make_model(path):
    """Returns the number of the model's parameters."""
    import torch

    import plumb

    sys.path.insert(0, "python/tests")
    from zoo import Llama

    torch.manual_seed(0)
    model = Llama(**SIZES)
    fp8 = plumb.transforms.simulate_fp8(plumb.transforms.unit_scale(model))
    plumb.save_pt2(plumb.capture(fp8, torch.zeros(ROWS, LENGTH, dtype=torch.long)), path)
    return sum(p.numel() for p in model.parameters())


class Run:
    def __init__(self, folder, steps):
        self.folder, self.steps = folder, steps
        self.log = folder / "events.jsonl"

    def options(self):
        every = max(1, self.steps // 20)
        return [
            *("fp8.pt2", "--data", "text.bin", "--eval-data", "held.bin", "--eval-every", 4 * every, "--steps", self.steps),
            *("--lr", RATE, "--rate", "cosine", "--warmup", every, "--clip", 1, "--gradient-groups", 2, "--threads", 1, "--seed", 1),
            *("--checkpoints", "run", "--checkpoint-every", every, "--max-restarts", 5, "--page", "run.html", "--csv", "run.csv", "--json"),
        ]

    def train(self, layout, on_step=None):
        """Returns the exit code. `on_step(step, process)` is called after each."""
        command = [COMMAND, "train", *map(str, [*self.options(), *layout])]
        with open(self.folder / "stderr.txt", "a") as errors:
            process = subprocess.Popen(command, cwd=self.folder, text=True, stdout=subprocess.PIPE, stderr=errors)
            for line in process.stdout:
                if not line.startswith("{"):
                    continue
                event = json.loads(line)
                if "options" in event:
                    event = {"layout": " ".join(map(str, layout))}
                self.tell(**event)
                if "step" in event and on_step:
                    on_step(event["step"], process)
            return process.wait()

    def tell(self, **event):
        with open(self.log, "a") as log:
            log.write(json.dumps(event | {"time": round(time.time(), 3)}) + "\n")

    def events(self):
        return [json.loads(line) for line in self.log.read_text().splitlines()] if self.log.exists() else []


def children(process):
    """Processes that `process` has started."""
    listed = pathlib.Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
    return [int(pid) for pid in listed.split()]


def first_part(run):
    """Two stages times two replicas, two ranks killed, up to SIGTERM at three quarters."""
    drill, outside, stop = (int(run.steps * share) for share in (0.3, 0.5, 0.75))
    done = {event["fault"] for event in run.events() if "fault" in event}

    def on_step(step, process):
        if step >= outside and "outside" not in done:
            done.add("outside")
            victim = children(process)[-1]
            run.tell(fault="outside", step=step, killed=victim)
            os.kill(victim, signal.SIGKILL)
        if step >= stop and "stop" not in done:
            done.add("stop")
            run.tell(fault="stop", step=step)
            process.send_signal(signal.SIGTERM)

    layout = ["--stages", 2, "--data-parallel", 2, "--microbatches", PARTS // 2]
    if not any("step" in e for e in run.events()):
        layout += ["--inject", f"kill rank 1 at 1B0 of step {drill}"]
    return run.train(layout, on_step)


def said(*arguments, folder):
    """Returns the output of a command."""
    return subprocess.run([COMMAND, *map(str, arguments)], cwd=folder, check=True, capture_output=True, text=True, errors="replace").stdout


def document(run, parameters, files, sample, evaluation):
    """docs/real_run.md from the events of the run."""
    events = run.events()
    text, held = ((run.folder / name).stat().st_size for name in ("text.bin", "held.bin"))
    steps = {e["step"]: e for e in events if "loss" in e}
    seconds = events[-1]["time"] - events[0]["time"]
    happened = []
    for event in events:
        at = f"{(event['time'] - events[0]['time']) / 60:.1f} min"
        if "layout" in event:
            happened.append([at, f"begins: `{event['layout']}`"])
        elif "resumed" in event:
            happened.append([at, f"goes on after step {event['resumed']}"])
        elif "restart" in event:
            happened.append([at, event["why"].replace("\n", " ")])
        elif event.get("fault") == "outside":
            happened.append([at, f"`kill -9` of a process after step {event['step']}"])
        elif event.get("fault") == "stop":
            happened.append([at, f"SIGTERM after step {event['step']}"])
        elif "interrupted" in event:
            happened.append([at, f"ends with step {event['interrupted']}, a checkpoint is there"])
    evaluations = {e["eval"]: e["eval_loss"] for e in events if "eval" in e}
    again = sum(1 for e in events if "loss" in e) - len(steps)
    equal = all(steps[e["step"]]["loss"] == e["loss"] for e in events if "loss" in e)
    rate = sorted(b["time"] - a["time"] for a, b in zip(events, events[1:]) if "loss" in a and "loss" in b)
    median = rate[len(rate) // 2] if rate else float("nan")
    tokens = next(iter(steps.values()))["tokens"]
    bits = "every loss had the same bits" if equal else "NOT EVERY LOSS HAD THE SAME BITS"
    fence = "`" * 3
    return f"""# A real run

<!-- tools/real_run.py --docs -->

`tools/real_run.py FOLDER` trains a Llama of {parameters:,} parameters ({SIZES['layers']} layers, width {SIZES['d']}) on Python's library and
documentation as bytes: {files} files, {text:,} bytes, and {held:,} bytes of other files held out. It is unit-scaled and in simulated FP8
(E4M3 forward, E5M2 backward, stochastic). The commands were

{fence}sh
plumb train {' '.join(map(str, run.options()))} LAYOUT
{fence}

It took {seconds / 60:.1f} minutes and {len(steps)} steps of {tokens:,} tokens; the median step took {median:.2f} s ({tokens / median:,.0f} tokens a second) with all
processes on {os.cpu_count()} shared cores. Steps computed twice: {again}; {bits}.

{table(["when", "what happened"], happened)}

{table(["after step", "loss on held-out text (nats a byte)"], [[step, f"{loss:.4f}"] for step, loss in sorted(evaluations.items())])}

The loss of the first step was {steps[min(steps)]['loss']:.3f}, of the last {steps[max(steps)]['loss']:.3f}. `plumb eval` says of the trained file: {evaluation.strip()}.
[The page of the run](data/real_run/run.html) was written while it ran.

What it writes (`plumb sample trained.pt2 --prompt 'def ' --tokens 300 --temperature 0.7 --top-k 40`):

{fence}text
{sample.rstrip()}
{fence}
"""


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--docs", action="store_true")
    given = parser.parse_args()
    folder = given.folder
    folder.mkdir(parents=True, exist_ok=True)
    facts = folder / "facts.json"
    if not facts.exists():
        facts.write_text(json.dumps({"files": gather_text(folder), "parameters": make_model(folder / "fp8.pt2")}))
    known = json.loads(facts.read_text())
    run = Run(folder, given.steps)
    if not any(e.get("fault") == "stop" for e in run.events()):
        code = first_part(run)
        if code != 75:
            sys.exit(f"the run was to end with code 75 after SIGTERM, its code is {code}: see {folder}/stderr.txt")
    code = run.train(["--stages", 4, "--microbatches", PARTS, "--save", "trained.pt2"])
    if code != 0:
        sys.exit(f"the run ended with code {code}: see {folder}/stderr.txt")
    evaluation = said("eval", "trained.pt2", "--data", "held.bin", folder=folder)
    sample = said("sample", "trained.pt2", "--prompt", "def ", "--tokens", 300, "--temperature", 0.7, "--top-k", 40, folder=folder)
    print(evaluation + sample)
    if given.docs:
        pathlib.Path("docs/data/real_run").mkdir(parents=True, exist_ok=True)
        shutil.copy(folder / "run.html", "docs/data/real_run/run.html")
        shown = re.sub(r"[^\x20-\x7e\n]", "?", sample)
        pathlib.Path("docs/real_run.md").write_text(document(run, known["parameters"], known["files"], shown, evaluation))


if __name__ == "__main__":
    main()
