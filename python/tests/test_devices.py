"""Demands of a device that is not the CPU: run with PLUMB_TEST_DEVICE, by `make test` with the test device."""

import copy
import os
import pathlib
import pickle
import subprocess
import sys

import device
import pytest
import ranks
import torch
from plumb.pipelining import PipelineStage, SplitPoint, pipeline
from plumb.pipelining.schedules import get_schedule_class
from torch import nn

import plumb
from plumb.transforms import Metrics, simulate_fp8, track_scales, unit_scale

pytestmark = pytest.mark.skipif(device.NAME == "cpu", reason="PLUMB_TEST_DEVICE names no device")
only_testdevice = pytest.mark.skipif(device.NAME != "testdevice", reason="asks the test device")


def values(*sizes, seed=0):
    return torch.randn(*sizes, generator=torch.Generator("cpu").manual_seed(seed), device="cpu")


def same(ours, theirs):
    return all((a is None and b is None) or torch.equal(a.cpu(), b.cpu()) for a, b in zip(ours, theirs, strict=True))


@only_testdevice
def test_memory_of_the_device_read_as_the_cpus_ends_the_process():
    code = "import ctypes, device, torch; device.use(); ctypes.string_at(torch.ones(4).data_ptr(), 4)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, cwd=device.FOLDER)
    assert ended.returncode == -11


FORMATS = ["E4M3", "e4m3fn-SR", "e5m2-SR-inf", "bf16-SR", "E3M0", "fp16-RZ", "mxfp8", "mxfp4-SR", "nvfp4", "nvfp4-SR"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", FORMATS)
def test_operators_have_the_cpus_bits(name, dtype):
    ops, x = torch.ops.plumb, (values(7, 333) * torch.exp2(values(7, 333, seed=1) * 8)).to(dtype)
    x[0, :3] = torch.tensor([torch.inf, -torch.inf, torch.nan], device="cpu")
    for view in (x, x.t(), x[:, ::3], x[:0], x[3, 5]):
        there = view.to(device.NAME)
        for op, arguments in [
            (ops.quantise, (name, "", 0, 5)),
            (ops.simulate_format, (name, "none", 5)),
            *([(ops.encode, (name, 5))] if name[:4] in ("E4M3", "e4m3", "e5m2") else []),
        ]:
            ours, theirs = op(there, *arguments), op(view, *arguments)
            assert ours.device.type == device.NAME.split(":")[0] and ours.stride() == theirs.stride()
            torch.testing.assert_close(ours.cpu(), theirs, rtol=0, atol=0, equal_nan=True)
    codes = torch.arange(256, dtype=torch.uint8, device="cpu")
    for text in ("E4M3", "e4m3fn", "e5m2", "e4m3fnuz", "e2m1fn"):
        ours = ops.decode(codes.to(device.NAME), text, dtype)
        torch.testing.assert_close(ours.cpu(), ops.decode(codes, text, dtype), rtol=0, atol=0, equal_nan=True)
    ours, theirs = ops.tensor_metrics(x.to(device.NAME), True).cpu(), ops.tensor_metrics(x, True)
    assert torch.equal(ours[5:], theirs[5:])
    x[0, :3] = 1
    ours, theirs = ops.tensor_metrics(x.to(device.NAME)).cpu(), ops.tensor_metrics(x)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0, equal_nan=True)


def test_the_seed_without_a_seed_is_the_cpus():
    x = values(1000)
    torch.manual_seed(3)
    theirs = torch.ops.plumb.quantise(x, "E4M3-SR")
    torch.manual_seed(3)
    assert torch.equal(torch.ops.plumb.quantise(x.to(device.NAME), "E4M3-SR").cpu(), theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_unit_scaled_dropout_has_the_cpus_bits(dtype):
    x = values(40, 333).to(dtype)

    def dropped(where):
        given = x.detach().to(where).requires_grad_()
        torch.manual_seed(3)
        results = [plumb.functional.dropout(view, 0.3) for view in (given, given.t(), given[:, ::3])]
        sum(y.sum() for y in results).backward()
        return [*results, given.grad]

    assert same(dropped(device.NAME), dropped("cpu"))
    assert 0.65 < (dropped(device.NAME)[0] != 0).float().mean() < 0.75


def net(where):
    torch.manual_seed(0)
    with torch.device("cpu"):
        # (No LayerNorm: torch's own sums its weight's gradient in another order in another thread.)
        made = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 32), nn.SiLU(), nn.Linear(32, 4))
    return made.to(where)


