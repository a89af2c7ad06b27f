"""What this process keeps of the memory that it frees."""

from __future__ import annotations

import pathlib
import platform
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has these settings")
def test_freed_memory_is_kept_except_that_of_large_buffers():
    """Large ones would leave gaps in the heap, which then grows from step to step."""
    program = """
import numpy as np
from models.devices import reuse_freed_memory

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096 // 2**20

reuse_freed_memory()
for size in (2**24, 2**28):
    before = resident()
    np.ones(size, np.uint8)
    print(resident() - before)
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    small, large = map(int, done.stdout.split())
    assert small >= 15
    assert large <= 8
