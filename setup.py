"""Builds the Python package: the *.py files, and what CMake installs as its component `wheel` beside them.

PLUMB_BUILD_DIR=folder   take a finished CMake build instead of making one in build-wheel/
JOBS=n                   compile jobs (default: one a core)
"""

import importlib.util
import os
import pathlib
import subprocess
import sys

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = pathlib.Path(__file__).resolve().parent


class CMakeBuild(build_ext):
    def run(self):
        if importlib.util.find_spec("torch") is None:
            raise SystemExit(
                f"plumb needs torch 2.11 or newer in {sys.executable}'s environment: install it, then run "
                "`pip install --no-build-isolation .`"
            )
        build = os.environ.get("PLUMB_BUILD_DIR")
        if not build:
            build = str(ROOT / "build-wheel" / "cmake")
            configure = ["cmake", "-S", str(ROOT), "-B", build, f"-DPLUMB_PYTHON={sys.executable}", "-DPLUMB_TESTS=OFF"]
            self._run(*configure)
            self._run("cmake", "--build", build, "-j", os.environ.get("JOBS", str(os.cpu_count())))
        elif not (pathlib.Path(build) / "cmake_install.cmake").exists():
            raise SystemExit(f"PLUMB_BUILD_DIR='{build}' is no CMake build of plumb.")
        folder = ROOT / "python" / "plumb" if self.inplace else pathlib.Path(self.build_lib).resolve() / "plumb"
        self._run("cmake", "--install", str(build), "--component", "wheel", "--prefix", str(folder))

    def _run(self, *command):
        if subprocess.run(command).returncode:
            raise SystemExit("plumb's build failed at: " + " ".join(command))

    def get_outputs(self):
        return []


setup(ext_modules=[Extension("plumb._C", [])], cmdclass={"build_ext": CMakeBuild})
