"""`python -m rollout.evaluate`: a model on a split, two runs compared, many in one table.

Owns the command line, what is loaded for it, and what is said while it runs. Every mistake of the user's is one line and exit code 2,
before anything heavy is loaded where that is possible. Ctrl-C and kill -9 lose the questions in flight; the same command goes on.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from typing import TextIO

import tyro

from models.features import FrameFeatures, frame_tokens
from models.qwen3_vl.config import Qwen3VLConfig
from models.qwen3_vl.hf import load as load_model
from models.qwen3_vl.hf_config import from_hf
from models.sharding import make_mesh
from models.weights.folder import local_folder, weights_files
from paravt_jax.data.video import VideoError
from paravt_jax.method import tokenizer
from paravt_jax.method.protocol import Protocol
from paravt_jax.method.tokenizer import Vocabulary
from paravt_jax.remote.client import ClientSettings
from rollout.agent.endpoint import (
    REFUSAL_REMEDY,
    EndpointError,
    EndpointSampler,
    FrameImages,
)
from rollout.agent.episode import Scene
from rollout.engine.engine import Engine
from rollout.engine.requests import Sampler
from rollout.engine.sizing import crop_tokens, overview_tokens, sizes_for_single_episodes
from rollout.evaluation.benchmarks import BENCHMARKS, Item, VideoFolder, load
from rollout.evaluation.compare import compare, comparison_text, table
from rollout.evaluation.folder import EvaluationFolder, FolderError, Line, latest, read_lines
from rollout.evaluation.origin import commit, questions_hash, versions, weights_hash
from rollout.evaluation.play import Player
from rollout.evaluation.settings import BenchmarkSettings
from rollout.evaluation.summary import rows_of, summarise

_LAST = 99_999.9  # seconds; a later frame's time would have one more digit than there is room for
_REFUSED_VIDEOS = 5  # the run ends when a server refused questions on so many and answered none
_PROG = "python -m rollout.evaluate"
_MODES = f"Of finished runs: {_PROG} --compare A B [--json], question by question; {_PROG} --table RUN ..., beside the paper's rows."


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        if {"--compare", "--table"} & set(argv):
            return _look(argv)
        settings = tyro.cli(
            BenchmarkSettings, args=argv, prog=_PROG, description=f"{__doc__}\n{_MODES}"
        )
        return 0 if evaluate_split(settings)["played"] else 1
    except KeyboardInterrupt:
        print("stopped; the same command goes on with the next question", file=sys.stderr)
        return 130
    except (FileNotFoundError, FolderError, EndpointError, ValueError, VideoError) as error:
        print(f"{_PROG}: {error}", file=sys.stderr)
        return 2


def _look(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog=_PROG)
    parser.add_argument(
        "--compare",
        nargs=2,
        type=pathlib.Path,
        metavar=("A", "B"),
        help="two runs of one split, question by question",
    )
    parser.add_argument(
        "--table", nargs="+", type=pathlib.Path, metavar="RUN", help="runs beside the paper's rows"
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="with --compare: as JSON, with the ids of all questions that differ",
    )
    asked = parser.parse_args(argv)
    if asked.compare:
        first, second = asked.compare
        found = compare(first, second)
        print(json.dumps(found, indent=1) if asked.json else comparison_text(first, second, found))
    if asked.table:
        finished = [run for run in asked.table if (run / "summary.json").exists()]
        for run in asked.table:
            if run not in finished:
                why = "it is not finished; the command that began it goes on"
                if not (run / "config.json").exists():
                    why = (
                        "no evaluation lies there; give folders such as evaluations/NAME/BENCHMARK"
                    )
                print(f"{run}: left out, {why}", file=sys.stderr)
        print(table(finished))
    return 0


def evaluate_split(settings: BenchmarkSettings, stream: TextIO | None = None) -> Line:
    """Plays what is not played yet and returns the summary, which is also in the folder.

    FileNotFoundError, FolderError or ValueError, in one line, where the run cannot start.
    """
    out_stream = stream or sys.stderr
    loaded = load(settings.benchmark, settings.data)
    videos = VideoFolder(_videos(settings))
    model = local_folder(settings.model, weights=not settings.endpoint)
    name = settings.name or _name(settings.model)
    if not settings.endpoint:
        weights_files(model)
    weights = None if settings.endpoint else weights_hash(model)
    identity = settings.identity() | {"weights": weights, "questions": questions_hash(loaded.items)}
    details = {"name": name, "settings": dataclasses.asdict(settings), "versions": versions()}
    out = pathlib.Path(
        settings.out or f"evaluations/{name.replace('/', '--')}/{settings.benchmark}"
    )
    index, count = settings.part()
    with EvaluationFolder(out, identity, details, commit(), (index, count)) as folder:
        done = {id for id, line in latest(read_lines(out)).items() if "left_out" not in line}
        items = [
            item
            for item in loaded.items[: settings.limit][index::count]
            if item.question.id not in done
        ]
        if items:
            player = _player(settings, model, videos)
            with _Progress(settings.benchmark, len(items), out_stream) as progress:
                _play(player, items, folder, progress, settings.endpoint if not done else "")
        summary = folder.summarise(
            lambda config, lines: summarise(config, lines, len(loaded.items), loaded.broken)
        )
    print("\n".join(_report(summary, out)), file=out_stream)
    return summary


def _play(
    player: Player,
    items: Sequence[Item],
    folder: EvaluationFolder,
    progress: _Progress,
    unproven_endpoint: str,
) -> None:
    """Plays questions and writes their lines.

    `unproven_endpoint` is the address of a server that has not answered any question yet, "" for
    none. EndpointError where it refuses all questions, or all on the first `_REFUSED_VIDEOS`
    videos: then the fault is in the set-up, not in the questions.
    """
    refused: list[Line] = []
    for line in player.lines(items):
        folder.append(line)
        progress.update(line)
        if "left_out" not in line:
            unproven_endpoint = ""
        elif line["left_out"] == "refused":
            refused.append(line)
        if unproven_endpoint and len({line["video"] for line in refused}) == _REFUSED_VIDEOS:
            break
    if unproven_endpoint and refused:
        videos = len({line["video"] for line in refused})
        raise EndpointError(
            f"--endpoint {unproven_endpoint}: refused the first {len(refused)} questions, on "
            f"{videos} videos ({refused[-1]['reason']}); {REFUSAL_REMEDY}"
        )


def _name(model: str) -> str:
    """A folder's own name, or its run's; a hub id."""
    folder = pathlib.Path(model).resolve()
    if not folder.is_dir():
        return model
    return folder.parent.name if folder.name == "model" else folder.name


def _videos(settings: BenchmarkSettings) -> str:
    if settings.videos:
        return settings.videos
    if pathlib.Path(settings.data).is_dir() and settings.data:
        return settings.data
    raise ValueError(
        "--videos is missing: the folder that the archives of the split were unpacked into"
    )


def _player(settings: BenchmarkSettings, folder: pathlib.Path, videos: VideoFolder) -> Player:
    config, vocabulary = from_hf(folder / "config.json"), tokenizer.load(folder)
    protocol, overview, crop = _protocol(
        settings, vocabulary, frame_tokens(settings.pixels(), config.vision)
    )
    features, sampler = _engine(settings, folder, config, videos, protocol, overview, crop)
    return Player(sampler, Scene(protocol, features), settings, videos)


def _protocol(
    settings: BenchmarkSettings, vocabulary: Vocabulary, frame: int
) -> tuple[Protocol, int, int]:
    """The protocol, and how many tokens a prompt (with its question) and a window may have."""
    crop = crop_tokens(Protocol(vocabulary, settings.protocol(0)), frame, _LAST)
    protocol, setting = Protocol(vocabulary, settings.protocol(crop)), settings.setting()
    room = settings.question_tokens + (
        settings.subtitle_tokens if settings.benchmark == "videomme_wsub" else 0
    )
    overview = (
        overview_tokens(protocol, setting.frames, frame, _LAST, setting.dispatch != "none") + room
    )
    return protocol, overview, crop


def _engine(
    settings: BenchmarkSettings,
    folder: pathlib.Path,
    config: Qwen3VLConfig,
    videos: VideoFolder,
    protocol: Protocol,
    overview: int,
    crop: int,
) -> tuple[FrameFeatures, Sampler]:
    if settings.endpoint:
        images = FrameImages(config, settings.pixels(), videos.root)
        server = ClientSettings(settings.endpoint, concurrency=settings.concurrency)
        vocabulary = protocol.vocabulary
        return images, EndpointSampler(server, settings.endpoint_model, vocabulary, images)
    mesh = make_mesh(1, 1, settings.tensor) if settings.tensor > 1 else None
    model = load_model(folder, config, mesh=mesh, dtype=settings.dtype, param_dtype=settings.dtype)
    features = FrameFeatures(model.vision, config, settings.pixels(), videos.root)
    return features, Engine(
        model,
        features,
        sizes_for_single_episodes(
            protocol, overview, crop, settings.episodes, settings.cache_tokens
        ),
    )


class _Progress:
    """One line: how many are done, the score so far, calls, seconds a question, time left."""

    def __init__(self, title: str, total: int, stream: TextIO):
        self._title, self._total, self._stream = title, total, stream
        self._started = self._shown = time.monotonic()
        self._done = self._played = self._calls = 0
        self._score = 0.0

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._stream.isatty() and self._done:
            print(file=self._stream)

    def update(self, line: Line) -> None:
        self._done += 1
        if "left_out" not in line:
            self._played, self._score, self._calls = (
                self._played + 1,
                self._score + line["score"],
                self._calls + line["calls"],
            )
        now, tty = time.monotonic(), self._stream.isatty()
        if tty or self._done == self._total or now - self._shown > 10:
            self._shown = now
            text = self._line((now - self._started) / self._done)
            self._stream.write(
                f"\r\x1b[2K{text[: shutil.get_terminal_size().columns - 1]}" if tty else f"{text}\n"
            )
            self._stream.flush()

    def _line(self, pace: float) -> str:
        parts = [f"{self._title} {self._done}/{self._total}"]
        if self._played:
            parts += [
                f"score {100 * self._score / self._played:.1f}",
                f"calls {self._calls / self._played:.2f}",
            ]
        if left_out := self._done - self._played:
            parts.append(f"left out {left_out}")
        return "  ".join(
            [
                *parts,
                f"{pace:.2f} s/question",
                f"{pace * (self._total - self._done) / 60:.0f} min left",
            ]
        )


def _report(summary: Line, out: pathlib.Path) -> Iterator[str]:
    """The summary as people read it."""
    benchmark = BENCHMARKS[summary["benchmark"]]
    rows = rows_of(summary)
    grounding = benchmark.grounding
    value = summary.get("miou" if grounding else "accuracy")
    if not summary["played"]:
        yield f"{benchmark.title}: not one of {rows} questions was played"
    elif value is not None:
        low, high = summary["interval"]
        opened = summary.get("open_ended", {}).get("n", 0)
        counted = summary["played"] - opened
        score = f"{100 * value:.1f} [{100 * low:.1f}, {100 * high:.1f}]"
        yield f"{benchmark.title}: {score} on {counted} of {rows} questions"
    if found := summary.get("open_ended"):
        low, high = found["interval"]
        score = f"{100 * found['score']:.1f} [{100 * low:.1f}, {100 * high:.1f}]"
        yield f"{benchmark.title}, open-ended by itself: {score} on {found['n']} questions"
    if summary["played"]:
        if summary["refused_reports"]:
            yield f"  {summary['refused_reports']} sub-agents' requests were refused"
        yield (
            f"  {summary['calls_per_question']:.2f} calls a question, {100 * summary['share_with_calls']:.0f} % with calls, "
            f"{summary['without_answer']} without an answer, "
            f"{summary['unread']} whose answer names no option or span, {summary['seconds_per_question']:.2f} s a question"
        )
    for cause, found in summary["left_out"].items():
        video, reason = next(iter(found["videos"].items()))
        counts = f"{found['questions']} questions on {len(found['videos'])} videos"
        yield f"  left out, {cause.replace('_', ' ')}: {counts}, such as {video}: {reason}"
    if summary["broken_rows"]:
        number, reason = next(iter(summary["broken_rows"].items()))
        yield f"  broken rows: {len(summary['broken_rows'])}, such as {number}: {reason}"
    yield f"  {out / 'summary.json'}"
