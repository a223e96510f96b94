"""No operator of plumb crashes or hangs, whatever it is called with."""

import subprocess
import sys
from pathlib import Path


def test_operators_take_hostile_arguments():
    fuzzer = Path(__file__).with_name("hostile_arguments.py")
    done = subprocess.run([sys.executable, fuzzer, "40"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert "all well" in done.stdout
