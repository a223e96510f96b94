#!/usr/bin/env bash
# What only a GPU shows, on a machine that may have no network. Parts in their order, none longer than ten minutes:
#
#   gpu_machine.sh pack       with a network, before: fetches headers and build tools into .gpu (under 64 MiB), to take along
#   gpu_machine.sh build      library and Python package in build-gpu, with the torch that is there
#   gpu_machine.sh operators  every operator on the GPU against the CPU
#   gpu_machine.sh bench      kernels against the memory's speed
#   gpu_machine.sh gpt        steps of a GPT of 1 billion parameters in bf16 and FP8; two processes on the GPU
#   gpu_machine.sh suites     the Python suites of devices, with PLUMB_TEST_DEVICE=cuda
#   gpu_machine.sh build-cpp  the C++ suites
#   gpu_machine.sh cpp        the C++ suites of devices, with PLUMB_TEST_DEVICE=cuda
#   gpu_machine.sh report     docs/gpu.md, of what has run here; each part that measures writes it again
#   gpu_machine.sh            all of them but pack; goes on after a part that fails, and says so in the end
#
#   TORCH_PYTHON=/path/to/python   the Python that has torch (default: python3)
#   GPU_BUILD=folder               a build folder that is there instead of build-gpu
set -euo pipefail
cd "$(dirname "$0")/.."
python=${TORCH_PYTHON:-python3}
build=${GPU_BUILD:-build-gpu}
say() { printf 'plumb: %s\n' "$*"; }
die() { printf 'plumb: %s\n' "$*" >&2; exit 1; }
headers="nlohmann-json3-dev libtomlplusplus-dev libcli11-dev libgtest-dev libgmock-dev"

pack() {
  mkdir -p .gpu/wheels .gpu/debs
  (cd .gpu/debs && apt-get download $headers)
  "$python" -m pip download -q --disable-pip-version-check --no-deps --only-binary=:all: --python-version 3.12 \
    --platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64 --platform manylinux_2_17_x86_64 \
    -d .gpu/wheels cmake ninja pytest iniconfig pluggy packaging pygments pytest-xdist execnet
  size=$(du -sm .gpu | cut -f1)
  [ "$size" -lt 64 ] || die ".gpu has $size MiB: more than the 64 that are carried"
  say ".gpu has $size MiB: headers of $headers, wheels of cmake, ninja, pytest and xdist"
}

