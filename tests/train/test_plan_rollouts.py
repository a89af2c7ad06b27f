"""The simulated rounds of a host's engine, with programs that take whole seconds."""

from __future__ import annotations

import dataclasses

import pytest

from paravt_extras.plan.rates import Cost
from paravt_extras.plan.rollouts import EngineCosts, play, shares
from paravt_extras.plan.workload import RESULT_TOKENS, Group, Rollout, Workload
from rollout.engine.settings import EngineSizes

SIZES = EngineSizes(
    row_lengths=(64, 256),
    prefill_lengths=(16, 64),
    slots=4,
    rows_per_prefix=2,
    page=16,
    pages=64,
    prefill_tokens=64,
    steps=8,
)


class Clock:
    """Costs of one second per decoding step, and notes of what was asked."""

    def __init__(self):
        self.rows: list[int] = []
        self.prefills: list[tuple[int, int, int]] = []

    def costs(self) -> EngineCosts:
        def token(contexts) -> Cost:
            self.rows.append(len(contexts))
            return Cost(memory=1.0)

        def prefill(rows: int, length: int, before: int) -> Cost:
            self.prefills.append((rows, length, before))
            return Cost(compute=10.0)

        return EngineCosts(token, prefill, lambda frames: Cost(compute=float(frames)))


def group(*rollouts: Rollout, prompt: int = 40) -> Group:
    return Group(prompt, 0, 3, rollouts)


def played(*groups: Group, sizes: EngineSizes = SIZES):
    clock = Clock()
    workload = Workload("", (groups,), crop_prompt=20, crop_frames=2, tool_seconds=100.0)
    return play(groups, workload, sizes, 16, clock.costs()), clock


def test_the_longest_rollout_decodes_alone_at_the_end():
    found, clock = played(group(Rollout(8), Rollout(8), Rollout(8), Rollout(24)))
    assert clock.rows == [4, 1, 1]
    assert found.seconds == {"vision": 3, "prefill": 10, "decode": 24, "tail": 16}
    assert found.calls == {"vision": 1, "prefill": 1, "decode": 3, "tail": 2}
    assert found.total == 37


def test_a_prompt_is_prefilled_once_for_its_group():
    _, clock = played(group(Rollout(4), Rollout(4)), group(Rollout(4), Rollout(4)))
    # 40 tokens take a piece of 64: one row per call.
    assert clock.prefills == [(1, 64, 0)] * 2


def test_decoding_ends_early_when_no_row_is_active():
    found, _ = played(group(Rollout(3), Rollout(5)))
    assert found.seconds["decode"] == 5


def test_rollouts_beyond_the_slots_wait():
    _, clock = played(group(*[Rollout(8)] * 6))
    assert clock.rows == [4, 2]


def test_rollouts_without_pages_wait():
    """Three pages hold the prompt; each rollout needs one for its tokens, one to copy to."""
    sizes = dataclasses.replace(SIZES, pages=16)
    _, clock = played(group(*[Rollout(100)] * 4, prompt=40), sizes=sizes)
    assert clock.rows[0] == 1


def test_calls_read_their_windows_and_wait_for_their_reports():
    report = 4
    rollout = Rollout(8 + 2 * (report + RESULT_TOKENS), (report, report))
    found, clock = played(group(rollout))
    # Half of the rollout's own tokens; both sub-agents; the other half.
    assert clock.rows == [1, 2, 1]
    assert found.seconds["tools"] == 200
    assert found.seconds["vision"] == 3 + 2 * 2
    # The prompt; two crops of 20 tokens in pieces of 64; the results behind the context.
    assert clock.prefills == [(1, 64, 0), (1, 64, 0), (1, 64, 0), (1, 64, 64)]
    assert found.seconds["decode"] == 4 + 4 + 4


def test_hosts_differ_by_one_rollout_at_most():
    step = tuple(group(*[Rollout(10 * n + m) for m in range(8)]) for n in range(1, 8))
    for hosts in (1, 4, 16):
        parts = shares(step, hosts)
        counts = [sum(len(part.rollouts) for part in share) for share in parts]
        assert sum(counts) == 56 and max(counts) - min(counts) <= 1
        found = [rollout for share in parts for part in share for rollout in part.rollouts]
        assert sorted(rollout.response for rollout in found) == sorted(
            rollout.response for part in step for rollout in part.rollouts
        )
    assert max(map(len, shares(step, 16))) == 2, "a host prefills one prompt, or two"


@pytest.mark.parametrize(
    ("cost", "seconds"), [(Cost(3, 2, 1), 3), (Cost(1, 2, 1, 4), 6), (Cost(0, 1, 5), 5)]
)
def test_synchronous_collectives_add_to_the_slowest_part(cost, seconds):
    assert cost.seconds == seconds
    assert cost.times(2).plus(cost).seconds == 3 * seconds
