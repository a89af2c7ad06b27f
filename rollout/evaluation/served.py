"""What an evaluation with a server needs: picture sizes, a tokenizer, and when to give up.

The server renders prompts, counts tokens and resizes pictures itself. If there is no tokenizer with
the markers of Qwen3-VL's chat format, a built-in vocabulary of single bytes keeps the books of an
episode; the server never sees it.

A single question that the server refuses or fails is left out, and the next command asks it again.
But if a server is down or set up wrongly, going on would leave out every question: then the run
ends with one line (`ServerWatch`).
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from typing import Any

from models.config import ModelConfig
from models.family import family
from paravt_jax.data import foreign
from paravt_jax.method import tokenizer
from paravt_jax.method.tokenizer import Vocabulary
from paravt_jax.world.vocabulary import build_tokenizer
from rollout.agent.endpoint import REFUSAL_REMEDY, EndpointError
from rollout.evaluation.folder import Line
from rollout.evaluation.settings import BenchmarkSettings

BYTES_PER_TOKEN = 16
"""Tokens of the built-in vocabulary per token of the server: most tokens are shorter, so that the
server's own limits act, not those of the books."""

BUILT_IN = "bytes"
"""Name of the built-in vocabulary in the record of an evaluation."""

_LIMITS = (
    "turn_tokens",
    "summary_tokens",
    "trajectory_tokens",
    "question_tokens",
    "subtitle_tokens",
)


@dataclasses.dataclass(frozen=True)
class Served:
    """The files of a served model, as far as there are any."""

    config: ModelConfig
    """Only patch size and merge size are used: frames have sides of their product."""
    vocabulary: Vocabulary
    tokenizer: str
    """`BUILT_IN`, or the digest of the model's own tokenizer."""

    @property
    def ids_per_token(self) -> int:
        """Upper bound on the ids in the books per token of the server."""
        return BYTES_PER_TOKEN if self.tokenizer == BUILT_IN else 1

    def scaled(self, settings: BenchmarkSettings) -> BenchmarkSettings:
        """The settings with token limits in the units of the books."""
        limits = {name: self.ids_per_token * getattr(settings, name) for name in _LIMITS}
        return dataclasses.replace(settings, **limits)


def served(folder: pathlib.Path | None) -> Served:
    """Read what there is of a served model.

    Args:
        folder: a folder with tokenizer.json, config.json, both or none of them; None for no folder.

    Raises:
        ValueError: a file is damaged.
    """
    vocabulary = _own_vocabulary(folder) if folder else None
    config = _picture_sizes(folder / "config.json" if folder else None)
    if vocabulary is None:
        return Served(config, Vocabulary(_built_in()), BUILT_IN)
    return Served(config, vocabulary, vocabulary.digest)


@functools.cache
def _built_in() -> Any:
    return build_tokenizer(())


def _own_vocabulary(folder: pathlib.Path) -> Vocabulary | None:
    """The tokenizer in a folder; None if there is none, or one of another chat format."""
    if not (folder / tokenizer.FILE).is_file():
        return None
    try:
        vocabulary = tokenizer.load(folder)
        needed = ("<|im_start|>", "<|vision_start|>", "<|image_pad|>", "</tool_call>")
        _ = [vocabulary[token] for token in needed]
    except KeyError:
        return None
    return vocabulary


def _picture_sizes(file: pathlib.Path | None) -> ModelConfig:
    """Sizes of a model, with the patch size and merge size of a config.json that has them."""
    sizes = family().size("8b")
    if file is None or not file.is_file():
        return sizes
    content = foreign.read_object(file, "download it again, or remove it")
    vision = content.get("vision_config")
    fields = ("patch_size", "spatial_merge_size", "temporal_patch_size")
    known = {name: vision[name] for name in fields if isinstance(vision, dict) and name in vision}
    if not all(type(value) is int and value > 0 for value in known.values()):
        return sizes
    return dataclasses.replace(sizes, vision=dataclasses.replace(sizes.vision, **known))


# --- when to give up ---

REFUSED_VIDEOS = 5
"""A run ends if a server refuses questions on this many videos before it has answered any."""

FAILED_AT_FIRST = 3
"""A run ends after this many failed questions in a row if the server has not answered any."""

FAILED_IN_A_ROW = 20
"""A run ends after this many failed questions in a row. Each has had all its attempts."""


class ServerWatch:
    """Counts refused and failed questions of one server.

    Args:
        endpoint: address of the server, for messages.
        proven: whether it answered questions of this evaluation in an earlier start.
    """

    def __init__(self, endpoint: str, proven: bool):
        self._endpoint = endpoint
        self._proven = proven
        self._refused = 0
        self._refused_videos: set[str] = set()
        self._failed = 0  # in a row
        self._reason = ""

    def add(self, line: Line) -> None:
        """Count a finished question. Raises EndpointError if the server is hopeless."""
        cause = line.get("left_out")
        if cause not in (None, "refused", "failed"):
            return  # the server was not asked
        self._reason = line.get("reason", "")
        if cause == "failed":
            self._failed += 1
            if self._failed == (FAILED_IN_A_ROW if self._proven else FAILED_AT_FIRST):
                raise self._hopeless()
            return
        self._failed = 0
        if cause is None:
            self._proven = True
            return
        self._refused += 1
        self._refused_videos.add(line["video"])
        if not self._proven and len(self._refused_videos) == REFUSED_VIDEOS:
            raise self._hopeless()

    def finish(self) -> None:
        """Check the whole run.

        Raises:
            EndpointError: the server has answered none of the questions that it got. Then the
                setup is at fault, not the questions.
        """
        if not self._proven and (self._failed or self._refused):
            raise self._hopeless()

    def _hopeless(self) -> EndpointError:
        if self._failed:
            what = f"{self._failed} questions in a row have no answer: {self._reason}"
            return EndpointError(
                f"--endpoint {self._endpoint}: {what}; the same command asks them again"
            )
        return EndpointError(
            f"--endpoint {self._endpoint}: refused the first {self._refused} questions, on "
            f"{len(self._refused_videos)} videos ({self._reason}); {REFUSAL_REMEDY}"
        )
