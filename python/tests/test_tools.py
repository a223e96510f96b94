"""Tools and benchmarks, as far as wrong use goes."""

import os
import pathlib
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]


def run(*command):
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, cwd=ROOT)


def test_a_benchmark_names_the_cases_that_there_are():
    ended = run("benchmarks/transforms_bench.py", "steps", "--quick", "--only=unit_scale,nonesuch")
    assert ended.returncode == 1 and ended.stdout == ""
    assert ended.stderr.startswith("--only=nonesuch: no case of these parts\n  try: captured, unit_scale,"), ended.stderr


def test_house_figures_say_what_they_are():
    ended = run("tools/house_figures.py", "--help")
    assert ended.returncode == 0 and ended.stdout.startswith("Counts how large the house is"), ended.stderr


REGISTERS = """
import sys
sys.path[:0] = ["tools", "python"]
import torch
from library_checks import CHECKS

class Table(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.register_buffer("slopes", torch.arange(4.0), persistent=False)
        self.register_buffer("table", None, persistent=False)

    def forward(self, x):
        if self.table is None:
            self.register_buffer("table", self.slopes * 2, persistent=False)
        return self.linear(x) + self.table

def make():
    torch.manual_seed(0)
    return Table(), (torch.randn(2, 4),), {}

print(CHECKS["transformed"](make))
"""


def test_the_libraries_table_compares_models_that_register_a_buffer_in_their_first_forward():
    ended = run("-c", REGISTERS)
    assert ended.stdout.split("\n")[-2:] == ["bit for bit", ""], ended.stderr


def test_a_build_with_several_sanitizers_is_configured(tmp_path):
    cmake = shutil.which("cmake", path=os.path.dirname(sys.executable) + os.pathsep + os.environ["PATH"])
    options = ["-G", "Ninja", f"-DPLUMB_PYTHON={sys.executable}", "-DPLUMB_PYTHON_PACKAGE=OFF", "-DPLUMB_FUZZ=ON"]
    options.append("-DPLUMB_SANITIZE=address,undefined")
    ended = subprocess.run([cmake, "-S", ROOT, "-B", tmp_path, *options], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
