"""Exit codes of the commands. `examples/supervise` decides by them what to start again."""

from __future__ import annotations

import errno

FAILED = 1
"""Settings, data or files have to change first: the same command would fail again."""
USAGE = 2
"""The command line has a mistake."""
LOST = 70
"""Contact with another process was lost, or the program failed in an unforeseen way."""
TEMPORARY = 75
"""A full disk, a store or network that does not answer, or a process that did not start in time."""

_TEMPORARY_ERRNOS = frozenset(
    {
        errno.ENOSPC,
        errno.EDQUOT,
        errno.EIO,
        errno.ESTALE,
        errno.EAGAIN,
        errno.EBUSY,
        errno.EHOSTDOWN,
        errno.EHOSTUNREACH,
        errno.ENETDOWN,
        errno.ENETUNREACH,
    }
)


def exit_code(error: BaseException) -> int:
    """The exit code of a command that ends because of `error`.

    An error whose class sets `exit_code` ends with that code. Others end with the code of their
    cause.
    """
    cause: BaseException | None = error
    while cause is not None:
        code = getattr(cause, "exit_code", None)
        if code is not None:
            return code
        if isinstance(cause, ConnectionError | TimeoutError):
            return TEMPORARY
        if isinstance(cause, OSError) and cause.errno in _TEMPORARY_ERRNOS:
            return TEMPORARY
        cause = cause.__cause__
    return FAILED
