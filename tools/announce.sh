#!/usr/bin/env bash
# Says what `make demo` or `make test` is about to do here, and how long that takes: announce.sh demo|test BUILD JOBS.
# Seconds: until the precompiled header is there only one core works (serial); core seconds of the rest; running. Compile times
# were measured on an AMD EPYC with an empty compile cache; the time of the tests is a guess, on the safe side.
set -euo pipefail
cd "$(dirname "$0")/.."
goal=$1 build=$2 jobs=$3
case "$goal" in
  demo) level=demo made="$build/bin/plumb_demo" serial=60 parallel=600 run=90 what="trains a small GPT five times" ;;
  test) level=test made="$build/tests/plumb_pipeline_test" serial=60 parallel=1400 run=660 what="runs every test" ;;
esac
steps="" seconds=$run
if ! tools/bootstrap.sh --check "$level"; then
  steps+="installs a compiler, torch and build tools where missing, "
  seconds=$((seconds + 60))
fi
if [ ! -e "$made" ]; then
  steps+="compiles, "
  seconds=$((seconds + serial + parallel / (jobs < 1 ? 1 : jobs)))
fi
echo "plumb: make $goal ${steps}${what}: about $(((seconds + 59) / 60)) minutes on $jobs cores"
