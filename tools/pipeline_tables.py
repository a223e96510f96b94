"""Writes the tables of docs/pipeline.md: the schedules, which runs over processes equal one process, and faults.

pipeline_tables.py [BUILD]: runs the roles of BUILD/tests/plumb_pipeline_test as processes of their own and replaces what
stands between the file's marks `<!-- NAME -->` and `<!-- end of NAME -->`.
pipeline_tables.py --schedules: writes the table of schedules alone, from the engine's list.
pipeline_tables.py --device testdevice --backend strict [--ranks 2]: writes the table of runs whose values travel on a
device alone, held against one process on that device.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import time
from pathlib import Path

from tables import put, table

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = ROOT / "docs" / "pipeline.md"
MODELS = ["mlp", "ragged", "skip", "tied", "norm", "tokens", "inplace", "half", "cut"]
MICROBATCHES = 8


def stages_a_rank() -> dict[str, int]:
    """Returns the stages a rank that each schedule is run with, by name."""
    from plumb import _C

    traits = map(_C.schedule_traits, _C.schedule_names())
    return {t["name"]: min(2, t["max_stages_per_rank"]) for t in traits}


def schedules() -> str:
    from plumb import _C

    rows = []
    for t in map(_C.schedule_traits, _C.schedule_names()):
        most = t["max_stages_per_rank"]
        stages = "any number" if most > 2 else "2, each also on the mirrored rank" if t["bidirectional"] else str(most)
        halves = "yes" if t["splits_backward"] else ""
        rows.append([t["name"], f"`Schedule{t['name']}`", stages, halves, t["summary"]])
    return table(["schedule", "Python", "stages a rank", "halves the backward", ""], rows)


class Ended:
    def __init__(self, code: int, out: str, err: str, seconds: float) -> None:
        self.code, self.out, self.err, self.seconds = code, out, err, seconds


def run_role(build: Path, ranks: int, stops: bool = False, timeout: float = 300, **settings: str) -> list[Ended]:
    """Runs a process a rank; one that is stopped is ended when the others have."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    base = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    base |= {f"PLUMB_TEST_{key}": value for key, value in settings.items()}
    if ranks > 1:
        base |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
        base |= {"MASTER_PORT": str(port)}
    begin, processes = time.monotonic(), []
    for rank in range(ranks):
        env = base | ({"RANK": str(rank)} if ranks > 1 else {})
        program = str(build / "tests" / "plumb_pipeline_test")
        out, err = (open(os.path.join("/tmp", f"plumb-{os.getpid()}-{rank}.{what}"), "w+") for what in ("out", "err"))
        processes.append((subprocess.Popen([program], env=env, stdout=out, stderr=err, text=True), out, err))
    ends: dict[int, tuple[int, float]] = {}
    while len(ends) < ranks and time.monotonic() - begin < timeout:
        for rank, (p, _, _) in enumerate(processes):
            if rank not in ends and p.poll() is not None:
                ends[rank] = (p.returncode, time.monotonic() - begin)
        if stops and len(ends) == ranks - 1 and time.monotonic() - max(t for _, t in ends.values()) > 1:
            break
        time.sleep(0.005)
    result = []
    for rank, (p, out, err) in enumerate(processes):
        if rank not in ends:
            p.kill()
            p.wait()
            ends[rank] = (p.returncode, float("nan"))
        out.seek(0), err.seek(0)
        result.append(Ended(ends[rank][0], out.read(), err.read(), ends[rank][1]))
        for file in (out, err):
            os.unlink(file.name)
    return result


def values(ended: list[Ended], case: str) -> dict[str, str]:
    found = {}
    for e in ended:
        if e.code:
            raise SystemExit(f"{case}: {e.err}")
        for line in e.out.splitlines():
            key, _, value = line.partition("=")
            if key.startswith(case + ":"):
                found[key[len(case) + 1 :]] = value
    return found


def differences(mine: dict[str, str], one: dict[str, str]) -> int:
    return sum(mine.get(key) != value for key, value in one.items())


