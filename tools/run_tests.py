"""Runs every test, also after one has failed, and says in one table what did.

run_tests.py PART...  cpp, python, device-cpp or device-python; default: cpp python device-python (ctest's suites are
                      the device's, too). cpus: the suites that compare bits, under every setting of SETTINGS.

Python's tests run beside the other parts, whose output follows when each of them has ended: either waits for processes and
time-outs for a third of its time.

Exit code 0: everything passed. 1: a test failed, or a part did not run to its end. 130: interrupted.
"""

import argparse
import asyncio
import contextlib
import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree

ROOT = pathlib.Path(__file__).resolve().parents[1]
TITLES = {"cpp": "C++", "device-cpp": "C++ on {}", "python": "Python", "device-python": "Python on {}"}

# Settings under which a CPU acts as another, and numbers of threads. MKL takes kernels of its own on Intel's CPUs:
# elsewhere it takes them if a setting says that this is one.
INTEL = "MKL as on Intel"
SETTINGS = [
    "",
    "ATEN_CPU_CAPABILITY=default",
    "ATEN_CPU_CAPABILITY=avx2",
    "ATEN_CPU_CAPABILITY=avx512",
    "ONEDNN_MAX_CPU_ISA=SSE41",
    "ONEDNN_MAX_CPU_ISA=AVX2",
    "ONEDNN_MAX_CPU_ISA=AVX512_CORE",
    "MKL_CBWR=COMPATIBLE",
    "MKL_CBWR=AVX2",
    "OMP_NUM_THREADS=1",
    "OMP_NUM_THREADS=2",
    "OMP_NUM_THREADS=4",
    INTEL,
]
BITS = {
    "cpp": "numerics autograd scaling capture transforms recording exported partition pipeline training",
    "python": "capture exported fold fp8_recipes freed_memory scaling strides trainer transforms transform_models "
    "transform_modules use_fp8 pipelining_recompute pipelining_schedules pipelining_steps pipelining_transforms",
}


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help="cpp, python, device-cpp, device-python, cpus")
    parser.add_argument("--build", default="build", type=pathlib.Path, help="the build folder")
    parser.add_argument("--python-tests", default=ROOT / "python/tests", type=pathlib.Path)
    parser.add_argument("--jobs", default=os.cpu_count(), type=int)
    parser.add_argument("--patience", default=2700, type=int, help="seconds until a suite of ctest, or a test in Python, hangs")
    parser.add_argument("--device", default="testdevice", help="the device of device-cpp and device-python")
    parser.add_argument("--setting", action="append", help="with cpus: only this one; NAME=VALUE or part of its text")
    given = parser.parse_args()
    given.parts = given.parts or ["cpp", "python", "device-python"]
    for part in given.parts:
        if part not in TITLES and part != "cpus":
            parser.error(f"there is no part '{part}': {', '.join(TITLES)} or cpus")
    for wanted in given.setting or []:
        if not any(wanted and wanted in setting for setting in SETTINGS):
            parser.error(f"there is no setting '{wanted}': {', '.join(filter(None, SETTINGS))}")
    return given


def command_of(part, given, report, only=None):
    """Returns the command of a part, which writes a report in JUnit's format. only: the suites, by name."""
    if part.endswith("cpp"):
        ctest = pathlib.Path(sys.executable).with_name("ctest")
        command = [ctest if ctest.exists() else "ctest", "--test-dir", given.build, "--output-on-failure",
                   "-j", given.jobs, "--timeout", given.patience, "--output-junit", report]  # fmt: skip
        if part == "device-cpp":
            command += ["-L", "device"]
        return command + (["-R", f"^({'|'.join(only)})$"] if only else [])
    if part == "device-python":
        only = (given.python_tests / "device_suites.txt").read_text().split()
    files = [given.python_tests / f"test_{name}.py" for name in only] if only else [given.python_tests]
    return [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "run_tests",  # leaves out what PLUMB_TESTS_DONE names
        "-n",
        given.jobs,
        "--dist",
        "loadfile",
        "--no-loadscope-reorder",  # which would put files of few tests last, however long they take
        "--max-worker-restart=0",  # a worker that takes a dead one's place begins the test again that killed it
        "-o",
        f"faulthandler_timeout={given.patience}",  # with the stacks of all threads
        "-o",
        "faulthandler_exit_on_timeout=true",
        f"--junitxml={report}",
        *files,
    ]


# Files of tests that take a minute or more: one that begins last would run alone.
LONGEST = ["docs", "hf_elsewhere", "lost_hosts", "types", "transform_compile", "lost_ranks"]


def pytest_collection_modifyitems(items):
    names = [f"test_{name}" for name in LONGEST]
    items.sort(key=lambda item: names.index(stem) if (stem := pathlib.Path(item.path).stem) in names else len(names))
    if done := os.environ.get("PLUMB_TESTS_DONE"):
        names = set(pathlib.Path(done).read_text().split("\n"))
        items[:] = [item for item in items if f"{pathlib.Path(item.path).stem}::{item.name}" not in names]


