"""Stages as modules, and the pipe that they form."""

import copy
import pickle
import signal
import weakref

import device
import pytest
import ranks
import torch
import torch.distributed as dist
import torch.distributed.pipelining  # noqa: F401  (its mark)
from capture_checks import same
from plumb.pipelining import (
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    deserialize_stage,
    pipe_split,
    pipeline,
    scatter_stages,
)
from plumb.pipelining._IR import get_submod_name
from plumb.pipelining._stage_module import StageModule
from split_models import BEGIN, LOSSES, Outputs, Shaped, Shared, stage_models
from torch import nn

import plumb


def run_stages(stages, table, *inputs):
    made = []
    for s, stage in enumerate(stages):
        args = [inputs[p["index"]] if p["stage"] < 0 else made[p["stage"]][p["index"]] for p in table.inputs(s)]
        out = stage(*args)
        made.append(out if isinstance(out, tuple) else (out,))
    return made[-1]


@pytest.mark.parametrize("how", ["itself", "deepcopy", "pickle", "bytes", "state_dict"])
def test_stages_run_alone(how):
    model, pipe, x = stage_models()
    expected = model(x)
    stages = [pipe.get_stage_module(s) for s in range(3)]
    table = pipe.info().table
    if how == "deepcopy":
        stages = copy.deepcopy(stages)
    elif how == "pickle":
        stages = [pickle.loads(pickle.dumps(s)) for s in stages]
    elif how == "bytes":
        stages = [deserialize_stage(pipe.serialize_stage(s))[0].to(x.device) for s in range(3)]  # they come to the CPU
    elif how == "state_dict":
        other = pipeline(Shared(), (x,))
        for s in range(3):
            assert list(other.get_stage_module(s).state_dict()) == list(stages[s].state_dict())
            other.get_stage_module(s).load_state_dict(stages[s].state_dict(), assign=s == 1)
        stages = [other.get_stage_module(s) for s in range(3)]
    same(run_stages(stages, table, x), [expected])
    assert stages[0].get_submodule("a").weight is stages[0].a.weight
    assert isinstance(stages[0].a.weight, nn.Parameter)
    if how not in ("itself",):
        assert stages[0].a.weight is not model.a.weight
        with torch.no_grad():
            stages[0].a.weight.zero_()
        same([model(x)], [expected])
    else:
        assert stages[0].a.weight is model.a.weight


def test_stages_move_with_their_device_arguments():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
            self.a.register_buffer("shift", torch.ones(4))

        def forward(self, x):
            x = self.a(x) + torch.arange(4, device=x.device) + self.a.shift * torch.tensor([1.0, 2, 3, 4])
            pipe_split()
            return self.b(x) + torch.zeros(4, device=x.device, dtype=x.dtype)

    pipe = pipeline(Net(), (torch.randn(2, 4),))
    stage = pipe.get_stage_module(0).to("meta")
    assert stage.device.type == "meta" and "device(\"cpu\")" not in stage.graph.to_string()
    assert stage(torch.randn(2, 4, device="meta")).is_meta
    assert pipe.get_stage_module(1).b.weight.device.type == "cpu"
    with pytest.raises(plumb.Error, match="cannot be sent"):
        pipe.serialize_stage(0)
    stage.to_empty(device="cpu")
    assert stage(torch.randn(2, 4)).device.type == "cpu"


def test_a_step_runs_the_graphs_of_cut_stages_without_python(monkeypatch):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)), torch.randn(6, 8)
    pipe = pipeline(model, (x[:2],), split_spec={"2": BEGIN})
    stages = [pipe.build_stage(s, torch.device(device.NAME)) for s in range(2)]
    schedule = ScheduleInterleaved1F1B(stages, 3, loss_fn=nn.functional.mse_loss)
    entered, forward = [], StageModule.forward

    def watched(self, *args, **kwargs):
        entered.append(self.stage_index)
        return forward(self, *args, **kwargs)

    def run():
        entered.clear()
        model.zero_grad()
        losses = []
        out = schedule.step(x, target=x, losses=losses)
        return [out, *losses, *(p.grad.clone() for s in stages for p in s.submod.parameters())]

    expected = [model(part) for part in x.chunk(3)]
    monkeypatch.setattr(StageModule, "forward", watched)
    alone = run()
    assert entered == [] and torch.equal(alone[0], torch.cat(expected))
    seen = []
    hook = stages[0].submod.register_forward_hook(lambda module, args, out: seen.append(out.shape))
    same(run(), alone)
    assert entered == [0, 0, 0] and seen == [(2, 8)] * 3, "a hook is Python's part in a forward"
    hook.remove()
    same(run(), alone)
    assert entered == []
    stages[1].submod.forward = lambda value: value * 0
    assert not schedule.step(x, target=x).any(), "a forward that was set is called"


