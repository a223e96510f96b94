#!/usr/bin/env bash
# What only a GPU shows, on a machine that may have no network. Parts in their order, none longer than ten minutes:
#
#   gpu_machine.sh pack       with a network, before: fetches headers and build tools into .gpu (under 64 MiB), to take along
#   gpu_machine.sh build      library, command and Python package in build-gpu, with the torch that is there
#   gpu_machine.sh operators  every operator on the GPU against the CPU
#   gpu_machine.sh bench      kernels against the memory's speed
#   gpu_machine.sh gpt        steps of a GPT of 1 billion parameters in bf16 and FP8; two processes on the GPU
#   gpu_machine.sh suites     the Python suites of devices, with PLUMB_TEST_DEVICE=cuda
#   gpu_machine.sh build-cpp  the C++ suites
#   gpu_machine.sh cpp        the C++ suites of devices, with PLUMB_TEST_DEVICE=cuda
#   gpu_machine.sh report     docs/gpu.md, of the logs that are there
#   gpu_machine.sh            all of them but pack; goes on after a part that fails, and says so in the end
#
# A part writes its log line by line, so that what ends it leaves the figures it had; the report takes them as they are.
#
#   TORCH_PYTHON=/path/to/python   the Python that has torch (default: python3)
#   GPU_BUILD=folder               a build folder that is there instead of build-gpu
#   GPU_RESULTS=folder             where logs and the page go (default: .gpu; then the page is docs/gpu.md, which a commit adds to mkdocs.yml)
#   GPU_DEVICE=testdevice          a dry run: everything on the device for tests, the GPT a very small one on the CPU
set -euo pipefail
cd "$(dirname "$0")/.."
python=${TORCH_PYTHON:-python3}
build=${GPU_BUILD:-build-gpu}
results=${GPU_RESULTS:-.gpu}
device=${GPU_DEVICE:-cuda}
limit=560 # seconds; who runs a part may allow it ten minutes
say() { printf 'plumb: %s\n' "$*"; }
die() { printf 'plumb: %s\n' "$*" >&2; exit 1; }
headers="nlohmann-json3-dev libtomlplusplus-dev libhwy-dev libcli11-dev libgtest-dev libgmock-dev"
wheels="cmake ninja pytest iniconfig pluggy packaging pygments pytest-xdist execnet torchao"

pack() {
  rm -rf .gpu/site .gpu/headers # unpacked where it is used
  mkdir -p .gpu/wheels .gpu/debs
  (cd .gpu/debs && apt-get download $headers)
  "$python" -m pip download -q --disable-pip-version-check --no-deps --only-binary=:all: --python-version 3.12 \
    --platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64 --platform manylinux_2_17_x86_64 \
    --platform manylinux_2_24_x86_64 -d .gpu/wheels $wheels
  size=$(du -sm .gpu | cut -f1)
  [ "$size" -lt 64 ] || die ".gpu has $size MiB: more than the 64 that are carried"
  say ".gpu has $size MiB: headers of $headers, wheels of $wheels"
}

# What the machine lacks comes from .gpu.
prepare() {
  "$python" -c 'import torch' 2>/dev/null || die "'$python' has no torch; set TORCH_PYTHON."
  mkdir -p "$results" .gpu/site .gpu/headers
  PATH="$(dirname "$(command -v "$python")"):$PWD/.gpu/site/bin:$PATH"
  export PATH PYTHONPATH="$PWD/python:$PWD/.gpu/site${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
  if [ ! -e .gpu/site/pytest ] && ls .gpu/wheels/*.whl >/dev/null 2>&1; then
    "$python" -m pip install -q --disable-pip-version-check --no-index --no-deps --upgrade --target .gpu/site .gpu/wheels/*.whl
  fi
  { command -v cmake && command -v ninja && "$python" -c 'import pytest, xdist'; } >/dev/null 2>&1 \
    || die "cmake, ninja, pytest or xdist is missing: run 'tools/gpu_machine.sh pack' where there is a network, and bring .gpu along."
  for package in .gpu/debs/*.deb; do [ ! -e "$package" ] || dpkg -x "$package" .gpu/headers; done
}

configure() {
  say "building with torch $("$python" -c 'import torch; print(torch.__version__)')"
  # The linker finds torch's CUDA libraries by their own paths (cmake/TorchWheel.cmake); a CUDA toolkit is not needed.
  cmake -S . -B "$build" -G Ninja --log-level=WARNING -DPLUMB_PYTHON="$(command -v "$python")" -DPLUMB_JOINED=ON \
    -DPLUMB_TESTS="$1" -DPLUMB_COMMAND=ON -DPLUMB_PYTHON_PACKAGE=ON -DCMAKE_PREFIX_PATH="$PWD/.gpu/headers/usr"
}

compile() { timeout "$limit" cmake --build "$build" -j "$(nproc)" --target "$@"; }

build() {
  prepare
  if [ "$device" = cuda ]; then
    configure OFF
    compile plumb plumb_python plumb_cli
  else
    configure ON
    compile plumb plumb_python plumb_cli plumb_test_device
  fi
}

# The rooms that ctest runs once more on a device.
device_tests() {
  for room in plumb/*/; do
    room=$(basename "$room")
    if grep -q "^$room " tests/device/left_out.txt; then printf 'plumb_%s_test ' "$room"; fi
  done
}

