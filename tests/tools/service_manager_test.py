# SPDX-License-Identifier: Apache-2.0
"""Goal    The stand-in for the service manager keeps, removes and hands over descriptors as systemd does.
Method  A small service of a few lines stores files in memory and says at its next start what it has got. Then
        forebayd itself, restarted and killed.
"""

import json
import sys

import pytest

from forebay_command import FOREBAY
from service_manager import ServiceManager

FOREBAYD = FOREBAY.parent / "forebayd"

# A service that reports the descriptors it received, then sends the messages in the file `orders`: lists of [text, names of its
# files].
SERVICE = """
import json, os, signal, socket, sys

folder = sys.argv[1]
pid, count = os.environ.get("LISTEN_PID"), int(os.environ.get("LISTEN_FDS", "0"))
names = os.environ.get("LISTEN_FDNAMES", "").split(":") if count else []
got = [[name, os.pread(fd, 100, 0).decode()] for fd, name in enumerate(names, 3)]
open_fds = sorted(int(fd) for fd in os.listdir("/proc/self/fd"))
with open(folder + "/report", "w") as report:
    json.dump({"is_ours": pid == str(os.getpid()), "got": got, "fds": open_fds,
               "fdstore": os.environ.get("FDSTORE")}, report)

manager = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
manager.connect(os.environ["NOTIFY_SOCKET"])
files = {}
for text, contents in json.load(open(folder + "/orders")):
    for content in contents:
        if content not in files:
            files[content] = os.memfd_create(content)
            os.write(files[content], content.encode())
    socket.send_fds(manager, [text.encode()], [files[content] for content in contents])
answer, barrier = os.pipe()
socket.send_fds(manager, [b"BARRIER=1"], [barrier])
os.close(barrier)
assert os.read(answer, 1) == b""
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
manager.send(b"READY=1")
signal.pause()
"""


def store(name, *contents):
    return [f"FDSTORE=1\nFDNAME={name}\nFDPOLL=0", list(contents)]


class Service:
    def __init__(self, folder, **options):
        self.folder = folder
        command = [sys.executable, "-I", "-c", SERVICE, folder]
        self.manager = ServiceManager(folder, command, **options)

    def order(self, *orders):
        (self.folder / "orders").write_text(json.dumps(orders))

    def report(self):
        return json.loads((self.folder / "report").read_text())


@pytest.mark.parametrize("end", [ServiceManager.restart, ServiceManager.kill])
def test_the_next_process_gets_what_was_stored_newest_first(tmp_path, end):
    service = Service(tmp_path)
    with service.manager as manager:
        service.order(store("a", "one"), store("b", "two", "three"), ["FDSTORE=1", ["four"]])
        manager.start()
        assert service.report()["got"] == []
        assert service.report()["fdstore"] == "9232"
        assert manager.names() == ["a", "b", "b", "stored"]
        service.order()
        end(manager)
        report = service.report()
        assert report["is_ours"]
        assert report["got"] == [["stored", "four"], ["b", "three"], ["b", "two"], ["a", "one"]]
        assert report["fds"][:7] == [0, 1, 2, 3, 4, 5, 6]
        assert len(report["fds"]) == 8, "one more reads the folder"
        # The store still has the descriptors: the next process gets them again.
        end(manager)
        assert len(service.report()["got"]) == 4


def test_duplicates_and_what_has_no_room_are_dropped(tmp_path):
    service = Service(tmp_path, fds_max=2)
    with service.manager as manager:
        service.order(store("a", "one"), store("b", "one"), store("c", "two"), store("d", "three"))
        manager.start()
        assert manager.names() == ["a", "c"]


def test_all_of_a_name_are_removed(tmp_path):
    service = Service(tmp_path)
    with service.manager as manager:
        service.order(
            store("a", "one", "two"), store("b", "three"), ["FDSTOREREMOVE=1\nFDNAME=a", []]
        )
        manager.start()
        assert manager.names() == ["b"]


def test_without_a_store_nothing_is_kept(tmp_path):
    service = Service(tmp_path, fds_max=0)
    with service.manager as manager:
        service.order(store("a", "one"))
        manager.start()
        assert service.report()["fdstore"] is None
        assert manager.names() == []


def test_a_stop_closes_what_was_kept(tmp_path):
    service = Service(tmp_path)
    with service.manager as manager:
        service.order(store("a", "one"))
        manager.start()
        assert manager.stop() == 0
        assert manager.names() == []


@pytest.mark.skipif(not FOREBAYD.exists(), reason=f"{FOREBAYD} is not built")
def test_it_runs_the_daemon(tmp_path):
    settings = [f"socket.path={tmp_path / 's'}", "memlock=best_effort", "dram.limit=64MiB"]
    command = [FOREBAYD, *(word for setting in settings for word in ("--set", setting))]
    with ServiceManager(tmp_path, command) as manager:
        manager.start()
        assert manager.restart() == 0, manager.log.read_text()
        assert manager.kill() == -9
        assert manager.stop() == 0, manager.log.read_text()
        assert "STOPPING=1" in manager.messages
