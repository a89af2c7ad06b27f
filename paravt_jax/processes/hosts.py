"""Host-side communication between the processes of a run: small Python values, not device arrays.

Every process makes the same calls in the same order and gets the same results. In a run of one
process the same functions return at once. `paravt_jax.processes.cluster` connects the processes.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable
from typing import Any, TypeVar, cast

import jax
import numpy as np
from jax.experimental import multihost_utils

from paravt_jax.processes.exit_codes import FAILED, UserError, exit_code

T = TypeVar("T")


class HostsError(UserError):
    """Another process of the run failed. This one ends with the same exit code."""

    # The default is for pickle, which restores an exception from its message, and then its fields.
    def __init__(self, message: str, code: int = FAILED):
        super().__init__(message)
        self.exit_code = code


_SMALLEST_MESSAGE = 1 << 20  # bytes


def process_count() -> int:
    """Return the number of processes of this run; does not wait for a device if it is one."""
    return jax.process_count() if jax.distributed.is_initialized() else 1


def process_index() -> int:
    """Return the index of this process; does not wait for a device if it is the only one."""
    return jax.process_index() if jax.distributed.is_initialized() else 0


def is_first() -> bool:
    """Return whether this process writes the files that a run has once: metrics, results."""
    return process_index() == 0


def gather(value: T) -> list[T]:
    """Collect `value` from every process, ordered by process index.

    Values are pickled and copied through device memory: use it for trajectories and metrics, not
    for weights. Pickle is safe enough here: whoever could send a message to this collective is a
    process of the same job, which runs the same code on behalf of the same user anyway.
    """
    if process_count() == 1:
        return [value]
    data = np.frombuffer(pickle.dumps(value), np.uint8)
    with jax.profiler.TraceAnnotation("hosts"):
        sizes = multihost_utils.process_allgather(np.array(len(data)))
        # An all-gather needs one shape on all processes, and XLA compiles each shape once. Padding
        # to a power of two, with a floor, keeps the number of compiled programs small.
        padded = np.zeros(max(_SMALLEST_MESSAGE, 1 << int(sizes.max() - 1).bit_length()), np.uint8)
        padded[: len(data)] = data
        messages = multihost_utils.process_allgather(padded)
    return [
        pickle.loads(message[:size].tobytes())
        for message, size in zip(messages, sizes, strict=True)
    ]


def from_first(make: Callable[[], T]) -> T:
    """Call `make` on the first process only, and return its result on every process.

    Use it for values read from files that only the first process writes.

    Raises:
        HostsError: On the other processes, if `make` fails on the first one. The first process
            raises the exception itself.
    """
    made = on_all(lambda: make() if is_first() else None)
    return cast(T, gather(made)[0])


def on_all(make: Callable[[], T]) -> T:
    """Call `make` on every process and return its own result, unless it fails on some process.

    Raises:
        HostsError: On processes where `make` succeeds, if it fails on others. Those raise the
            exception itself. One that is no `Exception`, such as a stop, is raised on all.
    """
    made, error = None, None
    try:
        made = make()
    except BaseException as raised:
        error = raised
    # A failure is sent like a result: the others already wait in gather and would hang.
    failures = gather(_for_others(error))
    if error is not None:
        raise error
    for failure in failures:
        if failure is not None:
            raise failure
    return cast(T, made)


def _for_others(error: BaseException | None) -> BaseException | None:
    """Return what the other processes raise."""
    if not isinstance(error, Exception):
        return error
    # Not every error can be pickled.
    text = f"process {process_index()} failed first: {type(error).__name__}: {error}"
    return HostsError(text, exit_code(error))


def require_same(name: str, value: Any) -> None:
    """Raise ValueError on every process if `value` differs between processes."""
    first, *others = gather(value)
    for index, other in enumerate(others, 1):
        if other != first:
            raise ValueError(
                f"{name}: {first!r} on process 0 and {other!r} on process {index}; start "
                "every process with the same command and the same code"
            )


def share_of(count: int) -> slice:
    """Return this process's slice of `count` items: contiguous and equal, the last ones shorter.

    7 items over 2 processes give slice(0, 4) and slice(4, 7).
    """
    per_process = math.ceil(count / process_count())
    first = min(process_index() * per_process, count)
    return slice(first, min(first + per_process, count))
