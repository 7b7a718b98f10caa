# SPDX-License-Identifier: Apache-2.0
# Goal    A daemon continues with the memory of a daemon of the previous release in the service manager's store: the
#         jobs of a daemon that was restarted, and of a daemon that was killed in the middle of an update.
# Method  left/*.tar.xz are the bytes of every memfd of a daemon of commit 4b14564 (protocol 14) in that store, each with the step
#         and the SHA-256 of the job at that time. The bytes become memfds again and are handed to a daemon of this build. Then the
#         job trains on. A release creates the files from scratch, with its own programs and package: left_by_release.py
#         handed-over left/handed-over.tar.xz; the same for killed. The case "converted" is handed-over without the record, so
#         that the job has the form of the ledger alone. In the case "killed-twice" the daemon of this build is killed as soon as it
#         has started: its own record has replaced that of the release before.

import copy
import fcntl
import json
import os
import pathlib
import signal
import tarfile

import pytest
import torch
from daemon_process import missing
from left_by_release import IN_UPDATE, LR, attached, groups_of, service_of
from models import assert_close, train

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing() or "")

LEFT = pathlib.Path(__file__).parent / "left"
FILE_OF = {"converted": "handed-over", "killed-twice": "killed"}


MFD_NOEXEC_SEAL, F_SEAL_EXEC = 0x8, 0x20  # defined since Linux 6.3


def memfd(name, data, seals, mode):
    flags = MFD_NOEXEC_SEAL if seals & F_SEAL_EXEC else os.MFD_ALLOW_SEALING
    fd = os.memfd_create(name, os.MFD_CLOEXEC | flags)
    os.pwrite(fd, data, 0)
    os.fchmod(fd, mode)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


@pytest.mark.parametrize("how", ["handed-over", "converted", "killed", "killed-twice"])
def test_a_daemon_goes_on_with_what_the_release_before_has_left(folder, how):
    service = service_of(folder)
    with service.manager as manager:
        with tarfile.open(LEFT / f"{FILE_OF.get(how, how)}.tar.xz") as file:
            for entry in file:
                data = file.extractfile(entry).read()
                if entry.name == "expected":
                    expected = json.loads(data)
                    continue
                seals, name, kept_as = entry.name.split(":")
                if how == "converted" and kept_as.startswith("forebay.record."):
                    continue
                manager.store.append([kept_as, memfd(name, data, int(seals), entry.mode)])
        manager.start()
        assert "job left goes on" in service.log(), service.log()
        if how == "killed-twice":
            assert [name for name, _ in manager.store if ".record." in name] == ["forebay.record.1.2"]
            manager.end(signal.SIGKILL)
            manager.start()
        model, opt = attached(service)
        assert opt.committed_step == expected["step"] > 0
        assert opt.state_sha256() == expected["sha256"]
        was_in_update = how.startswith("killed")
        assert IN_UPDATE.findall(service.log())[:1] == ([str(expected["step"])] if was_in_update else [])
        plain = copy.deepcopy(model)
        plain_opt = torch.optim.AdamW(groups_of(plain), lr=LR)
        plain_opt.load_state_dict(opt.state_dict())
        train(model, opt, 1, first=99)
        train(plain, plain_opt, 1, first=99)
        assert_close(model, plain, 1, lr=LR)
        opt.detach()
