"""`--protocol lmms-eval`: questions in the words of lmms-eval's tasks, scored by its functions.

By default the model answers directly, as in lmms-eval: greedily, without tools, within the task's
limit of tokens, after the system turn of lmms-eval's own Qwen3-VL. With another `--prompt` the
question is lmms-eval's and everything around it is this project's.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from paravt_extras.lmms_eval.answers import answer_text
from paravt_extras.lmms_eval.cache import Cache
from paravt_extras.lmms_eval.client import MODEL, LmmsEval, LmmsEvalError, UnaskableRow
from paravt_jax.method.records import Turn
from paravt_jax.method.subtitles import Subtitle
from paravt_jax.method.wording import OUR_WORDING, Prompt, Wording, fill
from rollout.evaluation.benchmarks import Item, VideoFolder
from rollout.evaluation.benchmarks.items import BrokenRow
from rollout.evaluation.packs import PromptPack, digest_of
from rollout.evaluation.summary import SAME


class LmmsEvalPack(PromptPack):
    """The words and scores of one of lmms-eval's tasks."""

    name = "lmms-eval"
    prompt = "direct"

    def __init__(self, python: str, benchmark: str, folder: str | os.PathLike, process: int = 0):
        """Find the task.

        Args:
            python: path of the interpreter of lmms-eval's environment.
            benchmark: the split.
            folder: where prompts and scores are kept, so that they are asked for once.
            process: index of this process among those that share the folder.

        Raises:
            LmmsEvalError: the interpreter, lmms-eval or the task is missing.
        """
        self._client = LmmsEval(python, benchmark, Cache(folder, process))
        self.digest = digest_of(self._client.digest, self._client.system, MODEL)

    def close(self) -> None:
        self._client.close()

    def wording(self, benchmark: str, prompt: Prompt) -> Wording:
        """This project's texts; `direct` has the system turn of lmms-eval's model."""
        direct = {"direct": self._client.system}
        return dataclasses.replace(OUR_WORDING, system_alone={**OUR_WORDING.system_alone, **direct})

    def question(
        self,
        benchmark: str,
        prompt: Prompt,
        item: Item,
        subtitles: Sequence[Subtitle],
        videos: VideoFolder,
        filled: Callable[..., str] = fill,
    ) -> str:
        files = _files(item, videos) if self._client.task.subtitles else {}
        try:
            (text,) = self._client.prompts([dict(item.row)], [files])
            misfit = self._client.misfit(dict(item.row))
        except UnaskableRow as error:
            raise BrokenRow(str(error)) from error
        if misfit:
            raise BrokenRow(misfit)
        return filled("{text}", text=text)

    def style(self, benchmark: str, prompt: Prompt) -> Mapping[str, Any]:
        # A prompt is made from the published row, so its options cannot be shuffled here.
        style: dict[str, Any] = {"shuffle": False, "temperature": 0.0}
        if prompt == "direct":
            limit = self._client.settings()["generation"].get("max_new_tokens", _DEFAULT_TOKENS)
            style |= {"turn_tokens": limit, "trajectory_tokens": limit}
        return style

    def differences(self, benchmark: str) -> list[str]:
        return ["frames of this project instead of lmms-eval's video"]

    def score(self, benchmark: str, item: Item, turns: Sequence[Turn]) -> Mapping[str, Any]:
        """The task's own score and result of an answer."""
        scored = self._client.score(dict(item.row), answer_text(turns))
        return {key: value for key, value in dataclasses.asdict(scored).items() if value != ""}

    def figures(self, scores: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        """lmms-eval's own figures of a run.

        Args:
            scores: what `score` returned for the questions that were played, and our score of
                each as `ours`.

        Returns:
            `lmms_eval_score`, which corresponds to this project's score, in [0, 1], and
            `lmms_eval`: version, task, its metrics as it prints them, the number of scores, and
            the number of questions whose score `differ`s from ours.
        """
        scored = [score for score in scores if score.get("result") is not None]
        results = [score["result"] for score in scored]
        task = self._client.task
        about: dict[str, Any] = {
            "version": self._client.version,
            "task": task.name,
            "n": len(results),
            "without_score": len(scores) - len(results),
            "differ": sum(abs(score["score"] - score["ours"]) > SAME for score in scored),
        }
        if not results:
            return {"lmms_eval": about}
        try:
            metrics = self._client.aggregate(results)
        except LmmsEvalError as error:  # a group that its functions do not know
            return {"lmms_eval": about | {"error": str(error)}}
        return {
            "lmms_eval_score": metrics[task.metric] / task.whole,
            "lmms_eval": about | {"metrics": metrics},
        }


# The limit of lmms-eval's Qwen3-VL for tasks without one.
_DEFAULT_TOKENS = 128


def _files(item: Item, videos: VideoFolder) -> dict[str, pathlib.Path]:
    """The files that a prompt with subtitles reads, at the places where the task looks for them."""
    name = pathlib.PurePosixPath(item.question.video).stem
    places = {
        f"data/{name}.mp4": videos.find(item.question.video),
        f"subtitle/{name}.srt": videos.find(item.subtitles) if item.subtitles else None,
    }
    return {
        place: (videos.root / path).absolute() for place, path in places.items() if path is not None
    }
