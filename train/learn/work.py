"""FLOPs that an update needs. A prompt counts once per group; only behind it are there logits.

Only lengths are needed, so they are known before a program is compiled.
"""

from __future__ import annotations

from collections.abc import Sequence

from models.config import ModelConfig
from models.flops import forward_flops
from train.learn.packing import GroupLengths


def real_tokens(groups: Sequence[GroupLengths]) -> int:
    """Return the tokens without padding; those of a shared prompt count once per group."""
    return sum(group.prompt + sum(group.suffixes) for group in groups)


def visible_pairs(prompt: int, suffixes: Sequence[int]) -> float:
    """Return the pairs of a token and one that it attends to, itself included.

    A token of the prompt sees those before it; a token of a rollout sees the whole prompt too.
    """
    rows = sum(n * prompt + n * (n + 1) / 2 for n in suffixes)
    return prompt * (prompt + 1) / 2 + rows


def update_flops(groups: Sequence[GroupLengths], config: ModelConfig) -> float:
    """Return the FLOPs of the forward and the backward pass of an update, without recomputation."""
    pairs = sum(visible_pairs(*group) for group in groups)
    # The backward pass costs twice the forward pass.
    return 3 * forward_flops(config, real_tokens(groups), sampled_tokens(groups), pairs)


def sampled_tokens(groups: Sequence[GroupLengths]) -> int:
    """Return the tokens behind the prompts, which are those with logits."""
    return sum(sum(group.suffixes) for group in groups)
