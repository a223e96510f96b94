"""Checkpoints: resumed bit for bit, at another cut, and read by other libraries."""

import json
import os
import pathlib
from collections import Counter

import numpy as np
import pytest
import ranks
import torch
from plumb._plain_state import from_plain, to_plain
from plumb.pipelining import SplitPoint, pipeline
from plumb.pipelining.schedules import Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch import nn

import plumb

CPU = torch.device("cpu")


def make_net():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 32), nn.BatchNorm1d(32), nn.Linear(32, 4))
    return net


OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, betas=(0.8, 0.99), amsgrad=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True),
    "adam of plumb": lambda p: plumb.optim.Adam(p, lr=0.1, allow_non_unit_scaling_params=True),
    "tensor rate": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01)),
}


def batch(step):
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(step))
    return x, x[:, :4]


def train(net, optimizer, steps, rates=None):
    for step in steps:
        x, y = batch(step)
        optimizer.zero_grad()
        nn.functional.mse_loss(net(x), y).backward()
        optimizer.step()
        if rates:
            rates.step()


def assert_equal_state(a, b):
    a, b = a.state_dict(), b.state_dict()
    assert a.keys() == b.keys()
    assert all(torch.equal(a[n], b[n]) for n in a)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_resumed_run_has_the_undisturbed_ones_bits(name, tmp_path):
    def make():
        net = make_net()
        optimizer = OPTIMIZERS[name](net.parameters())
        rates = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return net, optimizer, rates

    whole = make()
    train(whole[0], whole[1], range(6), whole[2])
    first = make()
    train(first[0], first[1], range(3), first[2])
    state = {"rates": first[2] and first[2].state_dict(), "text": "ä"}
    folder = plumb.checkpoint.save(tmp_path, first[0], first[1], step=3, state=state)
    assert folder == str(tmp_path / "step-00000003")
    assert not [f for f in os.listdir(folder) if not f.endswith((".json", ".safetensors"))]
    again = make()
    step, state = plumb.checkpoint.load(tmp_path, again[0], again[1])
    assert step == 3 and state["text"] == "ä"
    if again[2]:
        again[2].load_state_dict(state["rates"])
    train(again[0], again[1], range(3, 6), again[2])
    assert_equal_state(whole[0], again[0])


def test_saves_in_the_background_are_copies_and_the_last_are_kept(tmp_path):
    net = make_net()
    writer = plumb.checkpoint.Writer(tmp_path, keep_last=2, keep_every=3)
    for step in range(1, 8):
        with torch.no_grad():
            net[0].weight.fill_(step)
        writer.save(net, step=step)
    with torch.no_grad():
        net[0].weight.fill_(0)
    writer.wait()
    assert writer.problem() is None
    assert [r["step"] for r in writer.reports()] == list(range(1, 8))
    assert sorted(n for n in os.listdir(tmp_path) if n[0] != ".") == [f"step-0000000{n}" for n in (3, 6, 7)]
    for step in (3, 6, 7):
        plumb.checkpoint.load(tmp_path / f"step-0000000{step}", net)
        assert (net[0].weight == step).all()


def test_a_folder_has_one_writer_until_it_is_closed(tmp_path):
    net = make_net()
    with plumb.checkpoint.Writer(tmp_path) as writer:
        writer.save(net, step=1)
        with pytest.raises(plumb.Error, match="another writer of this process") as error:
            plumb.checkpoint.Writer(tmp_path)
        assert "close that writer" in error.value.remedy
    assert plumb.checkpoint.newest(tmp_path)[0].step == 1
    writer.close()  # once more: nothing
    assert writer.problem() is None and [r["step"] for r in writer.reports()] == [1]
    with pytest.raises(plumb.Error, match="this writer of checkpoints is closed") as error:
        writer.save(net, step=2)
    assert error.value.kind is plumb.ErrorKind.InvalidState
    plumb.checkpoint.Writer(tmp_path).save(net, step=2)


def test_an_altered_checkpoint_is_named_and_the_one_before_used(tmp_path):
    net = make_net()
    for step in (1, 2):
        plumb.checkpoint.save(tmp_path, net, step=step)
    path = tmp_path / "step-00000002" / "model-00001-of-00001.safetensors"
    bytes = bytearray(path.read_bytes())
    bytes[-5] ^= 1
    path.write_bytes(bytes)
    found, problems = plumb.checkpoint.newest(tmp_path)
    assert found.step == 1
    assert len(problems) == 1 and "step-00000002 is not used" in problems[0] and "not as it was written" in problems[0]
    assert plumb.checkpoint.load(tmp_path, net)[0] == 1
    with pytest.raises(plumb.Error, match="not as it was written") as error:
        plumb.checkpoint.load(tmp_path / "step-00000002", net)
    assert error.value.kind == plumb.ErrorKind.BadFile


