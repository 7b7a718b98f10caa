"""Every error that a caller can meet: one class per family, with `.code` ("E_..."), `.hint` and
`.retryable`."""

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


def usage_error(code: str, message: str, hint: str) -> UsageError:
    """Makes (does not raise) a UsageError like those of the extension.

    code     its stable id.
    message  the object, the numbers with units and the cause.
    hint     what helps.

    >>> print(usage_error("E_OPTION", "lr is -1", "give a number from 0 on"))
    error[E_OPTION]: lr is -1
    hint: give a number from 0 on
    """
    error = UsageError(f"error[{code}]: {message}\nhint: {hint}")
    error.code, error.hint, error.retryable = code, hint, False
    return error


def unsupported(message: str, hint: str) -> UsageError:
    """Makes the E_UNSUPPORTED error of something that would otherwise fail later or in silence.

    >>> unsupported("closure", "call backward() yourself").code
    'E_UNSUPPORTED'
    """
    return usage_error("E_UNSUPPORTED", message, hint)
