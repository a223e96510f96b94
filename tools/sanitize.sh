#!/usr/bin/env bash
# Builds with address and undefined-behavior sanitizers and runs every C++ test: sanitize.sh BUILD [ctest arguments].
# SANITIZER=thread: with ThreadSanitizer, the suites with several threads: modules, checkpoints, trainings, pipelines.
set -euo pipefail
cd "$(dirname "$0")/.."
build=$1
shift
export PATH="$PWD/.venv/bin:$PATH"
cmake -S . -B "$build" -G Ninja -DPLUMB_PYTHON="$PWD/.venv/bin/python" -DPLUMB_PYTHON_PACKAGE=OFF -DPLUMB_JOINED=ON \
  -DPLUMB_SANITIZE="${SANITIZER:-address,undefined}" >/dev/null
if [ "${SANITIZER:-}" = thread ]; then
  cmake --build "$build" -j "${JOBS:-2}" --target plumb_{transforms,checkpoint,training,pipeline}_test
  export OMP_WAIT_POLICY=PASSIVE OMP_NUM_THREADS=1
  export TSAN_OPTIONS="halt_on_error=1:allocator_may_return_null=1:ignore_noninstrumented_modules=1"
  TSAN_OPTIONS+=":suppressions=$PWD/tools/thread_suppressions.txt"
  "$build/tests/plumb_transforms_test" --gtest_filter='Threads.*'
  "$build/tests/plumb_checkpoint_test"
  "$build/tests/plumb_training_test"
  "$build/tests/plumb_pipeline_test" --gtest_filter=-Strict.*:DeviceCosts.*
  # Streams and backwards of the test device hand over between threads in torch's code, whose locks the sanitizer does
  # not see, or sees without their release.
  cat tools/thread_suppressions.txt - <<<"race:libtorch_cpu.so" >"$build/device_suppressions.txt"
  TSAN_OPTIONS+=":detect_deadlocks=0:suppressions=$PWD/$build/device_suppressions.txt"
  exec "$build/tests/plumb_pipeline_test" --gtest_filter=Strict.*:DeviceCosts.*
fi
cmake --build "$build" -j "${JOBS:-2}"
. tools/sanitizer_options.sh
# The consumer is built without sanitizers and could not load a library with them.
ctest --test-dir "$build" --output-on-failure -E '^(consumer|rooms)$' "$@"