def test_errors_name_what_is_missing_unexpected_or_other(tmp_path):
    net = make_net()
    optimizer = OPTIMIZERS["adamw"](net.parameters())
    train(net, optimizer, range(1))
    plumb.checkpoint.save(tmp_path, net, optimizer, step=1)
    before = {n: t.clone() for n, t in net.state_dict().items()}
    for other, said in [
        (nn.Sequential(*net, nn.Linear(4, 4)), "2 tensors are missing: 5.weight, 5.bias"),
        (net[:4], "2 tensors that the model does not have: 4.bias, 4.weight"),
        (nn.Sequential(nn.Linear(16, 31), *net[1:]), "'0.weight' is Float[32, 16], the model has Float[31, 16]"),
        (make_net().double(), "the model has Double"),
    ]:
        with pytest.raises(plumb.Error) as error:
            plumb.checkpoint.load(tmp_path, other)
        assert said.replace("[", "").split(" is ")[0] in str(error.value).replace("[", ""), str(error.value)
    assert all(torch.equal(before[n], t) for n, t in net.state_dict().items())
    with pytest.raises(plumb.Error, match="no checkpoint"):
        plumb.checkpoint.load(tmp_path / "none", net)
    with pytest.raises(plumb.Error, match="none of the model's"):
        plumb.checkpoint.save(tmp_path, net[:2], optimizer, step=2)
    for state in (1j, {1}, {"a": [object()]}):
        with pytest.raises(plumb.Error, match="cannot keep state.*: it is a"):
            plumb.checkpoint.save(tmp_path, net, step=2, state=state)
    with pytest.raises(plumb.Error, match="cannot be made of a int"):
        plumb.checkpoint.save(tmp_path, 3, step=2)
    plumb.checkpoint.save(tmp_path, net, step=5)
    with pytest.raises(plumb.Error, match="no optimizer's state of '0.weight'"):
        plumb.checkpoint.load(tmp_path, net, optimizer)
    (tmp_path / "file").write_text("")
    with pytest.raises(plumb.Error) as error:
        plumb.checkpoint.save(tmp_path / "file", net, step=1)
    assert error.value.kind == plumb.ErrorKind.CannotWrite


def test_what_is_no_optimizer_that_a_checkpoint_holds_is_refused_before_anything_changes(tmp_path):
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    folder = plumb.checkpoint.save(tmp_path, net, optimizer, step=1)
    net[0].weight.data.zero_()
    for other, said in (
        ([optimizer, optimizer], "the optimizer is a list\n  try: one optimizer .* of several each in a folder of its own"),
        (net, "the optimizer is a Sequential"),
        (torch.optim.LBFGS(net.parameters()), "LBFGS is lists of tensors.*\n  try: save and load without it"),
    ):
        with pytest.raises(plumb.Error, match=said):
            plumb.checkpoint.save(tmp_path, net, other, step=2)
        with pytest.raises(plumb.Error, match=said):
            plumb.checkpoint.load(tmp_path, net, other)
    assert not net[0].weight.any() and list(tmp_path.glob("step-*")) == [pathlib.Path(folder)]


@pytest.mark.parametrize(
    "schedule_of",
    [
        lambda optimizer: torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 3]),
        lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0),
    ],
)
def test_a_schedule_comes_back_as_it_was(schedule_of, tmp_path):
    def make():
        net = make_net()
        optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
        schedule = schedule_of(optimizer)
        arguments = [1.0] if isinstance(schedule, torch.optim.lr_scheduler.ReduceLROnPlateau) else []
        return net, optimizer, schedule, lambda: schedule.step(*arguments)

    net, optimizer, schedule, step = make()
    optimizer.step(), step()
    before = schedule.state_dict()
    plumb.checkpoint.save(tmp_path, net, optimizer, step=1, state={"schedule": before, "random": torch.get_rng_state()})
    net, optimizer, again, step_again = make()
    state = plumb.checkpoint.load(tmp_path, net, optimizer)[1]
    assert state["schedule"] == before and all(type(state["schedule"][key]) is type(each) for key, each in before.items())
    assert torch.equal(state["random"], torch.get_rng_state())
    again.load_state_dict(state["schedule"])
    for _ in range(3):
        step(), optimizer.step(), step_again()
    assert schedule.get_last_lr() == again.get_last_lr() and again.get_last_lr()[0] < 0.5