class Early(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        early = self.first(x)
        return early, self.second(early)


def test_outputs_of_an_earlier_stage_are_among_those_of_a_step():
    torch.manual_seed(0)
    model, x = Early(), torch.randn(4, 8)
    pipe = pipeline(model, (x[:2],), split_spec={"second": BEGIN})
    stages = [pipe.build_stage(s, torch.device(device.NAME)) for s in range(2)]
    schedule = ScheduleInterleaved1F1B(stages, 2, loss_fn=lambda outputs, target: (outputs[0] - outputs[1] - target).pow(2).mean())
    out = schedule.step(x, target=x)
    grads = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    parts = [model(part) for part in x.chunk(2)]
    same(out, [torch.cat(values) for values in zip(*parts)])
    for (early, late), part in zip(parts, x.chunk(2)):
        ((early - late - part).pow(2).mean() / 2).backward()
    same([p.grad for p in model.parameters()], grads)


class Options(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x, parts, scale=1, mask=None, shift=None):
        x = self.first(x + parts["add"] - 2 * parts["take"]) * scale
        x = self.second(x if mask is None else x * mask)
        return x if shift is None else x + shift


def test_a_step_takes_the_arguments_that_the_model_was_cut_with_and_no_others():
    torch.manual_seed(0)
    model, x, shift = Options(), torch.randn(4, 8), torch.randn(4, 8)
    parts = {"add": torch.randn(4, 8), "take": torch.randn(4, 8)}
    pipe = pipeline(model, (x, parts, 3), {"shift": shift, "mask": None}, split_spec={"second": BEGIN})
    stages = [pipe.build_stage(s, torch.device(device.NAME)) for s in range(2)]
    schedule = ScheduleInterleaved1F1B(stages, 2)
    expected = torch.cat([pipe(*call)[0] for call in zip(x.chunk(2), halves(parts), (3, 3), (None, None), shift.chunk(2))])
    turned = dict(reversed(parts.items()))
    first = pipe.get_stage_module(0)
    same([first(x=x[:2], parts=halves(turned)[0])], [first(x[:2], *halves(parts)[0].values())])
    for args, kwargs in [
        ((x, parts, 3), {"shift": shift, "mask": None}),
        ((x, turned, 3, None, shift), {}),
        ((x, parts), {"shift": shift}),
    ]:
        same([schedule.step(*args, **kwargs)], [expected])
    for args, kwargs, says in [
        ((x, parts, 4), {"shift": shift}, "input 'scale': the model was cut with 3 where 4 is given"),
        ((x, parts), {"shift": shift, "mask": x}, "input 'mask': the model was cut with None where a tensor is given"),
        ((x, parts, x), {"shift": shift}, "input 'scale': the model was cut with 3 where a tensor is given"),
        ((x, {"add": x}), {"shift": shift}, "input 'parts' should be a dict of 'add', 'take', got a dict of 'add'"),
        ((x, parts, 3, None, shift), {"scale": 3}, "the model got 'scale' by position and by name"),
        ((x, parts, 3, None, shift, x), {}, "'shift', 'a Tensor'\\] by position and"),
        ((x, parts), {"shift": shift, "bias": x}, "by position and \\['shift', 'bias'\\] by name"),
    ]:
        with pytest.raises(plumb.Error, match=says):
            schedule.step(*args, **kwargs)


def halves(parts):
    return [{name: value.chunk(2)[i] for name, value in parts.items()} for i in range(2)]


def test_an_interrupt_ends_a_step_whose_forwards_are_graphs_alone():
    x = torch.randn(256, 8)
    stage = pipeline(nn.Sequential(nn.Linear(8, 8)), (x[:1],)).build_stage(0, torch.device(device.NAME))
    schedule = ScheduleGPipe(stage, 256)
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        for i in range(5):  # wherever it comes
            with pytest.raises(KeyboardInterrupt):
                signal.setitimer(signal.ITIMER_REAL, 0.01 + 0.003 * i, 1)  # Python drops one that comes while it frees objects
                while True:
                    schedule.eval(x)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_stages_refuse_the_mode_that_they_were_not_cut_in():
    x = torch.randn(4, 8)
    pipe = pipeline(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8)), (x,), split_spec={"2": BEGIN})
    pipe.eval()
    for call in (pipe, pipe.get_stage_module(0)):
        with pytest.raises(plumb.Error, match="cut in training mode"):
            call(x)
    assert pipe.get_stage_module(1)(x).shape == (4, 8), "nothing in it depends on the mode"
    assert pipe.train()(x)[0].shape == (4, 8)
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)).eval()
    same(pipeline(model, (x,))(x), [model(x)])


