"""The time in which a host plays its rollouts, by a simulation of the engine's rounds.

It follows `rollout.engine`: sequences wait for a slot and for pages, prompts are prefilled in calls
of static shapes, and a call of decoding gives every running sequence some tokens. A tool reads its
windows one after the other, and meanwhile the engine stands still. So the tail, in which a few long
rollouts decode alone, and the turns of sub-agents follow from the lengths.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from paravt_extras.plan.rates import Cost
from paravt_extras.plan.workload import Group, Rollout, Step, Workload
from rollout.engine.pages import page_count
from rollout.engine.settings import EngineSizes
from train.learn.in_flight import deal

# With at most this many rows, decoding counts as the tail.
TAIL_ROWS = 3


class Row(NamedTuple):
    """What a running row reads. Lengths in tokens."""

    context: int
    shared: int
    """Leading tokens that other rows of its group read too; 0 for sub-agents."""
    group: int
    """Identifies the group."""


class EngineCosts(NamedTuple):
    """Costs of the engine's programs on the devices of one host."""

    token: Callable[[Sequence[Row]], Cost]
    """The running rows -> one decoding step."""
    prefill: Callable[[int, int, int], Cost]
    """(rows, length, before) -> one call."""
    frames: Callable[[int], Cost]
    """Number of frames -> encoding them."""


@dataclasses.dataclass
class Played:
    """Times of one host, in seconds, and what they consist of."""

    phases: dict[str, Cost] = dataclasses.field(default_factory=dict)
    """Sums of the costs, by phase."""
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)
    """By phase: vision, prefill, decode, tail (a part of decode) and tools."""
    calls: dict[str, int] = dataclasses.field(default_factory=dict)
    """Calls of a program, by phase."""

    @property
    def total(self) -> float:
        return sum(span for phase, span in self.seconds.items() if phase != "tail")

    def add(self, phase: str, cost: Cost, calls: int = 1) -> None:
        self.phases[phase] = self.phases.get(phase, Cost()).plus(cost)
        self.seconds[phase] = self.seconds.get(phase, 0.0) + cost.seconds
        self.calls[phase] = self.calls.get(phase, 0) + calls


@dataclasses.dataclass(eq=False)
class _Sequence:
    """One turn of an agent."""

    missing: int
    """Tokens to prefill."""
    context: int
    """Tokens in the cache."""
    left: int
    """Tokens to sample."""
    pages: int
    """Pages of its own."""
    shared: int
    """Leading tokens that it shares with its group."""
    agent: _Agent


@dataclasses.dataclass(eq=False)
class _Agent:
    """A rollout between its turns."""

    group: Group
    rollout: Rollout
    reports: int = 0
    """Reports that are still being written."""
    dispatched: bool = False


def play(
    groups: Sequence[Group], workload: Workload, sizes: EngineSizes, turn: int, costs: EngineCosts
) -> Played:
    """Plays the rollouts of one host.

    A rollout makes all its calls at once, when it has sampled half of its tokens.

    Args:
        groups: the host's groups.
        workload: sizes of sub-agents' prompts, and the time of a tool.
        sizes: sizes of the engine.
        turn: token limit of a turn, for which pages are reserved.
        costs: costs of the engine's programs.
    """
    host = _Host(workload, sizes, turn, costs)
    for group in groups:
        host.begin(group)
    while host.waiting or host.running:
        host.admit()
        host.decode()
    return host.played