def test_a_state_of_any_plain_values_comes_back_from_json():
    bits = [float("nan"), float("inf"), -0.0, 1e-320, 2**70, -1, True, None, "ä", b"\x00\xff", bytearray(b"a"), (), (1, [2, (3,)])]
    state = {"bits": bits, 3: "three", (1, "a"): {"x": 1}, "empty": torch.zeros(0, 3), "generator": torch.get_rng_state()}
    state |= {"numpy": np.random.RandomState(3).get_state(legacy=False), "half": torch.randn(2, 3).to(torch.bfloat16), "one": np.float32(2)}
    state |= {"milestones": Counter([1, 3, 3]), "version": torch.__version__}
    again = from_plain(json.loads(json.dumps(to_plain(state), allow_nan=False)), "state")
    assert repr(again) == repr(state) and list(map(type, again["bits"])) == list(map(type, bits))
    for name in ("empty", "generator", "half"):
        assert again[name].dtype == state[name].dtype and torch.equal(again[name], state[name])
    assert np.array_equal(again["numpy"]["state"]["key"], state["numpy"]["state"]["key"])
    state["itself"] = state
    with pytest.raises(plumb.Error, match="cannot keep state: it is nested too deep, or holds itself"):
        to_plain(state)
    with pytest.raises(plumb.Error, match=r"cannot keep state\['a'\]\[1\]: it is a object"):
        to_plain({"a": [1, object()]})
    for bad in ({"tensor": ["load", [1], "AAAA"]}, {"tensor": ["float32", [2], "AAAA"]}, {"array": ["O", [1], "AAAA"]}, {"bytes": "?"}, {}, {"x": 1}, {"items": [1]}):
        with pytest.raises(plumb.Error, match="damaged"):
            from_plain(bad, "state")


def test_a_compiled_model_has_the_names_of_the_model_that_was_compiled(tmp_path):
    net, again = make_net(), make_net()
    plumb.checkpoint.save(tmp_path, torch.compile(net, backend="eager"), torch.optim.SGD(net.parameters()), step=1)
    plumb.checkpoint.load(tmp_path, again, torch.optim.SGD(again.parameters()))
    assert_equal_state(net, again)
    net[0].weight.data.zero_()
    plumb.checkpoint.load(tmp_path, torch.compile(net, backend="eager"))
    assert_equal_state(net, again)


def test_names_of_one_tensor_take_no_two_values(tmp_path):
    def pair(tied):
        net = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
        if tied:
            net[1].weight = net[0].weight
        return net

    apart, tied = pair(False), pair(True)
    before = tied[0].weight.clone()
    plumb.checkpoint.save(tmp_path / "apart", apart, step=1)
    plumb.checkpoint.save(tmp_path / "tied", tied, step=1)
    with pytest.raises(plumb.Error, match="'0.weight' and '1.weight' have different values, and are one tensor") as error:
        plumb.checkpoint.load(tmp_path / "apart", tied)
    assert error.value.kind == plumb.ErrorKind.TensorMismatch and torch.equal(tied[0].weight, before)
    plumb.checkpoint.load(tmp_path / "tied", apart)
    assert torch.equal(apart[0].weight, before) and torch.equal(apart[1].weight, before)
    plumb.checkpoint.save(tmp_path / "equal", apart, step=1)
    assert plumb.checkpoint.load(tmp_path / "equal", tied)[0] == 1


def test_unit_scaled_weights_do_not_become_a_plain_nets(tmp_path):
    scaled = plumb.transforms.unit_scale(nn.Sequential(nn.Linear(16, 16), nn.GELU()))
    plumb.checkpoint.save(tmp_path, scaled, step=1)
    plumb.checkpoint.load(tmp_path, scaled)
    with pytest.raises(plumb.Error, match="unit_scaled"):
        plumb.checkpoint.load(tmp_path, nn.Sequential(nn.Linear(16, 16), nn.GELU()))


