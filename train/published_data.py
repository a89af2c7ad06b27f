"""Settings of published data and your own questions, and their held-out questions."""

from __future__ import annotations

import collections
import dataclasses
import hashlib

from paravt_jax.checks import require_at_least
from paravt_jax.data.any_path import require_local
from paravt_jax.data.video import Decoder, require_decoder
from paravt_jax.method.records import Question


@dataclasses.dataclass(frozen=True)
class DataSettings:
    """Published training data, from local folders, Hugging Face ids or bucket paths (gs://...)."""

    annotations: str = "ParaVT/ParaVT-Parquet"
    """Source of the annotations, Parquet tables."""
    media: str = "ParaVT/ParaVT-Source"
    """Source of videos and pictures; archives are unpacked into FOLDER/media."""
    folder: str = "data/paravt"
    """Local folder of the prepared data set."""
    frames: int = 64
    """Largest number of frames per video in a demonstration; up to that, one per second."""
    decoder: Decoder = "pyav"
    """Library that decodes frames; docs/data.md compares them. decord needs local files."""
    questions: str = ""
    """File of your own questions (JSON or CSV), on videos in `media`; replaces `annotations`."""

    def __post_init__(self):
        require_at_least("data", self, 1, "frames")
        for name in ("annotations", "media", "folder"):
            if not getattr(self, name):
                raise ValueError(f"data.{name}: empty; name a folder")
        require_local("data.folder", self.folder)
        require_decoder("data.decoder", self.decoder)


def hold_out(
    questions: tuple[Question, ...], count: int
) -> tuple[tuple[Question, ...], tuple[Question, ...]]:
    """Split questions into those to train on and at least `count` to evaluate with.

    All questions about a video go to the same split.

    Returns:
        The training questions, in their order, and the held-out questions.

    Raises:
        ValueError: If no question is left to train on.
    """
    by_video = collections.defaultdict(list)
    for question in questions:
        by_video[question.video].append(question)
    heldout: list[Question] = []
    # The hash of a path does not depend on the rest of the set, so the choice stays stable when
    # videos are added.
    for video in sorted(by_video, key=lambda path: hashlib.sha256(path.encode()).digest()):
        if len(heldout) < count:
            heldout += by_video[video]
    heldout_videos = {question.video for question in heldout}
    training = tuple(question for question in questions if question.video not in heldout_videos)
    if questions and not training:
        raise ValueError(
            f"evaluation.questions: {count} of {len(questions)} questions, which leaves none to "
            "train on; hold out fewer"
        )
    return training, tuple(heldout)
