"""Recipes: one small file each, whose functions return the settings of a whole run. `RECIPES` lists them for the commands."""

from configs.exploration_anchoring import exploration_anchoring_8b, exploration_anchoring_tiny
from configs.nframes_gating import nframes_gating_8b, nframes_gating_tiny
from configs.no_penalty import no_penalty_8b, no_penalty_tiny
from configs.no_tool_reward import no_tool_reward_8b, no_tool_reward_tiny
from configs.paradox import paradox_tiny
from configs.paravt_8b import paravt_8b
from configs.paravt_tiny import paravt_tiny
from configs.sft import sft_8b, sft_tiny
from configs.subagents import subagents_tiny
from configs.vanilla_grpo import vanilla_grpo_8b, vanilla_grpo_tiny

_LARGE = (
    paravt_8b,
    vanilla_grpo_8b,
    exploration_anchoring_8b,
    nframes_gating_8b,
    no_tool_reward_8b,
    no_penalty_8b,
    sft_8b,
)
_TINY = (
    vanilla_grpo_tiny,
    exploration_anchoring_tiny,
    nframes_gating_tiny,
    no_tool_reward_tiny,
    no_penalty_tiny,
    subagents_tiny,
    sft_tiny,
    paradox_tiny,
)

RECIPES = {recipe.__name__: recipe for recipe in (paravt_tiny, *_LARGE, *_TINY)}
