"""Transformed modules under torch's DistributedDataParallel and fully_shard, over two processes: the gradients of one process that does
both parts, and refusals of what a graph cannot do there."""

import pytest
import ranks
import torch
from torch import nn

import plumb
from plumb.transforms import simulate_fp8, track_scales, unit_scale

LR, STEPS = 2**-4, 2


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.up, self.down = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 24), nn.Linear(24, 8)
        self.last = nn.Linear(8, 8, bias=False)
        self.last.weight = self.first.weight

    def forward(self, x):
        x = self.norm(self.first(x))
        return self.last(x + nn.functional.dropout(self.down(nn.functional.gelu(self.up(x))), 0.1, self.training))


class WeightOfItsOwn(nn.Module):
    """The first graph alone shows that `weight` is one, and that that of `bilinear` is multiplied before it is used."""

    def __init__(self, rank=0):
        super().__init__()
        torch.manual_seed(rank)
        self.first, self.twice = nn.Linear(8, 8), nn.Linear(8, 8, bias=False)
        self.weight = nn.Parameter(torch.randn(8, 8) * 0.05)

    def forward(self, x):
        return torch.relu(self.first(x) @ self.weight) @ (self.twice.weight * 2).t()


class Sums(nn.Module):
    """Adds its inputs over the ranks, in place or by a function."""

    def __init__(self, in_place):
        super().__init__()
        self.in_place = in_place

    def forward(self, x):
        if not self.in_place:
            return torch.distributed.nn.functional.all_reduce(x * 2) + 1
        x = x * 2
        torch.distributed.all_reduce(x)
        return x + 1


def chain(model):
    return track_scales(simulate_fp8(unit_scale(model)))


def batch(rank):
    torch.manual_seed(7)
    return torch.randn(8, 8)[4 * rank : 4 * rank + 4], torch.randn(8, 8)[4 * rank : 4 * rank + 4]


def backward(module, rank, step):
    x, target = batch(rank)
    torch.manual_seed(step)  # draws dropout and stochastic rounding
    loss = nn.functional.mse_loss(module(x), target)
    loss.backward()
    return loss.item()


def whole(tensor):
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def descend(module, grads):
    with torch.no_grad():
        for p, grad in zip(module.parameters(), grads):
            p -= LR * grad


def wrappers():
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    return {
        "DistributedDataParallel": DistributedDataParallel,
        "static graph": lambda m: DistributedDataParallel(m, static_graph=True, gradient_as_bucket_view=True),
        "unused": lambda m: DistributedDataParallel(m, find_unused_parameters=True),
        "fully_shard": fully_shard,
        "resharded": lambda m: fully_shard(m, reshard_after_forward=True),
    }


CASES = [(t, w) for t in (track_scales, chain) for w in ("DistributedDataParallel", "static graph", "unused", "fully_shard", "resharded")]


def trained(transform, wrap, rank):
    module = wrap(transform(Net()))
    losses = []
    for step in range(STEPS):
        module.zero_grad()
        losses.append(backward(module, rank, step))
        descend(module, [p.grad for p in module.parameters()])
    inner = getattr(module, "module", module)
    return losses, [whole(p.grad) for p in inner.parameters()], {n: whole(t) for n, t in inner.state_dict().items()}


def refused(act, *args):
    try:
        return act(*args)
    except (plumb.Error, ValueError) as error:
        return str(error)


def texts(rank, folder):
    """Returns the refusals, by what was tried."""
    import torch.distributed.nn.functional
    from torch.distributed._composable.replicate import replicate
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
    from torch.nn.parallel import DistributedDataParallel

    x, _ = batch(rank)
    held, inner, parallel = nn.Sequential(DistributedDataParallel(Net())), track_scales(Net()), track_scales(Net())
    inner(x)
    fully_shard(inner.up)
    parallel(x)
    parallelize_module(parallel, init_device_mesh("cpu", (2,)), {"up": ColwiseParallel()})
    flat = FullyShardedDataParallel(track_scales(Net()), device_id=torch.device("cpu"))
    bypassed = fully_shard(track_scales(Net()))
    bypassed(x).sum().backward()
    return {
        "of replicated": refused(unit_scale, DistributedDataParallel(Net())),
        "of a part": refused(track_scales, held),
        "capture of replicated": refused(plumb.capture, DistributedDataParallel(Net()), x),
        "of sharded": refused(unit_scale, fully_shard(Net())),
        "capture of sharded": refused(plumb.capture, fully_shard(Net()), x),
        "sharded part": refused(inner, x),
        "tensor parallel": refused(parallel, x),
        "flat": refused(flat, x),
        "past the hooks": refused(bypassed.forward, x),
        "replicate": refused(track_scales, replicate(Net())),
        "metrics": refused(plumb.transforms.Metrics, next(bypassed.parameters())),
        "diff": refused(plumb.diff, bypassed.state_dict(), bypassed.state_dict()),
        "collective": refused(track_scales(Sums(True)), x),
        "function": torch.equal(track_scales(Sums(False))(x), Sums(True)(x)),
        "hashes": refused(hash_state, folder, rank, bypassed, x),
    }


def hash_state(folder, rank, sharded, x):
    with plumb.Recorder(sharded, 1, f"{folder}/history", rank=rank) as recorder:
        sharded(x).sum().backward()
        assert recorder.step() > 0
        recorder.hash_state()