build_cpp() {
  prepare
  configure ON
  compile plumb_test_device $(device_tests)
}

need_device() {
  prepare
  export PLUMB_BUILD_DIR="$PWD/$build"
  [ "$device" != cuda ] || "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' \
    || die "torch sees no CUDA device here: everything before the first CUDA call is done, the rest needs a GPU."
}

# logged PART COMMAND...: keeps what it prints, line by line, and writes the page, also where it fails.
logged() {
  local part=$1 status=0
  shift
  if [ "$device" = cuda ]; then
    "$python" -c 'import torch; print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")' >"$results/machine"
    git rev-parse --short HEAD >"$results/commit" 2>/dev/null || echo "an export" >"$results/commit"
  fi
  timeout "$limit" "$@" | tee "$results/$part.log" || status=$?
  [ $status -ne 124 ] || echo "(Ended after $limit s.)" | tee -a "$results/$part.log"
  report
  return $status
}

operators() {
  need_device
  say "comparing operators on the GPU with the CPU (under 5 minutes)"
  logged operators "$python" -m pytest -q python/tests/test_cuda.py
}

# Its workers share the device.
suites() {
  need_device
  say "running the Python suites on the GPU (under 10 minutes)"
  logged suites env PLUMB_TEST_DEVICE="$device" "$python" -m pytest -q -n 4 --dist loadfile \
    $(sed 's|.*|python/tests/test_&.py|' python/tests/device_suites.txt)
}

cpp() {
  need_device
  say "running the C++ suites on the GPU (under 10 minutes)"
  logged cpp env PLUMB_TEST_DEVICE="$device" ctest --test-dir "$build" -j 4 --output-on-failure -L device
}

bench() {
  need_device
  say "measuring kernels (under 5 minutes)"
  logged bench "$python" benchmarks/cuda_kernels.py
}

gpt() {
  need_device
  say "measuring steps of a GPT (under 10 minutes)"
  local tiny=""
  [ "$device" = cuda ] || tiny="--tiny --device cpu"
  logged gpt "$python" benchmarks/gpt_step.py --within $((limit - 20)) $tiny
}

# section PART TITLE TEXT: of tables all that was printed, of tests the last line.
section() {
  local log="$results/$1.log"
  printf '\n## %s\n\n%s\n\n' "$2" "$3"
  if [ ! -s "$log" ]; then
    echo "Not measured."
  elif [ "$1" = bench ] || [ "$1" = gpt ]; then
    grep -v '^plumb: ' "$log"
  else
    printf '```\n%s\n```\n' "$(tail -n 1 "$log")"
  fi
}

report() {
  local page="$results/gpu.md"
  mkdir -p "$results"
  {
    printf '# On a GPU\n\n'
    if [ -e "$results/machine" ]; then
      echo "Written by \`make gpu\` at $(cat "$results/commit"), on $(cat "$results/machine")."
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
  } >"$page.new"
  mv "$page.new" "$page"
  # The page of a dry run is not kept.
  if [ "$device" = cuda ] && [ "$results" = .gpu ]; then cp "$page" docs/gpu.md && page=docs/gpu.md; fi
  say "$page is written"
}

everything() {
  build
  need_device
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
