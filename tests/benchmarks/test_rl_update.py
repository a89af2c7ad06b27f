"""Timing two sides in turns: the other side is a stand-in for a checkout."""

from __future__ import annotations

import sys

import pytest

from benchmarks.rl_update import ROUNDS, main, take_turns

STAND_IN = """
import json, sys
lengths = json.loads(sys.stdin.readline())
assert lengths == [[[4, [2, 3]]], [[5, [1]]]], lengths
print("ready", flush=True)
for line in sys.stdin:
    print(100 * (1 + int(line)), 10, flush=True)
"""
LENGTHS = [[(4, (2, 3))], [(5, (1,))]]


def test_both_sides_compute_every_step_in_turns(tmp_path):
    steps = []
    (packed, padded) = take_turns(
        steps.append, [sys.executable, "-c", STAND_IN], LENGTHS, cwd=tmp_path
    )
    # Once to compile, and then the rounds.
    assert steps == [0] * (1 + ROUNDS) + [1] * (1 + ROUNDS)
    assert packed[0] == "packed" and float(packed[1]) < 10
    assert padded == ["padded", "150.000", "10.000", "1.00", "1.00"]


def test_a_folder_without_that_commit_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="--against .*git worktree add FOLDER 210a70d"):
        take_turns(print, [sys.executable, "-c", "pass"], LENGTHS, cwd=tmp_path)


@pytest.mark.parametrize("options", ["--lengths=/nowhere.json", "--against=/nowhere", "--steps=0"])
def test_options_that_cannot_work_are_one_line_and_code_2(options, capsys):
    assert main([options]) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith(f"error: {options.replace('=', ' ')}: ")
    assert printed.err.count("\n") == 1 and not printed.out
