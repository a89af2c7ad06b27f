"""The arrays of one RL update: main agents' rows, then sub-agents' if these are trained.

Every row carries the number of its rollout. The loss therefore does not depend on the order of the
rows, or on how they are spread over processes and micro-batches.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeVar, no_type_check

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import Mesh
from jaxtyping import Array, Float

from models.features import FrameFeatures
from models.sharding import ROWS, constrain
from paravt_jax.data.frames import VideoError
from paravt_jax.method.grpo import GRPOBatch, Totals
from paravt_jax.method.records import Trajectory
from paravt_jax.method.structure import find_structure, pad_structures
from paravt_jax.method.tokenizer import Vocabulary
from paravt_jax.processes import hosts
from rollout.agent.episode import split_prompt
from train.learn.batch import BatchShape, Sequences, build, mismatches
from train.learn.placement import BY_ROW, place, split_microbatches
from train.learn.rollouts import Rollouts

T = TypeVar("T")


# Annotations are not checked, for the same reason as in `Sequences`.
@no_type_check
@struct.dataclass
class RLBatch:
    """Input of an RL update.

    `sequences` are the main agents' and, if they are trained, the sub-agents'. `grpo` and
    `advantages` have the rows of both, stacked:

        main agents   [groups * rows, t]     zeros on the right of the narrower part
        sub-agents    [sub-agents, t]

    `totals` are the totals of the whole step, even in a micro-batch.
    """

    sequences: tuple[Sequences, ...]
    grpo: GRPOBatch
    advantages: Float[Array, "b t"]
    totals: Totals


def lay_out(
    parts: Sequence[Rollouts],
    features: FrameFeatures,
    shapes: Sequence[BatchShape],
    seed: Sequence[int],
) -> tuple[tuple[Sequences, ...], tuple[np.ndarray, ...], dict[str, float]]:
    """Lay out this process's share of a step: its main agents and, with a second shape, sub-agents.

    A process lays out the main agents that it played. Sub-agents beyond a process's room go to
    processes that have room left. If there are more than fit anywhere, those to train are drawn at
    random.

    Args:
        parts: Rollouts of every process, in the order of processes.
        features: Encodes the frames of the prompts.
        shapes: One process's shape of main agents and, if they are trained, of sub-agents.
        seed: Seed of the draw; the same on every process.

    Returns:
        The arrays of each shape; for each, the rollout of every row, counted over the whole step;
        and counts, to be summed over the processes. `subagents/left_out` counts sub-agents without
        room and those whose frames cannot be read here.
    """
    process = jax.process_index()
    main = shapes[0]
    rows = main.groups * main.rows
    groups = [[episode.trajectory for episode in group] for group in parts[process].groups]
    sequences = build(groups, features, main)
    owners = process * rows + np.arange(rows)
    counts = {"token_mismatches": float(mismatches(sequences, groups))}
    if len(shapes) == 1:
        return (sequences,), (owners,), counts

    agents, left_out = _assign_subagents(parts, rows, shapes[1].groups, seed)
    readable = [agent for agent in agents if _readable(agent[1], features)]
    left_out += len(agents) - len(readable)
    # A sub-agent has a prompt of its own: a group of one row.
    subagent_groups = [[trajectory] for _, trajectory in readable]
    subagent_sequences = build(subagent_groups, features, shapes[1])
    subagent_owners = np.zeros(shapes[1].groups, int)
    subagent_owners[: len(readable)] = [rollout for rollout, _ in readable]
    counts["token_mismatches"] += mismatches(subagent_sequences, subagent_groups)
    counts["subagents/trained"] = float(len(readable))
    counts["subagents/left_out"] = float(left_out)
    return (sequences, subagent_sequences), (owners, subagent_owners), counts


def _assign_subagents(
    parts: Sequence[Rollouts], rows: int, room: int, seed: Sequence[int]
) -> tuple[list[tuple[int, Trajectory]], int]:
    """Returns this process's sub-agents, each with its rollout, and the number without room.

    Args:
        parts: Rollouts of every process.
        rows: Rows of main agents per process.
        room: Rows of sub-agents per process.
        seed: Seed of the draw.
    """
    agents = [
        (home, home * rows + episode, trajectory)
        for home, part in enumerate(parts)
        for episode, trajectory in part.subagents
    ]
    # Sorted: the seed decides which sub-agents are drawn, but not their order.
    drawn = np.random.default_rng(seed).permutation(len(agents))[: room * len(parts)]
    chosen = [agents[n] for n in sorted(drawn)]
    items = deal([home for home, _, _ in chosen], len(parts), room)[jax.process_index()]
    own = [chosen[n][1:] for n in items]
    # Counts are summed over processes, so only the first process returns this one.
    without_room = len(agents) - len(chosen) if jax.process_index() == 0 else 0
    return own, without_room


def deal(homes: Sequence[int], processes: int, room: int) -> list[list[int]]:
    """Spread items over processes, at most `room` to each.

    Each process keeps its own items first, then takes the overflow of others in order:

        >>> deal([0, 0, 0, 1], processes=2, room=2)
        [[0, 1], [3, 2]]

    Args:
        homes: The process that has each item now.
        processes: Number of processes.
        room: Items that one process can take.

    Returns:
        The numbers of the items of each process.

    Raises:
        ValueError: There are more items than `processes * room`.
    """
    if len(homes) > processes * room:
        raise ValueError(
            f"deal: {len(homes)} items for {processes} processes with room = {room}; "
            "leave some items out first"
        )
    taken: list[list[int]] = [[] for _ in range(processes)]
    overflow = []
    for item, home in enumerate(homes):
        if len(taken[home]) < room:
            taken[home].append(item)
        else:
            overflow.append(item)
    for items in taken:
        free = room - len(items)
        items += overflow[:free]
        overflow = overflow[free:]
    return taken


def as_grpo_batch(
    rollouts: Rollouts,
    sequences: tuple[Sequences, ...],
    owners: tuple[np.ndarray, ...],
    reference: tuple[jax.Array, ...],
    vocabulary: Vocabulary,
    shapes: Sequence[BatchShape],
    mesh: Mesh,
) -> GRPOBatch:
    """Collect on the mesh what PARA-GRPO reads about the rollouts of the whole step.

    Args:
        rollouts: This process's rollouts.
        sequences: The step's rows, placed on the mesh: main agents', then sub-agents'.
        owners: The rollout of each of this process's rows, as `lay_out` returns them.
        reference: Log-probs of `sequences` under the reference weights, on the mesh.
        vocabulary: Gives the bytes of each token, from which struct(o) is parsed.
        shapes: One process's shapes, as for `lay_out`.
        mesh: The mesh of training.

    Returns:
        A batch whose rollouts are padded to the groups and rows of all processes.
    """
    # Only main agents have a struct(o): sub-agents have no format to keep.
    no_structure = (np.zeros(0, np.int32), np.zeros(0, np.int8))
    structures = [[no_structure] * len(rows) for rows in owners]
    for p, group in enumerate(rollouts.groups):
        for g, episode in enumerate(group):
            structures[0][p * shapes[0].rows + g] = _structure(episode.trajectory, vocabulary)
    # The width is the same in every step, so that nothing compiles again. It is the largest
    # possible: each token breaks at most one block and opens at most one.
    width = 2 * max(shape.suffix for shape in shapes)
    by_row = {
        "mask": [s.sampled for s in sequences],
        "behaviour": [s.logprobs for s in sequences],
        "reference": reference,
        "rollout": owners,
        "structure": [pad_structures(part, multiple=width) for part in structures],
    }
    arrays: dict[str, Any] = {}
    for name, parts in by_row.items():
        # Place each part before stacking the parts. In the other order, rows would be grouped by
        # process, with main agents and sub-agents mixed.
        placed = [place({name: part}, mesh)[name] for part in parts]
        arrays[name] = jax.tree.map(lambda *x: stack_rows(x), *placed)
    # Arrays by rollout are short and replicated, so every process gathers them all.
    for name, own in _by_rollout(rollouts, shapes[0]).items():
        arrays[name] = np.concatenate(hosts.gather(own))
    return place(GRPOBatch(**arrays), mesh)


def _by_rollout(rollouts: Rollouts, shape: BatchShape) -> dict[str, np.ndarray]:
    """Rewards of this process's rollouts, as arrays [groups, rows]; False and 0 for padding."""
    size = (shape.groups, shape.rows)
    arrays = {
        "rewards": np.zeros(size, np.float32),
        "anchor_rewards": np.zeros(size, np.float32),
        "valid": np.zeros(size, bool),
        "compliant": np.zeros(size, bool),
    }
    for p, rewards in enumerate(rollouts.rewards):
        for g, reward in enumerate(rewards):
            arrays["rewards"][p, g] = reward.total
            arrays["anchor_rewards"][p, g] = reward.anchor
            arrays["valid"][p, g] = True
            arrays["compliant"][p, g] = reward.compliant
    return arrays


