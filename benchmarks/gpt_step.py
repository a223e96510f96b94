"""A training step of a GPT in bf16 and in FP8, by plumb and by others, each in a process of its own. Prints Markdown.

python benchmarks/gpt_step.py                      a GPT of 1 billion parameters on the CUDA device
python benchmarks/gpt_step.py --tiny --device cpu  a very small one: shows that everything runs, its times mean nothing
python benchmarks/gpt_step.py --case fp8           one case; returns its numbers as JSON
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "examples"))
from gpt import GPT  # noqa: E402

LARGE = dict(vocab=32000, d=2048, layers=18, h=16, context=1024)
TINY = dict(vocab=64, d=32, layers=2, h=2, context=16)
CASES = {
    "bf16": "bf16, eager",
    "bf16-compiled": "bf16, torch.compile",
    "torchao": "torchao tensorwise FP8, torch.compile",
    "fp8": "plumb unit-scaled FP8",
    "fp8-compiled": "plumb unit-scaled FP8, torch.compile",
    "fp8-tracked": "plumb unit-scaled FP8, everything recorded every 10 steps",
    "one-process": "bf16, two stages in one process",
    "two-processes": "bf16, two stages, two processes on one device, staged through the CPU",
    "two-processes-wire": "the same, FP8 between the stages",
}


class Run:
    """Settings of a case: the model's sizes, the number of steps, the device."""

    def __init__(self, tiny, device):
        self.sizes, self.batch = (TINY, 4) if tiny else (LARGE, 4)
        self.device = torch.device(device)
        self.warm, self.steps = (2, 10) if tiny else (5, 20)
        self.backend = "aot_eager" if tiny else "inductor"
        torch.manual_seed(0)
        self.ids = torch.randint(self.sizes["vocab"], (self.batch, self.sizes["context"]), device=self.device)

    def model(self):
        torch.manual_seed(0)
        with torch.device(self.device):
            return GPT(**self.sizes, std=0.02).bfloat16()

    def wait(self):
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def timed(self, step):
        """Milliseconds a step: the median, and the mean, in which steps that record count."""
        times = []
        for i in range(self.warm + self.steps):
            self.wait()
            begin = time.perf_counter()
            step()
            self.wait()
            if i >= self.warm:
                times.append((time.perf_counter() - begin) * 1e3)
        return {"median": statistics.median(times), "mean": statistics.fmean(times)}


def trained(run, module, optimizer, recorder=None):
    last = None

    def step():
        nonlocal last
        optimizer.zero_grad()
        _, last = module(run.ids, run.ids)
        last.backward()
        optimizer.step()
        if recorder is not None:
            recorder.step()

    numbers = run.timed(step)
    return numbers | {"loss": last.detach().item(), "parameters": sum(p.numel() for p in module.parameters())}


def adamw(module):
    return torch.optim.AdamW(module.parameters(), 1e-4)


def bf16(run, compiled):
    model = run.model()
    return trained(run, torch.compile(model, backend=run.backend) if compiled else model, adamw(model))


def torchao(run):
    try:
        from torchao.float8 import convert_to_float8_training
    except ImportError:
        return {"missing": "torchao is not there"}
    # (The head's sizes fit FP8 units too, as plumb's.)
    model = convert_to_float8_training(run.model())
    return trained(run, torch.compile(model, backend=run.backend), adamw(model))


def fp8(run, compiled=False, tracked=False):
    import plumb
    from plumb.transforms import unit_scale, use_fp8

    model = use_fp8(unit_scale(run.model()))
    optimizer = plumb.optim.AdamW(model.parameters(), lr=1e-2)
    if not tracked:
        return trained(run, torch.compile(model, backend=run.backend) if compiled else model, optimizer)
    with tempfile.TemporaryDirectory() as folder:
        with plumb.Recorder(model, 10, os.path.join(folder, "run.history")) as recorder:
            return trained(run, model, optimizer, recorder)


