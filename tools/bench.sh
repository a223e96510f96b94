#!/usr/bin/env bash
# Runs every benchmark and writes the tables: bench.sh BUILD OUTPUT.md. Programs are benchmarks/*_bench.cpp, scripts are
# benchmarks/*.py, which print their own Markdown and find benchmarks/*_cases.cpp, their libraries, under $PLUMB_BUILD.
# One that fails is named at the end, and the exit code is then 1.
set -euo pipefail
cd "$(dirname "$0")/.."
build=$1 output=$2
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-PASSIVE}

programs=()
for source in benchmarks/*_bench.cpp; do [ -e "$source" ] && programs+=("$(basename "$source" .cpp)"); done
libraries=()
for source in benchmarks/*_cases.cpp; do [ -e "$source" ] && libraries+=("$(basename "$source" .cpp)"); done
# What scripts import is built too: the library, the Python module, the command.
PATH="$PWD/.venv/bin:$PATH" cmake --build "$build" -j "${JOBS:-2}" --target all "${programs[@]}" "${libraries[@]}"

mkdir -p "$(dirname "$output")"
draft=$(mktemp)
trap 'rm -f "$draft"' EXIT
{
  echo "# Benchmarks"
  echo
  echo "Written by \`make bench\` at $(git rev-parse --short HEAD 2>/dev/null || echo 'an export'), with" \
    "$(nproc) cores of $(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -1), torch" \
    "$(.venv/bin/python -c 'import importlib.metadata as m; print(m.version("torch"))')."
} >"$draft"

failed=""
for program in "${programs[@]}"; do
  printf '\n## %s\n\n' "$program" >>"$draft"
  echo "bench: $program" >&2
  if ! "$build/benchmarks/$program" --benchmark_format=json 2>/dev/null | .venv/bin/python tools/bench_table.py | tee -a "$draft"; then
    failed+=" $program"
  fi
done
for script in benchmarks/*.py; do
  [ -e "$script" ] || continue
  printf '\n## %s\n\n' "$(basename "$script" .py)" >>"$draft"
  echo "bench: $script" >&2
  if ! PLUMB_BUILD="$build" .venv/bin/python "$script" | tee -a "$draft"; then failed+=" $script"; fi
done
if [ -n "$failed" ]; then
  echo "bench: failed:$failed; $output is left as it was" >&2
  exit 1
fi
cp "$draft" "$output"
echo "bench: wrote $output" >&2
