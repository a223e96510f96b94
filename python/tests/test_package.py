"""`pip install --no-build-isolation .` into an environment of its own, from the build that is there."""

import importlib.metadata
import os
import pathlib
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile

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


def version_of_the_project():
    return re.search(r"^project\(plumb VERSION ([\d.]+)", (ROOT / "CMakeLists.txt").read_text(), re.M).group(1)


def test_version_stands_in_one_place(environment):
    home, python, site, env = environment
    version = version_of_the_project()
    (metadata,) = importlib.metadata.distributions(path=[str(site)], name="plumb")
    assert metadata.version == version
    script = "import plumb; print(plumb.__version__)"
    done = subprocess.run([python, "-c", script], cwd=home, env=env, capture_output=True, text=True)
    assert done.stdout.strip() == version
    for file in ("pyproject.toml", "setup.py", "python/plumb/__init__.py", "python/plumb/_version.py"):
        assert version not in (ROOT / file).read_text(), f"{file} says the version again"
    assert f"## {version}" in (ROOT / "CHANGELOG.md").read_text()
    assert f"version: {version}" in (ROOT / "CITATION.cff").read_text()


def test_package_has_its_license_says_that_it_is_typed_and_asks_for_the_torch_it_was_built_with(environment):
    home, python, site, env = environment
    (distribution,) = importlib.metadata.distributions(path=[str(site)], name="plumb")
    assert distribution.metadata["License-Expression"] == "BSD-3-Clause"
    assert any(str(f).endswith("licenses/LICENSE") for f in distribution.files)
    assert (site / "plumb" / "py.typed").exists() and (site / "plumb" / "_C.pyi").exists()
    built = re.search(r'TORCH = "(\d+\.\d+)', (site / "plumb" / "_built.py").read_text()).group(1)
    assert f"torch=={built}.*" in distribution.requires


def test_another_torch_is_refused_with_both_versions_and_what_to_do(environment):
    home, python, site, env = environment
    facts = site / "plumb" / "_built.py"
    ours = facts.read_text()
    here = re.search(r'TORCH = "(.*)"', ours).group(1)
    facts.write_text(ours.replace(here, "2.1.7"))
    try:
        imported = subprocess.run([python, "-c", "import plumb"], cwd=home, env=env, capture_output=True, text=True)
        command = subprocess.run([home / "bin" / "plumb", "--help"], cwd=home, env=env, capture_output=True, text=True)
    finally:
        facts.write_text(ours)
    for done, start in ((imported, "ImportError: plumb "), (command, "plumb: plumb ")):
        assert done.returncode == 1
        line = done.stderr.strip().splitlines()[-1]
        assert line.startswith(start + version_of_the_project() + " was built with torch 2.1.7")
        assert f"torch {here}" in line and "pip install 'torch==2.1.*'" in line and "--no-build-isolation" in line


def test_another_patch_of_the_same_torch_is_taken(environment):
    home, python, site, env = environment
    script = (
        "import runpy; check = runpy.run_path('plumb/_torch_check.py'); torch = check['built']()['TORCH']\n"
        "minor = '.'.join(torch.split('.')[:2])\n"
        "assert check['refusal'](minor + '.99+other', '/there') is None\n"
        "assert '(/there)' in check['refusal']('3' + minor, '/there')"
    )
    done = subprocess.run([python, "-c", script], cwd=site, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_libraries_are_looked_for_beside_the_package_only(environment):
    home, python, site, env = environment
    files = [next((site / "plumb").glob("_C.*.so")), site / "plumb" / "lib" / "libplumb.so"]
    for file in files:
        shown = subprocess.run(["readelf", "-d", file], capture_output=True, text=True, check=True).stdout
        (path,) = re.findall(r"R(?:UN)?PATH\).*\[(.*)\]", shown)
        assert all(part.startswith("$ORIGIN/") for part in path.split(":")), f"{file.name}: {path}"


def test_source_distribution_has_what_the_build_needs(tmp_path):
    tree = tmp_path / "tree"
    listed = ["git", "ls-files", "-co", "--exclude-standard"]
    ours = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    for file in ours:
        if (ROOT / file).exists():
            (tree / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / file, tree / file)
    subprocess.run([sys.executable, "setup.py", "-q", "sdist", "-d", tmp_path], cwd=tree, check=True, capture_output=True)
    version = version_of_the_project()
    with tarfile.open(tmp_path / f"plumb-{version}.tar.gz") as archive:
        archive.extractall(tmp_path, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))  # not in 3.11.2
    unpacked = tmp_path / f"plumb-{version}"
    needed = r"(plumb|cmake|python/plumb|python/bindings)/.*(?<!_test)\.(cpp|h|in|cmake|txt|py|css|js)$|setup\.py|LICENSE|CMakeLists"
    for file in ours:
        if re.match(needed, file) and "testdata" not in file and (ROOT / file).exists():
            assert (unpacked / file).exists(), f"{file} is not in the source distribution"
    # Every file that CMake names is there: it configures as setup.py does.
    cmake = shutil.which("cmake", path=os.path.dirname(sys.executable) + os.pathsep + os.environ["PATH"])
    options = [f"-DPLUMB_PYTHON={sys.executable}", "-DPLUMB_TESTS=OFF", "-DPLUMB_JOINED=ON"]
    done = subprocess.run([cmake, "-S", unpacked, "-B", tmp_path / "b", *options], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f'VERSION = "{version}"' in (unpacked / "python" / "plumb" / "_built.py").read_text()
