"""Stages whose parameters torch shards or replicates over other ranks, beside one process that does each replica's part."""

import pytest
import ranks
import torch
from pipelines import MSE, accumulate, batch, same
from plumb.pipelining import PipelineStage, SplitPoint, build_stage, pipeline
from plumb.pipelining.schedules import get_schedule_class
from torch import nn

CASES = [  # schedule, stages a rank, how the modules are spread
    ("GPipe", 1, "layers and stage"),
    ("1F1B", 1, "layers"),
    ("1F1B", 1, "resharded after forward"),
    ("Interleaved1F1B", 2, "stage"),
    ("InterleavedZeroBubble", 2, "layers and stage"),
    ("InterleavedZeroBubble", 2, "resharded after forward"),
    ("ZBVZeroBubble", 2, "stage"),
    ("DualPipeV", 2, "layers and stage"),
    ("1F1B", 1, "replicated"),
    ("ZBVZeroBubble", 2, "replicated"),
]
MICROBATCHES, STEPS = 4, 2


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 24, bias=False), nn.Linear(24, 8, bias=False)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def stages(count):
    torch.manual_seed(0)
    return [nn.Sequential(Layer(), Layer()) for _ in range(count)]


def spread(module, how, mesh):
    from torch.distributed._composable.replicate_with_fsdp import replicate
    from torch.distributed.fsdp import fully_shard

    if how == "replicated":
        return replicate(module, mesh=mesh)
    options = {"mesh": mesh, "reshard_after_forward": how == "resharded after forward"}
    if how != "stage":
        for layer in module:
            fully_shard(layer, **options)
    return module if how == "layers" else fully_shard(module, **options)


def gradients(module):
    return [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in module.parameters()]


