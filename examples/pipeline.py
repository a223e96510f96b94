"""Trains a small model over two processes with a schedule written by hand, saves it whole, and checks it against one process.

python examples/pipeline.py                             starts both processes itself
torchrun --nproc-per-node=2 examples/pipeline.py        the same under torch's launcher
python examples/pipeline.py --device cuda               on GPUs: over NCCL if there are two, else staged through the CPU
"""

import argparse
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


def batch(step: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns a batch of a function to learn: a wave along one direction of the inputs."""
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(step))
    return x.to(device), torch.sin(x @ torch.linspace(-0.5, 0.5, 8)[:, None]).to(device)


def train(rank: int, device: torch.device) -> list[float]:
    module = halves()[rank].to(device)
    stage = PipelineStage(module, rank, 2, device)
    table = pathlib.Path(__file__).with_name("schedule.csv")
    schedule = ScheduleTable([stage], MICROBATCHES, nn.functional.mse_loss, table=table)
    schedule.record_timeline = True
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    means = []
    for step in range(STEPS):
        x, target = batch(step, device)
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
    states = schedule.gather_stage_states()  # states of both stages, on both ranks
    if rank == 0:
        torch.save({f"{i}.{name}": tensor for i, state in enumerate(states) for name, tensor in state.items()}, "trained.pt")
    if rank == 1:
        print(f"loss {means[0]:.4f} -> {means[-1]:.4f}; ranks idle {bubble:.0%} of the last step: timeline.svg")
    return means


def train_alone(device: torch.device) -> tuple[list[float], dict[str, torch.Tensor]]:
    model = nn.Sequential(*halves()).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    means = []
    for step in range(STEPS):
        optimizer.zero_grad()
        losses = []
        for x, target in zip(*(t.chunk(MICROBATCHES) for t in batch(step, device))):
            losses.append(nn.functional.mse_loss(model(x), target))
            losses[-1].backward()
        for parameter in model.parameters():
            parameter.grad.div_(MICROBATCHES)
        optimizer.step()
        means.append(torch.stack(losses).mean().item())
    return means, model.state_dict()


def device_of(rank: int, name: str) -> tuple[torch.device, str]:
    """This rank's device, and the backends of the group."""
    if name == "cpu":
        return torch.device("cpu"), "gloo"
    try:
        torch.empty(1, device=name)
    except Exception as error:
        raise SystemExit(f"--device {name}: {str(error).splitlines()[0]}")
    count = torch.get_device_module(name).device_count()
    if name == "cuda" and count > 1 and dist.is_nccl_available():
        torch.cuda.set_device(rank)
        return torch.device(name, rank), "cpu:gloo,cuda:nccl"
    return torch.device(name, rank % count), "gloo"  # values are staged through the CPU


def main(rank: int, device_name: str, store: str | None = None) -> None:
    torch.set_num_threads(1)
    device, backend = device_of(rank, device_name)
    if store is None:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=2)
    means = train(rank, device)
    dist.barrier()  # trained.pt is written
    if rank == 1:
        alone, state = train_alone(device)
        print("one process gives", "the very same losses" if means == alone else "OTHER losses")
        saved = torch.load("trained.pt", map_location=device)
        alike = saved.keys() == state.keys() and all(torch.equal(saved[name], state[name]) for name in state)
        print("trained.pt is", "the very same model" if alike else "ANOTHER model")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu", help="cpu, cuda, ...: where the stages compute")
    device_name = parser.parse_args().device
    if "RANK" in os.environ:
        main(int(os.environ["RANK"]), device_name)
    else:
        device_of(0, device_name)  # says at once that there is no such device
        with tempfile.TemporaryDirectory() as folder:
            torch.multiprocessing.spawn(main, args=(device_name, os.path.join(folder, "store")), nprocs=2)