def first_graphs(rank):
    """Returns the refusals of first graphs that would change weights, and losses and weights where the module was called before."""
    x, _ = batch(rank)
    found = {}
    for name, wrap in wrappers().items():
        if name in ("DistributedDataParallel", "fully_shard"):
            early = wrap(unit_scale(WeightOfItsOwn(rank)))
            scaled = unit_scale(WeightOfItsOwn())
            scaled(x)
            scaled = wrap(scaled)
            loss = backward(scaled, rank, 0)
            found[name] = refused(early, x), loss, [whole(p) for p in scaled.parameters()]
    return found


def optimizers(rank):
    """Returns the refusal of parameters whose tags sharding has dropped, and rates and weights after a step: of a replicated model, and
    of the sharded one once it is tagged again."""
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    def stepped(model):
        optimizer = plumb.optim.AdamW(model.parameters(), lr=1.0)
        backward(model, rank, 0)
        optimizer.step()
        return [group["lr"] for group in optimizer.param_groups], [whole(p) for p in model.parameters()]

    model = unit_scale(Net())
    tags = {name: (p.mup_type, p.mup_scaling_depth, p.mup_fan_in) for name, p in model.named_parameters()}
    fully_shard(model)
    text = refused(plumb.optim.AdamW, model.parameters())
    for name, p in model.named_parameters():
        plumb.parameter.tag_parameter(p, *tags[name])
    return text, stepped(DistributedDataParallel(unit_scale(Net()))), stepped(model)


def work(rank, size, folder):
    wrap = wrappers()
    runs = {(t.__name__, w): trained(t, wrap[w], rank) for t, w in CASES}
    return runs, texts(rank, folder), first_graphs(rank), optimizers(rank)


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    return ranks.run(work, 2, str(tmp_path_factory.mktemp("ranks")))


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0].__name__}, {case[1]}")
def test_a_wrapped_transformed_module_trains_with_the_mean_of_both_parts_gradients(ended, case):
    transform, wrap = case
    parts = [transform(Net()), transform(Net())]
    losses = [[], []]
    for step in range(STEPS):
        for rank, part in enumerate(parts):
            part.zero_grad()
            losses[rank].append(backward(part, rank, step))
        means = [(p.grad + q.grad) / 2 for p, q in zip(parts[0].parameters(), parts[1].parameters())]
        for part in parts:
            descend(part, means)
        if not wrap.startswith(("fully", "re")):  # the buffers of rank 0 are everybody's in the next forward
            for buffer, first in zip(parts[1].buffers(), parts[0].buffers()) if step + 1 < STEPS else ():
                buffer.copy_(first)
    for rank, (runs, *_) in enumerate(ended):
        found, grads, state = runs[transform.__name__, wrap]
        assert found == losses[rank]
        assert all(map(torch.equal, grads, means))
        expected = parts[rank].state_dict()
        assert list(state) == list(expected)
        assert all(torch.equal(state[name], expected[name]) for name in expected)


PARTS = {
    "of replicated": ("the model (DistributedDataParallel) reduces gradients over ranks", "wrap last: DistributedDataParallel("),
    "of a part": ("module '0' (DistributedDataParallel)", "wrap last: DistributedDataParallel("),
    "capture of replicated": ("the model (DistributedDataParallel)", "takes the one inside, its .module"),
    "of sharded": ("the model (FSDPNet) was given to fully_shard", "call fully_shard last"),
    "capture of sharded": ("the model (FSDPNet) was given to fully_shard", "call fully_shard last"),
    "sharded part": ("module 'up' (FSDPLinear) was given to fully_shard", "call fully_shard last"),
    "tensor parallel": ("'up.weight' is sharded over ranks (DTensor)", "transform the model first"),
    "flat": ("the model (Net) has its parameters in a flat one", "use_orig_params=True"),
    "past the hooks": ("'first.weight' is sharded over ranks (DTensor)", "transform the model first"),
    "replicate": ("the model (DDPNet) was given to replicate", "call replicate last"),
    "metrics": ("measure was given a tensor of a class of Python's whose values are in other tensors", "full_tensor()"),
    "diff": ("'first.weight' is sharded over ranks (DTensor), and diff() compares whole tensors", "full_state_dict=True"),
    "collective": ("c10d::allreduce_ talks to other processes, and a graph would not wait", "torch.distributed.nn.functional"),
    "hashes": ("'first.weight' is sharded over ranks (DTensor), and hash_state() hashes whole tensors", "without hash_state()"),
}


@pytest.mark.parametrize("tried", PARTS)
def test_what_a_graph_would_leave_out_is_refused_by_name(ended, tried):
    for _, texts, *_ in ended:
        for part in PARTS[tried]:
            assert part in texts[tried], texts[tried]
        assert texts["function"]


@pytest.mark.parametrize("wrap", ["DistributedDataParallel", "fully_shard"])
def test_weights_that_the_first_graph_would_change_are_refused_unless_the_module_has_run_before(ended, wrap):
    scaled = unit_scale(WeightOfItsOwn())
    losses = [backward(scaled, rank, 0) for rank in range(2)]
    for rank, (_, _, first_graphs, _) in enumerate(ended):
        text, loss, weights = first_graphs[wrap]
        assert "unit_scale changes the values of 'weight'" in text or "values of 'twice.weight'" in text
        assert f"call the unit-scaled module once, on a batch, before you give it to {wrap}" in text
        assert loss == losses[rank]
        assert all(map(torch.equal, weights, scaled.parameters()))


def test_parameters_that_sharding_made_anew_get_their_learning_rates_by_tags_given_back(ended):
    for *_, (text, (rates, weights), (sharded_rates, sharded_weights)) in ended:
        assert "sharding made it anew" in text and "plumb.parameter.tag_parameter" in text
        assert sharded_rates == rates and len(set(rates)) > 1
        assert all(map(torch.equal, sharded_weights, weights))
