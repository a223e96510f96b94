"""Schedules as data, beside torch's own."""

import inspect
import json
import os
import pydoc
import re
import resource
import signal

import pytest
import torch
from plumb._C import make_schedule
from plumb.pipelining import PipelineStage, ScheduleTable, search_schedule
from plumb.pipelining.schedules import (
    RECV_F,
    RESHARD,
    SEND_B,
    UNSHARD,
    B,
    F,
    I,
    PipelineScheduleMulti,
    W,
    _Action,
    _PipelineScheduleRuntime,
    _validate_schedule,
    get_schedule_class,
)
from torch import nn
from torch.distributed.pipelining import _schedule_visualizer as torch_visualizer
from torch.distributed.pipelining import schedules as torchs
from torch_names import _schedule_visualizer, schedules
from torch_names._schedule_visualizer import get_schedule_ops

import plumb

NAMES = ["GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"]
SIZES = [(2, 4), (4, 8), (4, 10), (8, 16)]
OWN = ["ZBH1", "ZBH2", "VHalf", "VMin", "DualPipe"]


def text(rows):
    return [[str(a) for a in row if a is not None] for row in rows]


def without_waits(rows):
    """Returns rows of torch's without the waits that it has from 2.15 on."""
    return [[a for a in row if "WAIT" not in a] for row in rows]


def both(actions):
    """Returns a table as plumb's and as torch's actions."""
    return (
        {rank: [_Action.from_str(a) for a in row] for rank, row in actions.items()},
        {rank: [torchs._Action.from_str(a) for a in row] for rank, row in actions.items()},
    )


def computing(rows):
    return [[a for a in row if "REDUCE" not in a] for row in rows]


