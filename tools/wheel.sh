#!/usr/bin/env bash
# Makes dist/*.whl from the finished build BUILD: wheel.sh BUILD. Its name says for which torch and Python it is, and which
# glibc it needs at least (PEP 600; auditwheel finds out). No library is taken in: torch's come from the torch that is installed
# beside it, and so does OpenMP's runtime: a second one would keep threads of its own.
set -euo pipefail
cd "$(dirname "$0")/.."
build=$(realpath "$1")
export PATH="$PWD/.venv/bin:$PATH" PLUMB_BUILD_DIR=$build PLUMB_WHEEL_LABEL=1
plain="$build/wheel"
rm -rf "$plain"
echo "plumb: packing the wheel"
python -m pip wheel -q --disable-pip-version-check --no-build-isolation --no-deps -w "$plain" .
wheel=$(cd "$plain" && echo *.whl)
name=${wheel%-linux_*} machine=${wheel##*-linux_} # wheels for other machines stay
rm -f dist/"$name"-*_"$machine"
libraries=$(python -c 'import importlib.util, os; print(os.path.dirname(importlib.util.find_spec("torch").origin) + "/lib")')
LD_LIBRARY_PATH=$libraries auditwheel repair --exclude 'libtorch*' --exclude 'libc10*' --exclude 'libgomp*' \
  --exclude libplumb.so -w dist "$plain"/*.whl >"$build/auditwheel.log" 2>&1 || { tail -20 "$build/auditwheel.log" >&2; exit 1; }
wheel=$(ls dist/"$name"-*_"$machine")
if taken=$(python -m zipfile -l "$wheel" | grep -oE 'plumb\.libs/[^ ]+\.so[^ ]*'); then
  echo "plumb: $wheel has libraries of this machine: $taken" >&2
  exit 1
fi
echo "plumb: made $wheel"
