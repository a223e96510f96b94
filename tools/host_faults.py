"""Loses hosts on purpose, for tools/fault_table.py: three network namespaces, torchrun's agent in each.

A training of two stages and two replicas has two ranks a host: two hosts train, the third has spares. Every run must end
with the bits of the run on one host that nothing befell. The rendezvous' store runs on a fourth host, the switch.
"""

import os
import random
import statistics
import subprocess
import sys
import time

from tables import table

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "python", "tests"))

from hosts import Hosts, Lost, Training, why_not

PATIENCE = 10
STEPS, SLOW_STEPS = 200, 30  # a step over a slow link takes seconds
LAYOUT = ["--stages", "2", "--data-parallel", "2", "--microbatches", "2", "--threads", "1", "--lr", "0.01"]
KINDS = {
    "killed": "all processes killed",
    "off": "switched off: others hear nothing any more",
    "two": "two of three hosts killed at once",
    "cut off": "cut off (iptables drops)",
    "slow": "a slow link, 200 ms and 10 Mbit/s",
}


class Outcomes:
    def __init__(self, kind):
        self.kind, self.faults, self.idle, self.runs, self.seconds, self.ended = kind, 0, 0, 0, [], []
        self.again, self.nothing, self.wrong = [], [], []

    def cells(self):
        def both(values, digits=1):
            return f"{statistics.median(values):.{digits}f} / {max(values):.{digits}f}" if values else ""

        again = both(self.again, 0)
        return [KINDS[self.kind], self.runs, self.faults, self.idle, len(self.wrong), both(self.seconds), again, both(self.ended), len(self.nothing)]


def befall(training, out, dice, host):
    """Lets one fault happen at a random moment and waits until the training goes on. Returns false if it had ended."""
    begin = time.monotonic()
    if not training.wait_for(lambda: training.count_steps(begin) >= dice.randint(2, 6)):
        return False
    time.sleep(dice.uniform(0, 0.3))
    hosts, since = training.hosts, time.monotonic()
    lost = [host] if out.kind != "two" else dice.sample(range(3), 2)
    before = max(event["step"] for _, event in training.events() if "loss" in event)
    for one in lost:
        {"off": hosts.switch_off, "cut off": hosts.cut_off, "slow": hosts.slow_down}.get(out.kind, hosts.lose)(one)
    out.faults += len(lost)
    if out.kind == "slow":
        return True
    gone = [training.agents.pop(one) for one in lost]

    def came():
        goes_on = training.count_steps(since + 1) > 3  # with a host that has ranks lost, only after it was resumed
        return training.resumed(since) or goes_on

    found = training.wait_for(came)
    if found is None and out.kind != "cut off":
        return False
    if isinstance(found, tuple):
        when, event = found
        out.seconds.append(when - since)
        out.again.append(before - event["resumed"])
        if "copies" not in event["folder"]:
            out.nothing.append(event)
    else:
        out.idle += 1
    if out.kind == "cut off":
        own = gone[0]
        while own.ranks():
            if time.monotonic() > since + 240:
                raise Lost("the ranks that were cut off did not end")
            time.sleep(0.05)
        out.ended.append(time.monotonic() - since)
        late = [when - since for when, event in own.told if "loss" in event and when > since + PATIENCE]
        if late:
            raise Lost(f"the side that was cut off went on: {late}")
        hosts.join_again(host)
    for one in lost:
        hosts.kill_in(hosts.space(one))
        if out.kind == "off":
            hosts.switch_on(one)
        since = time.monotonic()
        training.begin(one)
    if found is None:
        return False
    training.wait_for(lambda: training.resumed(since))
    return True


def one_run(runs, out, faults, dice, number, expected, same_weights, losses):
    for path in runs.folder.glob("over.*"):
        path.unlink()
    run_folder = f"run{out.kind[:2]}{number}"
    steps = SLOW_STEPS if out.kind == "slow" else STEPS
    words = ["hosts.pt2", "--data", "tokens.bin", "--steps", str(steps), *LAYOUT, "--json", "--save", "over.pt2"]
    words += ["--max-restarts", "1", "--recut", "--patience", str(PATIENCE)]
    words += ["--checkpoints", run_folder, "--checkpoint-every", "25"] if dice.random() < 0.5 else []
    words += ["--eval-data", "held.bin", "--eval-every", "10", "--eval-batches", "1"] if dice.random() < 0.5 else []
    host = dice.randrange(3)
    training, problem = None, ""
    begun = out.faults
    try:
        with Hosts(3, [host] if out.kind == "slow" else []) as hosts:
            hosts.start_store()
            training = Training(hosts, [runs.command, "train", *words], runs.folder, nodes="1:3", ranks=2, patience=PATIENCE)
            while out.faults - begun < faults and befall(training, out, dice, host):
                host = dice.randrange(3)
            training.end()
        done = losses(training.events())
        if done is None or any(done.get(key) != value for key, value in expected[steps].items() if key[0] == "step"):
            problem = "other losses, or not all steps"
        elif not same_weights(runs.folder / f"whole{steps}.pt2", runs.folder / "over.pt2"):
            problem = "other weights"
    except (Lost, AssertionError, OSError, subprocess.SubprocessError) as e:
        problem = f"{type(e).__name__}: {e}"
    out.runs += 1
    if problem:
        out.wrong.append(problem)
        print(out.kind, words, problem, training.errors() if training else "", sep="\n", file=sys.stderr)
    print(f"{KINDS[out.kind]}: {out.faults - begun} faults, {problem or 'the same bits'}", file=sys.stderr, flush=True)


def host_table(runs, o, begin, same_weights, losses):
    if why := why_not():
        print(f"no hosts here: {why}", file=sys.stderr)
        return 1
    (runs.folder / "held.bin").write_bytes((runs.folder / "tokens.bin").read_bytes()[:400])
    whole = {}
    for steps in (STEPS, SLOW_STEPS):
        events, code, errors = runs.train("hosts.pt2", steps, *LAYOUT, "--save", f"whole{steps}.pt2")
        assert code == 0, errors
        whole[steps] = losses(events)
    two = o.hosts // 6 // 2 * 2
    plan = {"killed": o.hosts - o.hosts // 4 - two, "off": o.hosts // 4, "two": two, "cut off": o.partitions, "slow": o.slow}
    rows = [Outcomes(kind) for kind in plan if o.only in KINDS[kind]]
    while time.monotonic() - begin < o.seconds:
        short = [row for row in rows if row.faults < plan[row.kind] and len(row.wrong) < 5]
        if not short:
            break
        row = min(short, key=lambda row: row.faults / plan[row.kind])
        dice = random.Random(f"{o.seed} {row.kind} {row.runs}")
        one_run(runs, row, min(1 if row.kind == "slow" else 5, plan[row.kind] - row.faults), dice, row.runs, whole, same_weights, losses)
    head = ["fault", "runs", "faults", "of them spares'", "runs that ended otherwise", "s to the next step's begin, median / worst"]
    head += ["whole steps again, median / worst", "s until the ranks that were cut off had ended, median / worst", "went on without copies"]
    print(table(head, [row.cells() for row in rows]))
    for row in rows:
        print(row.kind, *row.nothing, *row.wrong, sep="\n  ", file=sys.stderr)
    return 1 if any(row.wrong for row in rows) else 0
