"""`python -m paravt_extras.plan`; see `paravt_extras.plan.command`."""

import os
import sys
from typing import NoReturn

from paravt_extras.plan import command


def main() -> NoReturn:
    """Run the command, and leave at once with its exit code."""
    code = command.main()
    sys.stdout.flush()
    sys.stderr.flush()
    # A stopped plan may still be compiling in worker threads. A normal exit would wait for them.
    os._exit(code)


if __name__ == "__main__":
    main()
