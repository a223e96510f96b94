"""Trainings over hosts (network namespaces) of which one is lost, cut off, or comes."""

import json
import subprocess
import sys
import time

import pytest
import torch
from command import COMMAND, run
from hosts import Hosts, Training, why_not
from pages import ROOT, fences
from torch import nn

over_hosts = pytest.mark.skipif(bool(why_not()), reason=why_not() or "-")
PATIENCE = 10


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(256, 16)
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 32), nn.GELU())
        self.head = nn.Linear(32, 256)

    def forward(self, tokens):
        return self.head(self.layers(self.embedding(tokens)))


@pytest.fixture
def folder(tmp_path):
    torch.manual_seed(0)
    torch.export.save(torch.export.export(Net(), (torch.zeros(8, 32, dtype=torch.long),)), tmp_path / "lm.pt2")
    (tmp_path / "text.bin").write_bytes(bytes(range(97, 123)) * 500)
    return tmp_path


def command(steps, *more):
    words = f"train lm.pt2 --data text.bin --steps {steps} --microbatches 2 --stages 2 --threads 1 --json"
    return [COMMAND, *words.split(), *more]


def losses(events):
    found = {}
    for event in events:
        if "loss" in event:
            assert found.setdefault(event["step"], event["loss"]) == event["loss"], "computed twice, with the same bits"
    return found


def whole(folder, words):
    """The run on one host that nothing befalls: its losses by step."""
    return losses(run([*words[1:], "--save", "whole.pt2"], folder))


def weights(path):
    return {name: tensor.detach().numpy().tobytes() for name, tensor in torch.export.load(path).state_dict.items()}


def over(hosts, folder, words, ranks=2):
    hosts.start_store()
    more = ["--max-restarts", "1", "--recut", "--patience", str(PATIENCE), "--save", "over.pt2"]
    return Training(hosts, [*words, *more], folder, "1:3", ranks, PATIENCE)


def under_way(training):
    """Waits for the first steps of all hosts; returns the time of the last event. A host that comes late is not in the
    first rendezvous: then the others begin, and begin again with it."""
    assert training.wait_for(lambda: all(agent.ranks() for agent in training.agents.values()))
    since = time.monotonic()
    assert training.wait_for(lambda: training.count_steps(since) > 5)
    return training.events()[-1][0]


def ends_like(training, folder, expected):
    training.end()
    assert losses([event for _, event in training.events()]) == expected
    assert weights(folder / "over.pt2") == weights(folder / "whole.pt2")
    assert not [path.name for path in folder.rglob("*") if "writing" in path.name or "tmp" in path.name]
    return [event for _, event in training.events() if "resumed" in event]


@over_hosts
def test_a_lost_host_loses_nothing_and_one_that_comes_is_taken_in(folder):
    """Two of three hosts train, with a replica each; the third has spares."""
    words = command(600, "--data-parallel", "2")
    expected = whole(folder, words)
    with Hosts(3) as hosts:
        training = over(hosts, folder, words)
        since = under_way(training)
        hosts.lose(0)
        training.agents.pop(0)
        _, event = training.wait_for(lambda: training.resumed(since))
        assert event["folder"] == "copies in memory" and event["resumed"] >= 5
        training.read_slowly(0.2)  # so that the rest of the steps takes longer than a host to come
        training.begin(0)
        since = training.events()[-1][0]
        assert training.wait_for(lambda: training.resumed(since)), "the training has ended before the host came"
        training.read_slowly(0)
        assert ends_like(training, folder, expected)


@over_hosts
def test_a_host_that_is_cut_off_ends_by_itself_and_the_others_go_on(folder):
    words = command(150, "--data-parallel", "2")
    expected = whole(folder, words)
    with Hosts(2) as hosts:
        training = over(hosts, folder, words)
        since = under_way(training)
        hosts.cut_off(1)
        alone = training.agents.pop(1)
        when, event = training.wait_for(lambda: training.resumed(since))
        assert event["folder"] == "copies in memory"
        for _ in range(1200):
            if not alone.ranks():
                break
            time.sleep(0.1)
        assert not alone.ranks()
        assert not [event for at, event in alone.told if at > when and "loss" in event], "one training goes on"
        hosts.lose(1)  # torchrun's agent, without ranks, waits for the store
        ends_like(training, folder, expected)


@over_hosts
def test_one_pipeline_goes_on_from_its_neighbors_copies(folder):
    words = command(150)
    expected = whole(folder, words)
    with Hosts(2) as hosts:
        training = over(hosts, folder, [*words, "--copies-to-neighbor", "5"], ranks=1)
        copied = training.wait_for(lambda: [e for _, e in training.events() if e.get("copied_step", 0) >= 10])
        assert copied[0]["bytes"] > 0
        since = training.events()[-1][0]
        hosts.lose(1)
        training.agents.pop(1)
        _, event = training.wait_for(lambda: training.resumed(since))
        assert event["folder"] == "copies in memory" and event["resumed"] >= 10 and event["resumed"] % 5 == 0
        ends_like(training, folder, expected)


@over_hosts
def test_two_hosts_by_hand_as_the_page_says(folder):
    page = (ROOT / "docs" / "howto" / "cluster.md").read_text()
    store, host = (body for language, info, body in fences(page) if language == "bash" and "title" in info)
    torchrun = f"exec {sys.executable} -m torch.distributed.run"
    host = host.replace("exec torchrun", torchrun).replace("HEAD", "10.77.0.254").replace(" plumb train", f" {COMMAND} train")
    with Hosts(2) as hosts:
        hosts.start(hosts.switch, "bash", "-c", store.replace("python -c", f"exec {sys.executable} -c"))
        both = [
            hosts.start(hosts.space(n), "bash", "-c", host.replace("OWN", hosts.address(n)), cwd=folder, stderr=subprocess.PIPE)
            for n in range(2)
        ]
        ended = [(process.communicate(timeout=600)[1], process.returncode) for process in both]
        assert [code for _, code in ended] == [0, 0], ended
    assert (folder / "trained.pt2").exists() and (folder / "run").is_dir()


@pytest.mark.parametrize("fault", ["kill", "raise"])
def test_what_torchrun_starts_again_goes_on_from_the_copies_of_its_host(folder, fault):
    words = command(30)
    expected = whole(folder, words)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
    more = ["--max-restarts", "1", "--save", "over.pt2", "--inject", f"{fault} rank 1 at 1F1 of step 20"]
    done = subprocess.run([*torchrun, "--no-python", *words, *more], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    events = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [event["resumed"] for event in events if "resumed" in event] in ([18], [19])
    assert losses(events) == expected and weights(folder / "over.pt2") == weights(folder / "whole.pt2")
