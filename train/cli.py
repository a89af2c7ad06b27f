"""The command line of a run: the name of a recipe, then overrides of its fields.

`--config=NAME --rl.grpo.group-size 4 ...` becomes one frozen settings object. Parsing touches no
device, so a typo is reported before anything compiles.
"""

from __future__ import annotations

import difflib
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn, TypeVar

import tyro

from paravt_jax.command_name import command_name

SettingsT = TypeVar("SettingsT")

EXIT_USAGE = 2  # the exit code of argparse and tyro for a wrong command line


def parse(
    argv: Sequence[str],
    recipes: Mapping[str, Callable[[], SettingsT]],
    prog: str = "python -m train.run",
) -> SettingsT:
    """Parse a command line into the settings of a recipe.

    Nested dataclasses become dotted flags, and the docstrings of their fields become the help text.
    `--config=NAME --help` lists every field with the recipe's value.

        run = parse(["--config=paravt_tiny", "--rl.steps", "8"], RECIPES)

    Args:
        argv: The arguments, without the program's name.
        recipes: Functions that return a frozen dataclass, by recipe name.
        prog: The command without the script `paravt`, to show in help and error messages.

    Returns:
        The recipe's settings with the overrides applied.

    Raises:
        SystemExit: With code 0 after printing help. With code 2, and a message on stderr, for a
            missing or unknown recipe, an unknown field, or a value that has the wrong type or is
            rejected by a dataclass's `__post_init__`.
    """
    prog = command_name(prog)
    names, overrides = _split_config(argv)
    if not names:
        if {"-h", "--help"} & set(overrides):
            print(_usage(recipes, prog))
            raise SystemExit(0)
        _fail(f"--config is missing: name a recipe.\n{_usage(recipes, prog)}")
    if len(set(names)) > 1:
        _fail(f"--config is given more than once ({' and '.join(names)}): name a single recipe.")
    name = names[0]
    if name not in recipes:
        nearest = difflib.get_close_matches(name, recipes, n=1, cutoff=0.3)
        hint = f" Did you mean {nearest[0]}?" if nearest else ""
        _fail(f"--config={name}: no such recipe.{hint} Recipes: {', '.join(recipes)}.")
    default = recipes[name]()
    return tyro.cli(
        type(default),
        default=default,
        args=overrides,
        prog=f"{prog} --config={name}",
        # By default, tyro turns a field that may be None into a subcommand. Keep it a flag.
        config=(tyro.conf.AvoidSubcommands,),
    )


def _split_config(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return all values of --config, and the other arguments in their order."""
    names: list[str] = []
    rest: list[str] = []
    args = iter(argv)
    for arg in args:
        if arg.startswith("--config="):
            names.append(arg.removeprefix("--config="))
        elif arg == "--config":
            value = next(args, "")
            if not value or value.startswith("-"):
                _fail("--config needs a value: the name of a recipe, as in --config=NAME.")
            names.append(value)
        else:
            rest.append(arg)
    return names, rest


def _usage(recipes: Mapping[str, Callable[[], object]], prog: str) -> str:
    """Return the usage line, then each recipe with the first line of its docstring."""
    lines = [
        f"usage: {prog} --config=NAME [--field value ...]",
        f"       {prog} --config=NAME --help lists the fields of a recipe.",
        "Recipes:",
    ]
    width = max(map(len, recipes), default=0)
    for name, recipe in recipes.items():
        summary = (inspect.getdoc(recipe) or "").split("\n")[0]
        lines.append(f"  {name:<{width}}  {summary}".rstrip())
    return "\n".join(lines)


def _fail(message: str) -> NoReturn:
    print(message, file=sys.stderr)
    raise SystemExit(EXIT_USAGE)
