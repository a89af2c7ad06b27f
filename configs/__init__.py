"""Recipes: one small file each, whose function returns the settings of a whole run. `RECIPES` lists them for the commands."""

from configs.paravt_8b import paravt_8b
from configs.paravt_tiny import paravt_tiny
from configs.sft_8b import sft_8b
from configs.vanilla_grpo_8b import vanilla_grpo_8b

RECIPES = {recipe.__name__: recipe for recipe in (paravt_tiny, paravt_8b, sft_8b, vanilla_grpo_8b)}
