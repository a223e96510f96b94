"""Trainings of the command whose launcher, or whose user, ends them: nothing is left, and they go on."""

import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
import ranks
import torch
from command import COMMAND
from torch import nn

import plumb


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(256, 8)
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 256))

    def forward(self, tokens):
        return self.layers(self.embedding(tokens))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lost")
    torch.manual_seed(0)
    torch.export.save(torch.export.export(Net(), (torch.zeros(2, 12, dtype=torch.long),)), folder / "net.pt2")
    (folder / "tokens.bin").write_bytes(bytes(range(97, 105)) * 500)
    return folder


def arguments(steps, *more):
    words = f"train ../net.pt2 --data ../tokens.bin --steps {steps} --microbatches 2 --stages 2 --threads 1 --json"
    return [COMMAND, *words.split(), *more]


@pytest.fixture
def folder(model, tmp_path):
    place = model / tmp_path.name
    place.mkdir()
    return place


def processes_in(folder):
    found = []
    for entry in os.listdir("/proc"):
        try:
            if entry.isdigit() and os.readlink(f"/proc/{entry}/cwd") == str(folder):
                found.append(int(entry))
        except OSError:
            pass
    return found


def wait_until_none(folder):
    for _ in range(2400):
        if not processes_in(folder):
            return
        time.sleep(0.05)
    raise AssertionError(f"left: {processes_in(folder)}")


def start(folder, *words, **settings):
    return subprocess.Popen(
        [*words],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # A shell's background job, as these tests may be, ignores Ctrl-C, and what it starts does, too.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        **settings,
    )


def read_steps(process, count):
    while count > 0:
        line = process.stdout.readline()
        assert line, process.stderr.read()
        count -= '"loss"' in line


@pytest.mark.parametrize("signals", [["SIGINT", "SIGINT"], ["SIGKILL"]])
def test_no_process_and_no_file_is_left(folder, signals):
    """Ctrl-C twice means now, and a launcher that is killed takes its processes with it."""
    process = start(folder, *arguments(1000000, "--max-restarts", "2", "--spares", "1", "--checkpoints", "run"))
    read_steps(process, 3)
    assert len(processes_in(folder)) == 4
    for name in signals:
        process.send_signal(getattr(signal, name))
        time.sleep(0.02)
    process.communicate(timeout=300)  # which reads on: a full pipe would hold it up
    assert process.returncode != 0
    wait_until_none(folder)
    assert [name for name in os.listdir(folder) if "writing" in name or "tmp" in name] == []


def wait_for_reader(pipe):
    """Makes a pipe so small that a training which prints into it goes on only while somebody reads."""
    fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, 4096)


def sockets_of(pids):
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):  # it has ended
            for link in os.scandir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    found.add(os.readlink(link.path))
    return {name[8:-1] for name in found if name.startswith("socket:[")}


def listening_sockets():
    rows = [line.split() for line in open("/proc/net/tcp").readlines()[1:]]
    return {row[9] for row in rows if row[3] == "0A"}


def test_no_port_is_left_when_a_lost_rank_was_made_up_for(folder):
    process = start(folder, *arguments(400, "--max-restarts", "2", "--inject", "kill rank 0 at 0B1 of step 3"))
    wait_for_reader(process.stdout)
    read_steps(process, 20)
    listened = sockets_of(processes_in(folder)) & listening_sockets()
    assert listened, "the store's"
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    wait_until_none(folder)
    assert not listened & listening_sockets(), "nobody listens there any more"


