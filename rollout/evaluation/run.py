"""A model on a split or on your own questions, with everything on disk: `evaluate`.

Loads what is needed, goes on from what a folder holds, and says how it goes. Ctrl-C and kill -9
lose the questions in flight; the same call goes on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import sys
from collections.abc import Iterator, Sequence
from typing import TextIO

from models.features import FrameFeatures, frame_tokens
from models.qwen3_vl.config import Qwen3VLConfig
from models.qwen3_vl.hf import load as load_model
from models.qwen3_vl.hf_config import from_hf
from models.sharding import make_mesh
from models.weights.folder import local_folder, weights_files
from paravt_jax.data import video
from paravt_jax.data.question_files import read_questions, require_unique_ids
from paravt_jax.method import tokenizer
from paravt_jax.method.protocol import Protocol
from paravt_jax.method.records import Question
from paravt_jax.method.server import ServerSettings
from paravt_jax.method.tokenizer import Vocabulary
from paravt_jax.progress import Progress
from paravt_jax.remote.judge import RemoteJudge
from rollout.agent.endpoint import (
    REFUSAL_REMEDY,
    EndpointError,
    EndpointSampler,
    FrameImages,
)
from rollout.agent.episode import Environment
from rollout.engine.engine import Engine
from rollout.engine.requests import Sampler
from rollout.engine.sizing import crop_tokens, overview_tokens, sizes_for_single_episodes
from rollout.evaluation.benchmarks import (
    BENCHMARKS,
    Item,
    Loaded,
    VideoFolder,
    load,
    title_of,
)
from rollout.evaluation.folder import EvaluationFolder, Line, latest, read_lines
from rollout.evaluation.provenance import commit, questions_hash, versions, weights_hash
from rollout.evaluation.settings import OWN, BenchmarkSettings
from rollout.evaluation.split import Player
from rollout.evaluation.summary import rows_of, score_of, summarise

_LAST = 99_999.9  # seconds; a later frame's time would have one more digit than there is room for
_REFUSED_VIDEOS = 5  # the run ends when a server refused questions on so many and answered none


def evaluate(
    settings: BenchmarkSettings,
    questions: Sequence[Question] | None = None,
    stream: TextIO | None = None,
) -> Line:
    """Plays what is not played yet and returns the summary, which is also in the folder.

    `questions` are played where `settings` names neither a benchmark nor a file; their videos lie
    below `settings.videos`. FileNotFoundError, FolderError or ValueError, in one line, where the
    run cannot start.
    """
    out_stream = stream or sys.stderr
    if not (settings.benchmark or settings.questions or questions):
        raise ValueError(
            "--benchmark, --questions: there is nothing to play; give the name of a split "
            f"({', '.join(BENCHMARKS)}), or a file of questions"
        )
    videos = VideoFolder(_videos(settings))
    loaded = _load(settings, questions, videos.root)
    model = local_folder(settings.model, weights=not settings.endpoint)
    name = settings.name or _name(settings.model)
    if not settings.endpoint:
        weights_files(model)
    weights = None if settings.endpoint else weights_hash(model)
    identity = settings.identity() | {"weights": weights, "questions": questions_hash(loaded.items)}
    details = {"name": name, "settings": dataclasses.asdict(settings), "versions": versions()}
    split = settings.benchmark or pathlib.Path(settings.questions or OWN).stem
    out = pathlib.Path(settings.out or f"evaluations/{name.replace('/', '--')}/{split}")
    index, count = settings.part()
    with EvaluationFolder(out, identity, details, commit(), (index, count)) as folder:
        done = {id for id, line in latest(read_lines(out)).items() if "left_out" not in line}
        items = [
            item
            for item in loaded.items[: settings.limit][index::count]
            if item.question.id not in done
        ]
        if items:
            subtitled = any(item.subtitles or item.question.subtitles for item in items)
            with contextlib.ExitStack() as stack:
                player = _player(settings, model, videos, subtitled, stack)
                progress = stack.enter_context(_Progress(split, len(items), out_stream))
                _play(player, items, folder, progress, settings.endpoint if not done else "")
        score = BENCHMARKS[settings.benchmark].score if settings.benchmark else "accuracy"
        summary = folder.summarise(
            lambda config, lines: summarise(config, lines, len(loaded.items), loaded.broken, score)
        )
    print("\n".join(_report(summary, out)), file=out_stream)
    return summary


def _load(
    settings: BenchmarkSettings, questions: Sequence[Question] | None, videos: pathlib.Path
) -> Loaded:
    """What is asked: a split's items, the questions of a file, or `questions`."""
    if (settings.benchmark or settings.questions) and questions is not None:
        raise ValueError(
            f"--benchmark {settings.benchmark!r}, --questions {settings.questions!r}: questions "
            "are given beside them; leave both empty, or give no questions"
        )
    if settings.benchmark:
        return load(settings.benchmark, settings.data)
    if questions is None:
        questions = read_questions(settings.questions, videos)
    require_unique_ids(questions)
    return Loaded(tuple(Item(question) for question in questions), {})


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
        progress.add(line)
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
    if settings.questions:
        return str(pathlib.Path(settings.questions).parent)
    if pathlib.Path(settings.data).is_dir() and settings.data:
        return settings.data
    raise ValueError(
        "--videos is missing: give the folder of the videos (for a split, the one that its "
        "archives were unpacked into)"
    )


