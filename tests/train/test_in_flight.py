"""Which process plays which episodes, and which groups an update takes."""

from __future__ import annotations

import collections
import random

import pytest

from paravt_jax.method.records import Question, QuestionKind
from train.learn.in_flight import EpisodeInFlight, GroupInFlight, capacity, choose, deal

QUESTION = Question("1", "v.mp4", "?", QuestionKind.OPEN_ENDED, "a")


def group(step: int, end: int | None) -> GroupInFlight:
    """A group of one episode."""
    flight = EpisodeInFlight(seed=0, clock=end or 0, done=end is not None)
    return GroupInFlight(0, QUESTION, 4, step, (flight,))


@pytest.mark.parametrize("processes", [1, 2, 4, 7, 16])
def test_processes_differ_by_one_episode_at_most(processes):
    """Episodes that have begun differ by one at most, too."""
    rng = random.Random(processes)
    for _ in range(100):
        count = rng.randint(1, 120)
        clocks = [rng.choice([0, 0, rng.randint(1, 99)]) for _ in range(count)]
        homes = [rng.randrange(processes + 2) if clock else None for clock in clocks]
        dealt = deal(clocks, homes, processes)
        held = collections.Counter(dealt)
        begun = collections.Counter(p for p, clock in zip(dealt, clocks, strict=True) if clock)
        assert set(dealt) <= set(range(processes))
        assert max(held.values()) - min(held[p] for p in range(processes)) <= 1
        assert max(begun.values(), default=0) - min(begun[p] for p in range(processes)) <= 1


def test_seven_prompts_occupy_sixteen_hosts_and_few_share_a_prompt():
    dealt = deal([0] * 56, [None] * 56, 16)
    assert sorted(collections.Counter(dealt).values()) == [3] * 8 + [4] * 8
    players = [set(dealt[start : start + 8]) for start in range(0, 56, 8)]
    assert max(map(len, players)) <= 4
    prompts = collections.Counter(p for group in players for p in group)
    assert max(prompts.values()) <= 2, "a host prefills one prompt, or two"


def test_an_episode_stays_where_it_has_begun_if_that_process_has_its_share():
    assert deal([5, 9, 7, 0, 0], [1, 0, 1, None, None], 2) == [1, 0, 1, 0, 0]
    # The two that have run longest stay; the third leaves a full process.
    assert deal([5, 9, 7], [0, 0, 0], 2) == [1, 0, 0]
    # Whoever left the run leaves its episodes to the others.
    assert sorted(deal([5, 9], [3, 3], 2)) == [0, 1]


@pytest.mark.parametrize("max_staleness", [0, 1, 2])
@pytest.mark.parametrize("prompts", [1, 2, 7])
def test_an_update_takes_as_many_groups_as_it_has_prompts_and_none_too_late(prompts, max_staleness):
    """At most `prompts` groups are due at once, whatever their lengths; none is ever dropped."""
    rng = random.Random(prompts)
    groups: list[tuple[int, int]] = []  # the step in which each began, and its end
    clock = taken_groups = begun = 0
    ages = collections.Counter()
    for step in range(100):
        while len(groups) < capacity(prompts, max_staleness):
            groups.append((step, clock + int(rng.lognormvariate(3, 1.5))))
            begun += 1
        while True:
            progress = [group(s, end if end <= clock else None) for s, end in groups]
            taken = choose(progress, step, prompts, max_staleness)
            if taken is not None:
                break
            clock += 5
        assert len(taken) == prompts and taken == sorted(taken)
        ages.update(step - groups[n][0] for n in taken)
        assert sum(s + max_staleness <= step for s, _ in groups) <= prompts
        left = [n for n in range(len(groups)) if n not in taken]
        # All that ended before the last one that was not due are taken.
        free = [n for n in taken if groups[n][0] + max_staleness > step]
        for n in left:
            assert not free or groups[n][1] >= max(groups[m][1] for m in free)
        groups = [groups[n] for n in left]
        taken_groups += prompts
    assert max(ages) == max_staleness and taken_groups + len(groups) == begun


def test_an_update_waits_for_a_group_that_would_be_too_old_for_the_next():
    done, running = group(4, 10), group(3, None)
    assert choose([done, done, running], 4, 2, 1) is None
    assert choose([done, done, running], 4, 2, 2) == [0, 1]
    assert choose([done, done, group(3, 50)], 4, 2, 1) == [0, 2]
