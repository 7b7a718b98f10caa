# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's aio handle, transferring for each message, asleep in between.

Started by infinity.py in the environment of the peers. A buffer of pinned memory as the handle makes it, a
file of the same size, O_DIRECT, 1 MiB a request, 32 at once, with one thread and with two. Each message is
answered with {"read", "write", "mixed"}: GB/s of the better of both; mixed reads one file and writes
another at the same time.
"""

import argparse
import multiprocessing.connection
import pathlib
import time

import torch

THREADS = (1, 2)
REQUEST_BYTES, DEPTH = 1 << 20, 32


class Disk:
    def __init__(self, library, folder, size_bytes):
        def handle(threads):
            single_submit, overlap_events = False, True
            return library.aio_handle(REQUEST_BYTES, DEPTH, single_submit, overlap_events, threads)

        self.readers = {threads: handle(threads) for threads in THREADS}
        self.writers = {threads: handle(threads) for threads in THREADS}
        byte = torch.empty(0, dtype=torch.uint8)
        self.read_into, self.write_from = (
            self.readers[1].new_cpu_locked_tensor(size_bytes, byte) for _ in range(2)
        )
        for tensor in (self.read_into, self.write_from):
            tensor.random_()
        self.files = [str(folder / f"aio-{number}.data") for number in range(2)]
        for file in self.files:
            self.writers[1].sync_pwrite(self.write_from, file)
        self.size_bytes = size_bytes

    def read(self, threads):
        self.readers[threads].sync_pread(self.read_into, self.files[0])

    def write(self, threads):
        self.writers[threads].sync_pwrite(self.write_from, self.files[1])

    def mixed(self, threads):
        reader, writer = self.readers[threads], self.writers[threads]
        reader.async_pread(self.read_into, self.files[0])
        writer.async_pwrite(self.write_from, self.files[1])
        reader.wait()
        writer.wait()

    def rates(self):
        rates = {}
        for name, work, moved in (
            ("read", self.read, self.size_bytes),
            ("write", self.write, self.size_bytes),
            ("mixed", self.mixed, 2 * self.size_bytes),
        ):
            seconds = []
            for threads in THREADS:
                began = time.perf_counter()
                work(threads)
                seconds.append(time.perf_counter() - began)
            rates[name] = moved / min(seconds) / 1e9
        return rates


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=pathlib.Path, required=True)
    parser.add_argument("--mib", type=int, required=True, help="of the buffer and each file")
    parser.add_argument("--connect", required=True, help="path of the conductor's socket")
    args = parser.parse_args()
    from deepspeed.ops.op_builder import AsyncIOBuilder

    disk = Disk(AsyncIOBuilder().load(), args.folder, args.mib << 20)
    with multiprocessing.connection.Client(args.connect, "AF_UNIX") as conductor:
        conductor.send({"threads": THREADS})
        while conductor.recv() == "step":
            conductor.send(disk.rates())
    for file in disk.files:
        pathlib.Path(file).unlink()


if __name__ == "__main__":
    main()