def stack_rows(parts: Sequence[Any]) -> Any:
    """Stack arrays along their rows; narrower ones get zeros on the right."""
    if len(parts) == 1:
        return parts[0]
    widest = np.max([x.shape[1:] for x in parts], axis=0)
    padded = []
    for x in parts:
        missing = [(0, width - size) for width, size in zip(widest, x.shape[1:], strict=True)]
        padded.append(jnp.pad(x, [(0, 0), *missing]))
    return jnp.concatenate(padded)


def split_rl_batch(batch: RLBatch, parts: int) -> RLBatch:
    """Split a batch into micro-batches of whole groups: each array gets a first axis of `parts`."""
    # Micro-batch n takes the n-th share of the main agents' rows and of the sub-agents' rows.
    # With 4 and 2 rows in 2 parts: [[0, 1, 4], [2, 3, 5]].
    counts = [len(s.ids) for s in batch.sequences]
    starts = np.cumsum([0, *counts[:-1]])
    shares = [
        start + np.arange(count).reshape(parts, -1)
        for start, count in zip(starts, counts, strict=True)
    ]
    rows = np.concatenate(shares, axis=1)

    def take(x: T) -> T:
        return jax.tree.map(lambda leaf: constrain(jnp.asarray(leaf)[rows], None, ROWS), x)

    def repeat(x: T) -> T:
        return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (parts, *jnp.shape(leaf))), x)

    # Rows are split. Arrays by rollout are repeated, since a row may belong to any rollout.
    fields = {}
    for field in dataclasses.fields(GRPOBatch):
        value = getattr(batch.grpo, field.name)
        fields[field.name] = take(value) if field.name in BY_ROW else repeat(value)
    return RLBatch(
        tuple(split_microbatches(s, parts) for s in batch.sequences),
        GRPOBatch(**fields),
        take(batch.advantages),
        repeat(batch.totals),
    )


def _readable(trajectory: Trajectory, features: FrameFeatures) -> bool:
    """Whether this process can read the frames, which another process may have played."""
    try:
        features(trajectory.frames)
    except VideoError:
        # `features` has noted the video as unreadable.
        return False
    return True


def _structure(trajectory: Trajectory, vocabulary: Vocabulary) -> tuple[np.ndarray, np.ndarray]:
    """struct(o) of a rollout: positions in its row, and kinds."""
    prompt, _ = split_prompt(trajectory)
    positions, kinds = find_structure(vocabulary.token_bytes, trajectory.ids, trajectory.authors)
    return positions - len(prompt), kinds
