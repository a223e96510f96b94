"""u-muP's tags go where parameters go: files, stages, copies, pickles."""

import copy
import gc
import pickle
import weakref

import plumb.nn as U
import pytest
import torch
import zoo
from plumb.pipelining import SplitPoint, deserialize_stage, pipeline
from torch import nn

import plumb
from plumb.transforms import unit_scale


def tags(module):
    return {
        n: plumb.parameter.tag_of(p)
        for n, p in module.named_parameters(remove_duplicate=False)
        if hasattr(p, "mup_type")
    }


@pytest.fixture
def scaled():
    torch.manual_seed(0)
    model, args, _ = zoo.MODELS["GPT tied"]()
    model = unit_scale(model, depth_rule=True)
    model(*args)
    assert tags(model)["blocks.0.mlp.0.weight"][1] is not None, "the depth rule gives depths"
    return model, args


def test_tagged_parameters_that_nobody_has_are_free_at_once():
    gc.disable()
    try:
        layer = plumb.nn.Linear(4, 4)
        kept = [weakref.ref(p) for p in layer.parameters()]
        del layer
        assert kept and not any(ref() is not None for ref in kept)
    finally:
        gc.enable()


def test_a_transformed_model_that_nobody_has_is_free_after_one_look_for_cycles(scaled):
    model = copy.deepcopy(scaled[0])
    model(*scaled[1])
    kept = [weakref.ref(p) for p in model.parameters()]
    gc.collect()
    del model
    gc.collect()
    assert kept and not any(ref() is not None for ref in kept)


def test_a_file_keeps_tags(scaled, tmp_path):
    model, args = scaled
    model.ln.weight.mup_scaling_depth, model.ln.weight.mup_fan_in = 7, 5  # set by hand, as attributes
    graph = plumb.capture(model, *args)
    plumb.save_pt2(graph, tmp_path / "m.pt2")
    again = plumb.load_pt2(tmp_path / "m.pt2")
    assert tags(again) == tags(model) and len(tags(again)) == len(list(model.named_parameters(remove_duplicate=False)))
    plumb.save_pt2(again, tmp_path / "n.pt2")
    assert tags(plumb.load_pt2(tmp_path / "n.pt2")) == tags(model)
    plumb.optim.AdamW(again.parameters(), lr=0.1)  # refuses parameters without tags
    torch.export.load(tmp_path / "m.pt2")


def test_graphs_keep_tags_in_copies_and_pickles(scaled):
    model, args = scaled
    graph = plumb.capture(model, *args)
    assert tags(graph) == tags(model)
    assert tags(copy.deepcopy(graph)) == tags(model)
    assert tags(pickle.loads(pickle.dumps(graph))) == tags(model)


def test_stages_keep_tags_as_bytes_copies_and_pickles(scaled):
    model, args = scaled
    pipe = pipeline(model, args, split_spec={"blocks.1": SplitPoint.BEGINNING})
    whole = tags(model)
    assert pipe.replicated_params, "the tied weight is in both stages"
    for i in range(2):
        stage = pipe.get_stage_module(i)
        wanted = {n: whole[n] for n in dict(stage.named_parameters(remove_duplicate=False))}
        assert tags(stage) == wanted
        assert tags(pickle.loads(pickle.dumps(stage))) == wanted
        assert tags(copy.deepcopy(stage)) == wanted
        assert tags(deserialize_stage(pipe.serialize_stage(i))[0]) == wanted
        plumb.optim.AdamW(stage.parameters(), lr=0.1)


def test_tensors_that_are_assigned_to_a_unit_scaled_module_get_its_tags(scaled):
    scaled, _ = scaled
    expected, state = tags(scaled), scaled.state_dict()
    frozen = next(iter(scaled.parameters())).requires_grad_(False)
    scaled.load_state_dict(state, assign=True)
    assert expected and tags(scaled) == expected
    assert frozen is not next(iter(scaled.parameters())) and not next(iter(scaled.parameters())).requires_grad
    plumb.optim.AdamW(scaled.parameters(), lr=0.1)


def test_tensors_that_are_assigned_to_unit_scaled_layers_get_their_tags():
    with torch.device("meta"):
        net = nn.Sequential(U.Embedding(8, 4), U.Linear(4, 4, bias=True), U.RMSNorm(4, elementwise_affine=True), U.LinearReadout(4, 2))
    expected = tags(net)
    net.load_state_dict({n: torch.randn(p.shape) for n, p in net.state_dict().items()}, assign=True)
    assert len(expected) == 5 and tags(net) == expected and not any(p.is_meta for p in net.parameters())
    plumb.optim.AdamW(net.parameters(), lr=0.1)


def test_tags_set_on_a_plain_module_travel_too(tmp_path):
    net = nn.Linear(4, 4)
    plumb.parameter.tag_parameter(net.weight, "output", 3)
    plumb.save_pt2(plumb.capture(net, torch.randn(2, 4)), tmp_path / "m.pt2")
    assert tags(plumb.load_pt2(tmp_path / "m.pt2")) == {"weight": ("output", 3, None)}
