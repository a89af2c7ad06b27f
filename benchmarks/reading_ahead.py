"""Times evaluations with overviews that are read ahead, and without.

    python -m benchmarks.reading_ahead

A tiny model with random weights answers one question on each of some generated videos. Both ways
take turns with the same compiled programs, so that what else the machine does slows both.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import pathlib
import statistics
import tempfile
import time

import av
import numpy as np
from flax import nnx

from models.model import VisionLanguageModel
from models.qwen3_vl.sizes import tiny
from models.weights.hf import save
from paravt_jax.method.records import Question, QuestionKind
from paravt_jax.method.tokenizer import Vocabulary
from paravt_jax.method.tools.crop_video import CropVideo
from paravt_jax.world.text import PIECES
from paravt_jax.world.vocabulary import build_tokenizer, recurring_texts, save_tokenizer
from rollout.evaluation.benchmarks import Item, VideoFolder
from rollout.evaluation.packs import own_pack
from rollout.evaluation.players import Setup, load_player, open_reader
from rollout.evaluation.replicas import ReadAhead
from rollout.evaluation.settings import BenchmarkSettings
from rollout.evaluation.sharing import Deal, Peers, units_of

_FRAMES = 16
_EPISODES = 2


def write_model(folder: pathlib.Path) -> None:
    """A tiny model with random weights, as a folder that the command takes."""
    pieces = (*PIECES, *recurring_texts((CropVideo(),)))
    vocabulary = Vocabulary(build_tokenizer(pieces))
    save_tokenizer(vocabulary.tokenizer, folder / "tokenizer")
    names = {"image": "image_pad", "video": "video_pad"}
    names |= {name: name for name in ("vision_start", "vision_end")}
    ids = {f"{field}_token_id": vocabulary[f"<|{name}|>"] for field, name in names.items()}
    config = dataclasses.replace(tiny(vocabulary.size), **ids)
    model = VisionLanguageModel(config, rngs=nnx.Rngs(0))
    save(model, folder / "model", files=sorted((folder / "tokenizer").iterdir()))


def write_video(file: pathlib.Path, seconds: int, seed: int) -> None:
    """A 720p clip of moving noise, which takes time to decode."""
    rng = np.random.default_rng(seed)
    picture = rng.integers(0, 256, (90, 160, 3), np.uint8).repeat(8, 0).repeat(8, 1)
    with av.open(str(file), "w") as container:
        stream = container.add_stream("libx264", rate=10, options={"preset": "ultrafast"})
        stream.width, stream.height, stream.pix_fmt = 1280, 720, "yuv420p"
        for number in range(10 * seconds):
            frame = av.VideoFrame.from_ndarray(np.roll(picture, 8 * number, 1), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())


def measure(folder: pathlib.Path, videos: int, rounds: int, seconds: int) -> list[float]:
    """Seconds without divided by seconds with reading ahead, per round."""
    write_model(folder)
    for number in range(videos):
        write_video(folder / f"v{number}.mp4", seconds, number)
    settings = BenchmarkSettings(
        str(folder / "model"),
        questions="own",
        frames=_FRAMES,
        episodes=_EPISODES,
        turn_tokens=192,
        trajectory_tokens=768,
        summary_tokens=32,
        question_tokens=256,
    )
    found = VideoFolder(folder)
    ratios: list[float] = []
    with contextlib.ExitStack() as stack:
        setup = Setup(settings, own_pack(), found, folder / "model")
        reader = stack.enter_context(open_reader(setup))
        player = load_player(setup, reader, False, stack)
        for number in range(rounds + 1):
            taken: dict[bool, float] = {}
            # The first way of a round alternates.
            for way in (number % 2 == 0, number % 2 == 1):
                items = [
                    Item(
                        Question(
                            f"{number}-{way}-{n}",
                            f"v{n}.mp4",
                            f"What is in part {number} of {n}?",
                            QuestionKind.OPEN_ENDED,
                            "noise",
                        )
                    )
                    for n in range(videos)
                ]
                deal = Deal(units_of(items, 1), Peers())
                start = time.perf_counter()
                ahead = ReadAhead(reader, found, _FRAMES, _EPISODES)
                lines = list(player.lines(ahead.items(deal) if way else deal.items()))
                taken[way] = time.perf_counter() - start
                assert len(lines) == videos
                assert not any("left_out" in line for line in lines), lines
            print(
                f"round {number}: {taken[False]:.1f} s without, {taken[True]:.1f} s with",
                flush=True,
            )
            if number:  # the first round compiles
                ratios.append(taken[False] / taken[True])
    return ratios


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.reading_ahead", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--videos", type=int, default=12, help="number of videos")
    parser.add_argument("--rounds", type=int, default=5, help="paired rounds, after one to compile")
    parser.add_argument("--seconds", type=int, default=20, help="length of a video")
    asked = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        ratios = measure(pathlib.Path(folder), asked.videos, asked.rounds, asked.seconds)
    print(
        f"{statistics.median(ratios):.2f} times as fast with reading ahead "
        f"(median of {len(ratios)} pairs, {min(ratios):.2f} to {max(ratios):.2f})"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
