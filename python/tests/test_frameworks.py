"""Transformed modules under training frameworks, which set forwards of their own, put layers into others and copy modules."""

import copy
import functools
import logging
import types

import pytest
import torch
from torch import nn
from transform_models import mlp, saved

import plumb
from plumb.transforms import fold, simulate_format, track_scales, unit_scale

x = torch.linspace(-2, 2, 32).reshape(4, 8)


def fp8():
    return track_scales(simulate_format(unit_scale(mlp()), "e4m3fn-RN", "e5m2-RN"))


def with_mixed_precision(module):
    """Sets a forward under autocast as accelerate does: a method where it finds one, a function else."""
    forward = module.forward
    around = torch.autocast("cpu", dtype=torch.bfloat16)
    module.original = forward
    if hasattr(forward, "__func__"):
        module.forward = types.MethodType(around(forward.__func__), module)
    else:
        module.forward = around(forward)
    return module


def with_hook(module):
    """Sets a partial function around the forward, as accelerate's hooks do."""
    module.old_forward = module.forward
    module.forward = functools.update_wrapper(functools.partial(_hooked, module), module.old_forward)
    return module


def _hooked(module, *args):
    return module.old_forward(*args)


def halved(module):
    with torch.no_grad():
        for p in module.parameters():
            p.mul_(0.5)
    return module


WRAPPERS = {"method": with_mixed_precision, "partial": with_hook}


@pytest.mark.parametrize("wrap", WRAPPERS)
def test_a_transformed_module_is_known_behind_the_forward_that_a_library_set(wrap):
    module = WRAPPERS[wrap](fp8())
    y = module(x)
    assert len(plumb.report(module)) == 3
    assert len(module.scales_graph().nodes) > 5
    with torch.no_grad():
        torch.testing.assert_close(fold(module)(x), unit_scale(mlp())(x), rtol=1e-5, atol=1e-5)
    assert torch.equal(simulate_format(module, "e4m3fn-RN", "none")(x), y), "rounded already"
    assert torch.equal(track_scales(module)(x), y), "under the same autocast"


@pytest.mark.parametrize("how", [copy.deepcopy, copy.copy, saved])
@pytest.mark.parametrize("wrap", WRAPPERS)
def test_a_copy_behind_the_forward_that_a_library_set_computes_with_its_own_weights(wrap, how):
    if wrap == "partial" and how is copy.copy:
        pytest.skip("a shallow copy keeps a partial function of the module, as in eager mode")
    module = WRAPPERS[wrap](fp8())
    y = module(x)
    made = how(module)
    made(x)
    assert len(plumb.report(made)) == 3
    if how is not saved:  # whose functions cannot be pickled
        assert torch.equal(made(x), y)
    if how is copy.copy:
        made.eval()
        assert module.training
        return
    halved(made)
    assert torch.equal(module(x), y) and not torch.equal(made(x), y)


