"""`paravt`: lists what can be done, and passes its arguments on to the command that does it."""

from __future__ import annotations

import importlib
import os
import pathlib
import signal
import sys

from paravt_jax.processes.exit_codes import stop_at_once

SCRIPT = "paravt"
_USAGE = 2  # the exit code of argparse and tyro for a wrong command line

# The command behind each word, as `python -m` takes it, and what it does.
_COMMANDS = {
    "run": ("train.run", "train a recipe from data to model, or resume that"),
    "check": ("train.run --check", "list what a run needs and what is missing"),
    "prepare": ("train.prepare", "download and prepare the published data of a recipe"),
    "ask": ("rollout.ask", "answer a question about a video"),
    "serve": ("rollout.serve", "serve a model: OpenAI's API, MCP and a page"),
    "view": ("rollout.view", "look at all episodes of a run or an evaluation, or compare two"),
    "evaluate": ("rollout.evaluate", "score a model on a benchmark"),
    "export": ("train.export", "write a checkpoint as a Hugging Face folder"),
    "fit": ("paravt_extras.fit", "say whether a recipe fits the devices here"),
    "rehearse": ("paravt_extras.rehearsal", "go through all phases of a recipe, cut to minutes"),
    "plan": ("paravt_extras.plan", "compile a recipe for a TPU slice, to see if it fits"),
    "scenes": ("paravt_extras.scenes", "draw videos with questions, to try a real model"),
    "report": ("paravt_extras.report", "write the page of a run: curves, tables, episodes"),
    "summary": ("paravt_extras.summary", "print figures of runs side by side, as a table"),
}


def main() -> int:
    """Run the script; returns its exit code."""
    words = sys.argv[1:]
    if not words or words[0] in ("-h", "--help", "help"):
        print(_help())
        return 0
    word, *arguments = words
    if word not in _COMMANDS:
        known = ", ".join(_COMMANDS)
        print(f"{SCRIPT}: {word}: no such command; give one of {known}", file=sys.stderr)
        return _USAGE
    name, *flags = _COMMANDS[word][0].split()
    # `python -m` searches the working directory, too, where tools of your own may be. Here it goes
    # last, so that a folder such as models/ hides no package of this project. The finder of an
    # editable install is asked after this list, so their own folder stands in it, too.
    sys.path += [str(pathlib.Path(__file__).parents[1]), os.getcwd()]
    sys.argv = [f"{SCRIPT} {word}", *flags, *arguments]
    # Importing takes seconds.
    former = signal.signal(signal.SIGINT, stop_at_once)
    module = importlib.import_module(name)
    if hasattr(module, "__path__"):  # a package, whose command is its __main__
        module = importlib.import_module(f"{name}.__main__")
    signal.signal(signal.SIGINT, former)
    return module.main()


def _help() -> str:
    lines = [f"usage: {SCRIPT} COMMAND [ARGUMENT ...]"]
    lines.append(f"       {SCRIPT} COMMAND --help lists the arguments of a command.")
    lines.append("Commands, and the same without this script:")
    for word, (command, what) in _COMMANDS.items():
        lines.append(f"  {word:<8}  {what:<51}  python -m {command}")
    return "\n".join(lines)
