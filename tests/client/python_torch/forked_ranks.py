# SPDX-License-Identifier: Apache-2.0
"""Ranks as processes that are forked, not spawned: none of them imports torch again."""

import tempfile

import torch
import torch.multiprocessing as processes


def make_pool():
    """Call it in each forked process before it computes: torch creates a new pool of threads at the first use after a
    fork, and ends the process ("Invalid thread pool!") if two threads do at once."""
    torch.set_num_threads(1)


def start(rank_main, ranks, *arguments):
    """Runs rank_main(rank, *arguments, folder) in `ranks` processes, with an empty folder that they share."""
    with tempfile.TemporaryDirectory() as folder:
        start_in(folder, rank_main, ranks, *arguments)


def start_in(folder, rank_main, ranks, *arguments):
    """As start(), with this folder."""
    processes.start_processes(_run, (rank_main, *arguments, folder), nprocs=ranks, start_method="fork")


def _run(rank, rank_main, *arguments):
    make_pool()
    rank_main(rank, *arguments)
