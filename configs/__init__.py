"""Recipes: functions that return the settings of a whole run. `RECIPES` lists them by name."""

from configs import ablations
from configs.ablations import paravt_7b, vanilla_grpo_7b
from configs.lora import paravt_2b_lora, paravt_4b_lora, paravt_8b_lora, sft_2b_lora
from configs.paravt_8b import paravt_8b, sft_8b
from configs.paravt_tiny import paravt_tiny, sft_tiny
from configs.released import paravt_8b_released, sft_8b_released

RECIPES = {
    recipe.__name__: recipe
    for recipe in (
        paravt_tiny,
        paravt_8b,
        sft_8b,
        paravt_8b_released,
        sft_8b_released,
        sft_tiny,
        paravt_2b_lora,
        sft_2b_lora,
        paravt_4b_lora,
        paravt_8b_lora,
        paravt_7b,
        vanilla_grpo_7b,
        *ablations.RECIPES.values(),
    )
}
