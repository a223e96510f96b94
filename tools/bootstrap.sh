#!/usr/bin/env bash
# Makes .venv (torch and the build tools) and installs missing distribution packages. Quick when all is there.
#
#   bootstrap.sh [demo | wheel | test | dev]    each level has what those before it have; without one: dev
#   bootstrap.sh --check LEVEL                  only reports whether all is there
#   TORCH_PYTHON=/path/to/python   use the torch (2.11 or newer) of that Python instead of installing one
set -euo pipefail
cd "$(dirname "$0")/.."

say() { printf 'plumb: %s\n' "$*"; }
die() { printf 'plumb: %s\n' "$*" >&2; exit 1; }

check=""
if [ "${1:-}" = --check ]; then check=yes; shift; fi
levels="demo wheel test dev"
level=${1:-dev}
case " $levels " in *" $level "*) ;; *) die "no level '$level'; there are $levels." ;; esac

stamp_text=$(cat tools/bootstrap.sh tools/requirements.txt 2>/dev/null | cksum; echo "${TORCH_PYTHON:-}"; pwd)
# One stamp a level; that of a higher one will do.
stamp_of() { if [ "$1" = dev ]; then echo .venv/.plumb-stamp; else echo ".venv/.plumb-stamp-$1"; fi; }
stamp=$(stamp_of "$level")
higher=""
for l in $levels; do
  [ "$l" != "$level" ] && [ -z "$higher" ] && continue
  higher=yes
  if [ -x .venv/bin/python ] && [ "$(cat "$(stamp_of "$l")" 2>/dev/null)" = "$stamp_text" ]; then exit 0; fi
done

[ -z "$check" ] || exit 1

# --- distribution packages -------------------------------------------------------------------------------------
packages="g++ make ccache"
case "$level" in test | dev) packages+=" git libgtest-dev libgmock-dev librapidcheck-dev chromium iproute2 iptables" ;; esac
[ "$level" = dev ] && packages+=" libbenchmark-dev"
[ "$level" = demo ] || packages+=" python3-dev"
packages+=" nlohmann-json3-dev libcli11-dev libtomlplusplus-dev libhwy-dev python3-venv"
missing=""
if command -v dpkg-query >/dev/null; then
  for p in $packages; do
    dpkg-query -W -f='${Status}' "$p" 2>/dev/null | grep -q 'install ok installed' || missing="$missing $p"
  done
  if [ -n "$missing" ]; then
    if [ "$(id -u)" = 0 ]; then as_root=""
    elif command -v sudo >/dev/null && sudo -n true 2>/dev/null; then as_root="sudo"
    else die "these packages are missing; install them and run make again:
  sudo apt-get install -y$missing"; fi
    say "installing$missing"
    $as_root env DEBIAN_FRONTEND=noninteractive apt-get update -qq
    $as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing >/dev/null \
      || die "apt-get could not install:$missing"
  fi
else
  say "not a Debian-like system: make sure these (or their like) are installed: $packages"
fi

# --- Python environment ----------------------------------------------------------------------------------------
base=${TORCH_PYTHON:-python3}
command -v "$base" >/dev/null || die "no Python at '$base'; set TORCH_PYTHON to one that has torch 2.11 or newer."
torch_site=""
if [ -n "${TORCH_PYTHON:-}" ]; then
  found=$("$TORCH_PYTHON" -c '
import importlib.util, os, runpy
s = importlib.util.find_spec("torch")
if s:
    d = os.path.dirname(s.origin)
    v = runpy.run_path(os.path.join(d, "version.py"))["__version__"]
    n = tuple(int(x) for x in v.split("+")[0].split(".")[:2])
    print("new" if n >= (2, 11) else "old", v, os.path.dirname(d))')
  read -r age version torch_site <<<"$found"
  case "$age" in
    new) ;;
    old) die "TORCH_PYTHON='$TORCH_PYTHON' has torch $version; plumb needs 2.11 or newer. Upgrade it there, or leave TORCH_PYTHON out." ;;
    *) die "TORCH_PYTHON='$TORCH_PYTHON' has no torch; install torch 2.11 or newer there, or leave TORCH_PYTHON out." ;;
  esac
fi
# A .venv stands on one Python and one torch: with another it is made anew.
if [ -e .venv/.plumb-base ] && [ "$(cat .venv/.plumb-base)" != "$base" ]; then
  say "making .venv anew for $base"
  rm -rf .venv
fi
rm -f "$stamp"
if [ ! -x .venv/bin/python ]; then
  say "making .venv"
  "$base" -m venv .venv || die "could not make .venv with '$base'"
  printf '%s\n' "$base" > .venv/.plumb-base
fi
site=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
if [ -n "$torch_site" ]; then
  echo "$torch_site" > "$site/_plumb_torch.pth"
else
  rm -f "$site/_plumb_torch.pth"
  if ! .venv/bin/python -c 'import importlib.metadata as m; v = m.version("torch").split("."); assert (int(v[0]), int(v[1])) >= (2, 11)' 2>/dev/null; then
    say "installing torch 2.13.0 into .venv"
    .venv/bin/python -m pip install -q --no-compile --disable-pip-version-check torch==2.13.0
  fi
  # On all cores, where pip would take one; the demo runs none of torch's Python.
  if [ "$level" != demo ] && [ ! -e .venv/.torch-bytecode ]; then
    .venv/bin/python -m compileall -q -j 0 "$site/torch" >/dev/null 2>&1 || true  # some of its files are templates
    touch .venv/.torch-bytecode
  fi
fi
# A constraint keeps every other package from pulling in another build of torch.
.venv/bin/python -c 'import importlib.metadata as m; print("torch==" + m.version("torch"))' > .venv/constraints.txt
sed "/^# level: $level\$/,\$ { /^# level: $level\$/d; /^# level: /,\$ d }" tools/requirements.txt > .venv/requirements.txt
say "installing into .venv: $(grep -v '^#' .venv/requirements.txt | tr '\n' ' ')"
.venv/bin/python -m pip install -q --disable-pip-version-check -c .venv/constraints.txt -r .venv/requirements.txt
pwd | sed 's,$,/python,' > "$site/plumb-dev.pth"
printf '%s' "$stamp_text" > "$stamp"
