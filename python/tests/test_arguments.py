"""Arguments of other types than a signature says are named, whatever function they are for."""

import numpy
import pytest
import torch
from plumb.formats import FPFormat
from plumb.pipelining import Balanced, ScheduleGPipe, pipeline, split_into_equal_size
from torch import nn

import plumb
from plumb import transforms


def net():
    return nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))


WRONG = [
    (lambda: transforms.unit_scale(net(), tau_mlp="x"), "tau_mlp of unit_scale() is 'x', not a number", "0.5"),
    (lambda: transforms.unit_scale(net(), depth_rule="x"), "depth_rule of unit_scale() is 'x', not True or False", "False"),
    (lambda: transforms.track_scales(net(), histogram="x"), "histogram of track_scales() is 'x', not True or False", "False"),
    (lambda: transforms.ScaleTrackingBackend([]), "histogram of ScaleTrackingBackend() is [], not True or False", "False"),
    (lambda: transforms.use_fp8(net(), history=2.5), "history of use_fp8() is 2.5, not a whole number", "1024"),
    (lambda: transforms.use_fp8(net(), kernel=3), "kernel of use_fp8() is 3, not a text", "'auto'"),
    (lambda: transforms.scale_causes(net(), high="x"), "high of scale_causes() is 'x', not a number", "4.0"),
    (lambda: transforms.run_passes(plumb.capture(net(), torch.ones(2, 8)), "dead_code", 3), "passes of run_passes() is 3, not a text", None),
    (lambda: FPFormat("x", 3), "exponent_bits of FPFormat() is 'x', not a whole number", None),
    (lambda: plumb.Parameter(torch.ones(2), "weight", "x"), "mup_scaling_depth of tag_parameter() is 'x', not a whole number", "None"),
    (lambda: pipeline(net(), (torch.ones(2, 8),), num_stages="x"), "num_stages of pipeline() is 'x', not a whole number", "None"),
    (lambda: plumb.pipelining.plan(net(), (torch.ones(2, 8),), ranks="x"), "ranks of plan() is 'x', not a whole number", None),
    (lambda: plumb.pipelining.PipelineStage(net(), "x", 1, "cpu"), "stage_index of PipelineStage() is 'x', not a whole number", None),
    (lambda: ScheduleGPipe(pipeline(net(), (torch.ones(2, 8),)).build_stage(0, "cpu"), 2.0), "n_microbatches of ScheduleGPipe() is 2.0, not a whole number", None),
    (lambda: plumb.checkpoint.Writer("x", keep_last="x"), "keep_last of Writer() is 'x', not a whole number", "2"),
    (lambda: plumb.Recorder(net(), 1, "x.history", append="x"), "append of Recorder() is 'x', not True or False", "False"),
    (lambda: split_into_equal_size("x"), "nstages of split_into_equal_size() is 'x', not a whole number", "1"),
    (lambda: Balanced(2, repeats="x"), "repeats of Balanced() is 'x', not a whole number", "5"),
]  # fmt: skip


def test_rules_of_a_recorder_are_a_file_or_a_number():
    with pytest.raises(plumb.Error, match="a dict is no rules\n.*the path of a TOML file, or a number of steps"):
        plumb.Recorder(net(), {"every": 1}, "x.history")


@pytest.mark.parametrize("call, said, default", WRONG, ids=[said.partition(" is ")[0] for _, said, _ in WRONG])
def test_an_argument_of_another_type_is_named_with_its_value_and_a_remedy(call, said, default):
    with pytest.raises(plumb.Error) as raised:
        call()
    name, of, function = said.partition(" is ")[0].partition(" of ")
    assert isinstance(raised.value, TypeError) and raised.value.message == said.replace(of + function, "", 1)
    assert raised.value.where == function
    kind = said.rpartition("not ")[2]
    assert raised.value.remedy == (kind if default is None else f"{kind}, or leave it out: {default}")


def test_numbers_of_other_libraries_and_optional_arguments_are_taken():
    scaled = transforms.unit_scale(net(), tau_mlp=numpy.float32(0.5), depth_rule=numpy.bool_(False), residual_mult=torch.tensor(1.0))
    scaled(torch.ones(2, 8))
    assert pipeline(net(), (torch.ones(2, 8),), num_stages=None).num_stages == 1
    transforms.use_fp8(net(), history=numpy.int64(16), kernel="auto")
