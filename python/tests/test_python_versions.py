"""The code that knows CPython's bytecode, under every Python that pyproject.toml allows and this machine has."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import plumb

CHECKS = Path(__file__).with_name("python_version_checks.py")
NEWEST = 14


def allowed():
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    oldest = int(re.search(r'requires-python = ">=3\.(\d+)"', text)[1])
    return [f"3.{minor}" for minor in range(oldest, NEWEST + 1)]


def interpreter(version):
    if version == f"{sys.version_info[0]}.{sys.version_info[1]}":
        return sys.executable
    found = shutil.which(f"python{version}")
    if found and subprocess.run([found, "-c", ""], capture_output=True).returncode == 0:
        return found
    return None


@pytest.mark.parametrize("version", allowed())
def test_bytecode_is_read_and_code_is_swapped(version):
    python = interpreter(version)
    if python is None:
        pytest.skip(f"Python {version} is not installed")
    ran = subprocess.run(
        [python, str(CHECKS), str(Path(plumb.__file__).parent)], capture_output=True, text=True, timeout=600
    )
    told = f"Python {version} changed: look in python/plumb/_capture/cpython.py, the one module that knows CPython's insides"
    assert ran.returncode == 0, f"{told}\n{ran.stderr}"
    assert ran.stdout.strip() == f"ok {version.replace('.', ' ')}"
