"""What the processes of a run tell each other, and what they decide together: Python values, no device arrays.

Devices speak to each other inside jitted programs, not here. A run of one process makes the same calls, which then cost nothing.
Every process makes the same calls in the same order; what they return is the same everywhere. How the processes find each other is
`train.durable.cluster`'s.
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

import jax
import numpy as np
from jax.experimental import multihost_utils

T = TypeVar("T")


class HostsError(RuntimeError):
    """Another process of the run could not go on."""


_LEAST = 1 << 20  # bytes that are gathered at the least


def is_first() -> bool:
    """Whether this is the process that writes what a run has once: figures, records, results."""
    return jax.process_index() == 0


def gather(value: T) -> list[T]:
    """Every process's value, in their order. What is gathered is pickled: trajectories and figures, never weights."""
    if jax.process_count() == 1:
        return [value]
    data = np.frombuffer(pickle.dumps(value), np.uint8)
    sizes = multihost_utils.process_allgather(np.array(len(data)))
    padded = np.zeros(
        max(_LEAST, 1 << int(sizes.max() - 1).bit_length()), np.uint8
    )  # of few sizes: each is a program
    padded[: len(data)] = data
    everyone = multihost_utils.process_allgather(padded)
    return [pickle.loads(row[:size].tobytes()) for row, size in zip(everyone, sizes, strict=True)]


def from_first(make: Callable[[], T]) -> T:
    """What the first process makes of it: for what lies in files that it alone writes. Where that fails, all fail."""
    made, error = None, None
    if is_first():
        try:
            made = make()
        except Exception as raised:  # it travels as a value: the others wait for an answer
            error = raised
    made, failure = gather((made, error and f"{type(error).__name__}: {error}"))[0]
    if error is not None:
        raise error
    _require_none(failure)
    return cast(T, made)


def require_same(name: str, value: Any) -> None:
    """Raises ValueError on every process where they were not started alike."""
    values = gather(value)
    for number, other in enumerate(values):
        if other != values[0]:
            raise ValueError(
                f"{name}: {values[0]!r} on process 0 and {other!r} on process {number}; start every process with the same command "
                "(hosts.index apart) and the same code"
            )


@contextlib.contextmanager
def one_after_another(alike: type[BaseException] | None = None) -> Iterator[None]:
    """The first process goes through the block alone, then the others do: what it writes to the shared directory they find there.

    Where the first one fails, the others fail too, instead of waiting for it: with its own exception if that is an `alike`, which has to
    survive pickling, else with HostsError.
    """
    error: BaseException | None = None
    if not is_first():
        failure = gather(None)[0]
        if isinstance(failure, BaseException):
            raise failure
        _require_none(failure)
    try:
        yield
    except BaseException as raised:
        error = raised
        raise
    finally:
        if is_first():
            same = alike is not None and isinstance(error, alike)
            gather(error if same else error and f"{type(error).__name__}: {error}")


def _require_none(failure: str | None) -> None:
    if failure is not None:
        raise HostsError(f"process 0 failed first: {failure}")


def share_of(count: int) -> slice:
    """Which of `count` items are this process's: equal parts in the processes' order, the last ones less where it does not divide."""
    each = -(-count // jax.process_count())
    return slice(
        min(jax.process_index() * each, count), min((jax.process_index() + 1) * each, count)
    )