def trained(where, steps=4):
    """Losses, parameters and scales of unit-scaled, tracked FP8 training with stochastic rounding."""
    fp8 = track_scales(simulate_fp8(unit_scale(net(where))))
    x, optimizer, losses = values(32, 16, seed=1).to(where), plumb.optim.AdamW(fp8.parameters(), lr=0.1), []
    torch.manual_seed(2)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (fp8(x) - x[:, :4]).pow(2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses, list(fp8.parameters()), fp8


@only_testdevice
def test_training_in_simulated_fp8_has_the_cpus_bits():
    ours, theirs = trained(device.NAME), trained("cpu")
    assert same(ours[0], theirs[0]) and same(ours[1], theirs[1])
    graphs = [run[2].scales_graph() for run in (ours, theirs)]
    scales = [[n.meta["metrics"] for n in graph.nodes if n.meta.get("metrics")] for graph in graphs]
    assert len(scales[0]) == len(scales[1]) > 5
    for a, b in zip(*scales):
        for mine, other in ((a.fwd, b.fwd), *([(a.bwd, b.bwd)] if a.bwd else [])):
            assert (mine.numel, mine.abs_max, mine.abs_min) == (other.numel, other.abs_max, other.abs_min)
            assert mine.std == pytest.approx(other.std, rel=1e-6)


@only_testdevice
def test_a_step_never_waits_for_the_device():
    reads = torch.ops.plumb_test_device.host_reads
    fp8 = track_scales(simulate_fp8(unit_scale(net(device.NAME))))
    x, optimizer = values(32, 16).to(device.NAME), plumb.optim.SGD(fp8.parameters(), lr=0.1)
    for step in range(3):
        before = reads()
        optimizer.zero_grad()
        fp8(x).pow(2).mean().backward()
        optimizer.step()
        assert step == 0 or reads() == before  # the first captures
    before = reads()
    str(fp8.scales_graph())
    assert reads() > before


@only_testdevice
def test_metrics_are_read_when_they_are_asked_for():
    x = values(100, 3).to(device.NAME)
    metrics, reads = read_during(lambda: Metrics(x, x * 2))
    assert reads == 0
    theirs = Metrics(x.cpu(), x.cpu() * 2)
    told, reads = read_during(lambda: (metrics.fwd.abs_max, metrics.fwd.std, metrics.fwd.numel, metrics.bwd.abs_max))
    assert told[0] == theirs.fwd.abs_max and told[2:] == (300, theirs.bwd.abs_max) and reads == 2
    assert told[1] == pytest.approx(theirs.fwd.std, rel=1e-6)
    x.zero_()
    assert metrics.fwd == copy.deepcopy(metrics.fwd) and "abs_max" in repr(pickle.loads(pickle.dumps(Metrics(x).fwd)))
    with pytest.raises(AttributeError):
        Metrics(x).fwd.nothing  # noqa: B018


class Checked(nn.Module):
    """Asserts, takes a buffer's value into the program and compares tensors: three guard nodes."""

    def __init__(self):
        super().__init__()
        self.inner = net(device.NAME)
        self.register_buffer("power", torch.tensor(2.0))

    def forward(self, x):
        if not torch.isfinite(x).all():
            raise ValueError("x is not finite")
        return self.inner(x * float(self.power)) if torch.equal(x, x + 1) else self.inner(x).abs()


def read_during(call):
    before = torch.ops.plumb_test_device.host_reads()
    result = call()
    return result, torch.ops.plumb_test_device.host_reads() - before


@only_testdevice
def test_guards_are_read_once_a_run_and_once_a_scope():
    model, x = Checked(), values(32, 16).to(device.NAME)
    graph = plumb.capture(model, x)
    assert str(graph.graph).count("plumb::guard_") >= 2
    out, reads = read_during(lambda: graph(x))
    assert torch.equal(out, model(x)) and reads == 1

    def steps():
        with plumb.DeferredChecks():
            _, inside = read_during(lambda: [graph(x).pow(2).mean().backward() for _ in range(3)])
        return inside

    assert read_during(steps) == (0, 1)


@only_testdevice
def test_a_check_that_failed_is_raised_where_it_is_read():
    x = values(32, 16).to(device.NAME)
    graph, bad = plumb.capture(Checked(), x), x.clone()
    bad[3, 3] = torch.nan
    with pytest.raises(plumb.Error, match="a check that the model makes in its forward fails") as alone:
        graph(bad)
    assert alone.value.kind is plumb.ErrorKind.GuardFailed and "test_devices.py" in alone.value.where
    with pytest.raises(plumb.Error) as together, plumb.DeferredChecks():
        graph(x)
        graph(bad)
        reached = True
    assert reached and str(together.value) == str(alone.value)
    with pytest.raises(ZeroDivisionError), plumb.DeferredChecks():
        graph(bad)
        1 / 0  # noqa: B018
    graph(x)


@only_testdevice
def test_a_transformed_module_chooses_its_graph_inside_of_a_scope():
    class Branching(nn.Module):
        def forward(self, x):
            return x * 2 if x.sum() > 0 else x - 1

    module = simulate_fp8(Branching())
    ones = torch.ones(4, 4, device=device.NAME)
    with plumb.DeferredChecks():
        found = [module(ones), module(-ones), module(ones)]
    assert same(found, [ones * 2, -ones - 1, ones * 2])


class Block(nn.Module):
    def __init__(self, drop=nn.Dropout):
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(8, 16), nn.Linear(16, 8), drop(0.2)

    def forward(self, x):
        return x + self.drop(self.down(torch.relu(self.up(x))))


def blocks(places, train=False, drop=nn.Dropout):
    torch.manual_seed(0)
    with torch.device("cpu"):
        made = [Block(drop).train(train) for _ in places]
    return [m.to(place) for m, place in zip(made, places)]


def run_stages(name, places, train=False, seed=None, drop=nn.Dropout):
    modules = blocks(places, train, drop)
    stages = [PipelineStage(m, i, len(places), torch.device(p)) for i, (m, p) in enumerate(zip(modules, places))]
    schedule = get_schedule_class(name)(stages, 4, nn.functional.mse_loss)
    schedule.seed = seed
    x, losses = values(12, 8, seed=1).to(places[0]).requires_grad_(), []
    schedule.step(x, target=values(12, 8, seed=2).to(places[-1]), losses=losses)
    return [*losses, *(p.grad for m in modules for p in m.parameters())], modules


@only_testdevice
def test_numbers_are_checked_at_the_end_of_a_pipelines_step():
    x, target = values(12, 8, seed=1).to(device.NAME), values(12, 8, seed=2).to(device.NAME)

    def made(check):
        stages = [PipelineStage(m, i, 2, torch.device(device.NAME)) for i, m in enumerate(blocks([device.NAME] * 2))]
        schedule = get_schedule_class("LoopedBFS")(stages, 4, nn.functional.mse_loss)
        schedule.check_numerics = check
        schedule.step(x, target=target)
        return schedule

    reads = [read_during(lambda s=made(check): s.step(x, target=target))[1] for check in (False, True)]
    assert reads[1] == reads[0] + 1
    x[4, 2] = torch.inf
    what = r"rank 0 at the end of the step: output 0 of stage 0, microbatch 1: entry \[1, \d\] is (inf|-inf|nan)"
    with pytest.raises(plumb.Error, match=what) as caught:
        made(True)
    assert caught.value.kind is plumb.ErrorKind.Numerics


def two_devices():
    return [f"{device.NAME}:0", f"{device.NAME}:1"] if device.NAME == "testdevice" else [device.NAME, "cpu"]


@pytest.mark.parametrize("name", ["Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble"])
def test_stages_on_devices_of_their_own_hand_values_over(name):
    first, second = two_devices()
    found, modules = run_stages(name, [first, second, "cpu", first])
    assert [next(m.parameters()).device.type for m in modules][2] == "cpu"
    assert all(p.grad.device == p.device for m in modules for p in m.parameters())
    expected, _ = run_stages(name, ["cpu"] * 4)
    if device.NAME == "testdevice":
        assert same(found, expected)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.cpu(), b)


