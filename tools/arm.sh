#!/usr/bin/env bash
# plumb for 64-bit ARM on an x86 machine: cross-built in build-arm, run under emulation (docs/howto/arm.md).
#
#   arm.sh setup              fetches what is missing into .arm: torch, Python and test libraries for ARM
#   arm.sh build [TARGET...]  compiles; default: everything. JOBS=n at once
#   arm.sh run COMMAND...     runs a command that may start ARM programs, also through others
#   arm.sh test [SUITE...]    builds and runs C++ suites one by one and prints a table; default: SUITES below
#   arm.sh wheel              dist/plumb-...-linux_aarch64.whl, imported once by an ARM Python
set -euo pipefail
cd "$(dirname "$0")/.."
say() { printf 'plumb: %s\n' "$*"; }
die() { printf 'plumb: %s\n' "$*" >&2; exit 1; }

self=$PWD/tools/arm.sh arm=$PWD/.arm build=$PWD/build-arm
root=$arm/root site=$arm/site
python=$root/usr/bin/python3
SUITES="core numerics pointwise graph schedule scaling capture transforms exported partition pipeline
  autograd recording checkpoint training"

# --- what is missing ---------------------------------------------------------------------------------------------

need_programs() {
  local missing=""
  compgen -c aarch64-linux-gnu-g++ >/dev/null || missing+=" g++-12-aarch64-linux-gnu"
  command -v qemu-aarch64-static >/dev/null || missing+=" qemu-user-static"
  [ -z "$missing" ] || die "these packages are missing: sudo apt-get install -y$missing"
}

# Debian's packages for ARM: neither root nor a second architecture of the system is needed to unpack them.
fetch_packages() {
  local folder=$1 version=$2 state
  state=$(mktemp -d)
  mkdir -p "$state"/{lists/partial,cache/archives/partial} "$folder.part"
  local apt=(apt-get -qq -o APT::Architecture=arm64 -o APT::Architectures::=arm64 -o APT::Sandbox::User=
    -o Dir::State="$state" -o Dir::State::status=/dev/null -o Dir::Cache="$state/cache")
  "${apt[@]}" update
  (cd "$folder.part" && "${apt[@]}" download libgtest-dev libgmock-dev librapidcheck-dev "python$version-minimal" \
    "libpython$version-minimal" "libpython$version-stdlib" "libpython$version-dev" libffi8 zlib1g libexpat1 libssl3 \
    libbz2-1.0 liblzma5 libuuid1 libsqlite3-0 >/dev/null)
  rm -rf "$state"
  mv "$folder.part" "$folder"
}

fetch_wheels() {
  local folder=$1 version=$2 torch=$3 transformers=$4 platforms=(--platform manylinux2014_aarch64) glibc
  for glibc in 17 24 25 26 27 28; do platforms+=(--platform "manylinux_2_${glibc}_aarch64"); done
  local download=(.venv/bin/python -m pip download -q --disable-pip-version-check -d "$folder.part" --only-binary=:all:
    --python-version "$version" --implementation cp "${platforms[@]}")
  "${download[@]}" "transformers==$transformers" # a test's program is of one of its models
  "${download[@]}" --no-deps "torch==$torch" typing_extensions filelock fsspec jinja2 markupsafe networkx sympy mpmath
  mv "$folder.part" "$folder"
}

# torch reads the machine when it starts and takes an x86 kernel's replies for an ARM CPU without cores.
describe_cpu() {
  local cpus cpu
  cpus=$(nproc --all)
  mkdir -p "$root/proc"
  : >"$root/proc/cpuinfo"
  for ((cpu = 0; cpu < cpus; ++cpu)); do
    local registers=$root/sys/devices/system/cpu/cpu$cpu/regs/identification
    mkdir -p "$registers"
    echo 0x00000000413fd0c1 >"$registers/midr_el1"
    printf '%s\t: %s\n' processor "$cpu" BogoMIPS 50.00 \
      Features "fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp" \
      "CPU implementer" 0x41 "CPU architecture" 8 "CPU variant" 0x3 "CPU part" 0xd0c "CPU revision" 1 >>"$root/proc/cpuinfo"
    echo >>"$root/proc/cpuinfo"
  done
}