def place(rank):
    """Returns the mesh of two replicas of two stages, the rank's place in its pipeline, and its replica's half of the batch."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "pipe"))
    replica, index = divmod(rank, 2)
    x, target = batch(16)
    half = slice(8 * replica, 8 * replica + 8)
    return mesh, index, x[half], target[half]


def work(rank, size):
    mesh, index, x, target = place(rank)
    found = {}
    for schedule, per_rank, how in CASES:
        count = 2 * per_rank
        all_stages = stages(count)
        v = schedule in ("ZBVZeroBubble", "DualPipeV")
        mine = [index, count - 1 - index] if v else list(range(index, count, 2))
        modules = {s: spread(all_stages[s], how, mesh["replica"]) for s in mine}
        own = [PipelineStage(modules[s], s, count, "cpu", group=mesh["pipe"].get_group()) for s in mine]
        runner = get_schedule_class(schedule)(own[0] if per_rank == 1 else own, MICROBATCHES, MSE)
        for _ in range(STEPS):
            runner.step(*([x] if 0 in mine else []), target=target if count - 1 in mine else None)
        settled = {s: whole_backward(module) for s, module in modules.items()} if how == "layers and stage" else {}
        found[schedule, how] = {s: (gradients(module) if not settled else settled[s]) for s, module in modules.items()}
    return found


def whole_backward(module):
    """Returns the gradients of the steps, after which the module must still reduce by itself as before."""
    kept = [g.clone() for g in gradients(module)]
    module.zero_grad()
    module(torch.ones(2, 8)).sum().backward()
    assert all(p.grad is not None and p.grad.to_local().numel() <= p.numel() for p in module.parameters())
    return kept


@pytest.fixture(scope="module")
def ended():
    return ranks.run(work, 4)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}, {case[2]}")
def test_sharded_stages_reduce_once_a_step_in_every_schedule(ended, case):
    schedule, per_rank, how = case
    x, target = batch(16)
    halves = [stages(2 * per_rank), stages(2 * per_rank)]
    for modules, inputs, targets in zip(halves, x.chunk(2), target.chunk(2)):
        accumulate(modules, inputs, targets, MICROBATCHES)
    for rank, found in enumerate(ended):
        for s, grads in found[schedule, how].items():
            means = [(p.grad + q.grad) / 2 for p, q in zip(halves[0][s].parameters(), halves[1][s].parameters())]
            assert same(grads, [STEPS * mean for mean in means]), f"rank {rank}, stage {s}"


def deferred_work(rank, size):
    from torch.distributed.tensor import DTensor

    mesh, index, x, target = place(rank)
    found = []
    for schedule, how in (("1F1B", "layers and stage"), ("ZBH1", "resharded after forward"), ("1F1B", "plain")):
        module = stages(2)[index]
        module = module if how == "plain" else spread(module, how, mesh["replica"])
        runner = get_schedule_class(schedule)(
            PipelineStage(module, index, 2, "cpu", group=mesh["pipe"].get_group()), MICROBATCHES, MSE
        )
        for finalize in (False, True):
            given = ([x] if index == 0 else []), (target if index == 1 else None)
            runner.step(*given[0], target=given[1], finalize_gradients=finalize)
            reduced = [isinstance(p.grad, DTensor) for p in module.parameters()]
            assert reduced == [finalize and how != "plain"] * len(reduced)
        found.append(gradients(module))
    return found


def test_gradients_of_sharded_stages_are_reduced_when_a_step_finalizes_them():
    x, target = batch(16)
    halves = [stages(2), stages(2)]
    for modules, inputs, targets in zip(halves, x.chunk(2), target.chunk(2)):
        accumulate(modules, inputs, targets, MICROBATCHES)
    for rank, (*sharded, plain) in enumerate(ranks.run(deferred_work, 4)):
        both = [list(half[rank % 2].parameters()) for half in halves]
        for grads in sharded:  # means over the replicas, of two steps
            torch.testing.assert_close(grads, [p.grad + q.grad for p, q in zip(*both)])
        torch.testing.assert_close(plain, [2 * p.grad for p in both[rank // 2]])


def half_precision_work(rank, size):
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh, index, x, target = place(rank)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32)
    found = []
    for schedule in ("Interleaved1F1B", "InterleavedZeroBubble"):
        modules = {s: fully_shard(stages(4)[s], mesh=mesh["replica"], mp_policy=policy) for s in (index, index + 2)}
        own = [PipelineStage(m, s, 4, "cpu", group=mesh["pipe"].get_group()) for s, m in modules.items()]
        runner = get_schedule_class(schedule)(own, MICROBATCHES, MSE)
        for _ in range(STEPS):
            runner.step(*([x] if 0 in modules else []), target=target if 3 in modules else None)
        found.append([g for m in modules.values() for g in gradients(m)])
    return found


def test_halves_of_a_backward_add_up_in_the_dtype_that_gradients_are_reduced_in():
    for whole, halves in ranks.run(half_precision_work, 4):
        assert same(whole, halves) and whole[0].dtype == torch.float32


def tensor_parallel_work(rank, size):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tensor", "pipe"))
    index = rank % 2
    x, target = batch(16)
    found = {}
    for schedule in ("1F1B", "ZBVZeroBubble"):
        count = 2 if schedule == "1F1B" else 4
        modules = {s: stages(count)[s] for s in ([index] if count == 2 else [index, 3 - index])}
        for module in modules.values():
            for layer in module:
                parallelize_module(layer, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        own = [PipelineStage(m, s, count, "cpu", group=mesh["pipe"].get_group()) for s, m in modules.items()]
        runner = get_schedule_class(schedule)(own[0] if count == 2 else own, MICROBATCHES, MSE)
        runner.step(*([x] if 0 in modules else []), target=target if count - 1 in modules else None)
        found[schedule] = {s: gradients(m) for s, m in modules.items()}
    return found


def test_tensor_parallel_stages_train_in_every_kind_of_schedule():
    x, target = batch(16)
    for found in ranks.run(tensor_parallel_work, 4):
        for schedule, of_stages in found.items():
            alone = stages(2 if schedule == "1F1B" else 4)
            accumulate(alone, x, target, MICROBATCHES)
            for s, grads in of_stages.items():
                for grad, parameter in zip(grads, alone[s].parameters(), strict=True):
                    torch.testing.assert_close(grad, parameter.grad)


def straight_work(rank, size):
    """Stages that return what a collective is still at work on, and then DTensors."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tensor", "pipe"))
    index, group = rank % 2, mesh["pipe"].get_group()
    x, target = batch(16)
    found = []
    for local in (True, False):
        torch.manual_seed(index)
        module = nn.Sequential(nn.Linear(8, 24), nn.GELU(), nn.Linear(24, 8))
        parallelize_module(module, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel(use_local_output=local)})
        schedule = get_schedule_class("1F1B")(PipelineStage(module, index, 2, "cpu", group=group), MICROBATCHES, MSE)
        try:
            schedule.step(*([x] if index == 0 else []), target=target if index == 1 else None)
            found.append(gradients(module))
        except RuntimeError as error:
            found.append(str(error))
    return found


