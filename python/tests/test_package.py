"""`pip install --no-build-isolation .` into an environment of its own, from the build that is there."""

import os
import pathlib
import subprocess
import sys
import sysconfig

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(os.environ.get("PLUMB_BUILD_DIR", ROOT / "build"))

USE = """
import plumb, torch
print(plumb.__file__)
m = torch.nn.Linear(4, 3)
x = torch.randn(2, 4)
assert torch.equal(plumb.capture(m, x)(x), m(x))
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    home = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", home], check=True)
    python = str(home / "bin" / "python")
    site = next((home / "lib").glob("python*/site-packages"))
    # torch and pip come from this environment; plumb-dev.pth is not followed from here.
    (site / "outer.pth").write_text("\n".join(p for p in sys.path if p.endswith("-packages")) + "\n")
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "LD_LIBRARY_PATH")}
    env["PLUMB_BUILD_DIR"] = str(BUILD)
    scripts = os.path.dirname(sys.executable)
    env["PATH"] = os.pathsep.join([scripts, sysconfig.get_path("scripts"), env["PATH"]])
    pip = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-build-isolation", "--no-deps"]
    done = subprocess.run([*pip, "--no-index", str(ROOT)], cwd=home, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    del env["PLUMB_BUILD_DIR"]
    return home, python, site, env


def test_package_is_complete_and_captures_without_the_source_tree(environment):
    home, python, site, env = environment
    assert (site / "plumb" / "lib" / "libplumb.so").exists()
    done = subprocess.run([python, "-c", USE], cwd=home, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(site / "plumb" / "__init__.py")


def test_command_runs_the_bundled_program_with_this_torch(environment):
    home, python, site, env = environment
    program = site / "plumb" / "bin" / "plumb"
    assert program.exists() == (BUILD / "bin" / "plumb").exists()
    program.parent.mkdir(exist_ok=True)
    program.unlink(missing_ok=True)
    program.write_text('#!/bin/sh\necho "$LD_LIBRARY_PATH"\necho "$@"\nexit 3\n')
    program.chmod(0o755)
    done = subprocess.run([home / "bin" / "plumb", "show", "a b"], cwd=home, env=env, capture_output=True, text=True)
    assert done.returncode == 3, done.stderr
    path, arguments = done.stdout.splitlines()
    assert path.endswith("torch/lib") and arguments == "show a b"


def test_command_without_its_program_says_what_to_do(environment):
    home, python, site, env = environment
    script = "import _plumb_command as c; c.os.access = lambda *a: False; c.main()"
    done = subprocess.run([python, "-c", script], cwd=home, env=env, capture_output=True, text=True)
    assert done.returncode == 1
    assert "bin/plumb is missing" in done.stderr and "pip install" in done.stderr
