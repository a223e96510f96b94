#!/usr/bin/env bash
# What only a GPU shows, on a machine that may have no network: each part stays under ten minutes.
#
#   gpu_machine.sh pack     with a network, before: fetches headers and build tools into .gpu (under 64 MiB), to take along
#   gpu_machine.sh build    library and Python package in build-gpu, with the torch that is there
#   gpu_machine.sh test     every operator on the GPU against the CPU
#   gpu_machine.sh bench    kernels against the memory's speed; writes docs/gpu.md
#   gpu_machine.sh          build, test, bench
#
#   TORCH_PYTHON=/path/to/python   the Python that has torch (default: python3)
#   GPU_BUILD=folder               a build folder that is there instead of build-gpu
set -euo pipefail
cd "$(dirname "$0")/.."
python=${TORCH_PYTHON:-python3}
build=${GPU_BUILD:-build-gpu}
say() { printf 'plumb: %s\n' "$*"; }
die() { printf 'plumb: %s\n' "$*" >&2; exit 1; }
headers="nlohmann-json3-dev libtomlplusplus-dev libcli11-dev"

pack() {
  mkdir -p .gpu/wheels .gpu/debs
  (cd .gpu/debs && apt-get download $headers)
  "$python" -m pip download -q --disable-pip-version-check --no-deps --only-binary=:all: --python-version 3.12 \
    --platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64 --platform manylinux_2_17_x86_64 \
    -d .gpu/wheels cmake ninja pytest iniconfig pluggy packaging pygments
  size=$(du -sm .gpu | cut -f1)
  [ "$size" -lt 64 ] || die ".gpu has $size MiB: more than the 64 that are carried"
  say ".gpu has $size MiB: headers of $headers, wheels of cmake, ninja and pytest"
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

build() {
  prepare
  say "building with torch $("$python" -c 'import torch; print(torch.__version__)')"
  # The linker finds torch's CUDA libraries by their own paths (cmake/TorchWheel.cmake); a CUDA toolkit is not needed.
  cmake -S . -B "$build" -G Ninja --log-level=WARNING -DPLUMB_PYTHON="$(command -v "$python")" -DPLUMB_JOINED=ON \
    -DPLUMB_TESTS=OFF -DPLUMB_COMMAND=OFF -DPLUMB_PYTHON_PACKAGE=ON -DCMAKE_PREFIX_PATH="$PWD/.gpu/headers/usr"
  timeout 600 cmake --build "$build" -j "$(nproc)" --target plumb plumb_python
}

need_gpu() {
  prepare
  "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' \
    || die "torch sees no CUDA device here: everything before the first CUDA call is done, the rest needs a GPU."
}

run_tests() {
  need_gpu
  say "comparing operators on the GPU with the CPU"
  PLUMB_BUILD_DIR="$PWD/$build" timeout 600 "$python" -m pytest -q python/tests/test_cuda.py
}

bench() {
  need_gpu
  say "measuring kernels"
  draft=$(mktemp)
  trap 'rm -f "$draft"' EXIT
  {
    echo "# On a GPU"
    echo
    echo "Written by \`make gpu\` at $(git rev-parse --short HEAD 2>/dev/null || echo 'an export'), on" \
      "$("$python" -c 'import torch; print(torch.cuda.get_device_name(), "with torch", torch.__version__)')."
    echo
    echo "## Kernels"
    echo
    echo "Bytes that a kernel must read and write, a second: the median of 20 calls on $((1 << 27)) values."
    echo
    PLUMB_BUILD_DIR="$PWD/$build" timeout 600 "$python" benchmarks/cuda_kernels.py
  } >"$draft"
  cp "$draft" docs/gpu.md
  say "docs/gpu.md is written"
}

case "${1:-all}" in
  pack) pack ;;
  build) build ;;
  test) run_tests ;;
  bench) bench ;;
  all) build && run_tests && bench ;;
  *) die "no part '$1'; there are pack, build, test, bench." ;;
esac