def test_a_model_of_averaged_weights_under_mixed_precision_is_one_of_its_own():
    module = with_mixed_precision(fp8())
    module(x)
    average = torch.optim.swa_utils.AveragedModel(module, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
    average.update_parameters(module)
    before = module(x)
    average.update_parameters(halved(module))
    mean = torch.optim.swa_utils.AveragedModel(module)
    assert not torch.equal(average(x), before) and not torch.equal(average(x), mean(x))


def test_a_method_taken_off_again_leaves_the_transformed_forward():
    module = with_mixed_precision(fp8())
    forward = module.forward.__func__
    while hasattr(forward, "__wrapped__"):
        forward = forward.__wrapped__
    module.forward = types.MethodType(forward, module)  # accelerate's unwrap_model
    assert torch.equal(module(x), fp8()(x))
    assert len(plumb.report(module)) == 3


def test_a_recorder_records_behind_the_forward_that_a_library_set(tmp_path):
    module = with_mixed_precision(fp8())
    y, forward = module(x), module.forward
    with plumb.Recorder(module, 1, tmp_path / "a.history") as recorder:
        assert torch.equal(module(x), y)
        assert recorder.step() > 5
    assert torch.equal(module(x), y) and module.forward == forward
    assert len(plumb.report(module)) == 3


class Adapted(nn.Module):
    """A layer in another one, as adapters of peft have it."""

    def __init__(self, layer):
        super().__init__()
        self.base_layer = layer
        self.down, self.up = nn.Linear(layer.in_features, 2, bias=False), nn.Linear(2, layer.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    @property
    def weight(self):
        return self.base_layer.weight

    def forward(self, x):
        return self.base_layer(x) + self.up(self.down(x))


def trained():
    module = unit_scale(mlp())
    module(x)
    with torch.no_grad():
        module[0].weight.mul_(3)
    return module


@pytest.mark.parametrize("how", ["loaded", "loaded_and_run", "copied", "adapted_before_it_is_loaded"])
def test_weights_whose_layer_is_put_into_another_are_not_scaled_again(how):
    base = trained()
    state = base.state_dict()
    module = unit_scale(mlp())
    if how == "adapted_before_it_is_loaded":
        module[0] = Adapted(module[0])
        state = {key.replace("0.", "0.base_layer.", 1) if key.startswith("0.") else key: value for key, value in state.items()}
        module.load_state_dict(state, strict=False)
    else:
        module.load_state_dict(state)
        if how == "loaded_and_run":
            module(x)
        module[0] = Adapted(module[0])
        if how == "copied":
            module = copy.deepcopy(module)
    before = module[0].base_layer.weight.detach().clone()
    module.train()(x)
    assert torch.equal(module[0].base_layer.weight, before)
    module.eval()(x)
    assert "0.base_layer.weight" in [e["node"] for e in plumb.report(module)[0]["entries"] if e["kind"] == "weight"]
    assert torch.equal(module[0].base_layer.weight, base[0].weight)


def test_a_wrapper_of_a_transformed_part_names_the_part():
    outer = nn.Sequential(fp8(), nn.ReLU())
    outer(x)
    with pytest.raises(plumb.Error, match=r"a part of it was\n  try: plumb\.report\(module\.get_submodule\('0'\)\)"):
        plumb.report(outer)
    with pytest.raises(plumb.Error, match=r"try: fold the part: fold\(module\.get_submodule\('0'\)\)"):
        fold(outer)


def test_more_kinds_of_inputs_than_graphs_are_kept_are_named_once(caplog, monkeypatch):
    monkeypatch.setattr(plumb.transforms._apply, "MAX_GRAPHS", 4)
    module = simulate_format(mlp(), "E4M3-RN", "none")
    with caplog.at_level(logging.WARNING, "plumb.transforms"):
        for rows in range(1, 5):
            module(x[:1].expand(rows, 8))
        assert not caplog.records
        for rows in (5, 1, 2):
            module(x[:1].expand(rows, 8))
    assert len(caplog.records) == 1 and "more than 4 kinds" in caplog.text and "pad_to_multiple_of" in caplog.text


def test_weights_that_a_hook_brings_for_the_call_are_refused_with_the_remedy():
    model = mlp()
    values = model[0].weight.detach()
    model[0].weight = nn.Parameter(values.to("meta"))
    model[0].register_forward_pre_hook(lambda layer, _: setattr(layer, "weight", nn.Parameter(values)))  # as offloading does
    with pytest.raises(plumb.Error, match=r"the parameter '0\.weight'.*\n  try: keep weights where the model runs.*\(offloading\)"):
        track_scales(model)(x)


def trained_by(module, step):
    """Trains for three steps and returns the losses."""
    optimizer = plumb.optim.AdamW(module.parameters(), lr=0.1)
    losses = []
    run, backward, optimizer = step(module, optimizer)
    for scale in (1.0, 0.5, 2.0):
        optimizer.zero_grad()
        loss = (run(x * scale) - x[:, :4]).pow(2).mean()
        losses.append(loss.item())
        backward(loss)
        optimizer.step()
    return losses


def test_accelerate_trains_a_transformed_module_with_the_losses_of_a_loop_by_hand():
    accelerate = pytest.importorskip("accelerate", reason="the package accelerate is not installed")
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    module = fp8()

    def by_hand(module, optimizer):
        return lambda x: torch.autocast("cpu", dtype=torch.bfloat16)(module)(x).float(), torch.Tensor.backward, optimizer

    def by_accelerate(module, optimizer):
        module, optimizer = accelerator.prepare(module, optimizer)
        return module, accelerator.backward, optimizer

    assert trained_by(module, by_accelerate) == trained_by(fp8(), by_hand)
    assert len(plumb.report(module)) == 3
    assert len(plumb.report(accelerator.unwrap_model(module, keep_fp32_wrapper=False))) == 3


def test_adapters_of_peft_leave_the_weights_of_a_unit_scaled_module_and_are_merged_once_it_is_folded():
    peft = pytest.importorskip("peft", reason="the package peft is not installed")
    base = trained()
    before = base[0].weight.detach().clone()
    module = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["0"], init_lora_weights=False))
    y = module(x)
    assert torch.equal(before, base[0].base_layer.weight)
    module.eval()
    assert torch.equal(module(x), y)
    module.base_model.model = fold(base)
    torch.testing.assert_close(module.merge_and_unload()(x), y, rtol=1e-4, atol=1e-4)