def _player(
    settings: BenchmarkSettings,
    folder: pathlib.Path,
    videos: VideoFolder,
    subtitled: bool,
    stack: contextlib.ExitStack,
) -> Player:
    """What plays the questions; `stack` closes its connections."""
    rewards = settings.rewards()
    judge = (
        stack.enter_context(contextlib.closing(RemoteJudge(rewards.judge)))
        if rewards.judge
        else None
    )
    config, vocabulary = from_hf(folder / "config.json"), tokenizer.load(folder)
    frame = frame_tokens(settings.pixels(), config.vision)
    protocol, overview, crop = _protocol(settings, vocabulary, frame, subtitled)
    features, sampler = _engine(settings, folder, config, videos, protocol, overview, crop, stack)
    return Player(sampler, Environment(protocol, features), settings, videos, judge)


def _protocol(
    settings: BenchmarkSettings, vocabulary: Vocabulary, frame: int, subtitled: bool
) -> tuple[Protocol, int, int]:
    """The protocol, and how many tokens a prompt (with its question) and a window may have."""
    crop = crop_tokens(Protocol(vocabulary, settings.protocol(0)), frame, _LAST)
    protocol, setting = Protocol(vocabulary, settings.protocol(crop)), settings.episode_settings()
    room = settings.question_tokens + (settings.subtitle_tokens if subtitled else 0)
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
    stack: contextlib.ExitStack,
) -> tuple[FrameFeatures, Sampler]:
    if settings.endpoint:
        images = FrameImages(config, settings.pixels(), videos.root, source=video)
        server = ServerSettings(settings.endpoint, concurrency=settings.concurrency)
        vocabulary = protocol.vocabulary
        sampler = EndpointSampler(server, settings.endpoint_model, vocabulary, images)
        return images, stack.enter_context(contextlib.closing(sampler))
    mesh = make_mesh(1, 1, settings.tensor) if settings.tensor > 1 else None
    model = load_model(folder, config, mesh=mesh, dtype=settings.dtype, param_dtype=settings.dtype)
    features = FrameFeatures(model.vision, config, settings.pixels(), videos.root, source=video)
    sizes = sizes_for_single_episodes(
        protocol, overview, crop, settings.episodes, settings.cache_tokens
    )
    return features, Engine(model, features, sizes)


class _Progress(Progress):
    """How many questions are done, with the score so far, calls per question and those left out."""

    def __init__(self, title: str, total: int, stream: TextIO):
        super().__init__(title, "question", every=10.0, stream=stream)
        self._total = total
        self._left_out = self._played = self._calls = 0
        self._score = 0.0

    def add(self, line: Line) -> None:
        """Counts a question that is done."""
        figures: dict[str, float] = {}
        if "left_out" in line:
            self._left_out += 1
        else:
            self._played += 1
            self._score += line["score"]
            self._calls += line["calls"]
        if self._played:
            figures["score"] = 100 * self._score / self._played
            figures["calls"] = self._calls / self._played
        if self._left_out:
            figures["left out"] = self._left_out
        self.update(self._left_out + self._played, self._total, figures)


def _report(summary: Line, out: pathlib.Path) -> Iterator[str]:
    """The summary as people read it."""
    title, rows, value = title_of(summary["benchmark"]), rows_of(summary), score_of(summary)
    if not summary["n"]:
        yield f"{title}: not one of {rows} questions was played"
    elif value is not None:
        low, high = summary["interval"]
        opened = summary.get("open_ended", {}).get("n", 0)
        counted = summary["n"] - opened
        score = f"{100 * value:.1f} [{100 * low:.1f}, {100 * high:.1f}]"
        yield f"{title}: {score} on {counted} of {rows} questions"
    if found := summary.get("open_ended"):
        low, high = found["interval"]
        score = f"{100 * found['score']:.1f} [{100 * low:.1f}, {100 * high:.1f}]"
        yield f"{title}, open-ended by itself: {score} on {found['n']} questions"
    if summary["n"]:
        if summary["refused_reports"]:
            yield f"  {summary['refused_reports']} sub-agents' requests were refused"
        yield (
            f"  {summary['calls']:.2f} calls per question, {100 * summary['share_with_calls']:.0f} % with calls, "
            f"{summary['without_answer']} without an answer, "
            f"{summary['unread']} whose answer names no option or span, {summary['seconds_per_question']:.2f} s per question"
        )
    for cause, found in summary["left_out"].items():
        video, reason = next(iter(found["videos"].items()))
        counts = f"{found['questions']} questions on {len(found['videos'])} videos"
        yield f"  left out, {cause.replace('_', ' ')}: {counts}, such as {video}: {reason}"
    if summary["broken_rows"]:
        number, reason = next(iter(summary["broken_rows"].items()))
        yield f"  broken rows: {len(summary['broken_rows'])}, such as {number}: {reason}"
    yield f"  {out / 'summary.json'}"
