"""`paravt`: lists what can be done, and passes its arguments on to the command that does it."""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import os
import pathlib
import sys

from paravt_jax.command_name import SCRIPT

_USAGE = 2  # the exit code of argparse and tyro for a wrong command line


@dataclasses.dataclass(frozen=True)
class _Command:
    """A word of the command line, and the module behind it.

    Attributes:
        help: What the command does.
        module: The module for `python -m`.
        flags: Arguments that the word stands for.
    """

    help: str
    module: str
    flags: tuple[str, ...] = ()

    @property
    def equivalent(self) -> str:
        return " ".join(("python -m", self.module, *self.flags))


_COMMANDS = {
    "run": _Command("train a recipe from data to report, or resume that", "train.run"),
    "fits": _Command("list which recipes fit the devices here", "paravt_extras.fits"),
    "check": _Command("list what a run needs and what is missing", "train.run", ("--check",)),
    "rehearse": _Command(
        "go through all phases of a recipe, cut to minutes", "paravt_extras.rehearsal"
    ),
    "plan": _Command("predict memory and time of a recipe on a TPU slice", "paravt_extras.plan"),
    "prepare": _Command("download and prepare the published data of a recipe", "train.prepare"),
    "scenes": _Command("draw videos with questions, to try a real model", "paravt_extras.scenes"),
    "download": _Command("download the questions and videos of a split", "paravt_extras.download"),
    "ask": _Command("answer a question about a video", "rollout.ask"),
    "evaluate": _Command("score a model on a benchmark, or compare runs", "rollout.evaluate"),
    "report": _Command("write the pages of a run anew", "paravt_extras.report"),
    "export": _Command("write a checkpoint as a Hugging Face folder", "train.export"),
}


def main() -> int:
    """Run the script; returns its exit code."""
    words = sys.argv[1:]
    if not words or words[0] in ("-h", "--help", "help"):
        print(_help())
        return 0
    word, *arguments = words
    if word not in _COMMANDS:
        nearest = difflib.get_close_matches(word, _COMMANDS, n=1, cutoff=0)
        print(
            f"{SCRIPT}: {word}: no such command; did you mean {SCRIPT} {nearest[0]}?",
            file=sys.stderr,
        )
        return _USAGE
    command = _COMMANDS[word]
    other = _other_copy()
    if other is not None:
        print(
            f"{SCRIPT}: {other} is not the installed copy; start this one with "
            f"{command.equivalent}, or install it (pip install -e .)",
            file=sys.stderr,
        )
        return _USAGE
    # `python -m` searches the working directory, too, where tools of your own may be. Here it goes
    # last, so that a file such as train.py does not hide a package of this project.
    sys.path.append(os.getcwd())
    sys.argv = [f"{SCRIPT} {word}", *command.flags, *arguments]
    module = importlib.import_module(command.module)
    if hasattr(module, "__path__"):  # a package, whose command is its __main__
        module = importlib.import_module(f"{command.module}.__main__")
    return module.main()


def _help() -> str:
    width = max(map(len, _COMMANDS))
    help_width = max(len(command.help) for command in _COMMANDS.values())

    def lines(extra: bool) -> list[str]:
        return [
            f"  {word:<{width}}  {command.help:<{help_width}}  {command.equivalent}"
            for word, command in _COMMANDS.items()
            if command.module.startswith("paravt_extras") == extra
        ]

    return "\n".join(
        [
            f"usage: {SCRIPT} COMMAND [ARGUMENT ...]",
            f"       {SCRIPT} COMMAND --help lists the arguments of a command.",
            "Commands, and the same without this script:",
            *lines(extra=False),
            "What helps around them:",
            *lines(extra=True),
        ]
    )


def _other_copy() -> pathlib.Path | None:
    """Return the working directory, if it holds another copy of this project.

    Processes that a command starts with `python -m` would run that copy's code.
    """
    here = pathlib.Path(__file__).with_name("run.py")
    there = pathlib.Path.cwd() / here.parent.name / here.name
    if there.exists() and not there.samefile(here):
        return pathlib.Path.cwd()
    return None
