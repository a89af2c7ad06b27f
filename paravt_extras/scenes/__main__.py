"""Writes videos of minutes at real pixels, with questions and demonstrations for a real model.

The same command continues an interrupted one, and does nothing once all is there.
"""

from __future__ import annotations

import dataclasses
import pathlib
import sys
from collections.abc import Sequence

import tyro

from paravt_extras.scenes.storyboard import SceneSettings
from paravt_extras.scenes.write import missing_videos, write_scenes
from paravt_jax.data.any_path import require_local
from paravt_jax.processes.cluster import run_command


@dataclasses.dataclass(frozen=True)
class _Asked:
    """The command line. Values are checked later: tyro would print their errors in a box."""

    out: str = "data/scenes"
    """Folder to write."""
    videos: int = SceneSettings.videos
    """Videos to train on; every fourth is for demonstrations."""
    heldout: int = SceneSettings.heldout
    """Videos to evaluate on."""
    seed: int = SceneSettings.seed
    """Seed of videos and questions."""
    lines: int = SceneSettings.lines
    """Height of a frame in pixels, an even number from 320 to 720; 0: mostly 360, some 720."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    prog = "python -m paravt_extras.scenes"
    asked = tyro.cli(_Asked, args=argv, prog=prog, description=__doc__)
    return run_command(lambda: _write(asked))


def _write(asked: _Asked) -> None:
    require_local("--out", asked.out)
    settings = SceneSettings(asked.seed, asked.videos, asked.heldout, asked.lines)
    missing = missing_videos(settings, pathlib.Path(asked.out))
    minutes = sum(video.seconds for video in missing) / 60
    print(f"{len(missing)} videos to draw, {minutes:.0f} minutes long", file=sys.stderr)
    write_scenes(settings, asked.out)


if __name__ == "__main__":
    raise SystemExit(main())
