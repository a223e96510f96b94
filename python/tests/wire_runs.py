"""A GPT trained with formats on the way between its stages, for test_pipelining_wire.py and tools/wire_figures.py."""

import torch
import zoo
from pipelines import SINGLE, V, cross_entropy
from plumb.pipelining import SplitPoint, pipeline
from plumb.pipelining.schedules import get_schedule_class

WIRE = ("e4m3fn", "e5m2")


def gpt():
    torch.manual_seed(0)
    return zoo.GPT(vocab=64, d=32, layers=8)


def batch(step, rows=16):
    g = torch.Generator().manual_seed(step)
    return torch.randint(64, (rows, 16), generator=g), torch.randint(64, (rows, 16), generator=g)


def cut(stages, **options):
    model = gpt()
    spec = {f"blocks.{8 * s // stages}": SplitPoint.BEGINNING for s in range(1, stages)}
    return model, pipeline(model, (batch(0, 2)[0],), split_spec=spec, **options)


def train(name, rank, size, wire, steps=2):
    """Returns a step's losses on the rank of the last stage, and how many bytes this rank sent."""
    num = size if name in SINGLE else 2 * size
    _, pipe = cut(num, wire=wire)
    here = sorted({rank, num - 1 - rank}) if name in V else [s for s in range(num) if s % size == rank]
    stages = [pipe.build_stage(s, torch.device("cpu")) for s in here]
    schedule = get_schedule_class(name)(stages[0] if name in SINGLE else stages, 8, cross_entropy)
    schedule.record_timeline = True
    optimizer = torch.optim.SGD([p for s in stages for p in s.submod.parameters()], lr=0.1)
    losses, sent = [], 0
    for step in range(steps):
        optimizer.zero_grad()
        ids, targets = batch(step)
        own: list = []
        schedule.step(*([ids] if 0 in here else []), target=targets, losses=own)
        optimizer.step()
        losses.append([loss.item() for loss in own])
        sent += sum(n for (of, _), n in schedule.bytes_sent().items() if of == rank)
    return (losses if num - 1 in here else None), sent


def reference(wire, stages, steps=2):
    """Returns the losses of one process: the pipe as a module, microbatch after microbatch."""
    _, pipe = cut(stages, wire=wire)
    optimizer = torch.optim.SGD(list(pipe.parameters()), lr=0.1)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        own = []
        for x, y in zip(*(t.chunk(8) for t in batch(step))):
            loss = cross_entropy(pipe(x)[0], y)
            loss.backward()
            own.append(loss.item())
        for p in pipe.parameters():
            p.grad.div_(8)
        optimizer.step()
        losses.append(own)
    return losses


def train_by_each(rank, size, names):
    return {(name, wire): train(name, rank, size, wire) for name in names for wire in (WIRE, None)}