def test_dropout_with_a_seed_is_the_same_in_every_schedule():
    found = [run_stages(n, [device.NAME] * 2, True, 5)[0] for n in ("LoopedBFS", "InterleavedZeroBubble")]
    assert same(*found)


@only_testdevice
def test_unit_scaled_dropout_of_microbatches_has_the_cpus_bits():
    ours, theirs = (run_stages("LoopedBFS", [where] * 2, True, 5, plumb.Dropout)[0] for where in (device.NAME, "cpu"))
    assert same(ours, theirs)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.body, self.head = nn.Embedding(20, 8), Block().eval(), nn.Linear(8, 20, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids):
        return self.head(self.body(self.table(ids)) + torch.arange(8, device=ids.device))


def cut(where):
    torch.manual_seed(0)
    with torch.device("cpu"):
        model = Tied().to(where)
    model.head.weight = model.table.weight  # torch unties parameters that go to such a device
    ids = torch.arange(24, device="cpu").view(4, 6) % 20
    return pipeline(model, (ids[:2].to(where),), split_spec={"head": SplitPoint.BEGINNING}), ids


def rank_of_pipe(rank, size, where):
    where = f"{where}:{rank}" if where == "testdevice" else where  # copies of the tied weight are on two devices
    pipe, ids = cut(where)
    stage = pipe.build_stage(rank, torch.device(where))
    schedule, losses = get_schedule_class("1F1B")(stage, 2, lambda y, t: y.pow(2).mean()), []
    first, last = rank == 0, rank == size - 1
    schedule.step(*([ids.to(where)] if first else []), target=ids.to(where) if last else None, losses=losses)
    if device.NAME == "testdevice" and where != "cpu":
        assert torch.ops.plumb_test_device.pinned_buffers() > 0
    return [t.detach().cpu() for t in (*losses, *(p.grad for p in stage.submod.parameters()))]


