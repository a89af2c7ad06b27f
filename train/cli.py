"""The command line of a run: the name of a recipe, then overrides of its fields.

`--config=NAME --rl.grpo.group-size 4 ...` becomes one frozen settings object. Parsing touches no
device, so a typo is reported before anything compiles.
"""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import tyro

SettingsT = TypeVar("SettingsT")


def parse(
    argv: Sequence[str],
    recipes: Mapping[str, Callable[[], SettingsT]],
    prog: str = "python -m train.run",
    description: str | None = None,
    parents: Sequence[argparse.ArgumentParser] = (),
) -> SettingsT:
    """Parse a command line into the settings of a recipe.

    Nested dataclasses become dotted flags, and the docstrings of their fields become the help text.
    `--config=NAME --help` lists every field with the recipe's value.

        run = parse(["--config=paravt_tiny", "--rl.steps", "8"], RECIPES)

    Args:
        argv: The arguments, without the program's name.
        recipes: Functions that return a frozen dataclass, by recipe name.
        prog: The command, to show in help and error messages.
        description: What the command does, for its help.
        parents: Parsers of the command's own options, for its help. `argv` is what they left.

    Returns:
        The recipe's settings with the overrides applied.

    Raises:
        SystemExit: With code 0 after printing help. With code 2, and a message on stderr, for a
            missing or unknown recipe, an unknown field, or a value that has the wrong type or is
            rejected by a dataclass's `__post_init__`.
    """
    parser = argparse.ArgumentParser(
        prog=prog,
        usage="%(prog)s --config=NAME [--field value ...]",
        description=description,
        epilog="\n".join(["recipes:", *_described(recipes)]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        parents=parents,
        add_help=False,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--config",
        metavar="NAME",
        choices=recipes,
        action="append",
        help="a recipe; with --help, lists its fields",
    )
    asked, overrides = parser.parse_known_args(argv)
    if {"-h", "--help"} & set(overrides):
        parser.print_help()
        if not asked.config:
            parser.exit()
    if not asked.config:
        parser.error(f"--config is missing: name a recipe, one of {', '.join(recipes)}")
    if len(asked.config) > 1:
        parser.error(f"--config is given {len(asked.config)} times: name one recipe")
    (name,) = asked.config
    default = recipes[name]()
    return tyro.cli(
        type(default),
        default=default,
        args=overrides,
        prog=f"{parser.prog} --config={name}",
        # By default, tyro turns a field that may be None into a subcommand. Keep it a flag.
        config=(tyro.conf.AvoidSubcommands,),
    )


def _described(recipes: Mapping[str, Callable[[], object]]) -> list[str]:
    """Return each recipe with the first line of its docstring."""
    width = max(map(len, recipes), default=0)
    firsts = {
        name: (inspect.getdoc(recipe) or "").partition("\n")[0] for name, recipe in recipes.items()
    }
    return [f"  {name:<{width}}  {first}" for name, first in firsts.items()]
