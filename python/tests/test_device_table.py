"""The table of operators and devices, and the script that measures steps of a GPT on a GPU."""

import json
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]


def test_the_table_of_devices_is_the_dispatchers():
    ended = subprocess.run([sys.executable, ROOT / "tools" / "device_table.py", "--check"], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    table = (ROOT / "docs" / "devices.md").read_text()
    assert table.count("| not measured |") > 3 and "`fp8_delayed_linear`" in table


@pytest.mark.parametrize("case", ["fp8-tracked", "two-processes-wire"])
def test_steps_of_a_small_gpt_are_measured(case):
    command = [sys.executable, ROOT / "benchmarks" / "gpt_step.py", "--tiny", "--device", "cpu", "--case", case]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    numbers = json.loads(ended.stdout.splitlines()[-1])
    assert 0 < numbers["median"] and 3 < numbers["loss"] < 6
