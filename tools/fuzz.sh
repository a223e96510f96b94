#!/usr/bin/env bash
# Builds the fuzzers with sanitizers and runs them, every reader and all operators for SECONDS each:
# fuzz.sh BUILD [SECONDS] [--seed=n].
set -euo pipefail
cd "$(dirname "$0")/.."
build=$1
seconds=${2:-30}
seed=${3:---seed=1}
export PATH="$PWD/.venv/bin:$PATH"
cmake -S . -B "$build" -G Ninja -DPLUMB_PYTHON="$PWD/.venv/bin/python" -DPLUMB_PYTHON_PACKAGE=OFF -DPLUMB_JOINED=ON -DPLUMB_TESTS=OFF \
  -DPLUMB_FUZZ=ON -DPLUMB_SANITIZE=address,undefined >/dev/null
cmake --build "$build" -j "${JOBS:-2}" --target fuzz_readers fuzz_operators

seeds=$build/programs
scripts=plumb/exported/testdata
if ! cat "$scripts"/*.py | cmp -s - "$seeds/stamp"; then
  rm -rf "$seeds" && mkdir -p "$seeds"
  python "$scripts/make_programs.py" make "$seeds" >/dev/null
  cat "$scripts"/*.py > "$seeds/stamp"
fi
. tools/sanitizer_options.sh
# An input that asks for much memory is refused or fails, it does not take the machine's.
export ASAN_OPTIONS+=":hard_rss_limit_mb=4000"
failed=""
"$build/fuzz/fuzz_readers" "--seconds=$seconds" "$seed" tests/fuzz/corpus "$seeds" || failed+=" fuzz_readers"
"$build/fuzz/fuzz_operators" "--seconds=$seconds" "$seed" || failed+=" fuzz_operators"
[ -z "$failed" ] || { echo "fuzz: failed:$failed" >&2; exit 1; }
echo "fuzz: clean"
