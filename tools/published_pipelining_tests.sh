#!/bin/bash
# Runs torch's own tests of pipelining on plumb, from a checkout of pytorch at the installed torch's version:
#   tools/published_pipelining_tests.sh CHECKOUT [pytest options, such as test_schedule.py or -k csv]
# CHECKOUT is the checkout, or a folder with the files of its test/distributed/pipelining (Debian's source package
# pytorch has them, too). The files are copied and not changed; those about DTensor are left out.
# docs/differences.md names the tests that plumb fails on purpose.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-$root/.venv/bin/python}
[ -x "$python" ] || python=python3
[ $# -ge 1 ] || { sed -n '2,6s/^# //p' "$0"; exit 2; }
from=$1
shift
[ ! -d "$from/test/distributed/pipelining" ] || from=$from/test/distributed/pipelining
ls "$from"/test_*.py > /dev/null
"$python" -c "import expecttest" || { echo "torch's tests need a package: pip install expecttest" >&2; exit 2; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cp -r "$from"/. "$work"
cp -r "$root/tools/published_pipelining"/. "$work"
cd "$work"
OMP_WAIT_POLICY=PASSIVE OMP_NUM_THREADS=1 PYTHONPATH=$work:$root/python${PYTHONPATH:+:$PYTHONPATH} "$python" -m pytest -q -p no:cacheprovider --ignore-glob="*test_dtensor*" "$@"