def cut_in_two(model):
    pipe = pipeline(model, (torch.randn(2, 16),), split_spec={"2": SplitPoint.BEGINNING})
    return [pipe.build_stage(i, CPU) for i in range(2)]


def test_weights_that_stages_saved_are_told_from_those_of_the_other_kind(tmp_path):
    def plain():
        return nn.Sequential(*[nn.Linear(16, 16) for _ in range(4)])

    def scaled():
        return plumb.transforms.unit_scale(plain())

    made = {  # by whether the weights are unit-scaled
        True: {"module": scaled, "stages": lambda: cut_in_two(scaled()), "one stage": lambda: cut_in_two(scaled())[1]},
        False: {"module": plain, "stages": lambda: cut_in_two(plain()), "one stage": lambda: cut_in_two(plain())[1]},
    }
    says = {
        True: "its weights are unit-scaled, and the model is not",
        False: "its weights are plain, and the model is unit-scaled",
    }
    for saved, savers in made.items():
        for saver in ("module", "stages"):
            folder = tmp_path / f"{saver} {saved}"
            plumb.checkpoint.save(folder, savers[saver](), step=1)
            for loader, make in made[saved].items():
                assert plumb.checkpoint.load(folder, make())[0] == 1, (saver, loader, saved)
            for loader, make in made[not saved].items():
                model = make()
                before = {name: t.clone() for name, t in plumb.checkpoint._tensors(model).items()}
                with pytest.raises(plumb.Error, match=f"{says[saved]}|unit_scaled__plumb_transforms_fold"):
                    plumb.checkpoint.load(folder, model)
                assert all(torch.equal(before[name], t) for name, t in plumb.checkpoint._tensors(model).items())
    folder = os.fsencode(plumb.checkpoint.newest(tmp_path / "stages True")[0].folder)
    with pytest.raises(plumb.Error, match="the folder's weights are unit-scaled"):
        plumb._C.refuse_unit_scaled(folder)
    plumb._C.refuse_unit_scaled(os.fsencode(plumb.checkpoint.newest(tmp_path / "stages False")[0].folder))


# --- over ranks ---


