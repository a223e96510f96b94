"""No name that a file or a peer chooses is ever run: not as source of torch.fx, not as a module to import, not on a page."""

import builtins
import gc
import json
import linecache
import sys
import zipfile

import pytest
import torch
from plumb._trees import load_spec
from plumb.pipelining import pipe_split, pipeline
from plumb.pipelining._chunks import unpack
from plumb.pipelining._IR import deserialize_stage
from plumb.pipelining.schedules import ScheduleGPipe
from torch import fx, nn

import plumb
import plumb.analysis
from plumb import _C

RUN = 'setattr(__import__("builtins"), "plumb_hit", 1)'
NAMES = {
    "closes a string": f'x"), {RUN}, ("',
    "is a default value": f"x={RUN}",
    "ends the line": f"x\r{RUN}\r",
    "ends the line after a word": "x\n",
    "closes a comment": f'x"""\n{RUN}\n"""',
    "is a keyword": "class",
    "is torch": "torch",
    "is a built-in constant": "__debug__",
    "is no ASCII": "ﬁ",
    "starts with a digit": "0",
    "has a backslash": "x\\",
    "is an attribute of torch.fx's modules": "graph",
}
names = pytest.mark.parametrize("name", NAMES.values(), ids=NAMES.keys())


@pytest.fixture(autouse=True)
def nothing_was_run():
    yield
    hit = hasattr(builtins, "plumb_hit")
    if hit:
        del builtins.plumb_hit
    assert not hit, "a name was run"


class Net(nn.Module):
    """A parameter, a buffer, a module, a keyword argument and a key of the output under one name."""

    def __init__(self, name):
        super().__init__()
        self.name = name
        self.sub = nn.Sequential()
        self.sub._modules[name] = nn.Linear(4, 4)
        self.sub._parameters[f"{name} parameter"] = nn.Parameter(torch.randn(4, 4))
        self._parameters[name] = nn.Parameter(torch.randn(4))
        self._buffers[f"{name} buffer"] = torch.randn(4)

    def forward(self, x, /, **other):
        y = self.sub._modules[self.name](x) @ self.sub._parameters[f"{self.name} parameter"] + self._parameters[self.name]
        return {self.name: y * self._buffers[f"{self.name} buffer"] + TABLE, "second": y * other[self.name]}


TABLE = torch.arange(4.0)


def quoted(name):
    return '"' + "".join("\\" + c if c in '"\\' else f"\\x{ord(c):02x}" if ord(c) < 32 else c for c in name) + '"'


def with_constant(module, name):
    """Returns the same module with its one constant under this name."""
    engine = module._engine
    (old,) = [n for n, kind, *_ in engine.state() if kind == 2]
    text = engine.graph.to_string().replace(f'get_attr "{old}"', f"get_attr {quoted(name)}")
    state = [(name if n == old else n, *rest) for n, *rest in engine.state()]
    renamed = _C.GraphModule(text, state, *engine.specs())
    return plumb.GraphModule(renamed, module._in_spec, module._out_spec, module._plain_inputs, module._plain_outputs, [])


def module_and_inputs(name):
    torch.manual_seed(0)
    return Net(name), torch.randn(2, 4), torch.randn(2, 4)


@pytest.fixture
def loaded(tmp_path):
    def load(name):
        net, x, z = module_and_inputs(name)
        captured = with_constant(plumb.capture(net, x, **{name: z}), f"{name} constant")
        plumb.save_pt2(captured, tmp_path / "net.pt2")
        return plumb.load_pt2(tmp_path / "net.pt2"), x, z, net(x, **{name: z})

    return load


def same(got, want):
    assert got.keys() == want.keys() and all(torch.equal(got[k], want[k]) for k in want)


@names
def test_a_file_runs_under_any_names(loaded, name):
    module, x, z, want = loaded(name)
    same(module(x, **{name: z}), want)
    assert set(module.state_dict()) == set(Net(name).state_dict())


@names
def test_the_fx_graph_of_a_file_has_harmless_names(loaded, name):
    module, x, z, want = loaded(name)
    gm = module.to_fx()
    state = dict([*module.named_parameters(), *module.named_buffers()])
    out = gm(*[state[n] for n in gm.attributes], x, z)
    assert all(torch.equal(a, b) for a, b in zip(out, want.values()))
    gm.recompile()


