"""What one RL update reads: packed rows, visual vectors, and the rollouts that PARA-GRPO scores.

Two layouts meet here. The model computes packed rows (`train.learn.batch`). PARA-GRPO works on
rollouts, which are the main agents' trajectories, side by side and padded. Log-probs are gathered
from the first layout into the second. So the loss does not depend on how trajectories are packed,
ordered, or split into micro-batches.

Every process knows all rollouts, and so lays out the same arrays. Visual vectors are the exception:
each process provides those of some prompts that it played.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, no_type_check

import numpy as np
from flax import struct
from jaxtyping import Array, Float, Shaped

from models.config import ModelConfig
from models.features import FrameFeatures
from paravt_jax.data.frames import VideoError
from paravt_jax.method.grpo.batch import GRPOBatch, Totals
from paravt_jax.method.records import Author, Frame
from paravt_jax.method.structure import find_structure, pad_structures
from paravt_jax.processes import hosts
from rollout.agent.episode import Environment, split_prompt
from train.learn.batch import Group, Microbatch, build, mismatches
from train.learn.packing import (
    GroupLengths,
    MicrobatchShape,
    PackedMicrobatch,
    StepRoom,
    StepShape,
    pack,
)
from train.learn.rollouts import Rollouts


# Annotations are not checked, because JAX also builds this tree with shardings as leaves.
@no_type_check
@struct.dataclass
class RLBatch:
    """What the loss reads besides a micro-batch: the r rollouts of the whole step, u tokens each,
    zeros on the right of shorter ones."""

    grpo: GRPOBatch
    advantages: Float[Array, "r u"]
    totals: Totals

    def later(self, proximal: Float[Array, "r u"]) -> RLBatch:
        """Return the batch of later updates, given the log-probs at the start of the step."""
        return dataclasses.replace(self, grpo=dataclasses.replace(self.grpo, proximal=proximal))


class LaidOut(NamedTuple):
    """A step's arrays in the host's memory, the same on every process except for `visual`."""

    microbatches: tuple[Microbatch, ...]
    visual: Shaped[np.ndarray, "m c d"]
    """What is cached of this process's frames, per visual token, from its first slot on."""
    grids: tuple[tuple[int, int], ...]
    """Height and width of these frames, in patches."""
    grpo: GRPOBatch
    """The rollouts, without log-probs of the reference (zeros)."""
    lengths: tuple[GroupLengths, ...]
    """Lengths of the trajectories that are trained."""
    rollouts: Rollouts
    """What was laid out. Groups whose frames can no longer be read are left out."""
    current: float
    """Share of the trained tokens that the weights of the update drew."""
    metrics: dict[str, float]
    """`token_mismatches`: trajectories whose ids differ from what the sampler saw, always 0.
    `packing/microbatches`: their number. `packing/size`: tokens of all rows, padding included.
    `packing/filled`: share of these that are no padding."""


