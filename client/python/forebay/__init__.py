# SPDX-License-Identifier: Apache-2.0
"""Forebay: parameters, gradients and optimizer states of a PyTorch model, held by the node's
daemon.

>>> opt = forebay.attach(model, forebay.AdamW(lr=1e-3))

Importing this package needs no daemon, no GPU and no torch; attach() does.

Public are this module, forebay.api, forebay.errors, forebay.optimizers, forebay.options and forebay.integrations. Modules whose names begin
with an underscore and the packages forebay.sharded and forebay.states are private.
"""

from ._core import __version__
from ._launcher import set_launcher_environment
from ._progress import Progress
from .api import attach, attach_reader, status, trace
from .errors import (
    DataLossError,
    ForebayError,
    ForebayTimeoutError,
    ResourceError,
    UnavailableError,
    UsageError,
)
from .optimizers import SGD, Adagrad, Adam, AdamW, Lamb, Lion
from .options import Durability, Memory, Sharding

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "DataLossError",
    "Durability",
    "ForebayError",
    "ForebayTimeoutError",
    "Lamb",
    "Lion",
    "Memory",
    "Progress",
    "ResourceError",
    "Sharding",
    "UnavailableError",
    "UsageError",
    "attach",
    "attach_reader",
    "set_launcher_environment",
    "status",
    "trace",
]
