"""Runs whose rollouts outlive updates, stopped and resumed, with adapters and trained mergers."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from typing import Any

import numpy as np
import pytest

import train.actor
import train.run
from benchmarks.killing import check_end, checkpoints_of, lines_of
from paravt_jax.method.protocol import render_call
from paravt_jax.method.records import CropCall
from paravt_jax.method.tokenizer import Vocabulary
from paravt_jax.processes.exit_codes import Stopped
from rollout.engine.engine import Engine
from rollout.engine.programs import MOST_STOP_IDS
from rollout.engine.requests import Request, Sample, SampleStop
from train.data import Data
from train.prepare import prepare
from train.run import execute
from train.settings import change

STEPS = 3

# RL alone, from random weights, with few programs to compile.
SHORT = {
    "align": None,
    "sft": None,
    "engine.slots": 4,
    "protocol.turn_tokens": 40,
    "protocol.summary_tokens": 8,
    "rl.steps": STEPS,
    "rl.save_every": STEPS,
    "rl.max_staleness": 2,
    "rl.updates_per_batch": 2,
    "rl.grpo.group_size": 2,
    "rl.frame_budgets": (4,),
    "rl.microbatch_tokens": 1,
    "evaluation.frames": (4,),
}


class Calling(Engine):
    """Begins every episode with a call, which random weights never write, and ends turns early."""

    def __init__(self, words: Vocabulary, *arguments: Any):
        super().__init__(*arguments)
        self.words = words
        ends = [id for id in range(words.size) if b"d" in words.token_bytes(id)]
        self.ends = tuple(ends[: MOST_STOP_IDS - 2])

    def warm_up(self) -> None:
        """Nothing: programs compile when they are first needed, and many are not."""

    def submit(self, request: Request) -> int:
        # Random weights seldom end a response; with common tokens, turns differ in length.
        stop_ids = (*request.sampling.stop_ids, *self.ends)
        sampling = dataclasses.replace(request.sampling, stop_ids=stop_ids)
        request = dataclasses.replace(request, sampling=sampling)
        prompt = self.words.decode(request.ids)
        first_turn = "<think>" in prompt and "<tool_response>" not in prompt
        if first_turn and request.begun is None:
            request = dataclasses.replace(request, begun=self._call())
        return super().submit(request)

    def _call(self) -> Sample:
        """The beginning of a turn."""
        text = f"</think>{render_call(CropCall(0, 16))}"
        ids = np.asarray(self.words.encode(text), np.int32)
        return Sample(
            ids,
            # About those of random weights.
            np.full(len(ids), -np.log(self.words.size), np.float32),
            SampleStop.PAUSED,
            np.full(len(ids), self.version, np.int32),
            digest="",
        )


def prepare_without_heldout(*arguments: Any) -> Data:
    """The data of a run that evaluates nothing."""
    return dataclasses.replace(prepare(*arguments), heldout=())


@pytest.mark.slow
def test_a_stopped_run_ends_bit_for_bit_like_an_uninterrupted_one(
    small, small_vocabulary, tmp_path, monkeypatch
):
    """It stops after the second step. The recipe has adapters, and trains the tower's mergers."""
    engine = functools.partial(Calling, small_vocabulary)
    monkeypatch.setattr(train.actor, "Engine", engine)
    monkeypatch.setattr(train.run, "prepare", prepare_without_heldout)
    monkeypatch.setattr(train.actor, "compile_ahead", lambda *_, **__: None)
    run = change(small.small_merger(), "small_merger", SHORT)
    whole, stopped = (
        dataclasses.replace(run, run_dir=str(tmp_path / name)) for name in ("whole", "stopped")
    )
    execute(whole)
    with pytest.raises(Stopped, match=f"after PARA-GRPO 2/{STEPS}"):
        execute(stopped, small.StopAfter(stopped, "rl", 2))
    execute(stopped)
    check_end(tmp_path / "stopped", tmp_path / "whole")
    assert last_checkpoint(tmp_path / "stopped") == last_checkpoint(tmp_path / "whole")

    rows = lines_of(tmp_path / "stopped")
    assert rows[1]["in_flight/groups"] > 0, "no episode was in flight at the stop"
    assert rows[2]["staleness/max"] >= 1
    assert [row["token_mismatches"] for row in rows] == [0] * STEPS


def last_checkpoint(folder: pathlib.Path) -> dict[str, bytes]:
    """Weights and optimizer after the last step of RL."""
    (leaves,) = (leaves for _, step, leaves in checkpoints_of(folder) if step == STEPS)
    return leaves
