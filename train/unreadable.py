"""Keeps a list of videos that cannot be read, and stops a run that has too many of them."""

from __future__ import annotations

import json
import pathlib

from paravt_jax.data.atomic import write_atomically
from paravt_jax.processes import hosts
from train.data import Data
from train.settings import Run

UNREADABLE = "unreadable_videos.json"
"""File in a run's folder: why each unreadable video cannot be read, by path."""

_NAMED = 20  # largest number of videos to print by name


class UnreadableVideosError(Exception):
    """More videos than allowed cannot be read; the message names them."""


def note_unreadable(run: Run, folder: pathlib.Path, data: Data, more: dict[str, str]) -> None:
    """Add unreadable videos to `data.unreadable`, and write the list to the run's folder.

    Args:
        run: `unreadable_share` is the limit.
        folder: The run's folder.
        data: The data, whose list of unreadable videos is extended.
        more: Reasons of further videos by path, found while checking or decoding.

    Raises:
        UnreadableVideosError: If the list exceeds the allowed share.
    """
    known = len(data.unreadable)
    data.unreadable.update(more)
    count = len(data.unreadable)
    if hosts.is_first():
        write_atomically(folder / UNREADABLE, json.dumps(data.unreadable, indent=1))
    shown = sorted(data.unreadable.items())[:_NAMED]
    named = "; ".join(f"{path}: {reason}" for path, reason in shown)
    if count > known and hosts.is_first():
        print(f"{count} videos cannot be read and are left out, see {folder / UNREADABLE}: {named}")
    if count > run.unreadable_share * data.videos:
        remedy = "Replace them"
        if run.world is not None:
            remedy = f"Delete {data.root} to render it again"
        raise UnreadableVideosError(
            f"{count} of {data.videos} videos cannot be read: {named}. {remedy}, or allow a larger "
            f"share than --unreadable-share {run.unreadable_share:g}."
        )