# Tools that the machine lacks come from .gpu; headers too.
prepare() {
  "$python" -c 'import torch' 2>/dev/null || die "'$python' has no torch; set TORCH_PYTHON."
  mkdir -p .gpu/site .gpu/headers
  PATH="$(dirname "$(command -v "$python")"):$PWD/.gpu/site/bin:$PATH"
  export PATH PYTHONPATH="$PWD/python:$PWD/.gpu/site${PYTHONPATH:+:$PYTHONPATH}"
  if ! { command -v cmake && command -v ninja && "$python" -c 'import pytest'; } >/dev/null 2>&1; then
    ls .gpu/wheels/*.whl >/dev/null 2>&1 \
      || die "cmake, ninja or pytest is missing: run 'tools/gpu_machine.sh pack' where there is a network, and bring .gpu along."
    "$python" -m pip install -q --disable-pip-version-check --no-index --no-deps --upgrade --target .gpu/site .gpu/wheels/*.whl
  fi
  for package in .gpu/debs/*.deb; do [ ! -e "$package" ] || dpkg -x "$package" .gpu/headers; done
}

configure() {
  say "building with torch $("$python" -c 'import torch; print(torch.__version__)')"
  # The linker finds torch's CUDA libraries by their own paths (cmake/TorchWheel.cmake); a CUDA toolkit is not needed.
  cmake -S . -B "$build" -G Ninja --log-level=WARNING -DPLUMB_PYTHON="$(command -v "$python")" -DPLUMB_JOINED=ON \
    -DPLUMB_TESTS="$1" -DPLUMB_COMMAND=OFF -DPLUMB_PYTHON_PACKAGE=ON -DCMAKE_PREFIX_PATH="$PWD/.gpu/headers/usr"
}

build() {
  prepare
  configure OFF
  timeout 600 cmake --build "$build" -j "$(nproc)" --target plumb plumb_python
}

cpp_suites="capture exported partition pipeline transforms recording"

build_cpp() {
  prepare
  configure ON
  timeout 600 cmake --build "$build" -j "$(nproc)" --target $(printf 'plumb_%s_test ' $cpp_suites)
}

need_gpu() {
  prepare
  "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' \
    || die "torch sees no CUDA device here: everything before the first CUDA call is done, the rest needs a GPU."
}

# tests WORDS...: pytest with this build; workers share the device.
tests() { PLUMB_BUILD_DIR="$PWD/$build" timeout 600 "$python" -m pytest -q "$@"; }

# logged PART COMMAND...: keeps what it prints for the page, also where it fails.
logged() {
  local part=$1 status=0
  shift
  mkdir -p .gpu
  "$@" | tee ".gpu/$part.log" || status=$?
  note "$part" ".gpu/$part.log"
  return $status
}

operators() {
  need_gpu
  say "comparing operators on the GPU with the CPU (under 5 minutes)"
  logged operators tests python/tests/test_cuda.py
}

suites() {
  need_gpu
  say "running the Python suites on the GPU (under 10 minutes)"
  export PLUMB_TEST_DEVICE=cuda
  logged suites tests -n 4 --dist loadfile $(sed 's|.*|python/tests/test_&.py|' python/tests/device_suites.txt)
}

cpp() {
  need_gpu
  say "running the C++ suites on the GPU (under 10 minutes)"
  export PLUMB_TEST_DEVICE=cuda
  logged cpp timeout 600 ctest --test-dir "$build" --output-on-failure -L device
}

bench() {
  need_gpu
  say "measuring kernels (under 5 minutes)"
  export PLUMB_BUILD_DIR="$PWD/$build"
  logged bench timeout 600 "$python" benchmarks/cuda_kernels.py
}

gpt() {
  need_gpu
  say "measuring steps of a GPT (under 10 minutes)"
  export PLUMB_BUILD_DIR="$PWD/$build"
  logged gpt timeout 600 "$python" benchmarks/gpt_step.py --limit 120
}

# note PART LOG: keeps what a part found, for the page. Of tests the last line.
note() {
  mkdir -p .gpu/found
  case "$1" in
    bench | gpt) cp "$2" ".gpu/found/$1.md" ;;
    *) { echo '```'; tail -n 1 "$2"; echo '```'; } >".gpu/found/$1.md" ;;
  esac
  "$python" -c 'import torch; print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")' >.gpu/found/machine
  git rev-parse --short HEAD >.gpu/found/commit 2>/dev/null || echo "an export" >.gpu/found/commit
  report
}

# section PART TITLE TEXT
section() {
  printf '\n## %s\n\n%s\n\n' "$2" "$3"
  if [ -e ".gpu/found/$1.md" ]; then cat ".gpu/found/$1.md"; else echo "Not measured."; fi
}

report() {
  draft=$(mktemp)
  {
    printf '# On a GPU\n\n'
    if [ -e .gpu/found/machine ]; then
      echo "Written by \`make gpu\` at $(cat .gpu/found/commit), on $(cat .gpu/found/machine)."
    else
      echo "\`make gpu\` (\`tools/gpu_machine.sh\`) writes this page on a machine with a GPU. It was not run yet."
    fi
    section operators "Operators" "Every operator on the GPU against the CPU's bits (\`python/tests/test_cuda.py\`)."
    section bench "Kernels" "Bytes that a kernel must read and write, a second: the median of 20 calls on $((1 << 27)) values. Goals: quantise and
metrics at least 0.85 of \`clone\`."
    section gpt "Steps of a GPT" "Forward, backward and AdamW of 1 billion parameters (\`benchmarks/gpt_step.py\`), batch 4 x 1024, 20 steps. Goals:
unit-scaled FP8 at least 1.25 times as quick as compiled bf16 and no slower than torchao; recording every 10 steps at most 1.02."
    section suites "Python suites" "Those of \`python/tests/device_suites.txt\`, with \`PLUMB_TEST_DEVICE=cuda\`."
    section cpp "C++ suites" "\`ctest -L device\`, with \`PLUMB_TEST_DEVICE=cuda\`."
  } >"$draft"
  cp "$draft" docs/gpu.md
  rm -f "$draft"
  say "docs/gpu.md is written"
}

everything() {
  build
  need_gpu
  failed=""
  for part in operators bench gpt suites build-cpp cpp; do tools/gpu_machine.sh "$part" || failed="$failed $part"; done
  [ -z "$failed" ] || die "failed:$failed"
}

case "${1:-all}" in
  pack | build | operators | suites | cpp | bench | gpt | report) "$1" ;;
  build-cpp) build_cpp ;;
  all) everything ;;
  *) die "no part '$1'; there are pack, build, operators, bench, gpt, suites, build-cpp, cpp, report." ;;
esac