@pytest.mark.parametrize("name", ["self", "torch", "class", "inf"])
def test_the_fx_graph_takes_inputs_under_words_of_its_own(name):
    captured = plumb.capture(nn.ReLU(), torch.randn(3))
    text = captured._engine.graph.to_string()
    (old,) = [n.name for n in captured.graph.nodes if n.op == "placeholder"]
    engine = _C.GraphModule(text.replace(f"%{old}", f"%{name}"), [], *captured._engine.specs())
    module = plumb.GraphModule(engine, captured._in_spec, captured._out_spec, [None], [None], [])
    x = torch.randn(3)
    assert torch.equal(module.to_fx()(x)[0], x.relu())


@names
def test_a_file_is_compiled_under_any_names(loaded, name):
    module, x, z, want = loaded(name)
    torch._dynamo.reset()
    same(torch.compile(lambda a, b: module(a, **{name: b}), backend="eager", fullgraph=True)(x, z), want)


@names
def test_a_file_is_cut_by_a_policy_that_marks_its_graph(loaded, name):
    module, x, z, want = loaded(name)
    seen = []

    def mark(gm):
        calls = [n for n in gm.graph.nodes if n.op == "call_function"]
        seen.extend(n.target for n in gm.graph.nodes if n.op == "get_attr")
        with gm.graph.inserting_before(calls[len(calls) // 2]):
            gm.graph.call_function(pipe_split)
        gm.recompile()
        gm(x, z)

    pipe = pipeline(module, (x,), {name: z}, split_policy=mark)
    assert pipe.num_stages == 2 and len(seen) >= 5
    same(pipe.unflatten(pipe(x, **{name: z})), want)
    assert set(pipe.merge_state_dict()) == set(module.state_dict())
    pipe.split_gm.recompile()
    for s in range(2):
        stage, info = deserialize_stage(pipe.serialize_stage(s))
        fx.GraphModule(pipe.split_gm, info.graph)
        stage.to_fx()
    pipe.print_readable(print_output=False)


@names
def test_transforms_and_pictures_of_a_file(loaded, name):
    module, x, z, want = loaded(name)
    seen = []

    def backend(gm, inputs):
        seen.append(gm.code)
        return gm

    same(plumb.transforms.utils.apply_transform(module, backend)(x, **{name: z}), want)
    assert seen
    tracked = plumb.transforms.track_scales(module)
    same(tracked(x, **{name: z}), want)
    graph = tracked.scales_graph()
    if name != "class":
        exec(compile(graph.python_code("self").src, "scales", "exec"), {})
    plumb.analysis.plot(graph)


def test_names_that_are_harmless_stay(loaded):
    module, x, z, _ = loaded("good")
    seen = []

    def mark(gm):
        seen.extend(n.target for n in gm.graph.nodes if n.op in ("get_attr", "placeholder"))
        with gm.graph.inserting_before(list(gm.graph.nodes)[-3]):
            gm.graph.call_function(pipe_split)

    pipe = pipeline(module, (x,), {"good": z}, split_policy=mark)
    assert {"good", "good buffer", "sub.good.weight", "sub.good parameter"} <= set(seen)
    assert "good" in [n.target for n in pipe.split_gm.graph.nodes if n.op == "placeholder"]


def test_modules_and_source_lines_of_a_file_are_text_alone(tmp_path):
    source = "class Strange(nn.Module):\n    def forward(self, x):\n        return torch.relu(self._modules[NAME](x))\n"
    name = NAMES["closes a comment"]
    space = {"nn": nn, "torch": torch, "NAME": name}
    exec(compile(source, f'/{name}.py"', "exec"), space)
    module = space["Strange"]()
    module._modules[name] = nn.Linear(4, 4)
    x = torch.randn(2, 4)
    plumb.save_pt2(plumb.capture(module, x), tmp_path / "net.pt2")
    module = plumb.load_pt2(tmp_path / "net.pt2")
    tracked = plumb.transforms.track_scales(module)
    tracked(x).sum().backward()
    exec(compile(tracked.scales_graph().python_code("self", verbose=True).src, "scales", "exec"), {})
    module.to_fx().print_readable(print_output=False)
    str(module.graph), plumb.report(tracked)


@pytest.mark.parametrize("name", ["forward", "a.weight.b", "_modules.weight", "training"])
def test_names_that_no_module_can_have_are_refused(name):
    net = nn.Sequential(nn.Linear(4, 4))
    captured = plumb.capture(net, torch.ones(1, 4))
    engine = captured._engine
    text = engine.graph.to_string().replace('"0.weight"', f'"{name}"').replace('"0.bias"', '"a.weight"')
    names = {"0.weight": name, "0.bias": "a.weight"}
    with pytest.raises(plumb.Error, match="torch.nn.Module|not a module|tensor and a module"):
        renamed = _C.GraphModule(text, [(names[n], *rest) for n, *rest in engine.state()], *engine.specs())
        plumb.GraphModule(renamed, captured._in_spec, captured._out_spec, [None], [None], [])


# --- structures ---
def spec_json(type_name, context, leaves=1):
    leaf = {"type": None, "context": None, "children_spec": []}
    return json.dumps([1, {"type": type_name, "context": context, "children_spec": [leaf] * leaves}])


HOSTILE_SPECS = {
    "a module to import": spec_json("builtins.dict", json.dumps([{"__enum__": True, "fqn": "plumb_evil:A", "name": "B"}])),
    "an attribute to look up": spec_json("builtins.dict", json.dumps([{"__enum__": True, "fqn": "os:environ", "name": "PATH"}])),
    "a function to call": spec_json(
        "collections.defaultdict",
        {"default_factory_module": "plumb_evil", "default_factory_name": "run", "dict_context": ["a"]},
    ),
    "a known function to call": spec_json(
        "collections.defaultdict", {"default_factory_module": "os", "default_factory_name": "abort", "dict_context": ["a"]}
    ),
}
specs = pytest.mark.parametrize("text", HOSTILE_SPECS.values(), ids=HOSTILE_SPECS.keys())


@pytest.fixture
def evil_module(tmp_path, monkeypatch):
    (tmp_path / "plumb_evil.py").write_text(RUN + "\nrun = list\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("plumb_evil", None)


@specs
def test_a_files_structure_imports_nothing(tmp_path, evil_module, text):
    net = nn.Linear(4, 4)
    plumb.save_pt2(plumb.capture(net, torch.ones(1, 4)), tmp_path / "net.pt2")
    with zipfile.ZipFile(tmp_path / "net.pt2") as old, zipfile.ZipFile(tmp_path / "evil.pt2", "w") as new:
        for item in old.infolist():
            data = old.read(item)
            if item.filename.endswith("models/model.json"):
                program = json.loads(data)
                (entry,) = program["graph_module"]["module_call_graph"]
                entry["signature"]["out_spec"] = text
                data = json.dumps(program).encode()
            new.writestr(item, data)
    with pytest.raises(plumb.Error):
        plumb.load_pt2(tmp_path / "evil.pt2")
    assert "plumb_evil" not in sys.modules


@specs
def test_a_peers_structure_imports_nothing(evil_module, text):
    message = torch.frombuffer(bytearray(json.dumps([text, [None]]).encode()), dtype=torch.uint8)
    with pytest.raises(plumb.Error):
        unpack([None, message, torch.ones(1)])
    assert "plumb_evil" not in sys.modules


def test_structures_with_known_enumerations_and_factories_are_read():
    import collections
    import enum

    class Key(enum.Enum):
        A = 1

    Key.__qualname__ = "Key"
    sys.modules[__name__].Key = Key
    tree = [{Key.A: 1}, collections.defaultdict(list, {"a": 2}), collections.OrderedDict(b=3), (4, None)]
    leaves, spec = torch.utils._pytree.tree_flatten(tree)
    assert load_spec(torch.utils._pytree.treespec_dumps(spec)) == spec


@pytest.mark.parametrize("message", [b"", b"{", b"[1, 2]", b'["[1, 2]", [null]]', b"\xff\xfe", b'["[]", [null, null]]'])
def test_a_message_without_structure_is_a_named_error(message):
    data = torch.frombuffer(bytearray(message), dtype=torch.uint8) if message else torch.empty(0, dtype=torch.uint8)
    with pytest.raises(plumb.Error, match="structure"):
        unpack([None, data, torch.ones(1)])


# --- what stays ---
def test_graphs_leave_no_source_behind(tmp_path):
    net, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), torch.ones(1, 4)

    def use():
        plumb.save_pt2(plumb.capture(net, x), tmp_path / "net.pt2")
        module = plumb.load_pt2(tmp_path / "net.pt2")
        module.to_fx()
        pipeline(module, (x,), split_policy=lambda gm: None)
        pipeline(net, (x,), num_stages=2, split_policy="equal_size")

    use()
    gc.collect()
    kept = fx.graph_module._loader.eval_cache
    before, lines = len(kept), len(linecache.cache)
    for _ in range(3):
        use()
    gc.collect()
    assert (len(kept), len(linecache.cache)) == (before, lines)


def test_capture_makes_no_fx_graph_until_it_is_asked_for():
    kept = fx.graph_module._loader
    before = kept.next_id
    module = plumb.capture(nn.Linear(4, 4), torch.ones(1, 4))
    assert kept.next_id == before
    module.to_fx()
    assert kept.next_id == before + 1


@pytest.mark.parametrize("register", ["module", "parameter", "buffer"])
@pytest.mark.parametrize(
    "transform", [plumb.capture, plumb.transforms.unit_scale, plumb.transforms.track_scales, plumb.transforms.simulate_fp8]
)
def test_a_name_with_a_lone_surrogate_is_refused_by_name(register, transform):
    net, x = nn.Sequential(nn.Linear(4, 4)), torch.randn(2, 4)
    made = {"module": nn.ReLU(), "parameter": nn.Parameter(torch.ones(4)), "buffer": torch.ones(4)}[register]
    getattr(net, f"register_{register}")("n\udc80", made)
    with pytest.raises(plumb.Error, match=r"'n\\udc80', which is no text in UTF-8"):
        transform(net, x) if transform is plumb.capture else transform(net)(x)


class Keywords(nn.Module):
    def forward(self, x, **more):
        return {more.pop("out", "y"): x * sum(value for value in more.values() if isinstance(value, float))}


def test_keys_and_texts_with_lone_surrogates_are_refused_by_name(tmp_path):
    x = torch.randn(2, 4)
    for more in ({"k\udc80": 2.0}, {"out": "k\udc80"}):
        with pytest.raises(plumb.Error, match=r"the key 'k\\udc80', which is no text in UTF-8"):
            plumb.capture(Keywords(), x, **more)
    graph = plumb.capture(Keywords(), x, text="t\udc80", number=2.0)
    assert torch.equal(graph(x, text="t\udc80", number=2.0)["y"], x * 2)
    with pytest.raises(plumb.Error, match=r"input 1 is 't\\udc80', no text in UTF-8"):
        plumb.save_pt2(graph, tmp_path / "net.pt2")


def test_files_of_any_name_are_recipes_and_dumps(tmp_path):
    path = f"{tmp_path}/recipe\udc80.toml"
    with open(path, "w", encoding="utf-8") as file:
        file.write('fwd = "e4m3fn-RN"\nbwd = "e5m2-RN"\n')
    torch.manual_seed(0)
    net, x = nn.Linear(4, 4), torch.randn(2, 4)
    want = plumb.transforms.simulate_format(net, "e4m3fn-RN", "e5m2-RN")(x)
    assert torch.equal(plumb.transforms.simulate_format(net, recipe=path)(x), want)
    assert torch.equal(plumb.transforms.use_fp8(net, recipe=path)(x), want)
    plumb.transforms.run_passes(plumb.capture(net, x), "dead_code", dump=f"{tmp_path}/dump\udc80")
    with pytest.raises(plumb.Error, match="x80.toml: cannot be opened|recipe.*no text in UTF-8"):
        plumb.verdict(net, [x], recipes=[path])


def test_errors_of_texts_with_lone_surrogates_are_errors():
    error = plumb.Error("m\udc80", where="w\ud800", remedy="r\udfff")
    assert (error.message, error.where, error.remedy) == (r"m\udc80", r"w\ud800", r"r\udfff")


def test_a_failure_that_names_a_lone_surrogate_is_shown():
    def loss(out, target):
        raise ValueError("no loss for k\udc80")

    x = torch.randn(2, 4)
    stage = pipeline(nn.Linear(4, 4), (x[:1],)).build_stage(0, torch.device("cpu"))
    with pytest.raises(plumb.Error, match=r"no loss for k\\udc80"):
        ScheduleGPipe(stage, n_microbatches=2, loss_fn=loss).step(x, target=x)