@pytest.mark.parametrize("ranks, microbatches", SIZES)
@pytest.mark.parametrize("name", NAMES)
def test_tables_are_torchs(name, ranks, microbatches):
    theirs = {"ZBV": "ZBVZeroBubble"}.get(name, name)
    ours = text(get_schedule_ops(name, ranks, microbatches))
    if name in ("Interleaved1F1B", "InterleavedZeroBubble") and microbatches % max(1, microbatches // ranks):
        with pytest.raises(ValueError):
            torch_visualizer.get_schedule_ops(theirs, ranks, microbatches)
    else:
        expected = without_waits(text(torch_visualizer.get_schedule_ops(theirs, ranks, microbatches)))
        if name == "1F1B":
            # torch's last rank begins with microbatch 1 and never runs 0.
            assert f"{ranks - 1}F0" not in expected.pop() and f"{ranks - 1}F0" in computing(ours).pop()
            ours.pop()
        assert ours == expected
    assert get_schedule_class(name.lower()) is get_schedule_class(name.upper())


@pytest.mark.parametrize("name", torchs.__all__)
def test_schedules_are_made_with_torchs_arguments_at_torchs_places(name):
    def arguments(module):
        return [(p.name, p.kind, p.default) for p in inspect.signature(getattr(module, name)).parameters.values()]

    theirs = arguments(torchs)
    assert arguments(plumb.pipelining.schedules)[: len(theirs)] == theirs


@pytest.mark.parametrize("name", OWN)
def test_own_tables_can_run(name):
    rows = get_schedule_ops(name, 4, 12)
    lowered = get_schedule_ops(name, 4, 12, with_comms=True)
    assert [[a for a in row if a and a.is_compute_op] for row in rows] == [
        [a for a in row if a.is_compute_op] for row in lowered
    ]
    assert any(a.computation_type is SEND_B for a in lowered[0] + lowered[1])


@pytest.mark.parametrize(
    "action",
    [
        "1F0",
        "2B1",
        "0W3",
        "4I10",
        "1UNSHARD",
        "3RESHARD",
        "2REDUCE_GRAD",
        "0SEND_F1",
        "1RECV_F0",
        "1SEND_B2",
        "0RECV_B0",
        "(0F5;7B2)OVERLAP_F_B",
        "(1F0;2I3)OVERLAP_F_B",
    ],
)
def test_actions_have_torchs_text(action):
    ours, theirs = _Action.from_str(f" {action}"), torchs._Action.from_str(action)
    assert str(ours) == repr(ours) == action
    assert tuple(ours[:3]) == tuple(theirs[:3]) and ours.is_compute_op == theirs.is_compute_op


def test_an_action_is_a_tuple():
    assert _Action.from_str("2F0") == _Action(2, F, 0) == (2, "F", 0, None)
    assert _Action.from_str("1UNSHARD") == _Action(1, UNSHARD) and _Action.from_str("3RESHARD") == _Action(3, RESHARD)
    assert _Action.from_str("  ") is None
    assert _Action(1, RECV_F, 0) != _Action(1, SEND_B, 0)


@pytest.mark.parametrize(
    "bad", ["2F", "F0", "2X0", "2F0x", "2F0 1F0", "1UNSHARD3", "(0F1)OVERLAP_F_B", "-1F0", "0SEND_F2>3"]
)
def test_the_parser_is_strict(bad):
    with pytest.raises(plumb.Error, match="."):
        _Action.from_str(bad)


@pytest.mark.parametrize("name", NAMES)
def test_lowering_is_torchs(name):
    rows = dict(enumerate(text(get_schedule_ops(name, 4, 8))))
    rows = {rank: [a for a in row if "REDUCE" not in a] for rank, row in rows.items()}
    ours, theirs = both(rows)
    mapping = _validate_schedule(ours, 4, 1 + max(a.stage_index for r in ours.values() for a in r), 8)
    stages = len(mapping)
    for rank in rows:
        unsharded = schedules._add_unshard_reshard(ours[rank], 2)
        assert text([unsharded]) == text([torchs._add_unshard_reshard(theirs[rank], 2)])
        reduced = without_waits(text([torchs._add_reduce_grad(theirs[rank], 8)]))
        assert text([schedules._add_reduce_grad(ours[rank], 8)]) == reduced
        assert text([schedules._merge_bw(ours[rank])]) == text([torchs._merge_bw(list(theirs[rank]))])
    lowered = schedules._add_send_recv(ours, mapping.__getitem__, stages)
    expected = torchs._add_send_recv(theirs, mapping.__getitem__, stages)
    assert text(lowered.values()) == text(expected.values())
    if hasattr(torchs, "_defer_recv_ops"):  # new in torch 2.12
        late = schedules._defer_recv_ops(lowered, mapping.__getitem__)
        assert text(late.values()) == text(torchs._defer_recv_ops(expected, mapping.__getitem__).values())
    if name != "DualPipeV":  # torch does not simulate pairs
        played = schedules._simulate_comms_compute(lowered, mapping.__getitem__, stages)
        reference = torchs._simulate_comms_compute(expected, mapping.__getitem__, stages)
        assert {r: list(map(str, row)) for r, row in played.items()} == {
            r: list(map(str, row)) for r, row in reference.items()
        }


def test_idle_entries_take_a_turn_where_messages_are_put_in_as_torchs_do():
    rows = {0: ["0F0", "0F1", "", "0B0", "", "0B1"], 1: ["", "1F0", "1B0", "1F1", "1B1", ""]}
    ours, theirs = both(rows)
    lowered = schedules._add_send_recv(ours, lambda stage: stage, 2)
    assert [str(action) for action in lowered[1][:3]] == ["1RECV_F0", "1RECV_F1", "1F0"]
    assert text(lowered.values()) == text(torchs._add_send_recv(theirs, lambda stage: stage, 2).values())


def test_a_table_with_messages_that_cannot_run_names_the_entries():
    def table(*rows):
        return {rank: [_Action.from_str(cell) for cell in row.split()] for rank, row in enumerate(rows)}

    with pytest.raises(AssertionError, match="Malformed.*nothing can run of rank 0 at 0B0, rank 1 at 1F1"):
        schedules._add_send_recv(table("0F0 0B0", "1F1 1F0 1B0"), lambda stage: stage, 2)
    with pytest.raises(ValueError, match="not progressing.*rank 0 at 0RECV_B0, rank 1 at 1F0"):
        schedules._simulate_comms_compute(table("0RECV_B0 0F0 0B0", "1F0 1B0"), lambda stage: stage, 2)
    with pytest.raises(AssertionError, match="rank 1 .* receives 1RECV_F0 and nothing after it uses that"):
        schedules._defer_recv_ops(table("0F0 0SEND_F0 0B0", "1RECV_F0 1B0"), lambda stage: stage)
    with pytest.raises(AssertionError, match="2 stages, and an entry 2F0"):
        schedules._add_send_recv(table("0F0 2F0", "1F0"), lambda stage: stage, 2)


def test_a_table_as_text_is_torchs():
    ours, theirs = both({0: ["0F0", "", "0F1", "0B0", "0B1"], 1: ["", "1F0", "1B0", "", "1RECV_F1", "1F1", "1B1"]})
    for step in (None, 0, 5):
        assert schedules._format_pipeline_order(ours, step) == torchs._format_pipeline_order(theirs, step)


def test_every_schedule_of_the_engine_has_a_class_and_a_line_in_the_docs():
    import pipeline_tables
    import plumb.pipelining

    for name in plumb._C.schedule_names():
        cls = getattr(plumb.pipelining, f"Schedule{name}")
        assert cls is get_schedule_class(name) and cls.__name__ in plumb.pipelining.__all__
        traits = plumb._C.schedule_traits(name)
        one_stage = traits["max_stages_per_rank"] == 1 and not traits["bidirectional"]
        assert cls.__doc__.startswith(traits["summary"]) and cls._name == name
        assert issubclass(cls, plumb.pipelining.PipelineScheduleSingle if one_stage else PipelineScheduleMulti)
    assert set(plumb.pipelining.schedules._CLASSES) == set(plumb._C.schedule_names())
    written = pipeline_tables.DOCUMENT.read_text()
    section = pipeline_tables.schedules()
    assert pipeline_tables.put(written, "schedules", section) == written, "run tools/pipeline_tables.py --schedules"


@pytest.mark.parametrize("cls", [plumb.pipelining.Schedule1F1B, plumb.pipelining.ScheduleZBVZeroBubble, ScheduleTable])
def test_help_of_a_schedule_explains_its_arguments_and_options(cls):
    text = pydoc.plain(pydoc.render_doc(cls))
    options = ["timeout", "record_timeline", "check_numerics", "seed", "first_step", "gradient_groups"]
    for name in [*options, "n_microbatches", "loss_fn", "output_merge_spec", "scale_grads"]:
        assert re.search(rf"\b{name}: \S", text), name
    assert not [name for name in options if not hasattr(cls, name)]


def parse(*rows):
    return {rank: [_Action.from_str(a) for a in row.split(",")] for rank, row in enumerate(rows)}


@pytest.mark.parametrize(
    "rows", [("0F0,0B0", "1F0,1B0"), ("0F0,0I0,0W0", "1F0,,1I0,1W0"), ("0F0,,,0B0", "1F0,1I0,1W0")]
)
def test_a_complete_table_says_who_runs_what(rows):
    assert _validate_schedule(parse(*rows), 2, 2, 1) == {0: 0, 1: 1}


@pytest.mark.parametrize(
    "ranks, microbatches, rows, says",
    [
        (2, 1, ("0F0,0B0",), "ranks"),
        (2, 1, ("0F0,0B0", "1F0"), "1"),
        (2, 2, ("0F0,0B0", "1F0,1B0"), "0F1 is missing"),
        (2, 1, ("0F0,0B0", "1B0,1F0"), "1B0"),
        (2, 1, ("0F0,0W0,0I0", "1F0,1B0"), "0W0"),
        (2, 1, ("0F0,0B0,1F0", "1F0,1B0"), "1F0"),
        (2, 2, ("0F0,0B0,0F1,0B1", "1F1,1B1,1F0,1B0"), "."),
    ],
)
def test_a_table_that_cannot_run_is_an_assertion_and_an_error(ranks, microbatches, rows, says):
    with pytest.raises(AssertionError, match=says):
        _validate_schedule(parse(*rows), ranks, 2, microbatches)
    with pytest.raises(plumb.Error):
        _validate_schedule(parse(*rows), ranks, 2, microbatches)


def stand_ins(count, ranks):
    return [_schedule_visualizer._StandIn(i, count * ranks, ranks) for i in range(count)]


def test_csv_files_round_trip_and_take_comments(tmp_path):
    made = get_schedule_class("ZBVZeroBubble")(stand_ins(2, 2), 4)
    compute, comms = str(tmp_path / "compute.csv"), str(tmp_path / "comms.csv")
    made._dump_csv(compute, format="compute_only")
    made._dump_csv(comms)
    for file, form in ((compute, "compute_only"), (comms, "compute_comms")):
        with open(file) as f:
            lines = f.read()
        with open(file, "w") as f:
            f.write(f"# a schedule\n\n{lines}# the end\n")
        runtime = _PipelineScheduleRuntime(stand_ins(2, 2), 4)
        runtime._load_csv(file, format=form)
        assert runtime.pipeline_order_with_comms == made.pipeline_order_with_comms
        assert runtime.stage_index_to_group_rank == made.stage_index_to_group_rank == {0: 0, 1: 1, 2: 1, 3: 0}
    assert runtime._simulate() == made._simulate()
    with pytest.raises(ValueError, match="Expected compute-only schedule"):
        runtime._load_csv(comms)
    with open(compute, "a") as f:
        f.write("0Q0\n")
    with pytest.raises(plumb.Error, match="compute.csv"):
        runtime._load_csv(compute)


def test_files_that_are_no_schedules_are_named(tmp_path):
    runtime = _PipelineScheduleRuntime(stand_ins(2, 2), 4)
    (tmp_path / "binary.csv").write_bytes(b"0F0,\xff\xfe\n")
    os.mkfifo(tmp_path / "fifo.csv")  # nobody writes into it: reading it would hang
    for name in ("binary.csv", "fifo.csv", "missing.csv"):
        with pytest.raises(plumb.Error, match=name):
            runtime._load_csv(str(tmp_path / name))


def test_a_table_is_written_whole_or_not_at_all(tmp_path):
    made = get_schedule_class("ZBVZeroBubble")(stand_ins(2, 2), 4)
    file = tmp_path / "table.csv"
    file.write_text("as it was")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (8, limits[1]))
        with pytest.raises(plumb.Error, match="table.csv"):
            made._dump_csv(str(file))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert file.read_text() == "as it was" and os.listdir(tmp_path) == ["table.csv"]


