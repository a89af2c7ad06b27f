"""Groups of episodes in flight, and the processes that play them.

Every process knows all groups; each plays the episodes that are dealt to it. What an episode draws
does not depend on who plays it, and how far it comes depends on virtual time only
(`rollout.engine.pacing`). So the processes agree without a word on which groups an update takes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from paravt_jax.method.records import Episode, Question
from paravt_jax.processes import hosts
from rollout.agent.episode import Environment, EpisodeSettings, play, unreadable
from rollout.engine.pacing import AgentLog, PacedAgent
from rollout.engine.requests import Sampler, run


@dataclasses.dataclass
class EpisodeInFlight:
    """One episode of a group."""

    seed: int
    process: int | None = None
    """The process that plays it; None: not dealt yet."""
    log: AgentLog = AgentLog()
    """What its agent was told, as of the latest `Player.share`; empty when it is done."""
    clock: int = 0
    """Its virtual time, from its own start."""
    done: bool = False
    episode: Episode | None = None
    """The finished episode, after `Player.share`."""


@dataclasses.dataclass
class GroupInFlight:
    """The episodes of one question. Groups are numbered in the order in which they begin."""

    number: int
    question: Question
    frames: int
    """Overview frames (K)."""
    step: int
    """The step in which it began. Its oldest tokens may have the weights of that step."""
    flights: tuple[EpisodeInFlight, ...]
    began: int = 0
    """The virtual time at which it began."""

    @property
    def episodes(self) -> tuple[Episode, ...]:
        """The episodes of a group that has ended."""
        episodes = tuple(flight.episode for flight in self.flights if flight.episode is not None)
        assert len(episodes) == len(self.flights), "an episode has not ended"
        return episodes

    @property
    def end(self) -> int | None:
        """The virtual time at which its last episode ended; None while one is in flight."""
        if not all(flight.done for flight in self.flights):
            return None
        return self.began + max(flight.clock for flight in self.flights)


@dataclasses.dataclass(frozen=True)
class PoolState:
    """A pool between two steps."""

    clock: int = 0
    """The virtual time."""
    number: int = 0
    """Number of groups that have begun."""
    groups: tuple[GroupInFlight, ...] = ()
    """The groups in flight."""


def deal(clocks: Sequence[int], homes: Sequence[int | None], processes: int) -> list[int]:
    """Return the process of each episode. Their numbers of episodes differ by one at most.

    Lengths have a long tail, so the longer an episode has run, the longer it will probably run on.
    Those that have begun are dealt first, the longest first: each stays where its frames are
    encoded, unless that process has its share of them. Those that have not begun level the numbers,
    in order, so that few processes prefill the same prompt.

    Args:
        clocks: How long each episode has run, in virtual time; 0: it has not begun.
        homes: The process that has played each so far, if any.
        processes: Number of processes.
    """
    begun = sorted((n for n, clock in enumerate(clocks) if clock), key=lambda n: -clocks[n])
    dealt: dict[int, int] = {}
    held = [0] * processes
    least, spare = divmod(len(begun), processes)
    for n in begun:
        home = homes[n]
        extra = spare - sum(count > least for count in held)
        if home is None or home >= processes or held[home] >= least + (extra > 0):
            home = min(range(processes), key=held.__getitem__)
        dealt[n] = home
        held[home] += 1
    fresh = [n for n, clock in enumerate(clocks) if not clock]
    room = [0] * processes
    for _ in fresh:
        emptiest = min(range(processes), key=lambda p: held[p] + room[p])
        room[emptiest] += 1
    targets = [process for process, count in enumerate(room) for _ in range(count)]
    dealt |= dict(zip(fresh, targets, strict=True))
    return [dealt[n] for n in range(len(clocks))]


def choose(
    groups: Sequence[GroupInFlight], step: int, prompts: int, max_staleness: int
) -> list[int] | None:
    """Return the groups that the update of `step` takes, in order; None: it has to wait.

    It takes the groups that would be too old for the next update, and then those that ended first.
    At most `prompts` groups began before this step (`capacity`), and only those can be due, so
    there is room for all that are. None is ever too old.
    """
    due = [n for n, group in enumerate(groups) if group.step + max_staleness <= step]
    others = [
        (group.end, n) for n, group in enumerate(groups) if n not in due and group.end is not None
    ]
    if any(groups[n].end is None for n in due) or len(due) + len(others) < prompts:
        return None
    assert len(due) <= prompts, "more groups are due than an update takes"
    first = sorted(others)[: prompts - len(due)]
    return sorted(due + [n for _, n in first])


def capacity(prompts: int, max_staleness: int) -> int:
    """Return the number of groups in flight at the beginning of a step.

    Beyond those of an update, as many more can outlive it. With still more, more groups could be
    due at once than an update takes.
    """
    return prompts * min(2, 1 + max_staleness)


_Name = tuple[int, int]  # the number of a group, and that of an episode in it


class Player:
    """Plays this process's share of the episodes in flight.

    Args:
        environment: The protocol, and the frames' features.
        temperature: Sampling temperature.
        charge: Virtual time of reading frames.
    """

    def __init__(self, environment: Environment, temperature: float, charge: int = 0):
        self._environment = environment
        self._temperature = temperature
        self._charge = charge
        # The agents of this process.
        self._agents: dict[_Name, PacedAgent[Episode]] = {}

    def deal(self, groups: Sequence[GroupInFlight], now: int) -> None:
        """Deal all episodes that are not done. Agents that leave this process are closed.

        Args:
            groups: The groups in flight.
            now: The virtual time, up to which all of them have been played.
        """
        flights: dict[_Name, EpisodeInFlight] = {}
        elapsed = []
        for name, (group, flight) in _named(groups):
            if flight.done:
                # Another number of processes may have played it.
                flight.process = (flight.process or 0) % hosts.process_count()
                continue
            flights[name] = flight
            # An episode's own clock stands still within a response.
            elapsed.append(now - group.began if flight.clock else 0)
        homes = [flight.process for flight in flights.values()]
        dealt = deal(elapsed, homes, hosts.process_count())
        for (name, flight), process in zip(flights.items(), dealt, strict=True):
            flight.process = process
            if process != hosts.process_index() and name in self._agents:
                self._agents.pop(name).close()

    def play(self, engine: Sampler, groups: Sequence[GroupInFlight], until: float) -> None:
        """Play all episodes up to the virtual time `until`, and tell all processes who is done."""
        everything = dict(_named(groups))
        begun: dict[_Name, PacedAgent[Episode]] = {}
        plays = {}
        for name, (group, flight) in everything.items():
            if flight.done or flight.process != hosts.process_index():
                continue
            if name not in self._agents:
                self._agents[name] = self._agent(group, flight)
                if flight.clock:
                    begun[name] = self._agents[name]
            plays[name] = self._agents[name].play(until - group.began)
        # Before anything is played: agents that have been restored ask at the same moment as those
        # that were never interrupted.
        run(engine, [agent.restore() for agent in begun.values()])
        for name, agent in begun.items():
            if agent.strayed:
                group, _ = everything[name]
                reason = "a frame that the episode had seen can no longer be read"
                agent.end(unreadable(group.question, group.frames, reason))
        run(engine, [*plays.values()])
        reached = {name: (self._agents[name].clock, self._agents[name].done) for name in plays}
        for others in hosts.gather(reached):
            for name, (clock, done) in others.items():
                _, flight = everything[name]
                flight.clock = clock
                flight.done = done

    def share(self, groups: Sequence[GroupInFlight]) -> None:
        """Bring the logs of all agents, and the episodes that have ended, to all processes."""
        everything = dict(_named(groups))
        logs = {name: (agent.log, agent.result) for name, agent in self._agents.items()}
        for others in hosts.gather(logs):
            for name, (log, episode) in others.items():
                _, flight = everything[name]
                flight.log = AgentLog() if flight.done else log
                flight.episode = episode
        self._agents = {name: agent for name, agent in self._agents.items() if not agent.done}

    def _agent(self, group: GroupInFlight, flight: EpisodeInFlight) -> PacedAgent[Episode]:
        settings = EpisodeSettings(group.frames, self._temperature)
        episode = play(self._environment, group.question, settings, flight.seed)
        return PacedAgent(episode, self._charge, flight.log)


def _named(
    groups: Sequence[GroupInFlight],
) -> Iterator[tuple[_Name, tuple[GroupInFlight, EpisodeInFlight]]]:
    """Return all episodes by name."""
    for group in groups:
        for member, flight in enumerate(group.flights):
            yield (group.number, member), (group, flight)
