"""plumb.Trainer: the engine of `plumb train`, with the same bits."""

import array
import contextlib
import fcntl
import json
import os
import pty
import re
import signal
import subprocess
import sys
import termios
import time
import traceback
import warnings

import pytest
import torch
from command import COMMAND
from plumb._progress import Progress
from safetensors import safe_open
from torch import nn

import plumb

LOST_AT_THE_START = "plumb: what is learned will be lost: no --save, --save-hf or --checkpoints\n"


class Lm(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.up, self.drop, self.head = nn.Embedding(64, 16), nn.Linear(16, 32), nn.Dropout(0.1), nn.Linear(32, 64)

    def forward(self, ids):
        return self.head(self.drop(torch.relu(self.up(self.wte(ids)))))


class Events:
    def __init__(self):
        self.steps, self.seen = [], []

    def on_step(self, event):
        self.steps.append(event)

    def on_event(self, event):
        self.seen.append(event)

    def __getattr__(self, name):
        if not name.startswith("on_"):
            raise AttributeError(name)
        return lambda event: self.seen.append((name, event))

    @property
    def losses(self):
        return [e["loss"] for e in self.steps]


@pytest.fixture
def folder(tmp_path):
    torch.manual_seed(0)
    torch.export.save(torch.export.export(Lm(), (torch.randint(64, (2, 8)),)), tmp_path / "lm.pt2")
    (tmp_path / "tokens.bin").write_bytes(bytes((i * i + i // 7) % 64 for i in range(500)))
    return tmp_path


OPTIONS = dict(steps=6, lr=0.01, microbatches=2, clip=0.5, rate="cosine", warmup=2, group=["*.bias: weight_decay=0"], threads=1, seed=3)


def trained(folder, model=None, data=None, **options):
    events = Events()
    result = plumb.Trainer(
        model if model is not None else folder / "lm.pt2",
        data if data is not None else folder / "tokens.bin",
        hooks=events,
        **(OPTIONS | options),
    ).run()
    return events, result


def test_the_command_and_python_give_the_same_bits_from_one_file(folder):
    events, result = trained(folder, save=str(folder / "python.pt2"))
    assert result.steps == 6 and result.loss == events.losses[-1] and not result.stopped
    trainer = plumb.Trainer(folder / "lm.pt2", folder / "tokens.bin", save=folder / "command.pt2", **OPTIONS)
    (folder / "run.toml").write_text(trainer.options)
    out = subprocess.run([COMMAND, "train", "--config", "run.toml", "--json"], cwd=folder, check=True, capture_output=True)
    told = [json.loads(line) for line in out.stdout.splitlines()]
    assert [e["loss"] for e in told if "loss" in e] == events.losses
    again = Events()
    plumb.Trainer(config=folder / "run.toml", save=folder / "file.pt2", hooks=again).run()
    assert again.losses == events.losses
    states = [torch.export.load(folder / f"{name}.pt2").state_dict for name in ("python", "command", "file")]
    assert all(torch.equal(states[0][n], s[n]) for s in states for n in states[0])


class LmLoss(Lm):
    def forward(self, ids, targets):
        return nn.functional.cross_entropy(super().forward(ids).flatten(0, 1), targets.flatten())


@pytest.mark.parametrize("stages", [1, 2])
def test_a_model_that_returns_its_loss_is_evaluated(folder, stages):
    torch.manual_seed(0)
    net, rows = LmLoss(), {name: torch.randint(64, (24, 8)) for name in ("ids", "targets")}
    torch.export.save(torch.export.export(net, tuple(x[:2] for x in rows.values())), folder / "loss.pt2")
    torch.save(rows, folder / "rows.pt")
    done = subprocess.run(
        [COMMAND, "train", "loss.pt2", "--data", "rows.pt", "--loss", "output", "--eval-data", "rows.pt", "--steps", "2",
         "--microbatches", "2", "--threads", "1", "--json", "--save", "trained.pt2", "--stages", str(stages)],
        cwd=folder, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said = [json.loads(line) for line in done.stdout.splitlines()]
    net.load_state_dict(dict(plumb.load_pt2(folder / "trained.pt2").state_dict()))
    with torch.no_grad():
        wanted = net.eval()(**rows)
    assert [event["eval_loss"] for event in said if "eval_loss" in event] == [pytest.approx(wanted.item(), rel=1e-6)]


def test_a_captured_graph_is_trained_in_place(folder):
    torch.manual_seed(0)
    net = Lm()
    before = net.head.weight.detach().clone()
    events, _ = trained(folder, plumb.capture(net, torch.zeros(2, 8, dtype=torch.long)))
    assert not torch.equal(net.head.weight, before)
    assert events.losses == trained(folder)[0].losses


class Filter(nn.Module):
    """Multiplies spectra by a complex parameter, or by two real ones."""

    def __init__(self, is_complex):
        super().__init__()
        parts = torch.randn(9, 2)
        self.filter = nn.Parameter(torch.view_as_complex(parts) if is_complex else parts)
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        filter = self.filter if self.filter.is_complex() else torch.view_as_complex(self.filter)
        return self.head(torch.fft.irfft(torch.fft.rfft(x) * filter, n=16)).square().mean()


@pytest.mark.parametrize("options", [dict(optimizer="adamw"), dict(optimizer="adam"), dict(optimizer="sgd", momentum=0.9)], ids=str)
def test_a_complex_parameter_is_stepped_as_its_two_real_parts(tmp_path, options):
    def run(is_complex, steps=6):
        torch.manual_seed(0)
        net, events = Filter(is_complex), Events()
        x = torch.randn(4, 16, generator=torch.Generator().manual_seed(1))
        folder = tmp_path / f"{is_complex}"
        plumb.Trainer(
            plumb.capture(net, x), [x], loss="output", steps=steps, lr=0.05, clip=0.01, microbatches=1, hooks=events, threads=1,
            checkpoints=folder, checkpoint_every=3, resume=steps > 3, **options,
        ).run()  # fmt: skip
        return net, events.losses

    (ours, losses), (theirs, expected) = (run(is_complex, 3) and run(is_complex) for is_complex in (True, False))
    assert losses == expected and len(losses) == 3, "from the checkpoint on"
    assert torch.equal(torch.view_as_real(ours.filter), theirs.filter) and torch.equal(ours.head.weight, theirs.head.weight)


def test_a_model_that_returns_its_loss_takes_the_targets_of_a_pair_as_its_input():
    class WithLoss(nn.Linear):
        def forward(self, x, target):
            return nn.functional.mse_loss(super().forward(x), target)

    def losses(*batches):
        torch.manual_seed(0)
        net, events = WithLoss(8, 2), Events()
        plumb.Trainer(plumb.capture(net, x, y), batches, loss="output", steps=3, lr=0.1, microbatches=1, hooks=events).run()
        return events.losses

    x, y = torch.randn(4, 8), torch.randn(4, 2)
    assert losses([x, y]) == losses(((x, y), ())) and len(losses((x, y))) == 3


def test_sparse_gradients_of_embeddings_train_as_dense_ones_do():
    def run(sparse):
        torch.manual_seed(0)
        net, events, ids = nn.Sequential(nn.Embedding(50, 8, sparse=sparse), nn.Linear(8, 4)), Events(), torch.arange(12).view(4, 3)
        options = dict(loss="cross_entropy", steps=3, lr=0.05, clip=0.1, microbatches=1, accumulate=2, threads=1)
        plumb.Trainer(plumb.capture(net, ids[:2]), [(ids, ids % 4)], hooks=events, **options).run()
        return events.losses, net[0].weight

    (losses, weight), (expected, dense) = run(True), run(False)
    assert losses == expected and torch.equal(weight, dense)


class Counted:
    """Batches with a state."""

    def __init__(self):
        self.position = 0

    def __iter__(self):
        while self.position < 5:
            generator = torch.Generator().manual_seed(self.position)
            ids = torch.randint(64, (4, 9), generator=generator)
            self.position += 1
            yield ids[:, :-1], ids[:, 1:]
        self.position = 0

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


@pytest.mark.parametrize("kept", [True, False])
def test_batches_of_an_iterable_go_on_where_they_were(folder, kept):
    def data():
        if kept:
            return Counted()
        return [(ids[:, :-1], ids[:, 1:]) for ids in (torch.randint(64, (4, 9), generator=torch.Generator().manual_seed(i)) for i in range(5))]

    whole, _ = trained(folder, data=data(), steps=8, rate="constant")
    first, _ = trained(folder, data=data(), steps=6, rate="constant", checkpoints=folder / "run")
    rest, _ = trained(folder, data=data(), steps=8, rate="constant", checkpoints=folder / "run")
    assert len(first.losses) == 6 and len(rest.losses) == 2
    assert first.losses + rest.losses == whole.losses


def test_checkpoints_of_an_iterable_hold_no_pickle(folder):
    trained(folder, data=Counted(), steps=2, rate="constant", warmup=0, checkpoints=folder / "run")
    state = json.loads((folder / "run" / "step-00000002" / "checkpoint.json").read_text())["state"]["data"]
    assert state == {"batches": 2, "state": {"dict": {"position": 2}}}


def test_a_data_loader_is_gone_through_again(folder):
    ids = torch.randint(64, (12, 9))
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(ids[:, :-1], ids[:, 1:]), batch_size=4)
    assert len(trained(folder, data=loader, steps=7)[0].losses) == 7


def test_stop_ends_with_the_step(folder):
    class Stop(Events):
        def on_step(self, event):
            super().on_step(event)
            if event["step"] == 3:
                trainer.stop()

    events = Stop()
    trainer = plumb.Trainer(folder / "lm.pt2", folder / "tokens.bin", hooks=events, **OPTIONS)
    result = trainer.run()
    assert result.stopped and result.steps == 3 and len(events.losses) == 3


def test_an_exception_of_a_hook_ends_the_training(folder):
    class Broken:
        def on_step(self, event):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        plumb.Trainer(folder / "lm.pt2", folder / "tokens.bin", hooks=Broken(), **OPTIONS).run()


def test_an_interrupt_of_the_data_ends_the_training_as_one(folder):
    def batches():
        yield torch.randint(64, (4, 8)), torch.randint(64, (4, 8))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        plumb.Trainer(folder / "lm.pt2", batches(), **OPTIONS).run()


def test_an_exception_of_the_data_is_the_cause_of_the_error(folder):
    def batches():
        yield from ()[0]

    with pytest.raises(plumb.Error, match="IndexError: tuple index out of range") as error:
        plumb.Trainer(folder / "lm.pt2", batches(), **OPTIONS).run()
    assert "yield from ()[0]" in "".join(traceback.format_exception(error.value.__cause__))


def test_wrong_use_names_what_is_wrong(folder):
    def says(*args, **kwargs):
        with pytest.raises(plumb.Error) as error:
            plumb.Trainer(*args, **kwargs).run()
        return str(error.value)

    model, data = folder / "lm.pt2", folder / "tokens.bin"
    assert "no option of a training is named 'step'" in says(model, data, step=3)
    assert "--steps: 0 is no whole number" in says(model, data, steps=0)
    assert "--lr: takes one value, got 2" in says(model, data, lr=[0.1, 0.2])
    assert "--data is missing" in says(model)
    assert "a Lm is neither a .pt2 file nor a graph" in says(Lm(), data)
    assert "the data has no batch" in says(model, [])
    assert "a batch holds a str" in says(model, ["text"])
    assert "ValueError: broken" in says(model, map(lambda _: (_ for _ in ()).throw(ValueError("broken")), [1]))
    assert "launcher started 1 processes" in says(model, data, stages=2)


def test_a_trainer_runs_once(folder):
    trainer = plumb.Trainer(folder / "lm.pt2", folder / "tokens.bin", **OPTIONS)
    trainer.run()
    trainer.stop()
    with pytest.raises(plumb.Error, match="this training has run"):
        trainer.run()


def test_a_table_and_a_dump_that_cannot_be_made_are_said_before_the_first_step(folder):
    (folder / "file").write_text("kept")
    (folder / "dangling").symlink_to("nowhere")
    dumps = ["file", "dangling", "/dev/null", "x" * 300, "file/below/it"]
    for option, name in [("--csv", "x" * 300), ("--csv", "/dev/full"), *(("--dump", name) for name in dumps)]:
        command = [COMMAND, "train", "lm.pt2", "--data", "tokens.bin", "--steps", "3", option, name]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600)
        assert done.returncode == 1 and name.removesuffix("/below/it") in done.stderr and "step 1/" not in done.stdout, (option, name, done)
    assert (folder / "file").read_text() == "kept" and not (folder / "nowhere").exists()


def unread(command, folder):
    read, write = os.pipe()
    os.close(read)  # as `| head -0` does
    done = subprocess.run(command, cwd=folder, stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    return done.returncode, done.stderr


@pytest.mark.parametrize("stages", [1, 2])
def test_a_training_that_nobody_reads_and_nothing_keeps_ends_as_other_commands_do(folder, stages):
    command = [COMMAND, "train", "lm.pt2", "--data", "tokens.bin", "--steps", "1000000", "--stages", str(stages)]
    code, said = unread(command, folder)
    assert code == -signal.SIGPIPE and LOST_AT_THE_START in said and "rank" not in said, said


@pytest.mark.parametrize("stages", [1, 2])
def test_a_training_that_nobody_reads_saves(folder, stages):
    command = [COMMAND, "train", "lm.pt2", "--data", "tokens.bin", "--steps", "20", "--save", "t.pt2", "--stages", str(stages)]
    code, said = unread(command, folder)
    assert code == 0 and "standard output cannot be written" in said, said
    assert "the training goes on, and will save" in said.splitlines()[0], said
    assert plumb.load_pt2(folder / "t.pt2")(torch.zeros(2, 8, dtype=torch.int64)).shape == (2, 8, 64)


@pytest.mark.parametrize("stages", [1, 2])
def test_a_signal_while_a_slow_reader_is_waited_for_loses_no_line(folder, stages):
    read, write = os.pipe()
    fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, 4096)
    command = [COMMAND, "train", "lm.pt2", "--data", "tokens.bin", "--steps", "1000000", "--json", "--stages", str(stages)]
    process = subprocess.Popen(command, cwd=folder, stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    before, there = 0, array.array("i", [-1])
    while there[0] != before or before < 3500:  # until the pipe is full
        before = there[0]
        time.sleep(0.5)
        fcntl.ioctl(read, termios.FIONREAD, there)
    process.send_signal(signal.SIGTERM)
    time.sleep(0.5)
    with open(read) as lines:
        events = [json.loads(line) for line in lines]
    said = process.communicate(timeout=300)[1]
    assert process.returncode == -signal.SIGTERM and "cannot be written" not in said, (process.returncode, said)
    assert [e["step"] for e in events if "loss" in e] == list(range(1, 1 + sum("loss" in e for e in events)))

def test_checkpoints_of_a_unit_scaled_file_are_for_unit_scaled_models(folder):
    subprocess.run([COMMAND, "scale", "lm.pt2", "-o", "scaled.pt2"], cwd=folder, check=True, capture_output=True)
    trained(folder, folder / "scaled.pt2", steps=2, checkpoints=folder / "run")
    trained(folder, steps=2, checkpoints=folder / "plain run")
    scaled, plain = plumb.load_pt2(folder / "scaled.pt2"), plumb.load_pt2(folder / "lm.pt2")
    (file,) = (folder / "run" / "step-00000002").glob("model-*.safetensors")
    (other,) = (folder / "plain run" / "step-00000002").glob("model-*.safetensors")
    with safe_open(file, "pt") as marked, safe_open(other, "pt") as unmarked:
        assert "plumb.unit_scaled" in marked.metadata() and "plumb.unit_scaled" not in unmarked.metadata()
    before = plain.state_dict()["up.weight"].clone()
    for model in (plain, Lm()):
        with pytest.raises(plumb.Error, match="weights are unit-scaled, and the model is not"):
            plumb.checkpoint.load(folder / "run", model)
    assert torch.equal(plain.state_dict()["up.weight"], before)
    assert plumb.checkpoint.load(folder / "run", scaled)[0] == 2
    assert plumb.checkpoint.load(folder / "plain run", Lm())[0] == 2
    plumb.checkpoint.save(folder / "again", scaled, step=3)
    with pytest.raises(plumb.Error, match="unit_scaled__plumb_transforms_fold"):
        plumb.checkpoint.load(folder / "again", plain)
    assert plumb.checkpoint.load(folder / "again", scaled)[0] == 3


class Even(Lm):
    """Has the operators of any of the models below, and their parameters' names and sizes."""

    tied, swapped, p, slope = False, False, 0.1, 0.5

    def __init__(self):
        super().__init__()
        self.up, self.again, self.head = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 64, bias=False)
        if self.tied:
            self.head.weight = self.wte.weight

    def forward(self, ids):
        first, second = (self.again, self.up) if self.swapped else (self.up, self.again)
        x = nn.functional.leaky_relu(second(first(self.wte(ids))), self.slope)
        return self.head(nn.functional.dropout(x, self.p, self.training))


OTHERS = {"ties": {"tied": True}, "order": {"swapped": True}, "dropout": {"p": 0.25}, "slope": {"slope": 0.25}}


def test_a_run_goes_on_with_its_own_model_alone(folder):
    def saved(**other):
        torch.manual_seed(0)
        model = type("Other", (Even,), other)()
        plumb.save_pt2(plumb.capture(model, torch.randint(64, (2, 8))), folder / "other.pt2")
        return folder / "other.pt2"

    trained(folder, saved(), steps=2, rate="constant", checkpoints=folder / "run")
    for other in OTHERS.values():
        with pytest.raises(plumb.Error, match="is of another model"):
            trained(folder, saved(**other), steps=4, rate="constant", checkpoints=folder / "run")
    assert len(trained(folder, saved(), steps=4, rate="constant", checkpoints=folder / "run")[0].steps) == 2


def test_a_trainer_warns_of_weights_that_nothing_keeps(folder):
    arguments, lost = (folder / "lm.pt2", folder / "tokens.bin"), "what is learned will be lost: no save, save_hf or checkpoints"
    with pytest.warns(UserWarning, match=lost) as warned:
        plumb.Trainer(*arguments, steps=1)
    assert warned[0].filename == __file__
    hooks = Events()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plumb.Trainer(*arguments, steps=1, hooks=hooks)
        assert hooks.seen == [("on_problem", {"problem": f"{lost}, and the model is a file"})]
        for kept in ({"save": folder / "t.pt2"}, {"checkpoints": folder / "run"}):
            plumb.Trainer(*arguments, steps=1, **kept)
        plumb.Trainer(plumb.load_pt2(folder / "lm.pt2"), folder / "tokens.bin", steps=1).run()  # the graph keeps them


def test_trainers_leave_the_number_of_threads_as_it_was(folder):
    before = torch.get_num_threads()
    made = [plumb.Trainer(folder / "lm.pt2", folder / "tokens.bin", **{**OPTIONS, "threads": n}) for n in (3, 4)]
    assert torch.get_num_threads() == before
    made.pop(0).run()
    made.clear()
    assert torch.get_num_threads() == before


def test_a_trainer_warns_of_problems_that_no_hook_takes(folder):
    trainer = plumb.Trainer(folder / "lm.pt2", folder / "tokens.bin", steps=2, save=folder / "t.pt2", page="/dev/full")
    with pytest.warns(UserWarning, match="--page ends here: /dev/full"):
        trainer.run()


def test_a_trainer_says_that_it_makes_up_for_no_lost_rank(folder):
    lasting = {"save": folder / "t.pt2", "checkpoints": folder / "run", "max_restarts": 2}
    with pytest.warns(UserWarning, match="--max-restarts: makes up for no lost rank, for this process is alone"):
        plumb.Trainer(folder / "lm.pt2", folder / "tokens.bin", steps=1, **lasting).run()


def test_a_trainer_says_what_it_is_and_how_far(folder):
    trainer = plumb.Trainer(folder / "lm.pt2", folder / "tokens.bin", **OPTIONS)
    assert repr(trainer) == f"<Trainer of {folder / 'lm.pt2'}: not run yet>"
    trainer.run()
    assert re.fullmatch(r"<Trainer of .*lm.pt2: ended at step 6 of 6, loss [\d.]+>", repr(trainer))
    trainer._what = "<b>lm</b>"
    assert "<code>&lt;b&gt;lm&lt;/b&gt;</code>: ended at step 6 of 6" in trainer._repr_html_()
    assert "<pre>" in trainer._repr_html_() and "steps = 6" in trainer._repr_html_()


def test_a_checkpoint_says_what_is_in_it(folder):
    trained(folder, checkpoints=folder / "<run>")
    newest, _ = plumb.checkpoint.newest(folder / "<run>")
    assert repr(newest) == f"<Checkpoint of step 6: 5 tensors, 15 of the optimizer, in {newest.folder}>"
    assert "&lt;run&gt;" in newest._repr_html_() and "<run>" not in newest._repr_html_()


def test_a_run_draws_its_progress_in_a_terminal(folder):
    program = folder / "run.py"
    program.write_text(f"import plumb\nplumb.Trainer('lm.pt2', 'tokens.bin', **{OPTIONS!r}).run()\n")
    read, write = pty.openpty()
    run = subprocess.run([sys.executable, program], cwd=folder, stderr=write, timeout=300)
    os.close(write)
    said = b""
    with contextlib.suppress(OSError):  # all has been read
        while part := os.read(read, 65536):
            said += part
    os.close(read)
    said = said.decode()
    assert run.returncode == 0 and re.search(r"\r\[ {5}#* *\] 1/6|\r\[#{5} {25}\] 1/6  loss [\d.]+", said)
    assert re.search(r"\r\[#{30}\] 6/6  loss [\d.]+  \d+:\d\d\x1b\[K\r?\n", said)
    quiet = subprocess.run([sys.executable, program], cwd=folder, capture_output=True, text=True, timeout=300)
    assert quiet.returncode == 0 and "#" not in quiet.stderr


def test_progress_in_a_notebook_is_an_escaped_bar():
    shown = []
    bar = Progress(shown.append)
    for step in (1, 2, 4):
        bar.step({"step": step, "steps": 4, "loss": 1.5})
    bar.close()
    assert shown[0].startswith('<progress value="1" max="4"></progress> <code>1/4  loss 1.5')
    assert shown[-1].startswith('<progress value="4" max="4"></progress> <code>4/4  loss 1.5')


def test_weights_that_a_trainer_saves_fit_into_the_model_of_unit_scaled_layers_that_was_captured(tmp_path):
    make = lambda: nn.Sequential(plumb.nn.Linear(8, 16), nn.ReLU(), plumb.nn.Linear(16, 8))  # noqa: E731
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    graph = plumb.capture(make(), x)
    plumb.Trainer(graph, [(x, x)], steps=1, loss="mse", save=tmp_path / "out.pt2").run()
    model = make()
    model.load_state_dict(plumb.load_pt2(tmp_path / "out.pt2").state_dict())
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), graph.parameters(), strict=True))
