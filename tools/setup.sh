# SPDX-License-Identifier: Apache-2.0
# Setup shared by tools/quickstart and tools/test: packages, virtual environment, builds. Sourced
# by bash, from the root of the checkout. Every function looks first and does only what is missing,
# so that a second call is quick.

readonly VENV=.venv
readonly VENV_PYTHON=$VENV/bin/python
readonly TORCH_MIN=2.4
readonly GIB_FOR_DEBIAN=2  # what debian-packages.txt takes on a bare system, rounded up
readonly GIB_FOR_TORCH=9   # torch's CUDA build from PyPI: 3 GiB to download, 5.4 GiB installed
readonly GIB_FOR_BUILD=3   # build trees of the default and the asan preset
readonly MINUTES_FOR_DEBIAN=3
readonly MINUTES_FOR_TORCH=5    # at 10 MB/s
readonly MINUTES_FOR_PROGRAMS=6  # forebay and forebayd, without a compiler cache

# Checkouts share what they have compiled. What uses a precompiled header is its own checkout's (FOREBAY_CCACHE_OF_CHECKOUT in
# CMakeLists.txt): a precompiled header has the paths of its own.
export CCACHE_NOHASHDIR=1
export CCACHE_BASEDIR=$PWD
export CCACHE_SLOPPINESS=pch_defines,time_macros  # without it, what uses a precompiled header is compiled each time

say() { printf '== %s\n' "$*"; }

# announce WHAT MINUTES: a part that takes long.
announce() {
  local unit=minutes
  if [[ $2 == 1 ]]; then unit=minute; fi
  say "$1: about $2 $unit on two cores"
}

# die MESSAGE HINT: one error in the form that every program of Forebay uses.
die() {
  printf 'error[E_SETUP]: %s\nhint: %s\n' "$1" "$2" >&2
  exit 1
}

listed_debian_packages() { sed -e 's/#.*//' -e '/^[[:space:]]*$/d' tools/debian-packages.txt; }

missing_debian_packages() {
  local package
  local -A installed=()
  while read -r package; do installed[$package]=1; done < <(
    dpkg-query -W -f='${db:Status-Status} ${Package}\n' 2>/dev/null | sed -n 's/^installed //p')
  for package in $(listed_debian_packages); do
    [[ -n ${installed[$package]:-} ]] || printf '%s\n' "$package"
  done
}

# A Python that can make the environment: the one on PATH where it is new enough, else Debian's.
base_python() {
  local python
  for python in python3 /usr/bin/python3; do
    if command -v "$python" >/dev/null &&
        "$python" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
      command -v "$python"
      return
    fi
  done
  return 1
}

# has_torch PYTHON: a torch of at least TORCH_MIN is installed there. Looks at its metadata:
# importing takes seconds.
has_torch() {
  "$1" - "$TORCH_MIN" <<'PYTHON' 2>/dev/null
import importlib.metadata, sys
have = importlib.metadata.version("torch").split("+")[0].split(".")
want = sys.argv[1].split(".")
sys.exit([int(part) for part in have[:2]] < [int(part) for part in want])
PYTHON
}

# Requirements the environment does not meet, one a line.
missing_python_packages() {
  "$VENV_PYTHON" - tools/python-requirements.txt <<'PYTHON'
import importlib.metadata, re, sys

def numbers(version):
    return [int(part) for part in re.findall(r"\d+", version.split("+")[0])[:3]]

for line in open(sys.argv[1], encoding="utf-8"):
    line = line.split("#")[0].strip()
    if not line:
        continue
    name, _, least = line.partition(">=")
    try:
        have = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        print(line)
        continue
    if least and numbers(have) < numbers(least):
        print(line)
PYTHON
}

# need_disk EXTRA_GIB WHAT: room for whatever setup still has to make, and for EXTRA_GIB on top.
need_disk() {
  local need=$1 free reasons=$2 base
  if [[ -n $(missing_debian_packages) ]]; then
    need=$((need + GIB_FOR_DEBIAN)) reasons+=", Debian packages"
  fi
  if ! { [[ -x $VENV_PYTHON ]] && has_torch "$VENV_PYTHON"; } &&
      ! { base=$(base_python) && has_torch "$base"; }; then
    need=$((need + GIB_FOR_TORCH)) reasons+=", torch"
  fi
  if [[ ! -e build/build.ninja ]]; then
    need=$((need + GIB_FOR_BUILD)) reasons+=", build trees"
  fi
  free=$(($(df -Pk . | awk 'NR == 2 { print $4 }') / 1024 / 1024))
  if ((free < need)); then
    die "too little free disk in $PWD: need $need GiB ($reasons), free $free GiB" \
      "make room there, or clone to a disk that has it; df -h . shows what is free"
  fi
}

install_debian_packages() {
  local missing command
  missing=$(missing_debian_packages | tr '\n' ' ')
  missing=${missing% }
  [[ -n $missing ]] || return 0
  command="apt-get install -y --no-install-recommends $missing"
  if ! command -v apt-get >/dev/null; then
    die "no apt-get here, and these Debian packages are missing: $missing" \
      "use Debian 12, or install what these packages hold by other means"
  fi
  if [[ $(id -u) != 0 ]]; then
    die "not root, and these Debian packages are missing: $missing" "sudo $command"
  fi
  announce "installing Debian packages ($missing)" "$MINUTES_FOR_DEBIAN"
  export DEBIAN_FRONTEND=noninteractive
  apt-get update -q || true  # the install below tells whether it mattered
  # shellcheck disable=SC2086  # a list of words
  if ! apt-get install -y -q --no-install-recommends $missing; then
    die "apt-get could not install: $missing (no network, or no package list)" \
      "apt-get update && $command"
  fi
}

