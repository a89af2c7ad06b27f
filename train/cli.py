"""The command line of a run: a recipe by name, then overrides of its fields.

Owns how `--config=NAME --rl.group-size 4 ...` becomes one frozen settings object. Refuses an unknown recipe, an unknown
field and a value of the wrong type, each by name and with exit code 2. Knows no recipe and touches no device: the caller
brings the recipes, and a mistake on the command line costs no compilation.
"""

from __future__ import annotations

import difflib
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn, TypeVar

import tyro

R = TypeVar("R")

EXIT_USAGE = 2  # what argparse and tyro use for a wrong command line


def parse(
    argv: Sequence[str], recipes: Mapping[str, Callable[[], R]], prog: str = "python -m train.run"
) -> R:
    """The settings that `argv` (without the program's name) asks for.

    `recipes` maps a name to a function that returns a frozen dataclass; nested dataclasses become dotted flags, their
    docstrings the help. `--config=NAME --help` lists every field with the recipe's value.

    Raises SystemExit(2) with a message on stderr for an unknown or missing recipe, an unknown field, a value of the wrong
    type, or one that a dataclass's `__post_init__` refuses with a ValueError; SystemExit(0) after printing help.
    """
    names, overrides = _split_config(argv)
    if not names:
        if {"-h", "--help"} & set(overrides):
            print(_usage(recipes, prog))
            raise SystemExit(0)
        _fail(f"--config is missing: name a recipe.\n{_usage(recipes, prog)}")
    if len(set(names)) > 1:
        _fail(
            f"--config is given as {' and '.join(names)}; a run has one recipe: keep one of them."
        )
    name = names[0]
    if name not in recipes:
        near = difflib.get_close_matches(name, recipes, n=1, cutoff=0.3)
        hint = f" Did you mean {near[0]}?" if near else ""
        _fail(f"--config={name}: there is no such recipe.{hint} Recipes: {', '.join(recipes)}.")
    default = recipes[name]()
    # A field that holds an optional dataclass stays a field: without this, tyro would make a subcommand of it.
    return tyro.cli(
        type(default),
        default=default,
        args=overrides,
        prog=f"{prog} --config={name}",
        config=(tyro.conf.AvoidSubcommands,),
    )


def _split_config(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Every value of --config, and the other arguments in their order."""
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
    """The recipes with the first line of their docstrings, one a line."""
    width = max(map(len, recipes), default=0)
    lines = [
        f"  {name:<{width}}  {(inspect.getdoc(recipe) or '').partition(chr(10))[0]}".rstrip()
        for name, recipe in recipes.items()
    ]
    return "\n".join(
        [
            f"usage: {prog} --config=NAME [--field value ...]; --config=NAME --help shows the fields. Recipes:",
            *lines,
        ]
    )


def _fail(message: str) -> NoReturn:
    print(message, file=sys.stderr)
    raise SystemExit(EXIT_USAGE)