def equality(build: Path, counts: tuple[int, ...] = (2, 4), models: list[str] = MODELS, **device: str) -> str:
    """`device`: DEVICE and BACKEND of the processes; without it on the CPU, over Gloo."""
    lines, per_rank_of = [], stages_a_rank()
    alone_on = {"DEVICE": device["DEVICE"]} if device else {}
    for ranks in counts:
        cases = {(m, s): f"{m},{s},{ranks},{MICROBATCHES},{v}" for m in models for s, v in per_rank_of.items()}
        alone = {(m, n): f"{m},LoopedBFS,1,{MICROBATCHES},{n}" for m in models for n in (ranks, 2 * ranks)}
        over = run_role(build, ranks, ROLE="train", CASES=";".join(cases.values()) + ";", **device)
        one = run_role(build, 1, ROLE="train", CASES=";".join(alone.values()) + ";", **alone_on)
        twice = [case for (_, schedule), case in cases.items() if schedule == "DualPipe"] if device else []
        gloo = run_role(build, ranks, ROLE="train", CASES=";".join(twice) + ";", **alone_on) if twice else []
        rows = []
        for schedule, per_rank in per_rank_of.items():
            rows.append([schedule])
            for m in models:
                case = cases[m, schedule]
                expected = values(gloo, case) if case in twice else values(one, alone[m, ranks * per_rank])
                wrong = differences(values(over, case), expected)
                rows[-1].append(f"= ({len(expected)})" if wrong == 0 else f"{wrong} of {len(expected)} differ")
        lines += [f"\n{ranks} processes:\n", table(["schedule", *models], rows)]
    return "\n".join(lines)


FAULTS = [
    ("raise", 2, 3, "rank 2's stage raises"),
    ("exit", 1, 3, "rank 1 calls exit(3)"),
    ("kill", 0, 3, "rank 0 is killed (it serves the store)"),
    ("stop", 1, 2, "rank 1 is stopped (SIGSTOP), time-out 3 s"),
    ("shape", 0, 2, "rank 0 sends a shape that rank 1 cannot use"),
    ("nan", 0, 2, "rank 0 makes NaN, with the check on"),
    ("schedule", 1, 2, "rank 1 was given another schedule"),
    ("missing", 1, 2, "rank 1 was not given its stage"),
]


def faults(build: Path) -> str:
    healthy = max(e.seconds for e in run_role(build, 3, ROLE="fault", KIND="none", FAULTY="1", TIMEOUT="60000"))
    rows = []
    for kind, faulty, ranks, what in FAULTS:
        timeout = "3000" if kind == "stop" else "60000"
        ended = run_role(build, ranks, kind == "stop", ROLE="fault", KIND=kind, FAULTY=str(faulty), TIMEOUT=timeout)
        for rank, e in enumerate(ended):
            after = "stopped" if e.seconds != e.seconds else f"{e.seconds:.1f} s"
            text = " ".join(e.err.split()).replace("|", "\\|") or ("(nothing)" if rank == faulty else "(nothing!)")
            rows.append([what if rank == 0 else "", rank, after, text])
    head = f"Three steps without a fault, start and connecting of the processes included: {healthy:.1f} s.\n\n"
    return head + table(["fault", "rank", "after:", "printed"], rows)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("build", nargs="?", type=Path, default=ROOT / "build")
    parser.add_argument("--schedules", action="store_true")
    parser.add_argument("--device")
    parser.add_argument("--backend", default="")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    given = parser.parse_args()
    build, counts, sections = given.build, tuple(given.ranks), {"schedules": schedules}
    if given.device:
        device = {"DEVICE": given.device, "BACKEND": given.backend}
        sections = {f"{given.backend} equality of {n}": lambda n=n: equality(build, (n,), **device) for n in counts}
    elif not given.schedules:
        sections |= {"equality": lambda: equality(build, counts), "faults": lambda: faults(build)}
    for name, make in sections.items():
        section = make()
        DOCUMENT.write_text(put(DOCUMENT.read_text(), name, section))
        print(section, flush=True)


if __name__ == "__main__":
    main()
