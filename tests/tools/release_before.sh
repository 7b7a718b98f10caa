#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Tests an upgrade of the daemon under ranks of the previous release. Runs the restart and kill tests of a checkout of that
# release, with its package and its daemon. Each time a daemon ends with descriptors, this build's daemon replaces it.
#
# usage: release_before.sh JUNIT_FILE      the default preset is built, and .venv is there
set -euo pipefail
cd "$(dirname "$0")/../.."
readonly RELEASE=a6932100
junit=$(realpath -m "$1")
root=$PWD
python=$root/.venv/bin/python
old=$root/build/release-before

if [[ ! -e $old/.git ]]; then
  git worktree prune
  git worktree add --force --detach "$old" "$RELEASE"
fi
cd "$old"
cmake --preset default -DFOREBAY_TESTS=OFF -DFOREBAY_PYTHON=ON "-DPython_EXECUTABLE=$python" --log-level=WARNING >/dev/null
cmake --build --preset default --target forebayd _core

# Tests of that release read records. This build's daemon writes records of another version.
tests=$old/tests/client/python_torch
git show "HEAD:tests/client/python_torch/kept_record.py" >"$tests/kept_record_before.py"
cp "$root/tests/client/python_torch/kept_record.py" "$tests/kept_record_now.py"
cp "$root/tests/tools/kept_record_of_both.py" "$tests/kept_record.py"

# The service manager's stand-in gives a daemon that takes over LISTEN_FDS.
mkdir -p "$old/build/upgraded"
cat >"$old/build/upgraded/forebayd" <<SCRIPT
#!/bin/sh
bin=$old/build/bin
if [ -n "\$LISTEN_FDS" ]; then
  bin=$root/build/bin
  # The tests set the share of a job to what that release counts. This build counts larger records for a job that is new.
  case " \$* " in *" dram.job_percent=1 "*) set -- "\$@" --set dram.job_percent=2 ;; esac
fi
exec "\$bin/forebayd" "\$@"
SCRIPT
chmod +x "$old/build/upgraded/forebayd"

core=$(find "$old/build/client" -name '_core*.so' -print -quit)
FOREBAY_BIN_DIR=$old/build/upgraded FOREBAY_CORE=$core "$python" -m pytest -q -p no:cacheprovider --junitxml "$junit" \
  tests/client/python_torch/test_daemon_restart.py tests/client/python_torch/test_daemon_kill.py \
  -k 'costs_time_alone or weights_are_on_swap or costs_no_committed_step'
