"""A step's rollouts as the arrays of one update: main agents' rows, and sub-agents' below them where these are trained too.

Owns the order of rows, which process lays which of them out, and how a batch is cut into micro-batches. Invariant: every row knows its
rollout, so how rows are ordered, dealt or cut changes nothing of the loss.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeVar

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
from rollout.agent.episode import split_prompt
from train.durable import hosts
from train.learn import placement
from train.learn.batch import BatchShape, Sequences, build, mismatches
from train.learn.placement import BY_ROW, place
from train.learn.rollouts import Rollouts

T = TypeVar("T")


@struct.dataclass
class RLBatch:
    """What an update reads. `sequences` are the main agents' and, where they are trained, the sub-agents'; the rows of `grpo` and
    `advantages` are theirs, one after the other, as wide as the longest. `totals` are those of the whole step."""

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
    """This process's arrays of main agents and, where a second shape is given, of sub-agents; the
    rollout of each row, counted over the whole step; and counts, whose sums over the processes are the
    step's. `parts` are every process's rollouts; shapes are one process's.

    Main agents stay where they were played; sub-agents go to other processes where there is no more room. Of more of them than there is
    room for in all, those that are left out are drawn from `seed`; they are counted, and so are those whose frames cannot be read here.
    """
    here, shape = jax.process_index(), shapes[0]
    rows = shape.groups * shape.rows
    groups = [[episode.trajectory for episode in group] for group in parts[here].groups]
    sequences, owners = (build(groups, features, shape),), (here * rows + np.arange(rows),)
    counts = {"token_mismatches": float(mismatches(sequences[0], groups))}
    if len(shapes) == 1:
        return sequences, owners, counts
    windows = shapes[1]
    agents = [
        (q, q * rows + n, trajectory)
        for q, part in enumerate(parts)
        for n, trajectory in part.subagents
    ]
    kept = sorted(
        np.random.default_rng(seed).permutation(len(agents))[: windows.groups * len(parts)]
    )
    dealt = [
        agents[kept[n]]
        for n in deal([agents[n][0] for n in kept], len(parts), windows.groups)[here]
    ]
    mine = [agent for agent in dealt if _readable(agent[2], features)]
    alone = [[trajectory] for _, _, trajectory in mine]
    below, owner = build(alone, features, windows), np.zeros(windows.groups, int)
    owner[: len(mine)] = [rollout for _, rollout, _ in mine]
    counts["token_mismatches"] += mismatches(below, alone)
    without_room = (
        len(agents) - len(kept) if here == 0 else 0
    )  # every process knows it, and one says it
    counts |= {
        "subagents/trained": float(len(mine)),
        "subagents/left_out": float(without_room + len(dealt) - len(mine)),
    }
    return (*sequences, below), (*owners, owner), counts


def deal(homes: Sequence[int], processes: int, room: int) -> list[list[int]]:
    """Which items each process takes, at most `room`: of those whose home it is the first ones, then, in order, what others have over.

    ValueError where there are more than room for them.
    """
    if len(homes) > processes * room:
        raise ValueError(
            f"deal: {len(homes)} items, and {processes} processes with room for {room} each; leave some out first"
        )
    taken = [
        [n for n, home in enumerate(homes) if home == process][:room]
        for process in range(processes)
    ]
    over = sorted(set(range(len(homes))) - {n for items in taken for n in items})
    for items in taken:
        free = room - len(items)
        items += over[:free]
        over = over[free:]
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
    """What the algorithm needs to know of the whole step's rollouts, on the mesh, padded to the batch's groups and rows. `rollouts`,
    `owners` and `shapes` are this process's; `sequences` lie on the mesh, and so does `reference`, their log-probs."""
    shape, longest = shapes[0], max(shape.suffix for shape in shapes)
    earned, anchors = np.zeros((2, shape.groups, shape.rows), np.float32)
    valid, compliant = np.zeros((2, shape.groups, shape.rows), bool)
    nothing = (np.zeros(0, np.int32), np.zeros(0, np.int8))
    structures = [
        [nothing] * len(rows) for rows in owners
    ]  # of sub-agents nothing is known, or needed
    for p, (group, rewards) in enumerate(zip(rollouts.groups, rollouts.rewards, strict=True)):
        for g, (episode, reward) in enumerate(zip(group, rewards, strict=True)):
            earned[p, g], anchors[p, g], valid[p, g], compliant[p, g] = (
                reward.total,
                reward.anchor,
                True,
                reward.compliant,
            )
            structures[0][p * shape.rows + g] = _structure(episode.trajectory, vocabulary)
    by_row = {
        "mask": [s.sampled for s in sequences],
        "behaviour": [s.logprobs for s in sequences],
        "reference": reference,
        "rollout": owners,
        # Every token breaks and opens at most one block: one shape.
        "structure": [pad_structures(part, multiple=2 * longest) for part in structures],
    }
    # Each part is placed before it is stacked: rows come part by part, and within a part process by process.
    arrays: dict[str, Any] = {
        name: jax.tree.map(
            lambda *x: stack_rows(x), *(place({name: part}, mesh)[name] for part in parts)
        )
        for name, parts in by_row.items()
    }
    # Whole on every device, from every process's own.
    whole = {"rewards": earned, "anchor_rewards": anchors, "valid": valid, "compliant": compliant}
    arrays |= {name: np.concatenate(hosts.gather(x)) for name, x in whole.items()}
    return place(GRPOBatch(**arrays), mesh)