def test_a_lost_rank_costs_neither_a_checkpoint_nor_a_training_without_its_logs(folder):
    """A checkpoint that the loss has ended is made up for at once. Logs that cannot be opened again are given up."""
    (folder / "rules.toml").write_text("every = 2\n[[rule]]\n")
    (folder / "logs").mkdir()
    logs = ["--csv", "logs/csv", "--tensorboard", "logs/tb", "--history", "logs/history", "--hashes", "logs/hashes"]
    saved = ["--checkpoints", "run", "--checkpoint-every", "20", "--max-restarts", "1", "--record", "rules.toml"]
    process = start(folder, *arguments(29, *saved, *logs, "--inject", "stop rank 1 at 1F0 of step 25"))
    last = folder / "run" / "step-00000020"
    while not (stopped := [pid for pid in processes_in(folder) if state_of(pid) == "T"]):
        assert process.poll() is None
        time.sleep(0.01)
    until = time.monotonic() + 1  # the stopped rank may have written its part, so that rank 0 finishes the checkpoint
    while not last.exists() and time.monotonic() < until:
        time.sleep(0.01)
    shutil.rmtree(last, ignore_errors=True)
    shutil.rmtree(folder / "logs")
    (folder / "logs").write_text("")
    os.kill(stopped[0], signal.SIGKILL)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    told = list(map(json.loads, out.splitlines()))
    assert [event["resumed"] for event in told if "resumed" in event] == [24], told
    assert [event["checkpoint"] for event in told if "checkpoint" in event][-2:] == [24, 29], told
    problems = " ".join(event["problem"] for event in told if "problem" in event)
    assert all(f"{option} ends here: " in problems for option in logs[::2]), problems


def state_of(pid):
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat") as stat:  # it has ended
        return stat.read().rpartition(")")[2].split()[0]


def measured(history):
    """Returns a history's values, no matter which ranks wrote them. The second of two stages also measures its input.
    """
    frame = plumb.read_history(history).to_dataframe("std", "abs_max")
    place = [name for name in ("step", "name", "direction", "stage", "rank") if name in frame]
    assert not frame.duplicated(place).any()
    frame = frame[frame.name != "linear"]  # in the first stage it is layers.0.linear
    return set(frame[["step", "name", "direction", "std", "abs_max"]].itertuples(index=False, name=None))


