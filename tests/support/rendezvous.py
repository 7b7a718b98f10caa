# SPDX-License-Identifier: Apache-2.0
"""The store of a launch, served by the process that starts its ranks: its port is nobody else's, from start to end."""

import torch.distributed as dist


class Rendezvous:
    """While it lives, ranks that have its environment meet by init_process_group()."""

    def __init__(self):
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def environment(self):
        """The variables that tell a rank that the store exists."""
        return {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
        }