def test_pipes_are_copied_and_pickled_with_their_tensors():
    model, x, y = Outputs(LOSSES["alone"][0]), torch.randn(4, 6), torch.randn(4, 6)
    pipe = pipeline(model, (x, y), output_loss_value_spec=True)
    with torch.no_grad():
        model.up.bias.add_(1)
    for other in (copy.deepcopy(pipe), pickle.loads(pickle.dumps(pipe))):
        same(other(x, y), pipe(x, y))
        assert other.num_stages == 3 and other.has_loss_and_backward
        stage = other.get_stage_module(0)
        assert stage.up.weight is not model.up.weight and stage.up.weight.grad is not None


def test_the_picture_keeps_no_stage_alive():
    _, pipe, x = stage_models()
    info = pipe.info()
    stage = weakref.ref(pipe.get_stage_module(0))
    text = str(info.graph)
    del pipe
    import gc

    gc.collect()
    assert stage() is None
    assert info.num_stages == 3 and str(info.graph) == text
    other = pickle.loads(pickle.dumps(info))
    assert other.table.to_json() == info.table.to_json()


def test_what_is_printed_shows_graph_ports_and_stages(capsys):
    model, x = Outputs(LOSSES["alone"][0]), torch.randn(4, 6)
    pipe = pipeline(model, (x, x), output_loss_value_spec=True)
    pipe.print_readable()
    text = capsys.readouterr().out
    assert "pipe of 3 stages" in text and "stage_backward" in text and 'get_attr "down.weight"' in text
    assert all(get_submod_name(s) in str(pipe) for s in range(3))


def _receive(rank, size):
    torch.manual_seed(rank)  # weights must come from rank 0
    pipe = stage_models()[1] if rank == 0 else None
    stages, info = scatter_stages(pipe)
    assert sorted(stages) == ([0, 2] if rank == 0 else [1]) and info.num_stages == 3
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(3))
    y = torch.empty(4, 8)
    if rank == 0:
        first = stages[0](x).detach()
        dist.send(first, 1)
        dist.recv(y, 1)
        same([stages[2](y)], list(pipe(x)))
    else:
        dist.recv(y, 0)
        dist.send(stages[1](y).detach(), 0)


def test_stages_are_sent_to_their_ranks():
    ranks.run(_receive, 2)


def test_a_pipe_of_a_live_model_takes_other_sizes_with_the_stages_tensors():
    torch.manual_seed(0)
    model = Shaped()
    pipe = pipeline(model, (torch.randn(2, 8),), {"y": torch.randn(2, 8)})
    pipe.get_stage_module(1).down.weight = nn.Parameter(torch.ones(4, 16))  # what a stage became, not what it was
    changed = copy.deepcopy(model)
    changed.down.weight = nn.Parameter(torch.ones(4, 16))
    for rows in (6, 2, 4, 6):
        x, y = torch.randn(rows, 8), torch.randn(rows, 8)
        (out,), expected = pipe(x, y), changed(x, y)
        assert torch.equal(out, expected)
        out.sum().backward()
        expected.sum().backward()
    for s, layer in enumerate(("up", "down")):
        stage = getattr(pipe.get_stage_module(s), layer)
        assert torch.equal(stage.weight.grad, getattr(changed, layer).weight.grad)
    assert torch.equal(model.down.weight, changed.down.weight) is False
    del model
    with pytest.raises(plumb.Error, match=r"should be f32\[2, 8\]"):
        pipe(torch.randn(8, 8), torch.randn(8, 8))
    assert pipe(torch.randn(6, 8), torch.randn(6, 8))[0].shape == (3, 4)  # as before