def make_pipe(stages):
    model = plumb.transforms.unit_scale(nn.Sequential(*[nn.Linear(16, 16) for _ in range(4)]))
    return pipeline(
        model, (torch.randn(2, 16),), split_spec={str(4 // stages * s): SplitPoint.BEGINNING for s in range(1, stages)}
    )


def make_part(kind, stages, rank, size):
    torch.manual_seed(0)
    pipe = make_pipe(stages)
    mine = [pipe.build_stage(i, CPU) for i in range(stages) if i % size == rank]
    schedule = kind(mine, 4, nn.functional.mse_loss) if stages > size else kind(mine[0], 4, nn.functional.mse_loss)
    parameters = [p for stage in mine for p in stage.submod.parameters()]
    return mine, schedule, plumb.optim.AdamW(parameters, lr=0.05)


def train_part(rank, size, kind, stages, folder, steps):
    mine, schedule, optimizer = make_part(kind, stages, rank, size)
    begin = 0
    if os.listdir(folder):
        begin, state = plumb.checkpoint.load(folder, schedule, optimizer)
        assert state == {"saved by": 0}
    for step in range(begin, steps):
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        schedule.step(*([x] if rank == 0 else []), **({"target": x} if rank == size - 1 else {}))
        optimizer.step()
    plumb.checkpoint.save(folder, schedule, optimizer, step=steps, state={"saved by": rank})
    return [s.submod.state_dict() for s in mine]


def test_a_run_over_ranks_goes_on_at_another_cut(tmp_path):
    for name in ("whole", "cut"):
        (tmp_path / name).mkdir()
    train_part(0, 1, ScheduleInterleaved1F1B, 4, tmp_path / "whole", 6)
    ranks.run(train_part, 2, Schedule1F1B, 2, tmp_path / "cut", 2)
    ranks.run(train_part, 2, ScheduleInterleaved1F1B, 4, tmp_path / "cut", 4)
    train_part(0, 1, ScheduleGPipe, 1, tmp_path / "cut", 6)
    whole, cut = (plumb.checkpoint.newest(tmp_path / name)[0] for name in ("whole", "cut"))
    assert whole.step == cut.step == 6
    assert whole.names() == cut.names() and whole.optimizer_names() == cut.optimizer_names()
    assert len(whole.optimizer_names()) == 3 * 8
    assert all(torch.equal(whole.read(n), cut.read(n)) for n in whole.names())
    assert all(torch.equal(whole.read_optimizer(n), cut.read_optimizer(n)) for n in whole.optimizer_names())


def test_a_stage_reads_only_its_own_tensors(tmp_path):
    net = make_net()
    plumb.checkpoint.save(tmp_path, net, step=1)
    part = {"2.weight": torch.zeros(32, 32)}
    found = plumb.checkpoint.newest(tmp_path)[0]
    found.load(list(part.items()))
    assert found.bytes_read == 4 * 32 * 32
    assert torch.equal(part["2.weight"], net[2].weight)


# --- other readers ---


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight


def test_safetensors_and_torchs_distributed_checkpoint_read_the_folder(tmp_path):
    from safetensors.torch import load_file, load_model

    net = make_net()
    optimizer = OPTIMIZERS["adamw"](net.parameters())
    train(net, optimizer, range(1))
    folder = pathlib.Path(plumb.checkpoint.save(tmp_path, net, optimizer, step=1))
    state = load_file(folder / "model-00001-of-00001.safetensors")
    assert state.keys() == net.state_dict().keys()
    assert all(torch.equal(state[n], t) for n, t in net.state_dict().items())
    moments = load_file(folder / "optimizer-00001-of-00001.safetensors")
    assert torch.equal(moments["exp_avg/0.weight"], optimizer.state[net[0].weight]["exp_avg"])

    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    into = {n: torch.zeros_like(t) for n, t in net.state_dict().items()}
    dcp.load(into, storage_reader=HuggingFaceStorageReader(str(folder)))
    assert all(torch.equal(into[n], t) for n, t in net.state_dict().items())

    tied = Tied()
    folder = pathlib.Path(plumb.checkpoint.save(tmp_path / "tied", tied, step=1))
    again = Tied()
    missing, unexpected = load_model(again, folder / "model-00001-of-00001.safetensors")
    assert not missing and not unexpected
    assert torch.equal(again.head.weight, tied.head.weight)
    assert json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"].keys() == {"embed.weight"}
    fresh = Tied()
    plumb.checkpoint.load(tmp_path / "tied", fresh)
    assert torch.equal(fresh.head.weight, tied.embed.weight)


def test_transformers_read_the_folder(tmp_path):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=16, n_positions=8)
    model = transformers.GPT2LMHeadModel(config)
    folder = plumb.checkpoint.save(tmp_path, model, step=1)
    config.save_pretrained(folder)
    again, info = transformers.GPT2LMHeadModel.from_pretrained(folder, output_loading_info=True)
    assert not any(info[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert_equal_state(model, again)


def test_what_is_no_tensor_of_a_state_dict_is_named_and_the_remedy_holds(tmp_path):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def state_dict(self, *args, **kwargs):
            return super().state_dict(*args, **kwargs) | {"settings": {"width": 4}}

    net, other = Net(), Net()
    optimizer = torch.optim.Adam(net.parameters())
    net.layer(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    with pytest.raises(plumb.Error, match="'settings' of the model's state_dict is a dict, no tensor") as refused:
        plumb.checkpoint.save(tmp_path, net, optimizer, step=1)
    expression = refused.value.remedy.partition("give the tensors: ")[2]
    tensors = [eval(expression, {"torch": torch, "model": model}) for model in (net, other)]
    plumb.checkpoint.save(tmp_path, tensors[0], optimizer, step=1)
    plumb.checkpoint.load(tmp_path, tensors[1], torch.optim.Adam(other.parameters()))
    assert torch.equal(other.layer.weight, net.layer.weight)


@pytest.mark.parametrize(("first", "then"), [("sgd", "adamw"), ("adamw", "sgd"), ("rmsprop", "adamw")])
def test_another_kind_of_optimizer_is_refused_before_anything_changes(tmp_path, first, then):
    net, other = make_net(), make_net()
    optimizer = OPTIMIZERS[first](net.parameters())
    net(batch(0)[0]).sum().backward()
    optimizer.step()
    plumb.checkpoint.save(tmp_path, net, optimizer, step=1)
    before = other[0].weight.clone()
    with pytest.raises(plumb.Error, match="was saved with an optimizer of the options .* instead"):
        plumb.checkpoint.load(tmp_path, other, OPTIMIZERS[then](other.parameters()))
    assert torch.equal(other[0].weight, before)
