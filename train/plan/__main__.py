"""`python -m train.plan`; see `train.plan.command`."""

import os
import sys

from train.plan.command import main

if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # A stopped plan may still be compiling in worker threads. A normal exit would wait for them.
    os._exit(code)
