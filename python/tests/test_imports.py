"""What importing plumb costs: nothing that takes long is loaded before somebody uses it."""

import subprocess
import sys

PROGRAM = """
import sys

import torch
from torch import nn

import plumb
from plumb import pipelining, transforms

model = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))
x = torch.randn(2, 4)
plumb.capture(model, x)(x).sum().backward()
transforms.unit_scale(model)(x).sum().backward()
pipe = pipelining.pipeline(model, (x,), split_policy="balanced", num_stages=2)
slow = ["torch._dynamo", "torch._inductor", "torch.distributed.fsdp", "torch.distributed.tensor", "pandas", "matplotlib"]
print([name for name in [*slow, "transformers"] if name in sys.modules])
"""

COMPILED_WITHIN = """
import sys

import torch
from torch import nn

import plumb


def refuse(gm, inputs):
    raise AssertionError("compiled")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return torch.compile(lambda y: y.sin() + 1, backend=refuse)(self.layer(x))


net, x = Net(), torch.randn(2, 4)
assert "torch._dynamo" not in sys.modules
graph = plumb.capture(net, x)
assert [node.target for node in graph.graph.nodes if "sin" in str(node.target)] == ["aten::sin"], graph.graph
torch.compile(nn.Linear(4, 4), backend="eager")(x)
try:
    net(x)
except Exception as error:
    assert "compiled" in str(error)
else:
    raise AssertionError("the capture's stance stayed")
"""


def run(program):
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_what_takes_long_to_import_is_not_loaded():
    assert run(PROGRAM) == "[]\n"


def test_the_first_torch_compile_within_a_capture_shows_its_operators():
    run(COMPILED_WITHIN)
