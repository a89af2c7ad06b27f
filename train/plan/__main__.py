"""`python -m train.plan`; see `train.plan.command`."""

import os
import sys

from train.plan.command import main

if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # what a stopped plan was still compiling ends with this process
