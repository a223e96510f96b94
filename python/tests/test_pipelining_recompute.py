"""Stages whose backward computes cheap results again: the same bits, less kept."""

import copy

import device
import pytest
import torch
from plumb.pipelining import PipelineStage, Schedule1F1B, SplitPoint, pipeline
from plumb.pipelining.schedules import ScheduleInterleavedZeroBubble, ScheduleLoopedBFS
from torch import nn
from torch.utils.checkpoint import checkpoint

WIDTH = 32


class Gpt(nn.Module):
    def __init__(self, dropout=0.1):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = (z.view(b, t, 4, 8).transpose(1, 2) for z in self.qkv(self.norm1(x)).split(WIDTH, -1))
        weights = self.dropout(torch.softmax(q @ k.transpose(-2, -1) * 8**-0.5, -1))
        x = x + self.out((weights @ v).transpose(1, 2).reshape(b, t, WIDTH))
        return x + self.down(self.dropout(nn.functional.gelu(self.up(self.norm2(x)))))


class Llama(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH))
        self.gate, self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        wide = x.float()
        h = self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype)
        return x + self.down(nn.functional.silu(self.gate(h)) * self.up(h))


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv1d(16, 16, 3, padding=1), nn.Conv1d(16, 16, 3, padding=1)
        self.norm = nn.BatchNorm1d(16)

    def forward(self, x):
        return x + self.conv2(torch.sigmoid(nn.functional.relu(self.norm(self.conv1(x)))) * 2)


class Reduction(nn.Module):
    """SegFormer's attention: a norm that a linear reads, and then a convolution of its pixels in twos."""

    def __init__(self):
        super().__init__()
        self.inner, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key, self.reduce = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Conv2d(WIDTH, WIDTH, 2, 2)

    def forward(self, x):
        b, t, _ = x.shape
        h = self.norm(self.inner(x))
        query = self.query(h)
        image = h.permute(0, 2, 1).reshape(b, WIDTH, 4, 4)
        key = self.key(self.reduce(image).reshape(b, WIDTH, -1).permute(0, 2, 1))
        return x + nn.functional.scaled_dot_product_attention(query, key, key)


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = Gpt(), Gpt(dropout=0.0)

    def forward(self, x):
        return checkpoint(self.second, nn.functional.gelu(self.first(x)), use_reentrant=False)


class UnderAutocast(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = Gpt()

    def forward(self, x):
        with torch.autocast(device.NAME, torch.bfloat16):
            return self.block(x).float()


class WritesItsResult(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        h = nn.functional.gelu(self.up(x))
        h.mul_(2)
        y = nn.functional.gelu(self.up(x))
        y.data.mul_(3)
        return self.down(h) + self.down(y)


ZOO = {
    "gpt": (Gpt, torch.float32),
    "gpt in bfloat16": (Gpt, torch.bfloat16),
    "llama": (Llama, torch.float32),
    "llama in bfloat16": (Llama, torch.bfloat16),
    "convolutions": (Convolutions, torch.float32),
    "reduction": (Reduction, torch.float32),
    "checkpoint": (Checkpointed, torch.float32),
    "autocast": (UnderAutocast, torch.float32),
    "writes": (WritesItsResult, torch.float32),
}


def train(module, dtype, recompute, kind):
    stages = [
        PipelineStage(m, i, 2, torch.device(device.NAME), recompute=recompute)
        for i, m in enumerate(copy.deepcopy(module))
    ]

    def loss(out, target):
        return nn.functional.mse_loss(out.float(), target)

    torch.manual_seed(1)
    x = torch.randn(8, 16, WIDTH).to(dtype)
    target = torch.randn(8, 16, WIDTH)
    schedule = kind(stages, 2, loss_fn=loss)
    torch.manual_seed(5)
    losses: list[torch.Tensor] = []
    for _ in range(2):
        schedule.step(x, target=target, losses=losses)
    values = losses + [p.grad for s in stages for p in s.submod.parameters()]
    return values + [b for s in stages for b in s.submod.buffers()], [s.recomputed for s in stages]


keeps_all = pytest.mark.skipif(torch.__version__ < (2, 12), reason="torch before 2.12 cannot fill an emptied storage again")


@keeps_all
@pytest.mark.parametrize("name", ZOO)
def test_gives_the_same_bits(name):
    make, dtype = ZOO[name]
    torch.manual_seed(0)
    module = nn.ModuleList([make(), make()]).to(dtype)
    # In the first a stage's backward is in halves, in the second no stage's first microbatch goes back at once.
    for kind in (ScheduleInterleavedZeroBubble, ScheduleLoopedBFS):
        kept, nothing = train(module, dtype, "none", kind)
        again, reports = train(module, dtype, "cheap", kind)
        assert len(kept) == len(again)
        for a, b in zip(kept, again):
            assert torch.equal(a, b)
        assert nothing == [{}, {}]
        if name == "writes":  # neither a result that was written, nor one that was written behind autograd's back
            assert reports == [{}, {}]
        else:
            assert reports[0] and (reports[1] or kind is ScheduleInterleavedZeroBubble)


@keeps_all
def test_says_which_operators_results_were_not_kept():
    torch.manual_seed(0)
    module = nn.ModuleList([Gpt(), Gpt()])
    _, (report, _) = train(module, torch.float32, "cheap", ScheduleInterleavedZeroBubble)
    rows = 4 * 16
    assert report["aten::native_layer_norm"] == (2, 2 * rows * WIDTH * 4)
    # The results of dropout, behind gelu and softmax. Off the CPU it is one operator, whose result is kept because it
    # draws.
    dropped = (2, 4 * (rows * 4 * WIDTH + 4 * 4 * 16 * 16)) if device.NAME == "cpu" else None
    assert report.get("aten::mul") == dropped


@keeps_all
def test_stages_of_a_cut_model_take_it_too():
    torch.manual_seed(0)
    model = nn.Sequential(Gpt(dropout=0.0), Gpt(dropout=0.0))
    x = torch.randn(4, 16, WIDTH)
    alone = copy.deepcopy(model)
    (alone(x) - x).square().mean().backward()
    pipe = pipeline(model, (x,), split_spec={"1": SplitPoint.BEGINNING})
    where = torch.device(device.NAME)
    for recompute in ("cheap", "none"):
        stages = [pipe.build_stage(i, where, recompute=recompute) for i in range(2)]
        for stage in stages:
            stage.submod.zero_grad()
        schedule = ScheduleInterleavedZeroBubble(stages, 1, loss_fn=lambda out, y: (out - y).square().mean())
        schedule.step(x, target=x)
        grads = {name: p.grad for stage in stages for name, p in stage.submod.named_parameters()}
        for name, p in alone.named_parameters():
            assert torch.equal(p.grad, grads[name]), name
        assert all(bool(stage.recomputed) == (recompute == "cheap") for stage in stages)


def test_refuses_other_words():
    with pytest.raises(ValueError, match="neither 'none' nor 'cheap'"):
        PipelineStage(nn.Linear(2, 2), 0, 1, torch.device(device.NAME), recompute="full")
    stage = PipelineStage(nn.Linear(2, 2), 0, 1, torch.device(device.NAME))
    assert stage.recompute == "cheap"
    Schedule1F1B(stage, 1, loss_fn=nn.MSELoss()).step(torch.ones(2, 2), target=torch.ones(2, 2))
    assert stage.recomputed == {}
