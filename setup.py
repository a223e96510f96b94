"""Builds the Python package: the *.py files, and what CMake installs as its component `wheel` beside them.

PLUMB_BUILD_DIR=folder   take a finished CMake build instead of making one in build-wheel/
PLUMB_WHEEL_LABEL=1      the version says for which torch it is, as in 1.2.3+torch2.13 (`make wheel`)
JOBS=n                   compile jobs (default: one a core)
"""

import importlib.util
import os
import pathlib
import re
import runpy
import subprocess
import sys

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = pathlib.Path(__file__).resolve().parent


def torch_version():
    """Of this environment, without importing it: "2.13"; None if there is none."""
    spec = importlib.util.find_spec("torch")
    if spec is None:
        return None
    facts = runpy.run_path(str(pathlib.Path(spec.origin).parent / "version.py"))
    return re.match(r"\d+\.\d+", facts["__version__"]).group()


class CMakeBuild(build_ext):
    def run(self):
        if torch_version() is None:
            raise SystemExit(
                f"plumb needs torch 2.11 or newer in {sys.executable}'s environment: install it, then run "
                "`pip install --no-build-isolation .`"
            )
        build = os.environ.get("PLUMB_BUILD_DIR")
        if not build:
            build = str(ROOT / "build-wheel" / "cmake")
            options = [f"-DPLUMB_PYTHON={sys.executable}", "-DPLUMB_TESTS=OFF", "-DPLUMB_JOINED=ON"]
            self._run("cmake", "-S", str(ROOT), "-B", build, *options)
            jobs = os.environ.get("JOBS", str(os.cpu_count()))
            self._run("cmake", "--build", build, "-j", jobs, "--target", "plumb", "plumb_cli", "plumb_python")
        elif not (pathlib.Path(build) / "cmake_install.cmake").exists():
            raise SystemExit(f"PLUMB_BUILD_DIR='{build}' is no CMake build of plumb.")
        folder = ROOT / "python" / "plumb" if self.inplace else pathlib.Path(self.build_lib).resolve() / "plumb"
        self._run("cmake", "--install", str(build), "--component", "wheel", "--strip", "--prefix", str(folder))

    def _run(self, *command):
        if subprocess.run(command).returncode:
            raise SystemExit("plumb's build failed at: " + " ".join(command))

    def get_outputs(self):
        return []


version = re.search(r"^project\(plumb VERSION ([\d.]+)", (ROOT / "CMakeLists.txt").read_text(), re.M).group(1)
torch = None if "sdist" in sys.argv else torch_version()
if torch and os.environ.get("PLUMB_WHEEL_LABEL"):
    version += f"+torch{torch}"
setup(
    version=version,
    # What is built runs with the torch it was built with.
    install_requires=[f"torch=={torch}.*" if torch else "torch>=2.11", "numpy"],
    ext_modules=[Extension("plumb._C", [])],
    cmdclass={"build_ext": CMakeBuild},
)
