"""A step's rollouts as the arrays of one update: main agents' rows, and sub-agents' below them where these are trained too.

Owns the order of rows and how a batch is cut into micro-batches. Invariant: every row knows its rollout, so how rows are ordered or cut
changes nothing of the loss.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Float

from models.features import FrameFeatures
from models.sharding import ROWS, constrain
from paravt_jax.grpo import GRPOBatch, Totals
from paravt_jax.records import Trajectory
from paravt_jax.structure import find_structure, pad_structures
from paravt_jax.tokenizer import Vocabulary
from rollout.episode import split_prompt
from train import hosts, placement
from train.batch import BatchShape, Sequences, build, mismatches
from train.placement import BY_ROW
from train.rollouts import Rollouts

T = TypeVar("T")


@struct.dataclass
class RLBatch:
    """What an update reads. `sequences` are the main agents' and, where they are trained, the sub-agents'; the rows of `grpo` and
    `advantages` are theirs, one after the other, as wide as the main agents'. `totals` are those of the whole step."""

    sequences: tuple[Sequences, ...]
    grpo: GRPOBatch
    advantages: Float[Array, "b t"]
    totals: Totals


def lay_out(
    rollouts: Rollouts, features: FrameFeatures, shape: BatchShape, windows: BatchShape | None, seed: Sequence[int]
) -> tuple[tuple[Sequences, ...], np.ndarray, dict[str, float]]:
    """The arrays of main agents and, where `windows` gives them room, of sub-agents; each row's rollout; and counts.

    Of more sub-agents than there is room for, those that are left out are drawn from `seed` and counted.
    """
    groups = [[episode.trajectory for episode in group] for group in rollouts.groups]
    sequences, owners = (build(groups, features, shape),), np.arange(shape.groups * shape.rows)
    counts = {"token_mismatches": float(mismatches(sequences[0], groups))}
    if windows is not None:
        agents = rollouts.subagents
        kept = sorted(np.random.default_rng(seed).permutation(len(agents))[: windows.groups])
        alone = [[agents[n][1]] for n in kept]
        rows = build(alone, features, windows)
        mine = np.zeros(windows.groups, int)
        mine[: len(kept)] = [agents[n][0] for n in kept]
        sequences, owners = (*sequences, rows), np.concatenate([owners, mine])
        counts["token_mismatches"] += mismatches(rows, alone)
        counts |= {"subagents/trained": float(len(kept)), "subagents/left_out": float(len(agents) - len(kept))}
    return sequences, owners, counts


def as_grpo_batch(
    rollouts: Rollouts,
    sequences: tuple[Sequences, ...],
    owners: np.ndarray,
    reference: jax.Array,
    vocabulary: Vocabulary,
    shape: BatchShape,
) -> GRPOBatch:
    """What the algorithm needs to know of the rollouts, padded to the batch's groups and rows; arrays of the host, but for `reference`,
    [b, t]."""
    earned, anchors = np.zeros((2, shape.groups, shape.rows), np.float32)
    valid, compliant = np.zeros((2, shape.groups, shape.rows), bool)
    structures = [(np.zeros(0, np.int32), np.zeros(0, np.int8))] * len(owners)
    for p, (group, rewards) in enumerate(zip(rollouts.groups, rollouts.rewards, strict=True)):
        for g, (episode, reward) in enumerate(zip(group, rewards, strict=True)):
            earned[p, g], anchors[p, g], valid[p, g], compliant[p, g] = reward.total, reward.anchor, True, reward.compliant
            structures[p * shape.rows + g] = _structure(episode.trajectory, vocabulary)
    whole = {"rewards": earned, "anchor_rewards": anchors, "valid": valid, "compliant": compliant}
    arrays: dict[str, Any] = {
        "mask": stack_rows([s.sampled for s in sequences]),
        "behaviour": stack_rows([s.logprobs for s in sequences]),
        "reference": reference,
        "rollout": owners + jax.process_index() * earned.size,
        # Every token breaks and opens at most one block: one shape.
        "structure": pad_structures(structures, multiple=2 * shape.suffix),
        # Whole on every device, from every process's own.
        **{name: np.concatenate(hosts.gather(x)) for name, x in whole.items()},
    }
    return GRPOBatch(**arrays)


def stack_rows(parts: Sequence[Any]) -> Any:
    """Rows one below the other, as wide as the first; what is narrower is padded with zeros. The host's arrays stay there."""
    width, on = parts[0].shape[1], np if isinstance(parts[0], np.ndarray) else jnp
    return on.concatenate([on.pad(x, ((0, 0), (0, width - x.shape[1]))) for x in parts])


def split(batch: RLBatch, parts: int) -> RLBatch:
    """The batch in `parts` micro-batches of whole groups: every array gets them as its first axis."""
    counts = [len(s.ids) for s in batch.sequences]
    starts = np.cumsum([0, *counts[:-1]])
    rows = np.concatenate([start + np.arange(n).reshape(parts, -1) for start, n in zip(starts, counts, strict=True)], axis=1)

    def take(x: T) -> T:
        return jax.tree.map(lambda leaf: constrain(jnp.asarray(leaf)[rows], None, ROWS), x)

    def repeat(x: T) -> T:
        return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (parts, *jnp.shape(leaf))), x)

    fields = {f.name: getattr(batch.grpo, f.name) for f in dataclasses.fields(GRPOBatch)}
    cut = GRPOBatch(**{name: take(x) if name in BY_ROW else repeat(x) for name, x in fields.items()})
    return RLBatch(tuple(placement.cut(s, parts) for s in batch.sequences), cut, take(batch.advantages), repeat(batch.totals))


def _structure(trajectory: Trajectory, vocabulary: Vocabulary) -> tuple[np.ndarray, np.ndarray]:
    """struct(o) of a rollout, positions counted from the end of its prompt."""
    prompt, _ = split_prompt(trajectory)
    positions, kinds = find_structure(vocabulary.token_bytes, trajectory.ids, trajectory.authors)
    return positions - len(prompt), kinds
