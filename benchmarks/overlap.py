"""Time of RL steps whose rollouts may outlive an update, on a virtual clock: no model is run.

python -m benchmarks.overlap
python -m benchmarks.overlap --hosts 4 --calls 2.5 --seeds 5
python -m benchmarks.overlap --hosts 16 --prompts 28

The policy is the trainer's own (`deal`, `choose` and `capacity` of `train.learn.in_flight`, quanta
as in `train.learn.rollout_pool`). Only seconds are modelled, as arithmetic for an 8B model on hosts
of four v5e chips. Lengths are log-normal, with a 99th percentile of eight times the median. Per
update, 7 groups of 8 rollouts are trained by default.

"Step" is the mean time of a step, "work" the mean time in which a host computes: decoding,
prefilling and its part of the update. Their ratio says how long hosts wait for files, for one
another, and for the slowest rollout. "Full" is the time of a step whose rollouts would all be there
at its beginning and end at the same moment: what remains above it is the tail, in which few rows
decode. "Least" is a bound for every schedule: the longest rollout that begins in a step, alone on
its host, has to end within `max_staleness` + 1 steps, and no step is shorter than "full".
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from paravt_extras.markdown import table
from train.learn.in_flight import GroupProgress, capacity, choose, deal
from train.learn.rollout_pool import virtual_times

ROLLOUTS = 8
# Tokens of a rollout's response: the median, and the most.
MEDIAN = 300  # so the mean is about 450, and one of a hundred has 2,400
MOST = 8192
# ln 8 / 2.326: the 99th percentile is eight times the median.
SIGMA = math.log(8) / 2.326
PROMPT = 2200
# Seconds per decoding step and host: weights and collectives, and the keys and values of each row.
# 4.1 GB of weights per device, and 2,800 tokens of 37 kB per row, at 88 % of 819 GB/s; 11 ms with
# 14 rows.
STEP_SECONDS = 9.0e-3
ROW_SECONDS = 0.14e-3
# 16.4 GFLOP per token at half of the peak of four chips.
PREFILL_SECONDS = 42e-6
READ_SECONDS = 1.2
# Packed update and reference pass of 7 groups on four hosts; more hosts share them.
UPDATE_SECONDS = 8.0
# Weights to the samplers, batch, metrics.
REST_SECONDS = 2.0
WARM_UP = 20


class Costs(NamedTuple):
    """Means per step. Seconds, except for the last two."""

    step: float
    work: float
    full: float
    least: float
    age: float
    """Age of trained groups, in updates, by the step in which they began."""
    groups: float
    """Groups in flight after an update."""


@dataclasses.dataclass
class Simulated:
    """A group: the virtual time and the tokens of its rollouts, and how far they are."""

    step: int
    start: int
    spans: np.ndarray
    tokens: np.ndarray
    reads: np.ndarray
    homes: list[int | None]

    def clocks(self, now: float) -> np.ndarray:
        return np.clip(now - self.start, 0, self.spans)

    def end(self, now: float) -> int | None:
        end = self.start + int(self.spans.max())
        return end if end <= now else None


def _seconds(tokens: np.ndarray) -> np.ndarray:
    """When each row has its tokens, if all are decoded side by side."""
    order = np.argsort(tokens)
    rows = np.arange(len(tokens), 0, -1)
    costs = np.diff(tokens[order], prepend=0.0) * (STEP_SECONDS + rows * ROW_SECONDS)
    ends = np.empty(len(tokens))
    ends[order] = np.cumsum(costs)
    return ends


def _least(longest: Sequence[float], max_staleness: int, floor: float) -> float:
    """The least mean of steps, each of `floor` seconds or more, in which all rollouts can end.

    The longest rollout that begins in step s takes `longest[s]` seconds, and ends in step
    s + `max_staleness` or before. What is missing is best added to the last of these steps, which
    later rollouts share.
    """
    steps = np.full(len(longest) + max_staleness, floor)
    for first, seconds in enumerate(longest):
        last = first + max_staleness
        steps[last] += max(0.0, seconds - steps[first : last + 1].sum())
    return float(steps[: len(longest)].mean())


def simulate(
    hosts: int, max_staleness: int, calls: float, steps: int, seed: int, prompts: int
) -> Costs:
    """Mean costs of `steps` steps after a warm-up."""
    rng = np.random.default_rng(seed)
    quantum, charge = virtual_times(MOST)
    groups: list[Simulated] = []
    clock = 0.0
    begun = trained = 0
    found = []
    all_longest = []
    for step in range(WARM_UP + steps):
        longest = 0.0
        while len(groups) < capacity(prompts, max_staleness):
            lengths = np.minimum(MEDIAN * np.exp(SIGMA * rng.standard_normal(ROLLOUTS)), MOST)
            reads = rng.poisson(calls, ROLLOUTS)
            tokens = np.ceil(lengths)
            alone = tokens * (STEP_SECONDS + ROW_SECONDS) + reads * READ_SECONDS
            longest = max(longest, float(alone.max()))
            spans = tokens + charge * (1 + reads)
            groups.append(Simulated(step, int(clock), spans, tokens, reads, [None] * ROLLOUTS))
            begun += 1
        all_longest.append(longest)
        flights = [
            (group, member)
            for group in groups
            for member in range(ROLLOUTS)
            if group.clocks(clock)[member] < group.spans[member]
        ]
        dealt = deal(
            [int(group.clocks(clock)[member]) for group, member in flights],
            [group.homes[member] for group, member in flights],
            hosts,
        )
        for (group, member), host in zip(flights, dealt, strict=True):
            group.homes[member] = host
        spans = np.array([group.spans[member] for group, member in flights])
        tokens = np.array([group.tokens[member] for group, member in flights])
        reads = np.array([group.reads[member] for group, member in flights])
        starts = np.array([group.start for group, _ in flights])
        host_of = np.array(dealt)
        prefilled = np.zeros(hosts)
        pairs = {(id(group), host) for (group, _), host in zip(flights, dealt, strict=True)}
        for _, host in pairs:
            prefilled[host] += PROMPT
        drawn = np.clip(clock - starts, 0, spans) / spans * tokens
        np.add.at(prefilled, host_of, drawn)
        work = prefilled * PREFILL_SECONDS
        seconds = float(work.max(initial=0.0))
        while True:
            progress = [GroupProgress(group.step, group.end(clock)) for group in groups]
            taken = choose(progress, step, prompts, max_staleness)
            if taken is not None:
                break
            # Without staleness there are no quanta: all are played to their end.
            last = max(group.start + int(group.spans.max()) for group in groups)
            until = clock + quantum if max_staleness else last
            parts = np.clip(until - starts, 0, spans) - np.clip(clock - starts, 0, spans)
            clock = until
            slowest = 0.0
            for host in range(hosts):
                own = (host_of == host) & (parts > 0)
                if not own.any():
                    continue
                share = parts[own] / spans[own]
                ends = _seconds(share * tokens[own])
                work[host] += ends.max()
                # An episode waits for its own files only, while the others decode.
                slowest = max(slowest, float((ends + share * reads[own] * READ_SECONDS).max()))
            seconds += slowest
        update = UPDATE_SECONDS * 4 / hosts * prompts / 7 + REST_SECONDS
        trained += len(taken)
        assert all(groups[n].step + max_staleness >= step for n in taken), "a group is too old"
        age = float(np.mean([step - groups[n].step for n in taken]))
        mean_tokens = float(np.sum([groups[n].tokens.sum() for n in taken]))
        per_host = prompts * ROLLOUTS / hosts
        even = mean_tokens / prompts / ROLLOUTS * (STEP_SECONDS + per_host * ROW_SECONDS)
        if step >= WARM_UP:
            left = len(groups) - len(taken)
            work_seconds = float(work.mean()) + update
            found.append((seconds + update, work_seconds, even + update, age, left))
        groups = [group for n, group in enumerate(groups) if n not in taken]
    assert begun == trained + len(groups), "a group was dropped"
    step_seconds, work_seconds, full, age, left = np.mean(found, axis=0).tolist()
    least = _least(all_longest[WARM_UP:], max_staleness, full - update) + update
    return Costs(step_seconds, work_seconds, full, least, age, left)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.overlap",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--hosts", type=int, nargs="+", default=[4, 16], help="default 4 16")
    parser.add_argument("--prompts", type=int, default=7, help="groups per update (default 7)")
    parser.add_argument("--calls", type=float, default=0.2, help="calls per rollout (default 0.2)")
    parser.add_argument("--steps", type=int, default=100, help="steps that count (default 100)")
    parser.add_argument("--seeds", type=int, default=20, help="default 20")
    asked = parser.parse_args()
    if min(*asked.hosts, asked.steps, asked.seeds, asked.prompts) < 1 or asked.calls < 0:
        parser.error("--hosts, --steps, --seeds and --prompts: give 1 or more; --calls: 0 or more")
    rows = []
    for hosts in asked.hosts:
        for max_staleness in (0, 1, 2):
            costs = np.array(
                [
                    simulate(hosts, max_staleness, asked.calls, asked.steps, seed, asked.prompts)
                    for seed in range(asked.seeds)
                ]
            )
            ratios = costs[:, 0] / costs[:, 1]
            mean = Costs(*costs.mean(axis=0).tolist())
            rows.append(
                [
                    str(hosts),
                    str(max_staleness),
                    f"{mean.step:.1f}",
                    f"{mean.work:.1f}",
                    f"{ratios.mean():.2f}",
                    f"{ratios.max():.2f}",
                    f"{mean.full:.1f}",
                    f"{mean.least:.1f}",
                    f"{mean.age:.2f}",
                    f"{mean.groups:.0f}",
                ]
            )
    names = ["hosts", "max_staleness", "step, s", "work, s", "ratio", "largest of all seeds"]
    print(table([*names, "full, s", "least, s", "mean age", "groups left"], rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
