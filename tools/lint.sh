#!/usr/bin/env bash
# Style and static checks: lint.sh BUILD. Looks at C++ files that differ from BASE (main); ALL=1 looks at every one.
# clang-tidy and the headers' check read torch's headers anew for each file: count on 20 s a file. With ALL=1 clang-tidy
# reads the joined files of a build instead: 29 of them, 45 s each.
set -uo pipefail
cd "$(dirname "$0")/.."
build=$1
export PATH="$PWD/.venv/bin:$PATH"
failed=""
base=$(git merge-base HEAD "${BASE:-main}" 2>/dev/null || git rev-parse HEAD)
if [ -n "${ALL:-}" ]; then list() { git ls-files -co --exclude-standard "$@"; }
else list() { { git diff --name-only --diff-filter=d "$base" -- "$@"; git ls-files -o --exclude-standard -- "$@"; } | sort -u; }; fi

echo "lint: clang-format"
git ls-files -co --exclude-standard '*.h' '*.cpp' | xargs -r clang-format --dry-run -Werror || failed+=" clang-format"
echo "lint: ruff"
ruff check -q . || failed+=" ruff"

headers=$(list 'plumb/*.h' | grep -v -e test -e gloo_seam -e '/cli/' || true)
torch=$(python -c 'import importlib.util, os; print(os.path.dirname(importlib.util.find_spec("torch").origin))')
if [ -n "$headers" ]; then
  echo "lint: each header compiles alone"
  # A header whose text never reaches torch's takes a fraction of a second; the others half a minute.
  level=""
  [ "$(uname -m)" != x86_64 ] || level=-march=x86-64-v2 # the lowest that the vector kernels are compiled for
  printf '%s\n' $headers | xargs -P "${JOBS:-2}" -I{} g++ -std=c++20 $level -fsyntax-only -w -x c++ -I. \
    -isystem "$torch/include" -isystem "$torch/include/torch/csrc/api/include" -DUSE_DISTRIBUTED -DUSE_C10D_GLOO {} \
    || failed+=" headers"
fi

sources=$(list 'plumb/*.cpp' | grep -v -e _test.cpp -e gloo_ || true)
if [ -n "$sources" ]; then
  echo "lint: clang-tidy"
  cmake -S . -B "$build/lint" -G Ninja --log-level=WARNING -DPLUMB_PYTHON="$PWD/.venv/bin/python" \
    -DPLUMB_JOINED="${ALL:+ON}" >/dev/null || failed+=" configure"
  commands="$build/lint/compile_commands.json" how=()
  # GCC's precompiled header means nothing to clang, which has no omp.h either: it reads what that header includes.
  sed -i -E "s# -fpch-preprocess| -Winvalid-pch| -fopenmp##g; s#-include [^ \"]*cmake_pch.hxx#-include $PWD/cmake/pch.h#g" "$commands"
  if [ -n "${ALL:-}" ]; then
    sources=$(sed -nE 's#^ *"file": "(.*)",?$#\1#p' "$commands" | grep -E "/plumb_[a-z]+\.dir/Unity|$PWD/plumb/" |
      grep -v -e _test -e testing -e _fuzz -e plumb_demo -e plumb_python -e gloo_ | sort -u)
    how=(--header-filter='.*/plumb/.*\.(h|cpp)$' --checks=-bugprone-suspicious-include,-misc-unused-using-decls)
  fi
  printf '%s\n' $sources | xargs -P "${JOBS:-2}" -n 1 clang-tidy -p "$build/lint" --quiet "${how[@]}" 2>/dev/null ||
    failed+=" clang-tidy"
fi
[ -z "$failed" ] || { echo "lint: failed:$failed" >&2; exit 1; }
echo "lint: clean"
