#!/usr/bin/env bash
# Builds with address and undefined-behaviour sanitizers and runs every C++ test: sanitize.sh BUILD [ctest arguments].
set -euo pipefail
cd "$(dirname "$0")/.."
build=$1
shift
export PATH="$PWD/.venv/bin:$PATH"
cmake -S . -B "$build" -G Ninja -DPLUMB_PYTHON="$PWD/.venv/bin/python" -DPLUMB_PYTHON_PACKAGE=OFF -DPLUMB_JOINED=ON \
  -DPLUMB_SANITIZE=address,undefined >/dev/null
cmake --build "$build" -j "${JOBS:-2}"
. tools/sanitizer_options.sh
# The consumer is built without sanitizers and could not load a library with them.
ctest --test-dir "$build" --output-on-failure -E '^(consumer|rooms)$' "$@"
