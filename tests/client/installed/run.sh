#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Goal    Programs of somebody else's build against the installed tree and train on a real daemon.
# Method  Installs the client into an empty directory, builds one program with find_package and one
#         with pkg-config, checks the header as C99, runs both, compares what they print.
# Usage   run.sh BUILD_DIR FOREBAYD
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
build=$1
forebayd=$2
work=$(mktemp -d)
daemon=
trap '[[ -z $daemon ]] || kill "$daemon"; rm -rf "$work"' EXIT

cmake --install "$build" --component client --prefix "$work/prefix" >/dev/null
libdir=$(cd "$work/prefix" && dirname "$(find . -name forebay.pc -printf '%h\n')")

gcc -std=c99 -pedantic -Wall -Wextra -Wconversion -Werror -fsyntax-only -x c \
  -I"$work/prefix/include" - <<<'#include <forebay.h>'
export PKG_CONFIG_PATH=$work/prefix/$libdir/pkgconfig
read -r -a flags < <(pkg-config --cflags --libs forebay)
gcc -std=c99 -pedantic -Wall -Wextra -Wconversion -Werror "$here/c/train.c" -o "$work/train_c" \
  "${flags[@]}" "-Wl,-rpath,$work/prefix/$libdir"

cmake -S "$here/cpp" -B "$work/cpp" -G Ninja -DCMAKE_PREFIX_PATH="$work/prefix" >"$work/log" ||
  { cat "$work/log"; exit 1; }
cmake --build "$work/cpp" >"$work/log" || { cat "$work/log"; exit 1; }

others=$(nm -D --defined-only "$work/prefix/$libdir/libforebay.so" | awk '$2 != "A" {print $3}' |
  grep -v '^forebay_' || true)
[[ -z $others ]] || { echo "libforebay.so also exports: $others"; exit 1; }

export FOREBAY_SOCKET=$work/s FOREBAY_RUN=installed
"$forebayd" --set "socket.path=$FOREBAY_SOCKET" --set dram.limit=256MiB \
  --set memlock=best_effort 2>"$work/daemon.log" &
daemon=$!
for ((i = 0; i < 600; ++i)); do
  grep -q 'forebayd ready' "$work/daemon.log" && break
  kill -0 "$daemon" || { cat "$work/daemon.log"; exit 1; }
  sleep 0.05
done

# AdamW moves each weight by about lr a step towards zero.
want='step 3: 0.2'
for program in "$work/train_c" "$work/cpp/train_cpp"; do
  got=$("$program")
  echo "$(basename "$program"): $got"
  [[ $got == "$want"* ]] || { echo "expected: $want..."; exit 1; }
done
[[ $("$work/train_c") == "step 6:"* ]] || { echo "the job did not go on"; exit 1; }