def lay_out(
    rollouts: Rollouts,
    environment: Environment,
    room: StepRoom,
    version: int | None = None,
    step: int = 0,
) -> LaidOut:
    """Lay out a step.

    Args:
        rollouts: Rollouts of all processes.
        environment: Encodes the frames of this process's prompts. Its vocabulary gives the bytes
            of each token, from which struct(o) is parsed.
        room: Upper bounds on the step, and the sizes of its micro-batches.
        version: Version of the weights that are updated; None: they drew all tokens.
        step: Its number, from 0, for messages.

    Raises:
        ValueError: No question has a readable video, there are more groups than `shape` has, a
            trajectory is longer than the largest row, or the visual tokens of a process exceed its
            slots.
    """
    features, vocabulary = environment.features, environment.protocol.vocabulary
    shape, sizes, devices = room
    processes = hosts.process_count()
    count = len(rollouts.groups)
    if not count:
        raise ValueError(
            f"rl: no question of step {step + 1} has a readable video; mend those in "
            f"{features.root}"
        )
    if count > shape.groups:
        raise ValueError(f"batch.groups: {count} of at most {shape.groups}; raise rl.prompts")
    trajectories = [
        tuple(episode.trajectory for episode in group.episodes) for group in rollouts.groups
    ]
    providers = _providers([group.players for group in rollouts.groups], shape.groups, processes)
    # Only prompts have frames, and a group has one prompt.
    frames = [members[0].frames for members in trajectories]
    vectors, grids = _encode(frames, providers, features)
    unreadable = [number for number in range(count) if number not in grids]
    if unreadable:
        return lay_out(rollouts.without(unreadable), environment, room, version, step)
    own_slots = shape.room(processes, devices).slots * (devices // processes)
    slots = _slots(providers, grids, features, own_slots)
    none = np.zeros((0, *features.vector), features.dtype)
    visual = np.concatenate([none, *(x for _, x in sorted(vectors.items()) if x is not None)])
    own_grids = tuple(grid for number in sorted(vectors) for grid in grids[number])
    groups = [
        Group(members, n * shape.rollouts, grids[n], slots[n])
        for n, members in enumerate(trajectories)
    ]
    lengths = tuple(group.lengths for group in groups)
    microbatches = tuple(
        build(packed, groups, features.config, shape.all_rollouts, shape.suffix)
        for packed in pack(lengths, sizes)
    )
    size = sum(microbatch.ids.size for microbatch in microbatches)
    filled = sum(int((microbatch.segments > 0).sum()) for microbatch in microbatches)
    metrics = {
        "token_mismatches": float(mismatches(microbatches, groups)),
        "packing/microbatches": float(len(microbatches)),
        "packing/size": float(size),
        "packing/filled": filled / size,
    }
    batch = _grpo_batch(rollouts, vocabulary.token_bytes, shape, version)
    current = 1.0
    if batch.current is not None:
        current = float(np.asarray(batch.current).sum() / max(1, np.asarray(batch.mask).sum()))
    return LaidOut(microbatches, visual, own_grids, batch, lengths, rollouts, current, metrics)


def lay_out_padding(room: StepRoom, features: FrameFeatures, stale: bool = False) -> LaidOut:
    """Return a step without rollouts, with one micro-batch of every size; the arguments of
    `lay_out`.

    `stale` says whether older weights may have drawn some tokens.
    """
    shape, sizes, devices = room
    processes = hosts.process_count()
    slots, frames = (n * (devices // processes) for n in shape.room(processes, devices))
    grids: tuple[tuple[int, int], ...] = ()
    if features.trained is not None and features.trained.whole:
        # Frames of the greatest length.
        merge, tokens = features.config.vision.spatial_merge_size, features.trained.frame_tokens
        grids, slots = ((merge, merge * tokens),) * frames, frames * tokens
    visual = np.zeros((slots, *features.vector), features.dtype)
    microbatches, batch = empty_step(shape, sizes, features.config, stale)
    return LaidOut(microbatches, visual, grids, batch, (), Rollouts(()), 0.0, {})


def empty_step(
    shape: StepShape, sizes: Sequence[MicrobatchShape], config: ModelConfig, stale: bool
) -> tuple[tuple[Microbatch, ...], GRPOBatch]:
    """Return a micro-batch of every size without rollouts, and what PARA-GRPO reads of none."""
    microbatches = tuple(
        build(PackedMicrobatch(size, ()), [], config, shape.all_rollouts, shape.suffix)
        for size in sizes
    )
    version = 0 if stale else None
    batch = _grpo_batch(Rollouts(()), lambda _: b"", shape, version)
    return microbatches, batch


def _providers(players: Sequence[Sequence[int]], groups: int, processes: int) -> list[int]:
    """Return the process that provides the visual vectors of each group.

    It is the first with room that played one of its rollouts and so has encoded its frames; if all
    of these are full, the process that provides the fewest. Each has room for its share of the
    prompts of a step, `groups`.
    """
    room = math.ceil(groups / processes)
    provided = [0] * processes
    providers = []
    for played in players:
        with_room = [process for process in played if provided[process] < room]
        least = min(range(processes), key=provided.__getitem__)
        providers.append(with_room[0] if with_room else least)
        provided[providers[-1]] += 1
    return providers


def _encode(
    frames: Sequence[tuple[Frame, ...]], providers: Sequence[int], features: FrameFeatures
) -> tuple[dict[int, np.ndarray | None], dict[int, tuple[tuple[int, int], ...]]]:
    """Return the visual vectors of the prompts that this process provides, and the grids of every
    prompt's frames.

    Both are by the number of the prompt. Prompts with unreadable frames are missing.
    """
    vectors: dict[int, np.ndarray | None] = {}
    grids = {}
    for number, shown in enumerate(frames):
        if providers[number] != hosts.process_index():
            continue
        try:
            grids[number] = tuple(features.grid(frame) for frame in shown)
            vectors[number] = features.cached(shown) if shown else None
        except VideoError:
            # `features` has noted the video as unreadable.
            grids.pop(number, None)
    every: dict[int, tuple[tuple[int, int], ...]] = {}
    for others in hosts.gather(grids):
        every |= others
    return vectors, every


def _slots(
    providers: Sequence[int],
    grids: Mapping[int, Sequence[tuple[int, int]]],
    features: FrameFeatures,
    room: int,
) -> dict[int, int]:
    """Return the slot of each prompt's first vector. Every process has `room` slots, one after
    another."""
    used: Counter[int] = Counter()
    slots = {}
    for number in sorted(grids):
        process = providers[number]
        slots[number] = process * room + used[process]
        patches = sum(height * width for height, width in grids[number])
        used[process] += patches // features.config.vision.spatial_merge_size**2
        if used[process] > room:
            raise ValueError(
                f"batch.visual: {used[process]} visual tokens of one process do not fit {room}; "
                "lower frames.max_pixels, or raise the largest frame budget"
            )
    return slots


def _grpo_batch(
    rollouts: Rollouts,
    token_bytes: Callable[[int], bytes],
    shape: StepShape,
    version: int | None,
) -> GRPOBatch:
    """Return what PARA-GRPO reads about the rollouts, but for the log-probs of the reference
    (zeros)."""
    size = (shape.all_rollouts, shape.suffix)
    by_token: dict[str, Any] = {
        "mask": np.zeros(size, bool),
        "behaviour": np.zeros(size, np.float32),
        "reference": np.zeros(size, np.float32),
    }
    if version is not None:
        by_token["current"] = np.zeros(size, bool)
    by_group = (shape.groups, shape.rollouts)
    by_rollout: dict[str, Any] = {
        "rewards": np.zeros(by_group, np.float32),
        "anchor_rewards": np.zeros(by_group, np.float32),
        "valid": np.zeros(by_group, bool),
        "compliant": np.zeros(by_group, bool),
    }
    structures = [(np.zeros(0, np.int32), np.zeros(0, np.int8))] * shape.all_rollouts
    for p, group in enumerate(rollouts.groups):
        for g, (episode, reward) in enumerate(zip(group.episodes, group.rewards, strict=True)):
            by_rollout["rewards"][p, g] = reward.total
            by_rollout["anchor_rewards"][p, g] = reward.anchor
            by_rollout["valid"][p, g] = True
            by_rollout["compliant"][p, g] = reward.compliant
            rollout = p * shape.rollouts + g
            trajectory = episode.trajectory
            first = len(split_prompt(trajectory)[0])
            length = len(trajectory.ids) - first
            by_token["mask"][rollout, :length] = trajectory.authors[first:] == Author.MODEL
            by_token["behaviour"][rollout, :length] = trajectory.logprobs[first:]
            if version is not None:
                by_token["current"][rollout, :length] = trajectory.versions[first:] == version
            ids, authors = trajectory.ids, trajectory.authors
            positions, kinds = find_structure(token_bytes, ids, authors)
            structures[rollout] = positions - first, kinds
    # The width is the same in every step, so that nothing compiles again. It is the largest
    # possible: each token breaks at most one block and opens at most one.
    structure = pad_structures(structures, multiple=2 * shape.suffix)
    return GRPOBatch(structure=structure, **by_token, **by_rollout)
