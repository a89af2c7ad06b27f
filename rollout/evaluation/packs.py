"""Prompt packs: the words in which an evaluation asks, and how it plays with them.

`own` is this project's wording. A pack may also be a folder of texts, or be read from another
evaluator's files (`--protocol`).
"""

from __future__ import annotations

import abc
import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from paravt_jax.method.subtitles import Subtitle
from paravt_jax.method.wording import OUR_WORDING, Prompt, Wording
from rollout.evaluation.benchmarks import Item, VideoFolder

PLACEHOLDERS: Mapping[str, tuple[str, ...]] = {
    "system": ("hints", "tools"),
    "system_alone": (),
    "system_pictures": (),
    "question": ("question", "options", "video"),
    "option": ("letter", "option"),
    "subtitled": ("subtitles", "question"),
    "subagent": ("start", "end", "question"),
    "window": ("count", "start", "end", "note"),
    "shown": ("frames", "response"),
    "answer_now": (),
}
"""The placeholders that a wording's templates may have, by field."""


class PackError(ValueError):
    """A pack cannot be used; the message is one line for people."""


class PromptPack(abc.ABC):
    """The words of an evaluation, and the settings that belong to them."""

    name: str
    """Name in tables and in config.json."""
    digest: str
    """Hash of everything that the pack says and decides."""

    @abc.abstractmethod
    def wording(self, benchmark: str, prompt: Prompt) -> Wording:
        """The texts for one benchmark ("" for a user's own questions) and one kind of prompt.

        Raises:
            PackError: the pack has no texts for them.
        """

    def question(
        self, benchmark: str, item: Item, subtitles: Sequence[Subtitle], videos: VideoFolder
    ) -> str:
        """The whole text of one question; "" leaves it to the wording.

        Args:
            benchmark: name of the benchmark; "" for a user's own questions.
            item: the question. `item.row` is its published row.
            subtitles: the subtitles that the prompt is to show.
            videos: finds files of the benchmark.

        Raises:
            BrokenRow: the pack cannot ask this row.
        """
        return ""

    def style(self, benchmark: str, prompt: Prompt) -> Mapping[str, Any]:
        """How the pack plays: values of `BenchmarkSettings` by field.

        A user who gives another value for one of these fields gets an error.
        """
        return {}

    def score(self, benchmark: str, item: Item, answer: str | None) -> Mapping[str, Any] | None:
        """The pack's own score of an answer, shown beside ours; None if it scores nothing."""
        return None

    def close(self) -> None:
        """Release what the pack holds open."""
        return


class OwnPack(PromptPack):
    """This project's wording."""

    name = "own"

    def __init__(self) -> None:
        self.digest = digest_of(OUR_WORDING)

    def wording(self, benchmark: str, prompt: Prompt) -> Wording:
        return OUR_WORDING


def digest_of(*contents: Any) -> str:
    """Hash wordings and other values, as 32 hexadecimal digits. The order of keys is ignored."""
    plain = [
        dataclasses.asdict(content) if isinstance(content, Wording) else content
        for content in contents
    ]
    text = json.dumps(plain, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]
