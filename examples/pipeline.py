"""Trains a small model over two processes with a schedule written by hand, saves it whole, and checks it against one process.

python examples/pipeline.py                             starts both processes itself
torchrun --nproc-per-node=2 examples/pipeline.py        the same under torch's launcher
"""

import os
import pathlib
import tempfile

import torch
import torch.distributed as dist
from plumb.pipelining import PipelineStage, ScheduleTable
from torch import nn

MICROBATCHES, STEPS, WIDTH = 4, 60, 32


def halves() -> list[nn.Module]:
    torch.manual_seed(0)
    return [
        nn.Sequential(nn.Linear(8, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.GELU()),
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, 1)),
    ]


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What there is to learn: a wave along one direction of the inputs."""
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(step))
    return x, torch.sin(x @ torch.linspace(-0.5, 0.5, 8)[:, None])


def train(rank: int) -> list[float]:
    module = halves()[rank]
    stage = PipelineStage(module, rank, 2, torch.device("cpu"))
    table = pathlib.Path(__file__).with_name("schedule.csv")
    schedule = ScheduleTable([stage], MICROBATCHES, nn.functional.mse_loss, table=table)
    schedule.record_timeline = True
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    means = []
    for step in range(STEPS):
        x, target = batch(step)
        optimizer.zero_grad()
        losses = []
        if rank == 0:
            schedule.step(x)
        else:
            schedule.step(target=target, losses=losses)
            means.append(torch.stack(losses).mean().item())
        optimizer.step()
    bubble = schedule.measured_bubble()
    schedule.draw_timeline("timeline.svg" if rank == 0 else None)
    states = schedule.gather_stage_states()  # of both stages, on both ranks
    if rank == 0:
        torch.save({f"{i}.{name}": tensor for i, state in enumerate(states) for name, tensor in state.items()}, "trained.pt")
    if rank == 1:
        print(f"loss {means[0]:.4f} -> {means[-1]:.4f}; ranks idle {bubble:.0%} of the last step: timeline.svg")
    return means


def train_alone() -> tuple[list[float], dict[str, torch.Tensor]]:
    model = nn.Sequential(*halves())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    means = []
    for step in range(STEPS):
        optimizer.zero_grad()
        losses = []
        for x, target in zip(*(t.chunk(MICROBATCHES) for t in batch(step))):
            losses.append(nn.functional.mse_loss(model(x), target))
            losses[-1].backward()
        for parameter in model.parameters():
            parameter.grad.div_(MICROBATCHES)
        optimizer.step()
        means.append(torch.stack(losses).mean().item())
    return means, model.state_dict()


def main(rank: int, store: str | None = None) -> None:
    torch.set_num_threads(1)
    if store is None:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    means = train(rank)
    dist.barrier()  # trained.pt is written
    if rank == 1:
        alone, state = train_alone()
        print("one process gives", "the very same losses" if means == alone else "OTHER losses")
        saved = torch.load("trained.pt")
        alike = saved.keys() == state.keys() and all(torch.equal(saved[name], state[name]) for name in state)
        print("trained.pt is", "the very same model" if alike else "ANOTHER model")
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" in os.environ:
        main(int(os.environ["RANK"]))
    else:
        with tempfile.TemporaryDirectory() as folder:
            torch.multiprocessing.spawn(main, args=(os.path.join(folder, "store"),), nprocs=2)
