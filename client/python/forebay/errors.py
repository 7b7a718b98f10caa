# SPDX-License-Identifier: Apache-2.0
"""Every error that a caller can meet: one class per family, with `.code` ("E_..."), `.hint` and
`.retryable`."""

from typing import TypeVar

from ._core import (
    DataLossError,
    ForebayError,
    ForebayTimeoutError,
    ResourceError,
    UnavailableError,
    UsageError,
)

__all__ = [
    "DataLossError",
    "ForebayError",
    "ForebayTimeoutError",
    "ResourceError",
    "UnavailableError",
    "UsageError",
]


# The call by which a script detaches a model: one that calls attach(), and one whose library does.
DETACH = "opt.detach() first (trainer.optimizer.optimizer.detach() of a Trainer, optimizer.optimizer.detach() of Accelerate)"

Error = TypeVar("Error", bound=ForebayError)


def make_error(family: type[Error], code: str, message: str, hint: str) -> Error:
    """Makes (does not raise) an error like those of the extension, for usage_error() and others.

    >>> make_error(ForebayTimeoutError, "E_TIMEOUT", "no answer", "call again").hint
    'call again'
    """
    error = family(f"error[{code}]: {message}\nhint: {hint}")
    error.code, error.hint = code, hint
    return error


def usage_error(code: str, message: str, hint: str) -> UsageError:
    """Makes (does not raise) a UsageError like those of the extension.

    code     its stable id.
    message  the object, the numbers with units and the cause.
    hint     what helps.

    >>> print(usage_error("E_OPTION", "lr is -1", "give a number from 0 on"))
    error[E_OPTION]: lr is -1
    hint: give a number from 0 on
    """
    return make_error(UsageError, code, message, hint)


def unsupported(message: str, hint: str) -> UsageError:
    """Makes the E_UNSUPPORTED error of something that would otherwise fail later or in silence.

    >>> unsupported("closure", "call backward() yourself").code
    'E_UNSUPPORTED'
    """
    return usage_error("E_UNSUPPORTED", message, hint)
