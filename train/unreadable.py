"""Videos that cannot be read: noted by name, and too many of them end a run."""

from __future__ import annotations

import json
import pathlib

from paravt_jax.data.atomic import write_atomically
from train.data import Data
from train.durable import hosts
from train.settings import Run

UNREADABLE = "unreadable_videos.json"


class UnreadableVideosError(Exception):
    """More videos than allowed cannot be read; names them."""


def note_unreadable(run: Run, folder: pathlib.Path, data: Data, more: dict[str, str]) -> None:
    """Writes down, by name, the videos that cannot be read, those met while decoding (`more`) among them.

    Raises UnreadableVideosError where they are more than the allowed share.
    """
    known = len(data.unreadable)
    data.unreadable.update(more)
    if hosts.is_first():
        write_atomically(folder / UNREADABLE, json.dumps(data.unreadable, indent=1))
    named = "; ".join(f"{path}: {reason}" for path, reason in sorted(data.unreadable.items())[:20])
    if len(data.unreadable) > known and hosts.is_first():
        print(
            f"{len(data.unreadable)} videos cannot be read and are left out, see {folder / UNREADABLE}: {named}"
        )
    if len(data.unreadable) > run.unreadable_share * data.videos:
        raise UnreadableVideosError(
            f"{len(data.unreadable)} of {data.videos} videos cannot be read: {named}. Put them back (a rendered world: delete {data.root} "
            f"and it is drawn again), or allow a larger share than --unreadable-share {run.unreadable_share:g}."
        )