def test_stages_may_return_what_a_collective_is_at_work_on_and_dtensors_are_refused():
    x, target = batch(16)
    alone = []
    for seed in range(2):
        torch.manual_seed(seed)
        alone.append(nn.Sequential(nn.Linear(8, 24), nn.GELU(), nn.Linear(24, 8)))
    accumulate(alone, x, target, MICROBATCHES)
    for rank, (grads, refused) in enumerate(ranks.run(straight_work, 4)):
        for grad, parameter in zip(grads, alone[rank % 2].parameters(), strict=True):
            torch.testing.assert_close(grad, parameter.grad)
        assert "value 0 of 0SEND_F0" in refused and "DTensor" in refused, refused


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.middle, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.last.weight = self.first.weight

    def forward(self, x):
        return self.last(torch.relu(self.middle(torch.relu(self.first(x)))))


def tied_work(rank, size):
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    mesh, index, x, target = place(rank)
    found = []
    for how in ("replicated", "compiled", "sharded"):
        model = Tied()
        pipe = pipeline(model, (x[:2],), split_spec={"last": SplitPoint.BEGINNING})
        module = pipe.get_stage_module(index)
        if how == "sharded":
            module = fully_shard(module, mesh=mesh["replica"])
        else:
            module = torch.compile(module, backend="eager") if how == "compiled" else module
            module = DistributedDataParallel(module, process_group=mesh["replica"].get_group())
        schedule = get_schedule_class("1F1B")(
            build_stage(module, index, pipe.info(), torch.device("cpu"), mesh["pipe"].get_group()), MICROBATCHES, MSE
        )
        try:
            schedule.step(*([x] if index == 0 else []), target=target if index == 1 else None)
            state = schedule.gather_stage_states()
            pipe.merge_state_dict(state)
            found.append({name: p.grad for name, p in pipe.get_stage_module(index).named_parameters()})
        except RuntimeError as error:
            found.append(str(error))
    return found


def test_cut_stages_that_share_weights_are_replicated_and_compiled_and_not_sharded():
    x, target = batch(16)
    models = [Tied(), Tied()]
    for model, inputs, targets in zip(models, x.chunk(2), target.chunk(2)):
        accumulate([model], inputs, targets, MICROBATCHES)
    expected = {name: (p.grad + q.grad) / 2 for (name, p), q in zip(models[0].named_parameters(), models[1].parameters())}
    for rank, (*replicated, refused) in enumerate(ranks.run(tied_work, 4)):
        for found in replicated:
            assert found.keys() == ({"first.weight", "last.bias"} if rank % 2 else expected.keys() - {"last.bias"})
            for name, grad in found.items():
                torch.testing.assert_close(grad, expected[name])
        assert f"'first.weight' is used in stages [0, 1], and stage {rank % 2} has it sharded" in refused, refused
