"""Draws the lengths that plans and counts of FLOPs use, and stores them beside this file.

python -m benchmarks.lengths

Lengths of paravt_8b are estimates, since it has not run: responses of 10 % of the limit on average,
so that the longest of a step's 56 has about 2,300 tokens, and one call per rollout, between the
published kappa of 2.5 after the cold start and 0.21 at the end of RL. Those of paravt_2b_lora are
estimates, too: its demonstrations are shorter, so its responses have 410 tokens on average, a fifth
of the limit. The other recipes with adapters share them. Those of paravt_tiny are near its measured
means.
"""

from __future__ import annotations

import dataclasses
import pathlib
import sys

from configs import RECIPES
from paravt_extras.plan.workload import Distribution, Workload, draw, limits_of, write

FOLDER = pathlib.Path(__file__).parent
STEPS = 8
SEED = 18


def file_of(recipe: str) -> pathlib.Path:
    """The committed file with a recipe's lengths."""
    return FOLDER / f"lengths_{recipe.removeprefix('paravt_')}.json"


def distributions() -> dict[str, Distribution]:
    """How the lengths of each recipe are drawn."""
    large = limits_of(RECIPES["paravt_8b"]())
    adapted = limits_of(RECIPES["paravt_2b_lora"]())
    small = limits_of(RECIPES["paravt_tiny"]())
    return {
        "paravt_8b": dataclasses.replace(
            large,
            text_tokens=(large.text_tokens[1] // 2, large.text_tokens[1]),
            response_mean=large.response_limit / 10,
            kappa=1.2,
            report_mean=128.0,
        ),
        "paravt_2b_lora": dataclasses.replace(
            adapted,
            text_tokens=(adapted.text_tokens[1] // 2, adapted.text_tokens[1]),
            response_mean=adapted.response_limit / 5,
            kappa=1.2,
            report_mean=128.0,
        ),
        "paravt_tiny": dataclasses.replace(
            small,
            text_tokens=(small.text_tokens[1] * 3 // 4, small.text_tokens[1]),
            response_mean=70.0,
            kappa=1.0,
            report_mean=8.0,
        ),
    }


def drawn(recipe: str) -> Workload:
    """A recipe's lengths, drawn again."""
    source = f"{STEPS} drawn steps of {recipe}"
    return draw(distributions()[recipe], STEPS, SEED, source)


def main() -> int:
    for recipe, distribution in distributions().items():
        workload = drawn(recipe)
        write(file_of(recipe), distribution, SEED, workload)
        print(workload.describe())
    return 0


if __name__ == "__main__":
    sys.exit(main())
