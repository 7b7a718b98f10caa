"""Every error a caller can meet: one class per family, `.code` ("E_..."), `.hint`, `.retryable`."""

try:
    from ._core import (
        DataLossError,
        ForebayError,
        ResourceError,
        ForebayTimeoutError,
        UnavailableError,
        UsageError,
    )
except ImportError:  # the package without its extension: errors of the Python half alone

    class ForebayError(Exception):
        """Base of all families."""

        code = "E_INTERNAL"
        hint = ""
        retryable = False

    class UsageError(ForebayError):
        """Fix the caller; never retry."""

    class ResourceError(ForebayError):
        """Release something or raise the limit, then retry."""

    class UnavailableError(ForebayError):
        """Attach again, then retry."""

    class ForebayTimeoutError(ForebayError):
        """The outcome is unknown: ask before repeating."""

    class DataLossError(ForebayError):
        """The bytes are gone: restore from a checkpoint."""


__all__ = [
    "DataLossError",
    "ForebayError",
    "ResourceError",
    "ForebayTimeoutError",
    "UnavailableError",
    "UsageError",
]


def usage_error(code, message, hint):
    """A UsageError as the extension makes it."""
    error = UsageError(f"error[{code}]: {message}\nhint: {hint}")
    error.code, error.hint, error.retryable = code, hint, False
    return error


def unsupported(message, hint):
    """Something that is refused by name until it is supported."""
    return usage_error("E_UNSUPPORTED", message, hint)
