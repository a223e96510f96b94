"""Tools and benchmarks, as far as wrong use goes."""

import pathlib
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
