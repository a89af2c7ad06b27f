"""Plays one question with frames of 602,112 pixels, and compares its peak memory with the plan.

    python -m benchmarks.published_pixels --out runs/pixels [--clip LONG.mp4]

A small random model sees 64 frames of up to 602,112 pixels, each 576 visual tokens at 16:9, and
calls the tool five times. Its first answer is replaced by these calls; all else is computed. The
question is asked about a generated file of 30 minutes at 1280 x 720, and about `--clip`. Each case
runs in a process of its own, and its peak is the largest resident size above that after the
imports.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import resource
import subprocess
import sys
import time
from typing import Any

import av
import jax
import numpy as np
from flax import nnx

from models.config import ModelConfig, TextConfig
from models.features import FrameFeatures
from models.model import VisionLanguageModel
from models.qwen3_vl.config import Qwen3VLConfig, Qwen3VLVisionConfig
from paravt_jax.data import video
from paravt_jax.method.protocol import Protocol, render_call
from paravt_jax.method.records import CropCall, Question, QuestionKind
from paravt_jax.method.tokenizer import Vocabulary
from paravt_jax.world.vocabulary import world_vocabulary
from rollout.agent.episode import Environment, play
from rollout.engine.engine import Engine
from rollout.engine.requests import Completion, Request, SampleStop, run
from rollout.engine.sizing import crop_tokens, overview_tokens, sizes_for_single_episodes
from rollout.evaluation.memory import plan_memory
from rollout.evaluation.settings import BenchmarkSettings

MIB = 2**20
MINUTES = 30
FPS = 10
LAST = 99_999.9  # seconds: the longest label

SETTINGS = BenchmarkSettings(
    "random",
    questions="one",
    frames=64,
    min_pixels=100_352,
    max_pixels=602_112,
    crop_min_pixels=784,
    crop_max_pixels=50_176,
    snap=28,
    jpeg=85,
    turn_tokens=192,
    summary_tokens=32,
    trajectory_tokens=2048,
    episodes=1,
)


def config_of(vocabulary: Vocabulary) -> ModelConfig:
    """A small model: width 256, 4 layers, a tower of 4 blocks with one DeepStack level."""
    vision = Qwen3VLVisionConfig(
        hidden_size=128,
        depth=4,
        num_heads=4,
        intermediate_size=512,
        out_hidden_size=256,
        num_position_embeddings=2304,
        deepstack_visual_indexes=(1,),
    )
    text = TextConfig(
        vocab_size=vocabulary.size,
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=32,
        mrope_section=(6, 5, 5),
        rope_theta=10_000.0,
        tie_word_embeddings=True,
    )
    marks = ("image", "video"), ("vision_start", "vision_end")
    ids: dict[str, Any] = {f"{kind}_token_id": vocabulary[f"<|{kind}_pad|>"] for kind in marks[0]}
    ids |= {f"{mark}_token_id": vocabulary[f"<|{mark}|>"] for mark in marks[1]}
    return Qwen3VLConfig(vision, text, **ids)


def write_long_video(path: pathlib.Path) -> None:
    """Write 30 minutes at 1280 x 720: a gradient that moves, so that frames differ."""
    columns = np.arange(1280)[None, :]
    rows = np.arange(720)[:, None]
    unfinished = path.with_suffix(".part.mp4")
    with av.open(str(unfinished), "w") as container:
        options = {"crf": "40", "preset": "ultrafast", "g": "100"}
        stream = container.add_stream("libx264", rate=FPS, options=options)
        stream.width, stream.height, stream.pix_fmt = 1280, 720, "gray"
        for second in range(MINUTES * 60):
            picture = ((columns + 3 * second) // 5 + rows // 3).astype(np.uint8)
            for _ in range(FPS):
                frame = av.VideoFrame.from_ndarray(picture, format="gray")
                container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    unfinished.rename(path)


class FiveCalls:
    """The engine, whose first completion is replaced by five calls of crop_video."""

    def __init__(self, engine: Engine, vocabulary: Vocabulary, duration: float):
        self.engine = engine
        starts = np.linspace(0, 0.9 * duration, 5).astype(int).tolist()
        end = max(1, int(0.1 * duration))
        calls = "\n".join(render_call(CropCall(start, start + end)) for start in starts)
        self._ids = vocabulary.encode(f"</think>\n{calls}<|im_end|>")
        self._first: int | None = None

    def submit(self, request: Request) -> int:
        ticket = self.engine.submit(request)
        if self._first is None:
            self._first = ticket
        return ticket

    def cancel(self, ticket: int) -> None:
        self.engine.cancel(ticket)

    def step(self) -> list[Completion]:
        return [
            (ticket, tuple(map(self._replaced, samples)) if ticket == self._first else samples)
            for ticket, samples in self.engine.step()
        ]

    def _replaced(self, sample: Any) -> Any:
        logprobs = np.zeros(len(self._ids), np.float32)
        return dataclasses.replace(
            sample, ids=self._ids, logprobs=logprobs, stop=SampleStop.STOP_ID
        )


def measure(path: pathlib.Path) -> dict[str, Any]:
    """Play the question about one file in this process."""
    vocabulary = world_vocabulary(SETTINGS.protocol(0))
    config = config_of(vocabulary)
    protocol = Protocol(vocabulary, SETTINGS.protocol(0))
    rules = SETTINGS.pixels()
    most = [rules.rules(config.vision, crop).most_tokens for crop in (False, True)]
    prompt = overview_tokens(protocol, SETTINGS.frames, most[0], LAST) + SETTINGS.question_tokens
    sizes = sizes_for_single_episodes(protocol, prompt, crop_tokens(protocol, most[1], LAST))
    plan = plan_memory(SETTINGS, config, sizes, paged=False)
    jax.device_put(0).block_until_ready()
    before = _peak()

    start = time.perf_counter()
    model = nnx.jit(lambda: VisionLanguageModel(config, rngs=nnx.Rngs(0)))()
    features = FrameFeatures(model.vision, config, rules, path.parent, source=video)
    engine = Engine(model, features, sizes)
    question = Question("q", path.name, "What is shown?", QuestionKind.OPEN_ENDED, "")
    sampler = FiveCalls(engine, vocabulary, features.info(path.name).duration)
    environment = Environment(protocol, features)
    (episode,) = run(sampler, [play(environment, question, SETTINGS.episode_settings(), seed=0)])
    statuses = [str(outcome.status) for outcome in episode.turns[0].calls]
    return {
        "file": path.name,
        "frames": len(episode.trajectory.segments[0].frames),
        "tokens per frame": features.tokens(path.name),
        "prompt tokens": len(episode.trajectory.segments[0].ids),
        "calls": statuses,
        "measured MiB": round((_peak() - before) / MIB),
        "planned MiB": round((plan.device + sum(plan.host.values())) / MIB),
        "plan": {
            name: round(size / MIB)
            for part in (plan.kept, plan.calls, plan.host)
            for name, size in part.items()
        },
        "seconds": round(time.perf_counter() - start, 1),
    }


def _peak() -> float:
    """The largest resident size of this process so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0


def main() -> None:
    """Generate the long file if it is missing, and print the figures of each case as JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", required=True, help="folder of the generated file")
    parser.add_argument("--clip", default="", help="another video to ask about")
    parser.add_argument("--one", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure(pathlib.Path(arguments.one))))
        return
    generated = pathlib.Path(arguments.out) / f"{MINUTES}-minutes-720p.mp4"
    generated.parent.mkdir(parents=True, exist_ok=True)
    if not generated.exists():
        write_long_video(generated)
    paths = [generated, *([pathlib.Path(arguments.clip)] if arguments.clip else [])]
    for path in paths:
        command = [sys.executable, "-m", "benchmarks.published_pixels", "--out", arguments.out]
        done = subprocess.run([*command, "--one", str(path)], check=True, stdout=subprocess.PIPE)
        print(done.stdout.decode().strip(), flush=True)


if __name__ == "__main__":
    main()
