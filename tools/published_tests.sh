#!/bin/bash
# Runs the tests that unit-scaling 0.3.5 brings along, unchanged, on plumb: `unit_scaling.X` is `plumb.X` for them.
#   tools/published_tests.sh [folder of an unpacked wheel] [pytest options]
# Without a folder the wheel is downloaded with pip. Left out: test_docs.py (helpers for docstrings, which plumb has not)
# and what needs a network (tokenizers of huggingface). docs/differences.md names the tests that plumb fails on purpose.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-$root/.venv/bin/python}
[ -x "$python" ] || python=python3
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
if [ -d "${1:-}/unit_scaling/tests" ]; then
  from=$1
  shift
else
  "$python" -m pip download -q --no-deps -d "$work" unit-scaling==0.3.5
  "$python" -m zipfile -e "$work"/unit_scaling-0.3.5-*.whl "$work/wheel"
  from=$work/wheel
fi
mkdir -p "$work/run/unit_scaling"
cp -r "$from/unit_scaling/tests" "$work/run/unit_scaling/tests"
cat > "$work/run/unit_scaling/__init__.py" <<'PYTHON'
import importlib
import importlib.abc
import importlib.machinery
import sys


class Alias(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.startswith("unit_scaling.") and not name.startswith("unit_scaling.tests"):
            return importlib.machinery.ModuleSpec(name, self)

    def create_module(self, spec):
        # Its `_modules` has all layers; plumb's are in two files.
        name = "nn" if spec.name == "unit_scaling._modules" else spec.name.partition(".")[2]
        return importlib.import_module(f"plumb.{name}")

    def exec_module(self, module):
        pass


sys.meta_path.insert(0, Alias())
import plumb  # noqa: E402

globals().update({k: v for k, v in vars(plumb).items() if not k.startswith("__")})
PYTHON
cd "$work/run"
PYTHONPATH=$work/run:$root/python${PYTHONPATH:+:$PYTHONPATH} MPLBACKEND=Agg "$python" -m pytest -q -p no:cacheprovider \
  --ignore unit_scaling/tests/test_docs.py \
  --deselect unit_scaling/tests/test_analysis.py::test_create_batch \
  --deselect unit_scaling/tests/test_analysis.py::test_example_batch \
  --deselect unit_scaling/tests/test_analysis.py::test_visualiser \
  unit_scaling/tests "$@"