def test_what_is_recorded_of_a_run_that_goes_on_is_that_of_one_that_nothing_befell(folder):
    """Steps that are computed again are there once, under their own numbers, in whatever layout the run goes on. A
    condition that held in the step before the loss, the fifth, has the next one recorded whole, as often as its limit says.
    """
    condition = 'when = { statistic = "abs_max", above = 0 }\nevery = 4\nthen = "all"\nlimit = 6\n'
    (folder / "rules.toml").write_text(f"every = 2\n[[rule]]\n[[rule]]\n{condition}")

    def run(name, steps, *more):
        words = ["--record", "rules.toml", "--history", f"{name}.history", "--csv", f"{name}.csv", "--page", f"{name}.html"]
        done = subprocess.run(arguments(steps, *words, *more), cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert "9 of 9" in (folder / f"{name}.html").read_text() or steps < 9
        return [line.split(",")[:2] for line in (folder / f"{name}.csv").read_text().splitlines()[1:]]

    table = run("whole", 9)
    rows = measured(folder / "whole.history")
    assert [step for step, _ in table] == [str(step) for step in range(1, 10)]
    assert {step for step, *_ in rows} == {1, 2, 3, 4, 5, 6, 7, 9}
    fault = ["--max-restarts", "1", "--inject", "kill rank 1 at 1B1 of step 6"]
    for name, more in (("again", fault), ("fewer", [*fault, "--recut"])):
        assert run(name, 9, *more) == table, name
        assert measured(folder / f"{name}.history") == rows, name
    (folder / "rules.toml").write_text("every = 2\n[[rule]]\n")  # a condition is each rank's own
    for steps, stages in ((3, "1"), (6, "2"), (9, "1")):  # from one file to one of each rank
        saved = run("layouts", steps, "--checkpoints", "run", "--stages", stages)
    assert saved == table
    assert measured(folder / "layouts.history") == {row for row in rows if row[0] % 2 == 1}


def test_torchrun_starts_all_again_from_the_checkpoint(folder):
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
    words += ["--no-python", *arguments(6, "--checkpoints", "run", "--checkpoint-every", "2")]
    process = start(folder, *words, "--inject", "kill rank 1 at 1F1 of step 5")
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert '"resumed":2' in out or '"resumed":4' in out, out
    whole = subprocess.run(arguments(6), cwd=folder, check=True, capture_output=True, text=True).stdout
    last = [line.split('"lr"')[0] for line in whole.splitlines() if '"step":6' in line]
    assert last and last[0] in out


def test_fewer_processes_of_torchrun_take_another_layout_with_the_same_bits(folder):
    """Restarts as an agent of --nnodes MIN:MAX does when a node is lost."""
    layout = ["--data-parallel", "2", "--microbatches", "1"]
    whole = subprocess.run(arguments(4, *layout), cwd=folder, check=True, capture_output=True, text=True).stdout
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python"]
    process = start(folder, *words, *arguments(4, *layout, "--max-restarts", "1", "--recut"))
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    losses = [[line.split('"lr"')[0] for line in text.splitlines() if '"loss"' in line] for text in (whole, out)]
    assert len(losses[0]) == 4 and losses[0] == losses[1]


def test_a_node_that_is_lost_leaves_the_other_to_go_on_alone(folder):
    """Two agents of torchrun --nnodes 1:2; the second one and its ranks are killed."""
    layout = ["--data-parallel", "2"]
    whole = subprocess.run(arguments(200, *layout), cwd=folder, check=True, capture_output=True, text=True).stdout
    launch = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:2", "--nproc-per-node", "2", "--max-restarts", "3"]
    launch += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{ranks.free_port()}", "--rdzv-id", "job", "--no-python"]
    conf = "read_timeout=600,last_call_timeout=10,keep_alive_interval=2,keep_alive_max_attempt=3"
    # With one store for agents and ranks, an agent that comes after the other has begun alone never gets its address.
    settings = os.environ | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    words = arguments(200, *layout, "--checkpoints", "run", "--checkpoint-every", "20", "--max-restarts", "1", "--recut")
    agents, (read, write) = [], os.pipe()
    wait_for_reader(read)
    for number in range(2):
        own = [*launch, "--rdzv-conf", f"{conf},is_host={1 - number}", *words]  # the first one has the store
        with open(folder / f"err{number}", "w") as err:
            pipes = {"stdout": write, "stderr": err}
            agents.append(subprocess.Popen(own, cwd=folder, env=settings, start_new_session=True, **pipes))
    os.close(write)

    def ranks_of(agent):
        found = []
        for pid in processes_in(folder):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/stat") as stat:
                if int(stat.read().rpartition(")")[2].split()[1]) == agent.pid:
                    found.append(pid)
        return found

    while len(ranks_of(agents[1])) < 2:
        assert agents[1].poll() is None, (folder / "err1").read_text()
        time.sleep(0.1)
    with open(read) as out:
        told = []
        for line in out:
            told.append(line)
            if '"checkpoint":20' in line:
                break
        lost = ranks_of(agents[1])
        assert len(lost) == 2, told
        for pid in [*lost, agents[1].pid]:
            os.kill(pid, signal.SIGKILL)
        agents[1].wait()
        told += out
    assert agents[0].wait() == 0, (folder / "err0").read_text()
    wait_until_none(folder)
    losses = []
    for lines in (whole.splitlines(), told):
        steps = {}
        for line in lines:
            if '"loss"' in line:
                event = json.loads(line)
                assert steps.setdefault(event["step"], event["loss"]) == event["loss"], event
        losses.append(steps)
    assert losses[0] == losses[1] and len(losses[0]) == 200
    assert any('"resumed":' in line for line in told) and sum('"step":200' in line for line in told) == 1


def test_srun_gives_notice_and_the_job_goes_on(folder):
    """SIGUSR1 to every task: a checkpoint, and exit code 75; the job that is queued again goes on."""
    port = ranks.free_port()

    def tasks(steps, restarts):
        environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "MASTER_ADDR")}
        environment |= {"SLURM_NTASKS": "2", "SLURM_NNODES": "1", "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}
        environment |= {"MASTER_PORT": str(port), "SLURM_RESTART_COUNT": str(restarts)}
        words = arguments(steps, "--checkpoints", "run")
        return [start(folder, *words, env=environment | {"SLURM_PROCID": str(r), "SLURM_LOCALID": str(r)}) for r in (0, 1)]

    first = tasks(1000000, 0)
    read_steps(first[0], 3)
    for task in first:
        task.send_signal(signal.SIGUSR1)
    outs = [task.communicate(timeout=300) for task in first]
    assert [task.returncode for task in first] == [75, 75], outs
    checkpoint = max(name for name in os.listdir(folder / "run") if name.startswith("step-"))
    step = int(checkpoint.removeprefix("step-"))
    again = tasks(step + 2, 1)
    outs = [task.communicate(timeout=300) for task in again]
    assert [task.returncode for task in again] == [0, 0], outs
    assert f'"resumed":{step}' in outs[0][0]