setup() {
  need_programs
  tools/bootstrap.sh test
  local version torch transformers
  version=$(.venv/bin/python -c 'import sys; print("%d.%d" % sys.version_info[:2])')
  torch=$(.venv/bin/python -c 'import importlib.metadata as m; print(m.version("torch").split("+")[0])')
  transformers=$(.venv/bin/python -c 'import importlib.metadata as m; print(m.version("transformers"))')
  local packages=$arm/packages-$version wheels=$arm/wheels-$version-$torch-$transformers stamp file
  stamp="$packages $wheels 1 $(cksum <tools/without_cuda.py)" # another number unpacks anew
  [ "$(cat "$arm/stamp" 2>/dev/null)" != "$stamp" ] || return 0
  mkdir -p "$arm"
  [ -d "$packages" ] || { say "fetching Debian's packages for ARM" && fetch_packages "$packages" "$version"; }
  [ -d "$wheels" ] || { say "fetching torch $torch for ARM" && fetch_wheels "$wheels" "$version" "$torch" "$transformers"; }
  say "unpacking Python and torch for ARM"
  rm -rf "$root" "$site"
  for file in "$packages"/*.deb; do dpkg-deb -x "$file" "$root"; done
  for file in "$wheels"/*.whl; do .venv/bin/python -m zipfile -e "$file" "$site"; done
  ln -sf "python$version" "$python"
  mkdir -p "$root/usr/local/lib/python$version/dist-packages"
  echo "$site" >"$root/usr/local/lib/python$version/dist-packages/plumb_arm.pth"
  cp -a /usr/aarch64-linux-gnu/lib "$root/" # the compiler's C and C++ libraries
  describe_cpu
  .venv/bin/python tools/without_cuda.py "$site/torch/lib" "$root"{/lib,/lib/aarch64-linux-gnu,/usr/lib/aarch64-linux-gnu}
  echo "$stamp" >"$arm/stamp"
}

# The wheel is tried where nothing of this checkout can be found.
wheel() {
  build plumb plumb_cli plumb_python
  # Python's own packaging takes the platform's name from here.
  rm -f dist/plumb-*aarch64.whl
  PATH="$PWD/.venv/bin:$PATH" _PYTHON_HOST_PLATFORM=linux-aarch64 "$self" run tools/wheel.sh "$build"
  there=$(mktemp -d) # not local: the trap runs when this function is over
  trap 'rm -rf "$there"' EXIT
  .venv/bin/python -m zipfile -e dist/plumb-*aarch64.whl "$there"
  say "importing it with Python for ARM"
  (cd "$there" && PYTHONPATH=$there "$self" run "$python" -c "
import platform, torch, plumb
from plumb.formats import FPFormat
x = torch.linspace(-1, 1, 8)
print('plumb', plumb.__version__, platform.machine(), torch.__version__, FPFormat.parse('e4m3fn').quantise(x).tolist())")
}

# --- running ------------------------------------------------------------------------------------------------------

# ARM programs start like others once the kernel knows their interpreter: told for this command alone, in a namespace of
# its own (Linux 6.7), so that nothing of the system changes.
run() {
  export QEMU_LD_PREFIX=$root QEMU_CPU=neoverse-n1
  # Tests that compile kernels load them. Before the build is configured there are none.
  local compiler
  compiler=$(sed -n 's/^PLUMB_ARM_COMPILER:FILEPATH=//p' "$build/CMakeCache.txt" 2>/dev/null || true)
  [ -z "$compiler" ] || export PLUMB_EMULATOR_COMPILER=$compiler
  export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} OMP_WAIT_POLICY=PASSIVE RC_PARAMS=${RC_PARAMS:-seed=1}
  if "$python" -c '' 2>/dev/null; then exec "$@"; fi
  exec unshare --user --map-root-user --mount "$self" registered "$@"
}

registered() {
  local registry=/proc/sys/fs/binfmt_misc
  mount -t binfmt_misc binfmt_misc $registry || die "ARM programs need Linux 6.7, or the package binfmt-support."
  # Name, an ELF header of 64 bits, little endian, machine 183, its mask, the emulator, opened now.
  printf '%s' ':plumb_arm:M::\x7fELF\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\xb7\x00:' \
    '\xff\xff\xff\xff\xff\xff\xff\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff:' \
    "$(command -v qemu-aarch64-static):F" >$arm/format
  cat "$arm/format" >$registry/register
  exec "$@"
}

build() {
  setup
  export PATH="$PWD/.venv/bin:$PATH"
  if [ ! -e "$build/build.ninja" ]; then
    "$self" run cmake -S . -B "$build" -G Ninja --toolchain cmake/aarch64.cmake -DPLUMB_ARM="$arm" -DPLUMB_JOINED=ON \
      -DPLUMB_TORCH_DIR="$site/torch" -DPLUMB_PYTHON="$python" --log-level=WARNING
  fi
  "$self" run cmake --build "$build" -j "${JOBS:-$(nproc)}" ${1:+--target "$@"}
}

# One suite after the other: each may use every core that torch takes.
test_suites() {
  local suites=${*:-$SUITES} suite targets=() failed=0
  for suite in $suites; do targets+=("plumb_${suite}_test"); done
  build "${targets[@]}"
  local table=$build/table.txt
  printf '%-12s %7s %7s %8s %8s  %s\n' suite passed failed skipped seconds "what failed" >"$table"
  for suite in $suites; do
    say "running $suite under emulation"
    local log=$build/$suite.log begun=$SECONDS code=0 count
    "$self" run timeout "${ARM_TIMEOUT:-3600}" "$build/tests/plumb_${suite}_test" >"$log" 2>&1 || code=$?
    count() { sed -n "s/^\[  $1  \] \([0-9]*\) test.*/\1/p" "$log" | tail -1; }
    local names
    names=$(sed -n 's/^\[  FAILED  \] \([A-Za-z0-9_/]*\.[A-Za-z0-9_/]*\)$/\1/p' "$log" | sort -u | paste -sd' ')
    [ $code = 0 ] || failed=1
    [ $code = 0 ] || [ -n "$names" ] || names="ended with $code after $(sed -n 's/^\[ RUN      \] //p' "$log" | tail -1)"
    local passed bad skipped
    passed=$(count PASSED) bad=$(count FAILED) skipped=$(count SKIPPED)
    printf '%-12s %7s %7s %8s %8s  %s\n' "$suite" "${passed:-0}" "${bad:-0}" "${skipped:-0}" $((SECONDS - begun)) \
      "${names:--}" | tee -a "$table"
  done
  echo
  say "64-bit ARM under emulation"
  sed 's/^/  /' "$table"
  return $failed
}

case "${1:-}" in
  setup | build | run | registered | wheel) "$@" ;;
  test) shift; test_suites "$@" ;;
  *) sed -n '2,/^set/ { /^#/ s/^# \{0,1\}//p }' "$self"; exit 2 ;;
esac