def read_report(report):
    """Returns the number of tests in a report, the names of those that failed (of a C++ suite, its tests), the names of
    all, and whether one has ended its process: then others may not have run."""
    cases = list(xml.etree.ElementTree.parse(report).iter("testcase"))
    failed, names, died = [], [], False
    for case in cases:
        place = (case.get("classname") or "").rpartition(".")[2]
        name = case.get("name") if place in ("", case.get("name")) else f"{place}::{case.get('name')}"
        names.append(name)
        found = case.find("failure") if case.find("failure") is not None else case.find("error")
        if found is None:
            continue
        died |= "crashed while running" in (found.get("message") or "") + (found.text or "")
        printed = case.findtext("system-out") or ""
        inside = dict.fromkeys(re.findall(r"^\[  FAILED  \] ([\w/]+\.[\w/]+)", printed, re.MULTILINE))
        failed.append(f"{name}: {', '.join(inside)}" if inside else name)
    return names, failed, died


async def run_to_the_end(command, environment, output):
    """Returns the exit code of a command, of which no process stays: one that a dead test has left would hold its pipes."""
    child = await asyncio.create_subprocess_exec(
        *command, env=environment, start_new_session=True, stdout=output, stderr=output and asyncio.subprocess.STDOUT
    )
    try:
        return await child.wait()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGTERM if child.returncode is None else signal.SIGKILL)
        await child.wait()


async def run_beside(part, title, given, environment):
    """Returns what run() returns, and prints what the part printed when it has ended."""
    with tempfile.TemporaryFile("w+") as output:
        try:
            return await run(part, title, given, environment, output=output)
        finally:
            output.seek(0)
            shutil.copyfileobj(output, sys.stdout)
            sys.stdout.flush()


async def run(part, title, given, environment, only=None, output=None):
    """Returns a row of the table: title, tests, failed, seconds, what failed."""
    print(f"plumb: running {title}", file=output, flush=True)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = pathlib.Path(folder) / "report.xml"
        command = [str(word) for word in command_of(part, given, report, only)]
        done = pathlib.Path(folder) / "done.txt"
        search = os.pathsep.join(filter(None, [str(ROOT / "tools"), os.environ.get("PYTHONPATH")]))
        own = {"PLUMB_BUILD_DIR": str(given.build.resolve()), **environment}
        if part.endswith("python"):
            own["PYTHONPATH"] = search
        if part.startswith("device"):
            own["PLUMB_TEST_DEVICE"] = given.device
        names, failed, died = [], [], True
        while died and len(failed) < 20:
            code, died = await run_to_the_end(command, {**os.environ, **own}, output), False
            with contextlib.suppress(OSError, xml.etree.ElementTree.ParseError):
                found, wrong, died = read_report(report)
                names, failed = names + found, failed + wrong
                report.unlink()
            done.write_text("\n".join(names))
            own["PLUMB_TESTS_DONE"] = str(done)
    if not names or (code not in (0, 5) and not failed):  # 5: there was no test left
        failed.append(f"exit code {code} of {shlex.join(command[:3])}")
    return title, str(len(names)), str(len(failed)), f"{time.monotonic() - began:.0f}", "; ".join(failed) or "-"


def intel_library(given):
    """Returns a library that tells MKL that this is a CPU of Intel's, or None without a C compiler or on such a CPU."""
    source = "int mkl_serv_intel_cpu(void) { return 1; }\nint mkl_serv_intel_cpu_true(void) { return 1; }\n"
    library = given.build.resolve() / "tests" / "mkl_as_on_intel.so"
    compile_it = ["cc", "-shared", "-fPIC", "-x", "c", "-o", str(library), "-"]
    try:
        if "GenuineIntel" in pathlib.Path("/proc/cpuinfo").read_text():
            return None
        subprocess.run(compile_it, input=source, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return library


async def rows_of_settings(given):
    for setting in SETTINGS:
        if given.setting and not any(wanted and wanted in setting for wanted in given.setting):
            continue
        environment = dict([setting.split("=")]) if "=" in setting else {}
        if setting == INTEL:
            library = intel_library(given)
            if not library:
                continue
            environment = {"LD_PRELOAD": str(library)}
        for part, suites in BITS.items():
            title = f"{TITLES[part]}, {setting or 'no setting'}"
            yield await run(part, title, given, environment, suites.split())


def print_table(rows):
    rows = [("part", "tests", "failed", "seconds", "what failed"), *rows]
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    print("\nplumb: all parts")
    for row in rows:
        numbers = "  ".join(row[i].rjust(widths[i]) for i in (1, 2, 3))
        print(f"  {row[0].ljust(widths[0])}  {numbers}  {row[4]}", flush=True)


async def run_parts(given, rows):
    for told in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(told, asyncio.current_task().cancel)

    async def run_all(parts, run_one):
        for part in parts:
            if part == "cpus":
                async for row in rows_of_settings(given):
                    rows.append(row)
            else:
                rows.append(await run_one(part, TITLES[part].format(given.device), given, {}))

    beside = [part for part in given.parts if "python" in given.parts and part not in ("python", "cpus")]
    await asyncio.gather(run_all([part for part in given.parts if part not in beside], run), run_all(beside, run_beside))


def main():
    given = parse_arguments()
    rows, interrupted = [], False
    try:
        asyncio.run(run_parts(given, rows))
    except asyncio.CancelledError:
        interrupted = True
    print_table(rows)
    return 130 if interrupted else int(not rows or any(row[2] != "0" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
