"""Activation checkpointing policies: what each layer keeps for the backward pass.

A policy trades memory for time. It never changes a number.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import jax

from models.attention import SAVED

Remat = Literal["auto", "none", "full", "attention", "dots", "offload"]
"""What is kept of each layer:

auto: chosen for the devices, before a program is built, from the others.
none: everything.
full: only its input; the layer is computed again.
attention: its input and the output of attention (cuDNN computes the output again anyway).
dots: its input, the output of attention, and the products with weights, adapters included.
offload: its input, in the host's memory. On CPU that is the same memory.
"""

# Name of a layer's input. It belongs at the entry of the checkpointed body: at the end of the body,
# offloading has no effect.
LAYER_INPUT = "layer_in"
# Name of the product of an input and a weight, with what the weight's adapter adds. Saving all
# matrix products instead would keep both terms of that sum.
PRODUCT = "product"


def rematerialise(body: Callable[..., Any], remat: Remat) -> Callable[..., Any]:
    """Apply a policy, which is not "auto", to the body of a scan over layers."""
    if remat == "none":
        return body
    policies = jax.checkpoint_policies
    policy = {
        "full": None,
        "attention": policies.save_only_these_names(SAVED),
        "dots": policies.save_only_these_names(SAVED, PRODUCT),
        "offload": policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=[LAYER_INPUT],
            offload_src="device",
            offload_dst="pinned_host",
        ),
    }[remat]
    # `prevent_cse` adds barriers, so that XLA does not merge the recomputation with the forward
    # pass. Inside a scan it cannot merge them anyway, and the barriers would cost time.
    return jax.checkpoint(body, prevent_cse=False, policy=policy)
