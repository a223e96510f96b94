"""plumb.doctor() and the command say what there is on this machine."""

import html
import json
import os
import pathlib
import subprocess
import sys

import torch

import plumb

BUILD = pathlib.Path(os.environ.get("PLUMB_BUILD_DIR", pathlib.Path(__file__).resolve().parents[2] / "build"))


def test_the_page_names_cpu_torch_kernels_and_groups():
    page = plumb.doctor()
    found = {finding.topic: finding for finding in page}
    assert torch.__version__.split("+")[0] in found["torch"].found
    assert torch.backends.cpu.get_cpu_capability() in found["torch"].found
    assert found["Gloo"].found == "two ranks met over loopback", found["Gloo"]
    assert str(torch.get_num_threads()) in found["threads"].found
    for finding in page:
        assert finding.topic in repr(page) and finding.found in repr(page)
    assert page._repr_html_() == f"<pre>{html.escape(repr(page))}</pre>"


def test_more_threads_than_processors_have_a_remedy():
    cores = len(os.sched_getaffinity(0))
    threads = 4 * cores  # set here: OMP_NUM_THREADS is no more than a wish where MKL counts the cores
    program = f"import torch, plumb; torch.set_num_threads({threads}); print(plumb.doctor())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert f"{threads} of torch's" in done.stdout and f"OMP_NUM_THREADS={cores}" in done.stdout, done.stdout


def test_a_setting_of_the_environment_is_named():
    env = {**os.environ, "ATEN_CPU_CAPABILITY": "default"}
    done = subprocess.run(
        [BUILD / "bin/plumb", "doctor", "--json"], env=env, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    found = {finding["topic"]: finding for finding in json.loads(done.stdout)}
    assert "ATEN_CPU_CAPABILITY=default" in found["settings that choose kernels"]["found"]
    assert "ATen DEFAULT" in found["torch"]["found"]