class _Host:
    """The engine of one host and the agents that use it."""

    def __init__(self, workload: Workload, sizes: EngineSizes, turn: int, costs: EngineCosts):
        self.workload = workload
        self.sizes = sizes
        self.turn = turn
        self.costs = costs
        self.free = sizes.pages
        self.waiting: list[_Sequence] = []
        self.running: list[_Sequence] = []
        self.played = Played()

    def begin(self, group: Group) -> None:
        """Encodes a prompt and submits its rollouts."""
        self.played.add("vision", self.costs.frames(group.frames))
        # The pages of a prompt are shared and stay while its group is played.
        self.free -= page_count(group.prompt, self.sizes.page)
        for number, rollout in enumerate(group.rollouts):
            agent = _Agent(group, rollout)
            # The first one prefills the prompt for all.
            missing = group.prompt if number == 0 else 0
            tokens = math.ceil(rollout.sampled / 2) if rollout.reports else rollout.sampled
            self.submit(agent, missing, group.prompt - missing, tokens, 0, group.prompt)

    def submit(
        self, agent: _Agent, missing: int, context: int, left: int, own: int, shared: int = 0
    ) -> None:
        """Queues a turn that samples `left` tokens, behind `shared` tokens and `own` others."""
        page = self.sizes.page
        longest = own + max(left, min(self.turn, self.sizes.row_lengths[-1] - context - missing))
        # One more for its copy of the prompt's last page.
        pages = page_count(longest, page) + 1
        self.waiting.append(_Sequence(missing, context, left, pages, shared, agent))

    def admit(self) -> None:
        """Gives waiting sequences a slot and pages, and prefills them."""
        admitted = []
        while self.waiting and len(self.running) < self.sizes.slots:
            if self.waiting[0].pages > self.free and self.running:
                break
            sequence = self.waiting.pop(0)
            self.free -= sequence.pages
            self.running.append(sequence)
            admitted.append(sequence)
        todo = [sequence for sequence in admitted if sequence.missing]
        while todo:
            # Prompts have frames; what is computed behind them is text.
            visual = any(not sequence.context for sequence in todo)
            length = self.sizes.piece(max(sequence.missing for sequence in todo), visual)
            before = self.sizes.width(max(sequence.context for sequence in todo))
            rows = self.sizes.prefill_rows(length, before)
            self.played.add("prefill", self.costs.prefill(rows, length, before))
            for sequence in todo[:rows]:
                computed = min(length, sequence.missing)
                sequence.missing -= computed
                sequence.context += computed
            todo = [sequence for sequence in todo if sequence.missing]

    def decode(self) -> None:
        """One call of decoding. It ends early when no row is active."""
        steps = min(self.sizes.steps, max(sequence.left for sequence in self.running))
        # Contexts in the middle of the call.
        rows = [
            Row(
                sequence.context + min(sequence.left, steps) // 2,
                sequence.shared,
                id(sequence.agent.group),
            )
            for sequence in self.running
        ]
        cost = self.costs.token(rows).times(steps)
        self.played.add("decode", cost)
        if len(self.running) <= TAIL_ROWS:
            self.played.add("tail", cost)
        for sequence in self.running[:]:
            sampled = min(steps, sequence.left)
            sequence.left -= sampled
            sequence.context += sampled
            if not sequence.left:
                self.running.remove(sequence)
                self.free += sequence.pages
                self.finish(sequence)

    def finish(self, sequence: _Sequence) -> None:
        """Goes on with an agent whose turn, or whose sub-agent's report, is complete."""
        agent = sequence.agent
        if agent.reports:
            agent.reports -= 1
            if not agent.reports:
                self.answer(agent)
        elif agent.rollout.reports and not agent.dispatched:
            self.dispatch(agent)

    def dispatch(self, agent: _Agent) -> None:
        """Reads the windows of an agent's calls, and submits their sub-agents."""
        reports = agent.rollout.reports
        agent.dispatched = True
        agent.reports = len(reports)
        self.played.add("tools", Cost(synchronous=len(reports) * self.workload.tool_seconds))
        frames = len(reports) * self.workload.crop_frames
        self.played.add("vision", self.costs.frames(frames))
        for report in reports:
            prompt = self.workload.crop_prompt
            self.submit(agent, prompt, 0, report, prompt)

    def answer(self, agent: _Agent) -> None:
        """Submits an agent's turn after the reports."""
        rollout = agent.rollout
        first = math.ceil(rollout.sampled / 2)
        context = agent.group.prompt + first
        left = max(1, rollout.sampled - first)
        own = first + rollout.results
        self.submit(agent, rollout.results, context, left, own, agent.group.prompt)


def shares(step: Step, hosts: int) -> list[list[Group]]:
    """The rollouts of each host, by prompt, as `train.learn.in_flight.deal` deals them."""
    numbered = [(n, rollout) for n, group in enumerate(step) for rollout in group.rollouts]
    dealt = deal([0] * len(numbered), [None] * len(numbered), hosts)
    own: list[dict[int, list[Rollout]]] = [{} for _ in range(hosts)]
    for (n, rollout), host in zip(numbered, dealt, strict=True):
        own[host].setdefault(n, []).append(rollout)
    return [
        [dataclasses.replace(step[n], rollouts=tuple(found)) for n, found in of_host.items()]
        for of_host in own
    ]
