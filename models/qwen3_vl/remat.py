"""What the backward pass finds saved of each layer, and what it computes again.

Owns the policies' names. Refuses names that it does not know. Invariant: a policy changes memory and time, never numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, get_args

import jax

from models.attention import SAVED

Remat = Literal["none", "full", "attention", "dots", "offload"]
"""none: everything is saved. full: a layer's input. attention: that and what attention gave (cuDNN computes it again all the same).
dots: both, and the matrix products with weights. offload: a layer's input, in the host's memory (on CPU that is the same memory)."""

LAYER_INPUT = (
    "layer_in"  # at the entry of a checkpointed body: at its end, offloading it does nothing
)


def rematerialise(body: Callable[..., Any], remat: Remat) -> Callable[..., Any]:
    """The body of a scan over layers under a policy. ValueError for a policy that is unknown."""
    check("remat", remat)
    if remat == "none":
        return body
    policies = jax.checkpoint_policies
    attention = policies.save_only_these_names(SAVED)
    policy = {
        "full": None,
        "attention": attention,
        "dots": policies.save_from_both_policies(
            policies.dots_with_no_batch_dims_saveable, attention
        ),
        "offload": policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=[LAYER_INPUT],
            offload_src="device",
            offload_dst="pinned_host",
        ),
    }[remat]
    return jax.checkpoint(body, prevent_cse=False, policy=policy)


def check(field: str, remat: str) -> None:
    """Raises ValueError for a policy that is unknown."""
    if remat not in get_args(Remat):
        raise ValueError(
            f"{field}: {remat!r} is unknown; choose one of {', '.join(get_args(Remat))}"
        )
