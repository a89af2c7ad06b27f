"""Prompts and scores of the mode against lmms-eval's own functions, called directly."""

from __future__ import annotations

import os

import pytest


def real_python() -> str:
    """The interpreter of an environment with lmms-eval; the test is skipped where there is none."""
    python = os.environ.get("PARAVT_TEST_LMMS_EVAL")
    if not python:
        pytest.skip("PARAVT_TEST_LMMS_EVAL is not set: it names an interpreter with lmms-eval 0.7")
    return python
