"""One module, several threads, from its first call on: the bits of one thread, and no crash."""

import copy
import os
import signal
import threading
import time

import pytest
import torch
from plumb._capture import torch_patches
from torch import nn

import plumb

THREADS = 4


@pytest.fixture(autouse=True)
def one_thread_each():
    """The gradient of a layer norm's weights is summed in as many parts as torch has threads: eager's bits depend on them."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def together(body):
    start, errors = threading.Barrier(THREADS), []

    def run(t):
        try:
            torch.set_num_threads(1)
            start.wait()
            body(t)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(t,)) for t in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4))


def step(module, x):
    y = module(x)
    return [y, *torch.autograd.grad(y.square().sum(), [p for p in module.parameters()])]


def same(got, want):
    assert len(got) == len(want) and all(torch.equal(a, b) for a, b in zip(got, want))


@pytest.fixture
def inputs():
    torch.manual_seed(1)
    return [torch.randn(5, 8) for _ in range(THREADS)]


def loaded(tmp_path, x):
    plumb.save_pt2(plumb.capture(net(), x), tmp_path / "net.pt2")
    return plumb.load_pt2(tmp_path / "net.pt2")


MODULES = {
    "captured": lambda path, x: plumb.capture(net(), x),
    "loaded": loaded,
    "unit-scaled": lambda path, x: plumb.transforms.unit_scale(net()),
    "tracked": lambda path, x: plumb.transforms.track_scales(net()),
}
modules = pytest.mark.parametrize("make", MODULES.values(), ids=MODULES.keys())


@modules
def test_first_calls_together_give_the_bits_of_one_thread(make, inputs, tmp_path):
    alone = make(tmp_path, inputs[0])
    want = [step(alone, x) for x in inputs]
    for _ in range(5):
        module = make(tmp_path, inputs[0])

        def body(t):
            for _ in range(3):
                same(step(module, inputs[t]), want[t])

        together(body)


def test_first_calls_with_other_shapes_each_get_their_graph():
    alone = plumb.transforms.unit_scale(net())
    inputs = [torch.randn(3 + t, 8) for t in range(THREADS)]
    want = [step(alone, x) for x in inputs]
    for _ in range(3):
        module = plumb.transforms.unit_scale(net())

        def body(t):
            for i in range(2 * THREADS):
                n = (t + i) % THREADS
                same(step(module, inputs[n]), want[n])

        together(body)


def test_graphs_that_depend_on_values_are_chosen_by_each_thread():
    class Gate(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(8, 4), nn.Linear(8, 4)

        def forward(self, x):
            return self.a(x) if x.sum() > 0 else self.b(x) * 2

    torch.manual_seed(0)
    gate = Gate()
    inputs = [torch.full((2, 8), float(1 + t) * (-1) ** t) for t in range(THREADS)]
    want = [gate(x) for x in inputs]
    for _ in range(3):
        module = plumb.transforms.track_scales(gate)

        def body(t):
            for i in range(2 * THREADS):
                n = (t + i) % THREADS
                assert torch.equal(module(inputs[n]), want[n])

        together(body)


def test_captures_of_modules_of_their_own_at_once(inputs):
    def body(t):
        for _ in range(5):
            module = net()
            same(step(plumb.capture(module, inputs[t]), inputs[t]), step(module, inputs[t]))

    together(body)


def test_a_graph_runs_while_another_thread_captures(inputs):
    model = net()
    graph = plumb.capture(model, inputs[0])
    want = graph(inputs[0])
    inside, done = threading.Event(), threading.Event()

    class Waiting(nn.Module):
        def forward(self, x):
            inside.set()
            assert done.wait(600)
            return x * 2

    captures = threading.Thread(target=plumb.capture, args=(Waiting(), inputs[1]))
    captures.start()
    try:
        assert inside.wait(600)
        assert torch.equal(graph(inputs[0]), want)
    finally:
        done.set()
        captures.join()


def beside_a_capture(model, inside, done, body):
    """Runs `body` after `model`, which another thread captures, has set `inside`; sets `done` then. Returns the graph."""
    x, made = torch.randn(2, 8), []
    captures = threading.Thread(target=lambda: made.append(plumb.capture(model, x)))
    captures.start()
    try:
        assert inside.wait(600)
        body()
    finally:
        done.set()
        captures.join()
    return made[0]


def test_a_backward_of_another_thread_is_not_the_captured_forwards(inputs):
    layer, inside, done, left = nn.Linear(8, 4), threading.Event(), threading.Event(), []

    class Waiting(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, x):
            inside.set()
            assert done.wait(600)
            return self.layer(x)

    def body():
        layer(inputs[1]).sum().backward()
        left.append(layer.weight.grad.clone())

    graph, x = beside_a_capture(Waiting(), inside, done, body), torch.randn(2, 8)
    assert torch.equal(graph(x), layer(x))
    assert torch.equal(layer.weight.grad, left[0])


def test_a_part_that_two_threads_need_first_is_made_by_one_of_them(inputs):
    part, inside, go = plumb.transforms.unit_scale(net()), threading.Event(), threading.Event()

    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.part = part

        def forward(self, x):
            inside.set()
            assert go.wait(600)
            return self.part(x) * 2

    found = {}
    calls = {
        "the whole": lambda: plumb.capture(Whole(), inputs[0])(inputs[0]),
        "the part": lambda: part(inputs[0]) * 2,
    }
    threads = []
    for name, call in calls.items():  # daemons: two that wait for each other would else keep the process
        threads.append(threading.Thread(target=lambda name=name, call=call: found.update({name: call()}), daemon=True))
        threads[-1].start()
        assert inside.wait(600)
    threads[1].join(0.5)  # it waits for the capture by now
    go.set()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert torch.equal(found["the whole"], found["the part"])


def test_a_process_that_is_forked_while_another_thread_captures_captures_too(inputs):
    inside = threading.Event()

    class Slow(nn.Module):
        def forward(self, x):
            inside.set()
            time.sleep(0.3)
            return x * 2

    captures = threading.Thread(target=plumb.capture, args=(Slow(), inputs[0]))
    captures.start()
    assert inside.wait(600)
    child = os.fork()
    if not child:
        model = net()
        os._exit(not torch.equal(plumb.capture(model, inputs[0])(inputs[0]), model(inputs[0])))
    captures.join()
    for _ in range(600):
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            break
        time.sleep(0.05)
    else:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert ended and status == 0


def test_copies_beside_a_capture_that_keeps_what_a_forward_leaves_are_copies():
    inside, done = threading.Event(), threading.Event()

    class Left:
        def __init__(self, tensor):
            self.tensor = tensor

        def __deepcopy__(self, memo):
            inside.set()
            assert done.wait(600)
            return Left(copy.deepcopy(self.tensor, memo))

    class Leaving(nn.Module):
        def forward(self, x):
            self.left = Left(x * 2)
            return x * 3

    model, tensor = net(), torch.randn(3)  # made here: a capture is refused beside who seeds torch's generator

    def body():
        same([copy.deepcopy(tensor)], [tensor])
        copied = copy.deepcopy(model)
        assert type(copied) is nn.Sequential and copied[0] is not model[0]
        same(list(copied.parameters()), list(model.parameters()))

    beside_a_capture(Leaving(), inside, done, body)


def test_a_reentrant_checkpoint_beside_a_capture_computes_again():
    inside, done, calls = threading.Event(), threading.Event(), []

    class Waiting(nn.Module):
        def forward(self, x):
            inside.set()
            assert done.wait(600)
            return x * 2

    def block(x):
        calls.append(x)
        return x.exp()

    def body():
        x = torch.randn(3, requires_grad=True)
        torch.utils.checkpoint.checkpoint(block, x, use_reentrant=True).sum().backward()
        assert len(calls) == 2 and torch.equal(x.grad, x.detach().exp())

    beside_a_capture(Waiting(), inside, done, body)


def test_a_library_is_told_of_a_capture_on_its_own_thread_alone():
    code = compile("def ask(): return torch.compiler.is_compiling()", "models.py", "exec")
    library = {"__name__": "transformers.models", "torch": torch}
    exec(code, library)
    answers = []
    with torch_patches.answer_compiling(lambda: True):
        assert library["ask"]()
        other = threading.Thread(target=lambda: answers.append(library["ask"]()))
        other.start()
        other.join()
    assert answers == [False] and not library["ask"]()


def test_a_hook_of_all_modules_that_comes_later_is_named(inputs):
    model = net()
    graph = plumb.capture(model, inputs[0])
    hook = nn.modules.module.register_module_forward_hook(lambda module, args, output: output * 2)
    try:
        with pytest.raises(plumb.Error, match="hooks of all modules"):
            graph(inputs[0])
    finally:
        hook.remove()
    graph(inputs[0])


def test_tensors_are_exchanged_beside_threads_that_run(inputs):
    module = plumb.capture(net(), inputs[0])
    want = [module(x) for x in inputs]
    weights = [{k: v.clone() for k, v in module.state_dict().items()} for _ in range(20)]

    def body(t):
        for state in weights:
            if t == 0:
                module.load_state_dict(state, assign=True)
            else:
                assert torch.equal(module(inputs[t]), want[t])

    together(body)
