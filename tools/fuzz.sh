#!/usr/bin/env bash
# Builds the fuzzers with sanitizers and runs each for SECONDS: fuzz.sh BUILD [SECONDS] [--seed=n].
set -euo pipefail
cd "$(dirname "$0")/.."
build=$1
seconds=${2:-30}
seed=${3:---seed=1}
export PATH="$PWD/.venv/bin:$PATH"
cmake -S . -B "$build" -G Ninja -DPLUMB_PYTHON="$PWD/.venv/bin/python" -DPLUMB_PYTHON_PACKAGE=OFF -DPLUMB_JOINED=ON -DPLUMB_TESTS=OFF \
  -DPLUMB_FUZZ=ON -DPLUMB_SANITIZE=address,undefined >/dev/null
drivers=()
for source in tests/fuzz/fuzz_*.cpp; do drivers+=("$(basename "$source" .cpp)"); done
cmake --build "$build" -j "${JOBS:-2}" --target "${drivers[@]}"

seeds=$build/programs
scripts=plumb/exported/testdata
if ! cat "$scripts"/*.py | cmp -s - "$seeds/stamp"; then
  rm -rf "$seeds" && mkdir -p "$seeds"
  python "$scripts/make_programs.py" make "$seeds" >/dev/null
  cat "$scripts"/*.py > "$seeds/stamp"
fi
. tools/sanitizer_options.sh
failed=""
for driver in "${drivers[@]}"; do
  echo "fuzz: $driver for $seconds s"
  "$build/fuzz/$driver" "--seconds=$seconds" "$seed" "$seeds" || failed+=" $driver"
done
[ -z "$failed" ] || { echo "fuzz: failed:$failed" >&2; exit 1; }
echo "fuzz: clean"
