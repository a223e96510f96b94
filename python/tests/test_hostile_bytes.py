"""Bytes that may come from anywhere end in `plumb.Error` and nothing else."""

import json
import os
import random
import struct
import threading

import pytest
import torch
from plumb.pipelining import SplitPoint, pipeline
from plumb.pipelining._IR import deserialize_stage
from torch import nn

import plumb
from plumb import _C


@pytest.fixture(scope="module")
def stage_bytes():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))
    return pipeline(net, (torch.randn(3, 4),), split_spec={"2": SplitPoint.BEGINNING}).serialize_stage(0)


def parts(data):
    (length,) = struct.unpack("<Q", data[8:16])
    return json.loads(data[16 : 16 + length]), data[16 + length :]


def whole(header, tensors):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return b"PLUMBSTG" + struct.pack("<Q", len(text)) + text + tensors


def read(data):
    try:
        deserialize_stage(data)
    except plumb.Error as error:
        str(error).encode()


def places(value, path=()):
    if path:
        yield path
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield from places(value[key], (*path, key))


OTHER = [None, True, -1, 2**62, 0.5, "", "x", "a..b", "\x1b[2J", [], [None], {}, [0], ["x"], [[2**62]]]


def test_stages_with_other_values_anywhere_are_refused_by_name(stage_bytes):
    header, tensors = parts(stage_bytes)
    for text_field in (None, "table", "in_spec"):
        inner = header if text_field is None else json.loads(header[text_field])
        for path in places(inner):
            for other in OTHER:
                changed = json.loads(json.dumps(inner))
                owner = changed
                for key in path[:-1]:
                    owner = owner[key]
                owner[path[-1]] = other
                read(whole(changed if text_field is None else {**header, text_field: json.dumps(changed)}, tensors))


def test_stages_with_missing_parts_are_refused_by_name(stage_bytes):
    header, tensors = parts(stage_bytes)
    for path in places(header):
        changed = json.loads(json.dumps(header))
        owner = changed
        for key in path[:-1]:
            owner = owner[key]
        del owner[path[-1]]
        read(whole(changed, tensors))


def test_stages_of_damaged_bytes_are_refused_by_name(stage_bytes):
    draw = random.Random(0)
    for _ in range(2000):
        data = bytearray(stage_bytes)
        for _ in range(draw.randrange(1, 4)):
            data[draw.randrange(min(len(data), 3000))] = draw.randrange(256)
        read(bytes(data))


@pytest.mark.parametrize("text", [b"\xff\xfe", b'{"version": "\xff"}', b'{"\x80": 1}'])
def test_what_is_no_utf8_is_a_named_error(text):
    with pytest.raises(plumb.Error, match="no pipeline stage"):
        deserialize_stage(whole(text, b""))


def test_graphs_names_are_utf8():
    with pytest.raises(plumb.Error, match="UTF-8"):
        _C.parse_graph('graph {\n  %x = placeholder "\\xff"\n  output(%x)\n}')
    with pytest.raises(plumb.Error, match="UTF-8"):
        _C.parse_graph('graph {\n  %x = placeholder "x"\n  %y = aten::relu(%x) at "\\xc3(":1:"f"\n  output(%y)\n}')


@pytest.mark.parametrize("name", ["a..b", "", ".a", "a."])
def test_names_of_tensors_have_no_empty_parts(name):
    captured = plumb.capture(nn.Linear(2, 2), torch.ones(1, 2))
    state = [(name if n == "weight" else n, *rest) for n, *rest in captured._engine.state()]
    with pytest.raises(plumb.Error, match="no name"):
        _C.GraphModule(captured._engine.graph.to_string(), state, *captured._engine.specs())


def test_files_with_names_that_are_no_utf8_are_read_and_named(tmp_path):
    folder = os.fsencode(tmp_path)
    plumb.save_pt2(plumb.capture(nn.ReLU(), torch.ones(2)), folder + b"/\xff.pt2")
    assert torch.equal(plumb.load_pt2(os.fsdecode(folder + b"/\xff.pt2"))(-torch.ones(2)), torch.zeros(2))
    with pytest.raises(plumb.Error, match=r"\\xfe.pt2: cannot be opened"):
        plumb.load_pt2(folder + b"/\xfe.pt2")


READERS = {
    "load_pt2": plumb.load_pt2,
    "read_history": plumb.read_history if hasattr(plumb, "read_history") else lambda path: _C.read_history(os.fsencode(path)),
    "rules": lambda path: _C.RecordRules.load(os.fsencode(path)),
}


@pytest.mark.parametrize("read_it", READERS.values(), ids=READERS.keys())
def test_a_fifo_and_a_device_without_end_are_no_files_to_read(read_it, tmp_path):
    os.mkfifo(tmp_path / "fifo")
    done = []

    def refuse():
        for path in (tmp_path / "fifo", "/dev/zero"):
            with pytest.raises(plumb.Error, match="not a regular file"):
                read_it(path)
        done.append(True)

    thread = threading.Thread(target=refuse, daemon=True)
    thread.start()
    thread.join(120)
    assert done


OF_A_FILE = """
class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)

class Branches(nn.Linear):
    def forward(self, x):
        return x if x.sum() > 0 else super().forward(x)
"""


def test_modules_of_a_file_whose_name_is_no_utf8_are_captured_and_named(tmp_path):
    names = {"nn": nn, "__name__": "mine"}
    exec(compile(OF_A_FILE, os.fsdecode(b"/\xff.py"), "exec"), names)
    model, x = names["Doubled"](4, 4), torch.randn(2, 4)
    graph = plumb.capture(model, x)
    assert torch.equal(graph(x), model(x)) and 'udcff.py":4:' in graph._engine.graph.to_string()
    assert torch.equal(plumb.transforms.track_scales(model)(x), model(x))
    plumb.save_pt2(graph, tmp_path / "a.pt2")
    assert torch.equal(plumb.load_pt2(tmp_path / "a.pt2")(x), model(x))
    with pytest.raises(plumb.Error, match=r"\\udcff.py:8"):
        plumb.capture(names["Branches"](4, 4), x)
