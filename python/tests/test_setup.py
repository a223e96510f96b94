"""tools/bootstrap.sh with stand-ins for the system's commands: what it says when it cannot go on."""

import os
import pathlib
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def without_torch_python(monkeypatch):
    """`make test TORCH_PYTHON=...` hands the variable on to the tests, and a stamp names it."""
    monkeypatch.delenv("TORCH_PYTHON", raising=False)


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
    done = bootstrap()
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def run_level(bootstrap, *arguments):
    """With stand-ins for a machine without packages and without root: the line it prints."""
    bootstrap.stand_in("dpkg-query", "exit 1")
    bootstrap.stand_in("id", "echo 1000")
    bootstrap.stand_in("sudo", "exit 1")
    env = {**os.environ, "PATH": f"{bootstrap.folder / 'commands'}:{os.environ['PATH']}"}
    script = bootstrap.folder / "tools/bootstrap.sh"
    return subprocess.run([script, *arguments], env=env, capture_output=True, text=True)


def test_the_demo_needs_no_browser_and_no_test_library_and_each_level_has_what_those_before_it_have(bootstrap):
    packages = []
    for level in ("demo", "wheel", "test", "dev"):
        done = run_level(bootstrap, level)
        assert done.returncode == 1
        packages.append(set(done.stderr.splitlines()[-1].split("install -y ")[1].split()))
    demo, wheel, test, dev = packages
    assert demo < wheel < test < dev
    assert not any("test" in p or "chromium" in p or "python3-dev" in p for p in demo)
    assert "chromium" in test and "libbenchmark-dev" in dev


def test_a_level_that_does_not_exist_is_named(bootstrap):
    done = run_level(bootstrap, "everything")
    assert done.returncode == 1 and "no level 'everything'; there are demo wheel test dev" in done.stderr


def stamp(bootstrap, name):
    text = subprocess.run(
        ["bash", "-c", 'cat tools/bootstrap.sh tools/requirements.txt | cksum; echo ""; pwd'],
        cwd=bootstrap.folder, capture_output=True, text=True,
    ).stdout.rstrip("\n")  # fmt: skip
    python = bootstrap.folder / ".venv/bin/python"
    python.parent.mkdir(parents=True, exist_ok=True)
    python.write_text("#!/bin/sh\nexit 1\n")
    python.chmod(0o755)
    (bootstrap.folder / ".venv" / name).write_text(text)


@pytest.mark.parametrize("level, enough", [("demo", True), ("test", True), ("dev", False)])
def test_a_higher_level_has_what_a_lower_one_asks_for(bootstrap, level, enough):
    stamp(bootstrap, ".plumb-stamp-test")
    checked = run_level(bootstrap, "--check", level)
    assert (checked.returncode == 0, checked.stdout, checked.stderr) == (enough, "", "")
    assert (run_level(bootstrap, level).returncode == 0) == enough


def test_the_demo_says_first_how_long_it_takes_and_what_it_does(bootstrap):
    bootstrap.stand_in("dpkg-query", "exit 1")

    def announced(jobs):
        script = bootstrap.folder / "tools/announce.sh"
        return subprocess.run([script, "demo", "build", str(jobs)], capture_output=True, text=True, check=True).stdout

    def minutes(text):
        return int(text.split("about ")[1].split()[0])

    first = announced(2)
    assert "installs" in first and "compiles" in first and "trains a small GPT five times" in first
    assert minutes(announced(1)) > minutes(first) >= minutes(announced(16))
    stamp(bootstrap, ".plumb-stamp-demo")
    assert "installs" not in announced(2) and "compiles" in announced(2)
    (bootstrap.folder / "build/bin").mkdir(parents=True)
    (bootstrap.folder / "build/bin/plumb_demo").touch()
    again = announced(2)
    assert "compiles" not in again and minutes(again) < minutes(first)


def test_what_a_part_on_a_gpu_printed_before_it_ended_is_on_the_page(tmp_path):
    (tmp_path / "bench.log").write_text("| kernel | type |\n|---|---|\n| clone | float32 |\n")
    (tmp_path / "suites.log").write_text("....\n12 passed in 3.00s\n")
    (tmp_path / "machine").write_text("a GPU, torch 2.11.0\n")
    (tmp_path / "commit").write_text("1234567\n")
    script, env = ROOT / "tools/gpu_machine.sh", {**os.environ, "GPU_RESULTS": str(tmp_path), "GPU_DEVICE": "testdevice"}
    done = subprocess.run([script, "report"], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "gpu.md").read_text()
    assert "at 1234567, on a GPU, torch 2.11.0" in page
    assert "| clone | float32 |\n" in page and "```\n12 passed in 3.00s\n```" in page
    assert page.count("Not measured.") == 3
