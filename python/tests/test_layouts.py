"""Runs that die in one layout and go on in another: pairs of tools/layouts_table.py."""

import layout_runs
import pytest


@pytest.mark.parametrize(
    ("model", "first", "second"),
    [
        ("gpt", "2 x 2, Interleaved1F1B", "1 x 1"),
        ("gpt", "1 x 2, GPipe", "2 x 1, ZBVZeroBubble"),
        ("convnet", "3 x 1, GPipe", "2 x 2, 1F1B"),
        ("fp8", "2 x 1, ZBVZeroBubble", "1 x 2, GPipe"),
    ],
)
def test_a_run_goes_on_in_another_layout_with_the_bits_of_one_that_nobody_killed(tmp_path, monkeypatch, model, first, second):
    monkeypatch.setattr(layout_runs, "STEPS", 8)
    run = layout_runs.Run(tmp_path, layout_runs.MODELS[model](tmp_path))
    losses, wanted = run.train("1 x 1", "whole"), run.last("whole")
    assert len(losses) == wanted[0] == 8
    before = run.train(first, "killed", kill_at=5)
    assert layout_runs.go_on(run, before, losses, wanted, second, "killed") == (0, 0, 0)
    other = {name: value + 1 for name, value in wanted[1].items()}
    assert layout_runs.differing_bits(other, wanted[1]) > 0 and layout_runs.differing_bits({}, losses) >= 8
