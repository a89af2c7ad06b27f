"""The name under which a command was started, for its help and its error messages."""

from __future__ import annotations

import sys

SCRIPT = "paravt"


def command_name(module_command: str) -> str:
    """Return the command as it was typed.

    Args:
        module_command: The command without the script, such as "python -m train.run".

    Returns:
        Script and word, such as "paravt run", if `train.command` started the command. It leaves
        them in `sys.argv[0]`. Otherwise `module_command`.
    """
    return sys.argv[0] if sys.argv[0].startswith(f"{SCRIPT} ") else module_command
