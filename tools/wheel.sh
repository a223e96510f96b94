#!/usr/bin/env bash
# Makes dist/*.whl from the finished build BUILD: wheel.sh BUILD. Its name says for which torch and Python it is, and which
# glibc it needs at least (PEP 600; auditwheel finds out). torch's libraries are not taken in: they come from the torch that
# is installed beside it.
set -euo pipefail
cd "$(dirname "$0")/.."
build=$(realpath "$1")
export PATH="$PWD/.venv/bin:$PATH" PLUMB_BUILD_DIR=$build PLUMB_WHEEL_LABEL=1
plain="$build/wheel"
rm -rf "$plain"
echo "plumb: packing the wheel"
python -m pip wheel -q --disable-pip-version-check --no-build-isolation --no-deps -w "$plain" .
libraries=$(python -c 'import importlib.util, os; print(os.path.dirname(importlib.util.find_spec("torch").origin) + "/lib")')
LD_LIBRARY_PATH=$libraries auditwheel repair --exclude 'libtorch*' --exclude 'libc10*' --exclude libplumb.so -w dist \
  "$plain"/*.whl >"$build/auditwheel.log" 2>&1 || { tail -20 "$build/auditwheel.log" >&2; exit 1; }
wheel=$(cd "$plain" && echo *.whl)
ls dist/"${wheel%-linux_*}"-*.whl | sed 's/^/plumb: made /'
