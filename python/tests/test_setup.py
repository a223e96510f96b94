"""tools/bootstrap.sh with stand-ins for the system's commands: what it says when it cannot go on."""

import os
import pathlib
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.fixture
def bootstrap(tmp_path):
    shutil.copytree(ROOT / "tools", tmp_path / "tools")
    commands = tmp_path / "commands"
    commands.mkdir()

    def stand_in(name, script):
        (commands / name).write_text("#!/bin/sh\n" + script + "\n")
        (commands / name).chmod(0o755)
        return str(commands / name)

    def run(**variables):
        env = {**os.environ, "PATH": f"{commands}:{os.environ['PATH']}", **variables}
        return subprocess.run([tmp_path / "tools/bootstrap.sh"], env=env, capture_output=True, text=True)

    stand_in("apt-get", "echo apt-get was called >&2; exit 1")
    run.stand_in = stand_in
    run.folder = tmp_path
    return run


def test_missing_packages_without_root_print_the_line_to_run(bootstrap):
    bootstrap.stand_in("dpkg-query", 'for last; do :; done; [ "$last" = make ] && echo "install ok installed" || exit 1')
    bootstrap.stand_in("id", "echo 1000")
    bootstrap.stand_in("sudo", "exit 1")
    done = bootstrap()
    assert done.returncode == 1
    line = done.stderr.splitlines()[-1].strip()
    assert line.startswith("sudo apt-get install -y g++ ccache git libgtest-dev ")
    assert " make " not in line
    assert "apt-get was called" not in done.stderr
    assert not (bootstrap.folder / ".venv").exists()


def test_torch_python_without_torch_is_named(bootstrap):
    bootstrap.stand_in("dpkg-query", 'echo "install ok installed"')
    python = bootstrap.stand_in("bare", f'exec "{sys.executable}" -S -I "$@"')
    done = bootstrap(TORCH_PYTHON=python)
    assert done.returncode == 1
    assert f"TORCH_PYTHON='{python}' has no torch" in done.stderr
    assert not (bootstrap.folder / ".venv").exists()


def test_torch_python_with_an_old_torch_is_named(bootstrap):
    bootstrap.stand_in("dpkg-query", 'echo "install ok installed"')
    old = bootstrap.folder / "old" / "torch"
    old.mkdir(parents=True)
    (old / "__init__.py").touch()
    (old / "version.py").write_text("__version__ = '2.9.1+cpu'\n")
    python = bootstrap.stand_in("old", f'PYTHONPATH="{old.parent}" exec "{sys.executable}" -S "$@"')
    done = bootstrap(TORCH_PYTHON=python)
    assert done.returncode == 1
    assert "has torch 2.9.1+cpu; plumb needs 2.11 or newer" in done.stderr


def test_a_python_that_is_not_there_is_named(bootstrap):
    bootstrap.stand_in("dpkg-query", 'echo "install ok installed"')
    done = bootstrap(TORCH_PYTHON="/nowhere/python")
    assert done.returncode == 1
    assert "no Python at '/nowhere/python'" in done.stderr


def test_nothing_to_do_does_nothing(bootstrap):
    first = subprocess.run(
        ["bash", "-c", 'cat tools/bootstrap.sh tools/requirements.txt | cksum; echo ""; pwd'],
        cwd=bootstrap.folder, capture_output=True, text=True,
    )  # fmt: skip
    python = bootstrap.folder / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\nexit 1\n")
    python.chmod(0o755)
    (bootstrap.folder / ".venv/.plumb-stamp").write_text(first.stdout.rstrip("\n"))
    bootstrap.stand_in("dpkg-query", "echo asked >&2; exit 1")
    done = bootstrap(TORCH_PYTHON="")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