def stack_rows(parts: Sequence[Any]) -> Any:
    """Rows one below the other, as wide as the widest; what is narrower is padded with zeros."""
    if len(parts) == 1:
        return parts[0]
    wide = np.max([x.shape[1:] for x in parts], axis=0)
    missing = (
        [(0, 0), *((0, most - size) for most, size in zip(wide, x.shape[1:], strict=True))]
        for x in parts
    )
    return jnp.concatenate([jnp.pad(x, more) for x, more in zip(parts, missing, strict=True)])


def split_rl_batch(batch: RLBatch, parts: int) -> RLBatch:
    """The batch in `parts` micro-batches of whole groups: every array gets them as its first axis."""
    counts = [len(s.ids) for s in batch.sequences]
    starts = np.cumsum([0, *counts[:-1]])
    rows = np.concatenate(
        [start + np.arange(n).reshape(parts, -1) for start, n in zip(starts, counts, strict=True)],
        axis=1,
    )

    def take(x: T) -> T:
        return jax.tree.map(lambda leaf: constrain(jnp.asarray(leaf)[rows], None, ROWS), x)

    def repeat(x: T) -> T:
        return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (parts, *jnp.shape(leaf))), x)

    fields = {f.name: getattr(batch.grpo, f.name) for f in dataclasses.fields(GRPOBatch)}
    cut = GRPOBatch(
        **{name: take(x) if name in BY_ROW else repeat(x) for name, x in fields.items()}
    )
    return RLBatch(
        tuple(placement.cut(s, parts) for s in batch.sequences),
        cut,
        take(batch.advantages),
        repeat(batch.totals),
    )


def _readable(trajectory: Trajectory, features: FrameFeatures) -> bool:
    """Whether the frames that another process has seen can be seen here; that they cannot is noted by `features`."""
    try:
        features(trajectory.frames)
    except VideoError:
        return False
    return True


def _structure(trajectory: Trajectory, vocabulary: Vocabulary) -> tuple[np.ndarray, np.ndarray]:
    """struct(o) of a rollout, positions counted from the end of its prompt."""
    prompt, _ = split_prompt(trajectory)
    positions, kinds = find_structure(vocabulary.token_bytes, trajectory.ids, trajectory.authors)
    return positions - len(prompt), kinds
