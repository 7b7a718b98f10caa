# SPDX-License-Identifier: Apache-2.0
"""Writes what a daemon of this build leaves to the next one, for the tests of the release behind it.

usage: left_by_release.py handed-over|killed FILE      FOREBAY_BIN_DIR and FOREBAY_CORE as in daemon_process.py

FILE is a tar.xz: the bytes of each memfd in the service manager's store of descriptors, under its seals and names, and
"expected", the step of the job and the SHA-256 of its weights and states. handed-over: after SIGTERM. killed: after
SIGKILL in the middle of an update.
"""

import fcntl
import io
import json
import os
import re
import signal
import sys
import tarfile
import tempfile
import threading

import forebay
import torch
from kept_record import DECISION, STEP, steps
from models import batch, loss_of, net
from test_daemon_restart import Service, without_swap

torch.set_num_threads(1)

LR = 1e-2
STEPS = 3
IN_UPDATE = re.compile(r"job left goes on in the middle of the update of step (\d+)")


def service_of(folder):
    """Without swap: the retained memory says nothing of a machine's disks."""
    service = Service(folder, "dram.limit=256MiB", "update.workers=1")
    service.manager.command = without_swap(service.manager.command)
    return service


def groups_of(model):
    small = [p for p in model.parameters() if p.dim() < 2]
    large = [p for p in model.parameters() if p.dim() >= 2]
    return [{"params": small, "weight_decay": 0.0}, {"params": large, "lr": LR / 2}]


def attached(service):
    model = net(width=24)  # two blocks
    where = {"job": "left", "run": "one", "socket": f"{service.folder}/s"}
    return model, forebay.attach(model, forebay.AdamW(lr=LR), param_groups=groups_of(model), **where)


def train_until(ended, model, opt):
    """Ends behind the first step that is whole once `ended` is set."""
    while opt.committed_step < STEPS or not ended.is_set():
        loss_of(model, batch(opt.committed_step)).backward()
        try:
            opt.step()
        except forebay.ForebayError as error:
            if error.code != "E_GRAD_DROPPED":
                raise
        opt.zero_grad()


def store_of(manager):
    """{"SEALS:MEMFD:NAME": (bytes, mode)} of the memfds in it."""
    found = {}
    for name, fd in manager.store:
        if memfd := re.match(r"/memfd:(\S+)", os.readlink(f"/proc/self/fd/{fd}")):
            info, seals = os.fstat(fd), fcntl.fcntl(fd, fcntl.F_GET_SEALS)
            found[f"{seals}:{memfd[1]}:{name}"] = os.pread(fd, info.st_size, 0), info.st_mode & 0o777
    return found


def stop_in_update(record, pid):
    """SIGSTOP at a moment at which the record of the job says that a step is decided and not published."""

    def published_and_decided():
        found = steps(record)
        return found.get(STEP, 0), found.get(DECISION, 0)

    while True:
        published, decided = published_and_decided()
        if published < STEPS or published == decided:
            continue
        os.kill(pid, signal.SIGSTOP)
        while " T " not in open(f"/proc/{pid}/stat").read():
            pass
        published, decided = published_and_decided()
        if published < decided:
            return
        os.kill(pid, signal.SIGCONT)


def await_update(manager):
    """The daemon is stopped in one. Another process looks for it: a thread would take the interpreter from the training."""
    [record] = [fd for name, fd in manager.store if name.startswith("forebay.record.")]
    child = os.fork()
    if child == 0:
        stop_in_update(record, manager.process.pid)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


def left_by(how, folder):
    """(step, SHA-256, store) of a training whose daemon has ended."""
    service = service_of(folder)
    with service.manager as manager:
        manager.start()
        model, opt = attached(service)
        ended = threading.Event()
        training = threading.Thread(target=train_until, args=(ended, model, opt))
        training.start()
        if how == "killed":
            await_update(manager)
        ended.set()
        if how == "handed-over":
            training.join()
        manager.end(signal.SIGKILL if how == "killed" else signal.SIGTERM)
        left = store_of(manager)
        manager.start()
        training.join()
        step, sha256 = opt.committed_step, opt.state_sha256()
        opt.detach()
        assert how == "handed-over" or IN_UPDATE.findall(service.log()) == [str(step)], service.log()
    return step, sha256, left


def main(arguments):
    how, path = arguments
    with tempfile.TemporaryDirectory(prefix="fb", dir="/var/tmp") as folder:
        step, sha256, left = left_by(how, folder)
    with tarfile.open(path, "w:xz") as file:
        left["expected"] = json.dumps({"step": step, "sha256": sha256}).encode(), 0o600
        for name, (data, mode) in left.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(data), mode
            file.addfile(entry, io.BytesIO(data))


if __name__ == "__main__":
    main(sys.argv[1:])