make_venv() {
  local base missing site=()
  if [[ ! -x $VENV_PYTHON ]] || ! "$VENV_PYTHON" -c 'import pip' 2>/dev/null; then
    base=$(base_python) || die "no Python of at least 3.10 that can make a virtual environment" \
      "apt-get install -y python3 python3-venv"
    if has_torch "$base"; then
      site=(--system-site-packages)
    fi
    say "making $VENV with $base"
    rm -rf "$VENV"
    "$base" -m venv "${site[@]}" "$VENV"
  fi
  missing=$(missing_python_packages)
  if [[ -n $missing ]]; then
    local packages minutes=1
    if [[ $missing == *torch* ]]; then minutes=$MINUTES_FOR_TORCH; fi
    announce "installing Python packages (${missing//$'\n'/ })" "$minutes"
    mapfile -t packages <<<"$missing"
    # --no-compile: about a tenth of ten thousand files is ever imported. Python compiles each of these at its first import.
    if ! "$VENV_PYTHON" -m pip install --quiet --disable-pip-version-check --no-compile "${packages[@]}"; then
      die "pip could not install: ${missing//$'\n'/ } (no network, or no room)" \
        "$VENV_PYTHON -m pip install -r tools/python-requirements.txt"
    fi
  fi
}

# build_preset PRESET [TARGET...]: with the tests that FOREBAY_TESTS of the environment says, or all of them.
build_preset() {
  local preset=$1 target_flags=()
  shift
  if (($# > 0)); then
    target_flags=(--target "$@")
  fi
  say "building preset $preset"
  cmake --preset "$preset" "-DFOREBAY_TESTS=${FOREBAY_TESTS:-ON}" --log-level=WARNING >/dev/null || return 1
  local -x NINJA_STATUS='[%f/%t, %e s] '
  if [[ -t 1 ]]; then  # ninja updates one line
    cmake --build --preset "$preset" "${target_flags[@]}"
  else
    cmake --build --preset "$preset" "${target_flags[@]}" | every_tenth_step
    return "${PIPESTATUS[0]}"
  fi
}

# Copies ninja's output, but of its progress lines one for each 10 %.
every_tenth_step() {
  awk '/^\[[0-9]+\/[0-9]+, / {
         split(substr($0, 2), part, /[\/,]/)
         tenth = int(10 * part[1] / part[2])
         if (tenth == shown) next
         shown = tenth
       }
       { print; fflush() }'
}

# Digest of everything the wheel is made from.
wheel_digest() {
  {
    "$VENV_PYTHON" -V
    find CMakeLists.txt client cpu_adam daemon gpu nvme pinned_mem protocol \
      tools/CMakeLists.txt tools/forebay tools/package tools/setup.sh -type f ! -name '*.pyc' -print0 | sort -z | xargs -0 sha256sum
  } | sha256sum | cut -d' ' -f1
}

# tag_wheel WHEEL FOLDER: writes the wheel to FOLDER with its shared libraries inside, each under a name of its own, and with the
# tag of the C library that its binaries need.
tag_wheel() {
  local log
  if ! log=$(PATH=$PWD/$VENV/bin:$PATH "$VENV_PYTHON" -m auditwheel repair --wheel-dir "$2" "$1" 2>&1); then
    printf '%s\n' "$log" >&2
    return 1
  fi
}

# build_wheel FOLDER [PYTHON]: the wheel for a Python that has nanobind and scikit-build-core. The archives and programs are those
# of the default preset; only the extension itself is compiled.
build_wheel() {
  local python=${2:-$VENV_PYTHON}
  build_preset default forebay forebayd || return 1
  announce "building the wheel" 1
  rm -rf "$1"/forebay-*.whl "$1/linux"
  "$python" -m pip wheel --quiet --disable-pip-version-check --no-build-isolation --no-deps --wheel-dir "$1/linux" \
    --config-settings "cmake.define.FOREBAY_BUILD=$PWD/build" ./client/python &&
    tag_wheel "$1"/linux/forebay-*.whl "$1"
}

# Builds the wheel, build/wheel/forebay-*.whl, and installs it into the environment, where its sources changed.
install_wheel() {
  local stamp=$VENV/forebay.stamp digest
  digest=$(wheel_digest)
  if [[ -e $stamp && $(<"$stamp") == "$digest" && -n $(compgen -G 'build/wheel/forebay-*.whl') ]] &&
      "$VENV_PYTHON" -c 'import importlib.util as u, sys; sys.exit(u.find_spec("forebay._core") is None)' \
        2>/dev/null; then
    return 0
  fi
  rm -f "$stamp"
  build_wheel build/wheel || return 1
  "$VENV_PYTHON" -m pip install --quiet --disable-pip-version-check --no-deps --force-reinstall \
    build/wheel/forebay-*.whl || return 1
  printf '%s\n' "$digest" >"$stamp"
}