def test_subclasses_give_their_own_tables():
    class Loop(PipelineScheduleMulti):
        def __init__(self, stages, n):
            super().__init__(stages, n)
            for rank in range(self.pp_group_size):
                self.pipeline_order[rank] = [_Action(rank, F, m) for m in range(n)] + [
                    _Action(rank, B, m) for m in range(n)
                ]

    assert text(get_schedule_ops(Loop, 2, 2, 1)) == [["0F0", "0F1", "0B0", "0B1"], ["1F0", "1F1", "1B0", "1B1"]]


def test_the_memory_of_a_table_is_counted_action_by_action():
    table = make_schedule("GPipe", 1, 2)
    costs = {"activation": 10, "gradient": [100], "working": {"first_full": 60}}
    assert table.simulate(costs)["peak_memory"] == [170]  # in the first backward
    with pytest.raises(plumb.Error, match="no cost named 'gradients'") as refused:
        table.simulate({"gradients": 1})
    assert "gradient, " in str(refused.value) and "working" in str(refused.value)
    with pytest.raises(plumb.Error, match="no cost named 'backward'"):
        table.simulate({"working": {"backward": 1}})


def test_tables_are_refused_where_they_do_not_fit():
    with pytest.raises(ValueError, match="2 stages on every rank") as refused:
        get_schedule_class("ZBVZeroBubble")(stand_ins(3, 2), 4)
    assert "ScheduleInterleaved1F1B, which runs any number" in refused.value.remedy
    get_schedule_class("Interleaved1F1B")(stand_ins(3, 2), 4)
    with pytest.raises(ValueError, match="no schedule named"):
        get_schedule_class("2F2B")
    table = search_schedule(3, 6, {"forward": 2, "input": 2, "weight": 1, "communication": 0.1}, memory_limit=3)
    assert ScheduleTable(stand_ins(1, 3), 6, table=table).stage_index_to_group_rank == {0: 0, 1: 1, 2: 2}
    with pytest.raises(AssertionError, match="3 ranks"):
        ScheduleTable(stand_ins(1, 2), 6, table=table)
    assert table.simulate({"forward": 2, "input": 2, "weight": 1})["peak_memory"] <= [3, 3, 3]


