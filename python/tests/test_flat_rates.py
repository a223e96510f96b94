"""Optimizers that give all unit-scaled parameters one learning rate are named."""

import warnings

import torch
from torch import nn

import plumb
from plumb.transforms import unit_scale


def steps(optimizer, count=2):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(count):
            optimizer.step()
    return [str(w.message) for w in seen if "unit-scaled" in str(w.message)]


def test_an_optimizer_that_gives_unit_scaled_parameters_one_rate_is_named_once_with_the_remedy():
    scaled = unit_scale(nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 4)))
    scaled(torch.randn(2, 16)).sum().backward()
    (text,) = steps(torch.optim.AdamW(scaled.parameters(), lr=1e-3))
    assert "AdamW" in text and "plumb.optim.AdamW" in text
    (text,) = steps(torch.optim.RMSprop(scaled.parameters(), lr=1e-3))
    assert "plumb.optim.scaled_parameters" in text
    rates = plumb.optim.lr_scale_func_adam
    assert not steps(plumb.optim.AdamW(scaled.parameters(), lr=1e-3))
    assert not steps(torch.optim.RMSprop(plumb.optim.scaled_parameters(scaled.parameters(), rates, lr=1e-3)))


def test_nothing_is_said_of_rates_that_differ_or_of_plain_parameters():
    scaled, plain = unit_scale(nn.Linear(16, 16)), nn.Linear(16, 16)
    for m in (scaled, plain):
        m(torch.randn(2, 16)).sum().backward()
    assert not steps(torch.optim.AdamW([{"params": [scaled.weight], "lr": 1e-3}, {"params": [scaled.bias], "lr": 1e-2}]))
    assert not steps(torch.optim.AdamW(plain.parameters(), lr=1e-3))


def test_rates_of_plumbs_optimizers_that_a_loop_or_schedule_sets_to_one_are_named_and_the_remedy_holds():
    scaled = unit_scale(nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 4)))
    scaled(torch.randn(2, 16)).sum().backward()

    def made():
        return plumb.optim.AdamW(scaled.parameters(), lr=1e-3)

    by_loop, one_cycle, remedied = made(), made(), made()
    for rate in (0.0, 1e-3):  # a warm-up that begins at zero
        for group in by_loop.param_groups:
            group["lr"] = rate
        said = steps(by_loop)
        assert len(said) == (rate > 0) and all("AdamW steps" in text and "multiply each group's rate" in text for text in said)
    torch.optim.lr_scheduler.OneCycleLR(one_cycle, max_lr=0.1, total_steps=9)
    (text,) = steps(one_cycle)
    assert "max_lr=[g['lr'] for g in optimizer.param_groups]" in text
    torch.optim.lr_scheduler.OneCycleLR(remedied, max_lr=[g["lr"] for g in remedied.param_groups], total_steps=9)
    assert not steps(remedied)
    averaged, kept = made(), made()
    for optimizer, swa_lr in ((averaged, 0.05), (kept, [g["lr"] for g in kept.param_groups])):
        scheduler = torch.optim.swa_utils.SWALR(optimizer, swa_lr=swa_lr, anneal_epochs=2)
        said = []
        for _ in range(4):  # whose rates come to be one after the first step
            said += steps(optimizer, 1)
            scheduler.step()
        assert len(said) == (optimizer is averaged) and all("swa_lr=" in text for text in said)
    warm, same = made(), plumb.optim.AdamW([scaled[0].weight], lr=1e-3)
    torch.optim.lr_scheduler.LambdaLR(warm, lambda step: step / 10)
    assert not steps(warm) and not steps(same)


def test_an_optimizer_may_lose_groups_after_its_first_step():
    scaled = unit_scale(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 4)))
    scaled(torch.randn(2, 16)).sum().backward()
    optimizer = plumb.optim.AdamW(scaled.parameters(), lr=1e-3)
    assert not steps(optimizer)
    del optimizer.param_groups[1:]
    assert not steps(optimizer)


class Transposed(nn.Module):
    """A weight of no layer of torch's, as Conv1D of transformers has it: only the graph shows that it is one."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 4))

    def forward(self, x):
        return x @ self.weight


def test_an_optimizer_that_was_made_before_the_graph_showed_the_weights_is_named_once_with_the_remedy():
    for early in (True, False):
        scaled = unit_scale(nn.Sequential(nn.Linear(16, 16), nn.GELU(), Transposed()))
        if not early:
            scaled(torch.randn(2, 16))
        optimizer = plumb.optim.AdamW(scaled.parameters(), lr=1e-3)
        scaled(torch.randn(2, 16)).sum().backward()
        said = steps(optimizer)
        assert len(said) == early
        assert all("1 of its 3 learning rates" in text and "call the module once on a batch" in text for text in said)
