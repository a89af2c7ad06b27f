"""A variant of the recipe: sub-agents' turns are trained too, with what their episode earned."""

from __future__ import annotations

from configs.paravt_tiny import paravt_tiny
from train.settings import Run, change


def subagents_tiny() -> Run:
    """The full recipe in the small world; sub-agents' turns are trained as well.

    Command: python -m train.run --config=subagents_tiny --start runs/paravt_tiny
    Measured, seed 0, commit 6327b53: accuracy 0.56 before RL and 0.85 after, f 0.34 and 0.98, kappa at K = 4 1.98 after; 122
    sub-agents' turns trained per step, none left out. Not told apart from the full recipe.
    Elsewhere: add --rl.subagents-per-rollout to any recipe. The release has a flag for it that nothing sets
    (REFERENCE 4, point 8).
    """
    # Most rollouts make two calls once they have learned to.
    return change(paravt_tiny(), "subagents_tiny", subagents_per_rollout=2.0)
