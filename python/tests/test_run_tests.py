"""tools/run_tests.py, on suites that fail."""

import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
pytest.importorskip("xdist")


def make_suites(folder, cpp, python):
    build, tests = folder / "build", folder / "tests"
    build.mkdir()
    tests.mkdir()
    commands = {True: '"true"', False: '"sh" "-c" "echo; echo \\"[  FAILED  ] Room.IsGreen (1 ms)\\"; exit 1"'}
    (build / "CTestTestfile.cmake").write_text(
        "".join(f"add_test({name} {commands[passes]})\n" for name, passes in cpp.items())
        + 'set_tests_properties(first PROPERTIES LABELS "device")\n'
    )
    for name, passes in python.items():
        (tests / f"test_{name}.py").write_text(f"def test_that_passes():\n    assert {passes}\n")
    (tests / "device_suites.txt").write_text("one\n")
    return ["--build", build, "--python-tests", tests, "--jobs", "1"]


def run(*arguments):
    command = [sys.executable, ROOT / "tools/run_tests.py", *arguments]
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=600)
    rows = {}
    for line in done.stdout.partition("plumb: all parts")[2].splitlines():
        if found := re.match(r"  (\S.*?)  +(\d+) +(\d+) +\d+  (.*)$", line):
            rows[found[1]] = (int(found[2]), int(found[3]), found[4])
    return done, rows


def test_everything_runs_after_a_suite_that_fails_and_the_table_names_it(tmp_path):
    done, rows = run(*make_suites(tmp_path, {"first": False, "second": True}, {"one": True, "two": False}))
    assert done.returncode == 1, done.stderr
    assert rows == {
        "C++": (2, 1, "first: Room.IsGreen"),
        "Python": (2, 1, "test_two::test_that_passes"),
        "Python on testdevice": (1, 0, "-"),
    }
    assert "50% tests passed, 1 tests failed out of 2" in done.stdout  # closing lines of ctest and pytest
    assert "1 failed, 1 passed in" in done.stdout


def test_only_what_passes_is_green(tmp_path):
    suites = make_suites(tmp_path, {"first": True}, {"one": True})
    done, rows = run(*suites)
    assert done.returncode == 0 and [row[1] for row in rows.values()] == [0, 0, 0], done.stdout
    done, rows = run("device-cpp", *suites)
    assert done.returncode == 0 and rows == {"C++ on testdevice": (1, 0, "-")}, done.stdout


def test_a_part_that_cannot_run_is_red_and_the_others_run(tmp_path):
    suites = make_suites(tmp_path, {"first": True}, {"one": True})
    (tmp_path / "tests/test_one.py").write_text("import no_such_module\n")
    (tmp_path / "build/CTestTestfile.cmake").write_text("")
    done, rows = run("cpp", "python", *suites)
    assert done.returncode == 1
    assert [row[1] for row in rows.values()] == [1, 1], done.stdout
    assert "exit code" in rows["C++"][2] and "test_one" in rows["Python"][2]


def test_tests_that_hang_or_end_their_process_are_named_and_the_others_run(tmp_path):
    suites = make_suites(tmp_path, {"first": True, "second": True}, {"one": True, "two": True})
    with open(tmp_path / "build/CTestTestfile.cmake", "a") as file:
        file.write('add_test(third "sleep" "1000")\n')
    (tmp_path / "tests/test_two.py").write_text(
        "import os, subprocess, time\n"
        "def test_that_hangs():\n    subprocess.Popen(['sleep', '1000'])\n    time.sleep(1000)\n"
        "def test_after_it():\n    pass\n"
        "def test_that_ends_its_process():\n    os.abort()\n"
        "def test_that_fails():\n    assert False\n"
    )
    done, rows = run("cpp", "python", "--patience", "10", *suites)
    assert done.returncode == 1
    red = "test_two::test_that_hangs; test_two::test_that_ends_its_process; test_two::test_that_fails"
    assert rows == {"C++": (3, 1, "third"), "Python": (5, 3, red)}, done.stdout + done.stderr
    assert "in test_that_hangs" in done.stderr, "the stack"


def test_a_part_that_there_is_not_is_refused():
    done, _ = run("cp")
    assert (
        done.returncode == 2 and "there is no part 'cp': cpp, device-cpp, python, device-python or cpus" in done.stderr
    )
    done, _ = run("cpus", "--setting", "AVX3")
    assert done.returncode == 2 and "there is no setting 'AVX3': ATEN_CPU_CAPABILITY=" in done.stderr