def loss_of(logits, target):
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def pipelined(run, rank, size, wire):
    from plumb.pipelining import SplitPoint, pipeline
    from plumb.pipelining.schedules import get_schedule_class

    model = run.model()
    cut = {f"blocks.{run.sizes['layers'] // 2}": SplitPoint.BEGINNING}
    pipe = pipeline(model, (run.ids[:1],), split_spec=cut, wire=("e4m3fn", "e5m2") if wire else None)
    own = [pipe.build_stage(i, run.device) for i in range(2) if size == 1 or i == rank]
    del model
    schedule = get_schedule_class("1F1B" if size == 2 else "LoopedBFS")(own[0] if size == 2 else own, run.batch, loss_of)
    optimizer = torch.optim.AdamW([p for stage in own for p in stage.submod.parameters()], 1e-4)
    losses = []

    def step():
        losses.clear()
        optimizer.zero_grad()
        given = {} if rank + 1 < size else {"target": run.ids, "losses": losses}
        schedule.step(*([run.ids] if rank == 0 else []), **given)
        optimizer.step()

    numbers = run.timed(step)
    return numbers | {"loss": torch.stack(losses).mean().item() if losses else None}


def rank_of(rank, tiny, device, wire, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    numbers = pipelined(Run(tiny, device), rank, 2, wire)
    dist.barrier()
    dist.destroy_process_group()
    if rank == 1:
        pathlib.Path(folder, "numbers").write_text(json.dumps(numbers))


def two_processes(tiny, device, wire):
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(rank_of, args=(tiny, device, wire, folder), nprocs=2)
        return json.loads(pathlib.Path(folder, "numbers").read_text())


def run_case(name, tiny, device):
    if name.startswith("two-processes"):
        return two_processes(tiny, device, name.endswith("wire"))
    run = Run(tiny, device)
    if name.startswith("bf16"):
        return bf16(run, name.endswith("compiled"))
    if name == "torchao":
        return torchao(run)
    if name == "one-process":
        return pipelined(run, 0, 1, False)
    return fp8(run, compiled=name.endswith("compiled"), tracked=name.endswith("tracked"))


def measured(name, options, limit):
    """Returns the case's numbers, from a process of its own: memory and compiled code of one are not the next one's."""
    command = [sys.executable, os.path.abspath(__file__), "--case", name, "--device", options.device]
    command += ["--tiny"] if options.tiny else []
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        return {"missing": f"not done after {limit:.0f} s"}
    if ended.returncode != 0:
        print(ended.stderr, file=sys.stderr)
        last = ended.stderr.strip().splitlines()[-1:] or ["it ended without a word"]
        return {"missing": last[0][:120].replace("|", "/")}
    return json.loads(ended.stdout.strip().splitlines()[-1])


def report(options):
    print("| step | ms, median | ms, mean | of bf16 compiled | of torchao | loss |\n|---|---:|---:|---:|---:|---:|", flush=True)
    found, failed, end = {}, False, time.monotonic() + options.within
    for name in options.cases or CASES:
        left = end - time.monotonic()
        now = found[name] = (
            measured(name, options, min(options.limit, left)) if left > 0 else {"missing": "no time was left"}
        )
        if "missing" in now:
            failed = failed or name != "torchao"
            print(f"| {CASES[name]} | not measured: {now['missing']} | | | | |", flush=True)
            continue
        speeds = [found.get(other, {}).get("median") for other in ("bf16-compiled", "torchao")]
        cells = [f"{speed / now['median']:.2f}" if speed and not name.startswith(("one", "two")) else "" for speed in speeds]
        print(f"| {CASES[name]} | {now['median']:.1f} | {now['mean']:.1f} | {' | '.join(cells)} | {now['loss']:.3f} |", flush=True)
    if all("mean" in found.get(name, {}) for name in ("fp8", "fp8-tracked")):
        print(f"\nRecording every 10 steps: {found['fp8-tracked']['mean'] / found['fp8']['mean']:.3f} times the time of steps without.")
    if "parameters" in found.get("bf16", {}):
        print(f"\n{found['bf16']['parameters'] / 1e6:.1f} million parameters. \"of\": times as quick as.")
    return 1 if failed else 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--case", choices=CASES)
    parser.add_argument("--cases", nargs="+", choices=CASES, help="only these in the table")
    parser.add_argument("--limit", type=int, default=150, help="seconds that a case may take")
    parser.add_argument("--within", type=int, default=24 * 3600, help="seconds that the whole table may take")
    options = parser.parse_args()
    if torch.device(options.device).type == "cuda" and not torch.cuda.is_available():
        print("There is no CUDA device: not measured.")
        return 0
    if options.case:
        print(json.dumps(run_case(options.case, options.tiny, options.device)))
        return 0
    return report(options)


if __name__ == "__main__":
    sys.exit(main())