def test_messages_between_processes_are_staged_through_the_cpu():
    ours, theirs = (ranks.run(rank_of_pipe, 2, where) for where in (device.NAME, "cpu"))
    for mine, other in zip(ours, theirs, strict=True):
        assert len(mine) == len(other) > 0
        for a, b in zip(mine, other):
            torch.testing.assert_close(a, b)
        assert device.NAME != "testdevice" or same(mine, other)


def rank_over_a_backend_of_the_devices(rank, size, where):
    torch.ops.plumb_test_device.use_strict_backend(torch.distributed.group.WORLD.boxed(), 60_000)
    places, reads = [where] * size, torch.ops.plumb_test_device.host_reads
    module = blocks(places)[rank]
    stage, counts = PipelineStage(module, rank, size, torch.device(where)), []
    schedule = get_schedule_class("1F1B")(stage, 4, nn.functional.mse_loss)
    x, target, losses = values(12, 8, seed=1).to(where), values(12, 8, seed=2).to(where), []
    for _ in range(2):
        for p in module.parameters():
            p.grad = None
        before, losses = reads(), []
        schedule.step(*([x] if rank == 0 else []), target=target if rank == size - 1 else None, losses=losses)
        counts.append(reads() - before)
    return [t.detach().cpu() for t in (*losses, *(p.grad for p in module.parameters()))], counts


@only_testdevice
def test_messages_between_processes_stay_on_a_device_that_has_a_backend():
    ours = ranks.run(rank_over_a_backend_of_the_devices, 2, device.NAME)
    expected, _ = run_stages("LoopedBFS", ["cpu"] * 2)
    found = [*ours[1][0][:4], *ours[0][0], *ours[1][0][4:]]
    assert same(found, expected)
    assert [counts[1] for _, counts in ours] == [0, 0], "the host never reads what the device has"


# The call that init_process_group("cpu:gloo,cuda:nccl") makes by itself.
WITH_A_BACKEND = """
import torch.distributed as dist
init = dist.init_process_group
def with_backend(*args, **kwargs):
    init(*args, **kwargs)
    torch.ops.plumb_test_device.use_strict_backend(dist.group.WORLD.boxed(), 60_000)
dist.init_process_group = with_backend
"""


@only_testdevice
@pytest.mark.parametrize("backend", ["", WITH_A_BACKEND], ids=["staged", "strict"])
def test_the_example_computes_on_the_device(tmp_path, backend):
    script = pathlib.Path(__file__).resolve().parents[2] / "examples" / "pipeline.py"
    code = "import device, runpy, sys, torch; device._load_testdevice()" + (backend or "\n")
    code += "runpy.run_path(sys.argv.pop(1), run_name='__main__')"
    env = {
        **os.environ,
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(ranks.free_port()),
        "PYTHONPATH": device.FOLDER,
    }
    started = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(script), "--device", device.NAME],
            env={**env, "RANK": str(rank)},
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    ends = [(*process.communicate(timeout=600), process.returncode) for process in started]
    assert [code for _, _, code in ends] == [0, 0], ends
    assert "the very same losses" in ends[1][0] and "trained.pt is the very same model" in ends[1][0]


def test_a_captured_model_is_saved_moved_and_loaded(tmp_path):
    x = values(3, 16).to(device.NAME)
    module = net(device.NAME)
    graph = plumb.capture(module, x)
    plumb.save_pt2(graph, tmp_path / "net.pt2")
    loaded = plumb.load_pt2(tmp_path / "net.pt2")
    assert next(loaded.parameters()).device.type == x.device.type and torch.equal(loaded(x), module(x))
    on_cpu = plumb.load_pt2(tmp_path / "net.pt2", device="cpu")
    assert torch.equal(on_cpu(x.cpu()), copy.deepcopy(module).cpu()(x.cpu()))
    torch.save(graph.state_dict(), tmp_path / "state.pt")
    assert same(torch.load(tmp_path / "state.pt", map_location="cpu").values(), module.state_dict().values())


def test_autocast_of_the_device_is_captured():
    module, x = net(device.NAME), values(3, 16).to(device.NAME)

    class Cast(nn.Module):
        def __init__(self):
            super().__init__()
            self.module = module

        def forward(self, x):
            with torch.autocast(device.NAME.split(":")[0], dtype=torch.bfloat16):
                return self.module(x)

    cast = Cast()
    assert cast(x).dtype == torch.bfloat16 and torch.equal(plumb.capture(cast, x)(x), cast(x))
    with torch.autocast(device.NAME.split(":")[0], dtype=torch.bfloat16):
        assert plumb.functional.linear(x, module[0].weight, None).dtype == torch.bfloat16
        assert unit_scale(module)(x).dtype == torch.bfloat16