@pytest.mark.parametrize("name", NAMES)
def test_spacing_shows_where_ranks_wait(name, capsys):
    ours = get_schedule_ops(name, 4, 8, add_spacing=True)
    lengths = {sum(map(_schedule_visualizer._width, row)) for row in ours}
    assert len(lengths) == 1
    assert capsys.readouterr().out == ""


def test_pictures_and_traces_are_written(tmp_path):
    ops = get_schedule_ops("DualPipeV", 2, 4, add_spacing=True)
    _schedule_visualizer.visualize_schedule(ops, str(tmp_path / "a.svg"))
    picture = (tmp_path / "a.svg").read_text()
    times = re.findall(r"<title>[FB]\d: stage \d, microbatch \d, (rank \d\n\S+ to \S+)", picture)
    # An overlapped pair is two halves at one time.
    assert "<svg" in picture and max(map(times.count, times)) == 2
    schedules._dump_chrometrace({0: [_Action(0, F, 0), None, _Action(0, I, 0), _Action(0, W, 0)]}, str(tmp_path / "t"))
    events = json.loads((tmp_path / "t").read_text())["traceEvents"]
    assert [(e["name"], e["ts"]) for e in events] == [("0F0", 0), ("0I0", 2), ("0W0", 3)]


def test_use_full_backward_refuses_a_table_that_halves_it():
    def schedule(name, full):
        stages = [PipelineStage(nn.Linear(2, 2), i, 2, torch.device("cpu")) for i in range(2)]
        made = _PipelineScheduleRuntime(stages, 2, nn.functional.mse_loss, use_full_backward=full)
        made._load_actions(get_schedule_class(name)(stages, 2, nn.functional.mse_loss).pipeline_order)
        return made.step(torch.randn(4, 2), target=torch.randn(4, 2))

    for name, full in (("Interleaved1F1B", True), ("InterleavedZeroBubble", False), ("InterleavedZeroBubble", None)):
        assert schedule(name, full).shape == (4, 2)
    with pytest.raises(plumb.Error, match="use_full_backward is True, and the table of PipelineScheduleMulti halves"):
        schedule("InterleavedZeroBubble", True)
