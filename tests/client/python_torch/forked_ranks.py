# SPDX-License-Identifier: Apache-2.0
"""Ranks as processes that are forked, not spawned: none of them imports torch anew."""

import tempfile

import torch
import torch.multiprocessing as processes


def start(rank_main, ranks, *arguments):
    """Runs rank_main(rank, *arguments, folder) in `ranks` processes, with an empty folder that they share."""
    with tempfile.TemporaryDirectory() as folder:
        processes.start_processes(_run, (rank_main, *arguments, folder), nprocs=ranks, start_method="fork")


def _run(rank, rank_main, *arguments):
    # After a fork torch makes its pool of threads anew at the next use, and fails where two threads do at once.
    torch.set_num_threads(1)
    rank_main(rank, *arguments)
