"""Traces steps of training with `jax.profiler` (`Run.profile`).

Every process writes its trace into RUN/profile/PHASE/process-N, where TensorBoard finds it. A trace
has the parts of a step (`rollout`, `data`, `update` and others), the compiled programs by the names
of their functions, and inside of them the scopes of `jax.named_scope`. docs/speed.md lists them.
"""

from __future__ import annotations

import pathlib
import re
from collections.abc import Iterator, Mapping

import jax

from paravt_jax.processes import hosts


def parse_steps(text: str) -> range:
    """Return the steps that "3" or "3-5" names, both ends included; none for "".

    Raises:
        ValueError: The text names no steps.
    """
    if not text:
        return range(0)
    found = re.fullmatch(r"([0-9]+)(?:-([0-9]+))?", text)
    first, last = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 1 <= first <= last:
        raise ValueError(
            f"profile: {text!r}; give a step or the first and the last of several, counted from 1, "
            "such as 3 or 3-5"
        )
    return range(first, last + 1)


def require_reached(text: str, steps: Mapping[str, int]) -> None:
    """Raise ValueError if no phase has the first step that is named.

    Args:
        text: As for `parse_steps`.
        steps: Number of steps of each training phase.
    """
    wanted = parse_steps(text)
    if wanted and wanted.start > max(steps.values(), default=0):
        listed = ", ".join(f"{phase} {count}" for phase, count in steps.items())
        raise ValueError(
            f"profile: {text!r}; no phase gets there (steps: {listed or 'no phase trains'}): give "
            "earlier steps"
        )


class Profiler:
    """Traces steps of one phase, in every process for itself.

    A run that is stopped in between keeps the trace of the steps so far, and traces what is left of
    the steps when it goes on.

    Args:
        folder: RUN/profile/PHASE.
        steps: The steps; none are traced if it is empty.
    """

    def __init__(self, folder: pathlib.Path, steps: range):
        self._folder = folder / f"process-{hosts.process_index()}"
        self._steps = steps
        self._is_tracing = False

    def annotated(self, phase: str, steps: range) -> Iterator[int]:
        """Yield the steps of a phase, each of which is an event of the trace."""
        for step in steps:
            if step in self._steps and not self._is_tracing:
                options = jax.profiler.ProfileOptions()
                # Calls of Python functions would be most of the events, and slow the steps down.
                options.python_tracer_level = 0
                jax.profiler.start_trace(self._folder, profiler_options=options)
                self._is_tracing = True
            with jax.profiler.StepTraceAnnotation(phase, step_num=step):
                yield step
            if step + 1 not in self._steps:
                self.close()

    def close(self) -> None:
        """Write the trace, if one was begun."""
        if self._is_tracing:
            jax.profiler.stop_trace()
            self._is_tracing = False
