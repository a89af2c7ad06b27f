"""Evaluates a model on a split or on your own questions, and writes the results to a folder.

Each finished question is written to disk at once, so Ctrl-C or kill -9 loses only the questions in
flight. The same call continues with the questions that have no result yet.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import sys
from collections.abc import Callable, Collection, Iterator, Sequence

import jax

from models.features import FrameFeatures, frame_tokens
from models.qwen3_vl.config import Qwen3VLConfig, VisionConfig
from models.qwen3_vl.hf import load as load_model
from models.qwen3_vl.hf_config import from_hf
from models.sharding import make_mesh
from models.weights.folder import local_folder, weights_files
from paravt_jax.data import video
from paravt_jax.data.question_files import read_questions, require_unique_ids
from paravt_jax.method import tokenizer
from paravt_jax.method.protocol import Protocol
from paravt_jax.method.records import Question, QuestionKind
from paravt_jax.method.server import ServerSettings
from paravt_jax.method.tokenizer import Vocabulary
from paravt_jax.method.wording import Wording
from paravt_jax.processes import cluster, hosts
from paravt_jax.progress import Progress
from paravt_jax.remote.judge import RemoteJudge
from rollout.agent.endpoint import EndpointSampler, FrameImages
from rollout.agent.episode import Environment
from rollout.engine.engine import Engine
from rollout.engine.requests import Sampler
from rollout.engine.sizing import (
    crop_tokens,
    overview_tokens,
    sizes_for_single_episodes,
)
from rollout.evaluation.ahead import ReadAhead
from rollout.evaluation.benchmarks import (
    BENCHMARKS,
    Item,
    Loaded,
    VideoFolder,
    load,
    title_of,
)
from rollout.evaluation.folder import EvaluationFolder, Line, answered
from rollout.evaluation.memory import MemoryPlan, plan_memory, planned_paged, require_room
from rollout.evaluation.native_video import video_overview, video_tokens
from rollout.evaluation.packs import PackError, PromptPack, own_pack
from rollout.evaluation.protocols import as_the_pack_plays, open_pack
from rollout.evaluation.provenance import commit, questions_hash, versions, weights_hash
from rollout.evaluation.replicas import Devices, device_groups, play_all
from rollout.evaluation.served import BUILT_IN, Served, served
from rollout.evaluation.server_watch import ServerWatch
from rollout.evaluation.settings import OWN, BenchmarkSettings
from rollout.evaluation.sharing import Deal, forget_meetings, meet, units_of
from rollout.evaluation.split import Player
from rollout.evaluation.summary import rows_of, score_of, summarise

# Timestamp in seconds, as long as any label gets. It bounds the lengths of prompts.
_LATEST_FRAME = 99_999.9


def evaluate(
    settings: BenchmarkSettings,
    questions: Sequence[Question] | None = None,
    given: Collection[str] = (),
) -> Line:
    """Play all questions that have no result yet, then write and return the summary.

    Progress and a short report go to stderr. If several processes have joined
    (`paravt_jax.processes.cluster`), all of them call this, share the work, and return the summary.

    Args:
        settings: the model, the questions, and how to play them.
        questions: questions to play if `settings` names neither a benchmark nor a file. The paths
            of their videos are relative to `settings.videos`.
        given: fields of `settings` that the user gave, if they are known.

    Returns:
        The content of summary.json.

    Raises:
        FileNotFoundError, FolderError, ValueError: the run cannot start. The message is one line.
        EndpointError: the server does not answer, or refuses all questions.
        HostsError: another process failed.
    """
    opened = hosts.on_all(lambda: open_pack(settings, _out(settings)))
    with contextlib.closing(opened) as pack:
        return _evaluate(as_the_pack_plays(settings, pack, given), pack, questions)


def _evaluate(
    settings: BenchmarkSettings, pack: PromptPack, questions: Sequence[Question] | None
) -> Line:
    """`evaluate` with the settings as the pack plays them."""
    # All checks of files come before the model is loaded, which takes minutes.
    work = hosts.on_all(lambda: _prepare(settings, pack, questions))
    # Hosts deal units by their numbers, and `episodes` bounds the size of a unit.
    apart = ("limit", "benchmark", "episodes")
    same = work.identity | {name: getattr(settings, name) for name in apart}
    hosts.require_same_fields({f"--{name.replace('_', '-')}": same[name] for name in same})
    with contextlib.ExitStack() as stack:
        folder = _open(work, stack)
        # Try questions again that were left out: their videos may have been added since.
        done = hosts.from_first(lambda: answered(work.out))
        items = [
            item for item in work.loaded.items[: settings.limit] if item.question.id not in done
        ]
        if items:
            # An endpoint that answered questions in an earlier start needs no proof.
            _play(work, items, folder, proven=bool(done))
        summary = hosts.from_first(lambda: folder.summarise(work.summary))
        if hosts.is_first():
            forget_meetings(work.out)
    if hosts.is_first():
        print("\n".join(_report(summary, work.out)), file=sys.stderr)
    return summary


@dataclasses.dataclass(frozen=True)
class _Work:
    """What is evaluated, once all files have been found."""

    settings: BenchmarkSettings
    pack: PromptPack
    videos: VideoFolder
    loaded: Loaded
    model: pathlib.Path | None
    """Folder of the model, if it is known."""
    out: pathlib.Path
    identity: Line

    def summary(self, config: Line, lines: Iterator[Line]) -> Line:
        """The content of summary.json."""
        benchmark = BENCHMARKS.get(self.settings.benchmark)
        score = benchmark.score if benchmark else "accuracy"
        figures = self.pack.figures
        return summarise(config, lines, len(self.loaded.items), self.loaded.broken, score, figures)


def _prepare(
    settings: BenchmarkSettings, pack: PromptPack, questions: Sequence[Question] | None
) -> _Work:
    """Find the questions, the videos and the model."""
    if not (settings.benchmark or settings.questions or questions):
        raise ValueError(
            "--benchmark, --questions: there is nothing to play; give the name of a split "
            f"({', '.join(BENCHMARKS)}), or a file of questions"
        )
    videos = VideoFolder(_videos(settings))
    loaded = _load(settings, questions, videos.root)
    model = None
    if settings.model:
        model = local_folder(settings.model, weights=not settings.endpoint)
    files = _model_files(settings, model)
    weights = None  # an endpoint does not reveal its weights
    if model and not settings.endpoint:
        weights_files(model)  # raises before hashing if a file is missing
        weights = weights_hash(model)
    _check_prompts(files.scaled(settings), files, pack)

    out = _out(settings)
    identity = settings.identity() | {
        "weights": weights,
        "questions": questions_hash(loaded.items),
        "protocol": pack.name,
        "protocol_digest": pack.digest,
        # Limits mean something else in the books of the built-in vocabulary.
        **({"tokenizer": BUILT_IN} if files.tokenizer == BUILT_IN else {}),
    }
    return _Work(settings, pack, videos, loaded, model, out, identity)


def _open(work: _Work, stack: contextlib.ExitStack) -> EvaluationFolder:
    """Open the folder on all hosts, which must see the same one. `stack` closes it."""
    settings = dataclasses.asdict(work.settings)
    del settings["hosts"]
    details = {
        "name": _name(work.settings),
        "differences": work.pack.differences(work.settings.benchmark),
        "settings": settings,
        "versions": versions(),
    }

    def open_own() -> EvaluationFolder:
        process = hosts.process_index()
        opened = EvaluationFolder(work.out, work.identity, details, commit(), process)
        return stack.enter_context(opened)

    with hosts.one_after_another():
        folder = open_own() if hosts.is_first() else None
    cluster.require_shared(work.out, "--out")
    return hosts.on_all(lambda: folder or open_own())


# --- the questions ---


def _load(
    settings: BenchmarkSettings, questions: Sequence[Question] | None, videos: pathlib.Path
) -> Loaded:
    """Load the items of a split or the questions of a file, or wrap `questions`."""
    if (settings.benchmark or settings.questions) and questions is not None:
        raise ValueError(
            f"--benchmark {settings.benchmark!r}, --questions {settings.questions!r}: the argument "
            "questions is given too; leave both settings empty, or leave out the argument"
        )
    if settings.benchmark:
        return load(settings.benchmark, settings.data)
    if questions is None:
        questions = read_questions(settings.questions, videos)
    require_unique_ids(questions)
    return Loaded(tuple(Item(question) for question in questions), {})


def _out(settings: BenchmarkSettings) -> pathlib.Path:
    """The folder of the evaluation."""
    name = _name(settings).replace("/", "--")
    return pathlib.Path(settings.out or f"evaluations/{name}/{_split(settings)}")


def _split(settings: BenchmarkSettings) -> str:
    """The name of the questions."""
    return settings.benchmark or pathlib.Path(settings.questions or OWN).stem


def _name(settings: BenchmarkSettings) -> str:
    """The run's name, by default NAME for `runs/NAME/model`, else the model's folder or hub id."""
    if settings.name:
        return settings.name
    model = settings.model or settings.endpoint_model
    folder = pathlib.Path(model).resolve()
    if not folder.is_dir():
        return model
    return folder.parent.name if folder.name == "model" else folder.name


def _videos(settings: BenchmarkSettings) -> str:
    """The folder of the videos."""
    if settings.videos:
        return settings.videos
    if settings.questions:
        return str(pathlib.Path(settings.questions).parent)
    if settings.data and pathlib.Path(settings.data).is_dir():
        return settings.data
    data = f", and --data {settings.data} is no folder here" if settings.data else ""
    raise ValueError(
        f"--videos is missing{data}: give the folder of the videos; `rollout.download` fetches "
        "those of a split"
    )


# --- the model ---


def _load_players(
    work: _Work, subtitled: bool, groups: Sequence[Devices], stack: contextlib.ExitStack
) -> list[Player]:
    """One player per group of devices."""
    given = (work.settings, work.model, work.videos, subtitled, stack, work.pack)
    players = []
    for devices in groups:
        with jax.default_device(devices[0]) if len(groups) > 1 else contextlib.nullcontext():
            players.append(load_player(*given, devices, len(groups)))
    return players


def load_player(
    settings: BenchmarkSettings,
    folder: pathlib.Path | None,
    videos: VideoFolder,
    subtitled: bool,
    stack: contextlib.ExitStack,
    pack: PromptPack | None = None,
    devices: Devices = (),
    replicas: int = 1,
) -> Player:
    """Load the model or connect to the endpoint. `stack` closes the connections.

    Without a pack, this project's wording is used. Without a folder, the settings name an endpoint.
    Without `devices`, the model goes to the first ones. `replicas` share the host's memory.
    """
    pack = pack or own_pack()
    judge = None
    rewards = settings.rewards()
    if rewards.judge:
        judge = stack.enter_context(contextlib.closing(RemoteJudge(rewards.judge)))
    files = _model_files(settings, folder)
    config, vocabulary = files.config, files.vocabulary
    settings = files.scaled(settings)
    wording = pack.wording(settings.benchmark, settings.prompt)
    protocol, prompt, crop = _protocol(settings, vocabulary, config.vision, subtitled, wording)
    if settings.endpoint or folder is None:
        features, sampler = _endpoint(settings, files, videos, stack)
    else:

        def planned(changed: BenchmarkSettings) -> MemoryPlan:
            lengths = _protocol(changed, vocabulary, config.vision, subtitled, wording)
            return _planned(changed, config, *lengths, replicas)

        require_room(settings, planned, replicas)
        features, sampler = _engine(
            settings, folder, config, videos, protocol, prompt, crop, devices
        )
    overview = video_overview if settings.native_video else FrameFeatures.overview
    environment = Environment(protocol, features, overview=overview, canonical=pack.reads())
    return Player(sampler, environment, settings, videos, judge, pack)


def _model_files(settings: BenchmarkSettings, folder: pathlib.Path | None) -> Served:
    """Sizes and tokenizer of the model. An endpoint needs neither."""
    if settings.endpoint or folder is None:
        return served(folder)
    vocabulary = tokenizer.load(folder)
    return Served(from_hf(folder / "config.json"), vocabulary, vocabulary.digest)


def _check_prompts(settings: BenchmarkSettings, files: Served, pack: PromptPack) -> None:
    """Render a prompt, so that texts that do not work end the run before it has a folder."""
    wording = pack.wording(settings.benchmark, settings.prompt)
    try:
        _protocol(settings, files.vocabulary, files.config.vision, False, wording)
    except ValueError as error:
        raise PackError(f"--protocol {pack.name}: {error}") from error


def _protocol(
    settings: BenchmarkSettings,
    vocabulary: Vocabulary,
    vision: VisionConfig,
    subtitled: bool,
    wording: Wording,
) -> tuple[Protocol, int, int]:
    """The protocol, and the longest prompts of a main agent and of a sub-agent, in tokens."""
    # With dispatch `frames`, the token limits include crops. The size of a crop does not depend on
    # these limits, so measure it under preliminary ones.
    without_crops = Protocol(vocabulary, settings.protocol(0), wording)
    pixels = settings.pixels()
    crop_frame_tokens = frame_tokens(pixels, vision, crop=True)
    crop = crop_tokens(without_crops, crop_frame_tokens, _LATEST_FRAME)
    if "{question}" in wording.subagent:
        crop += settings.question_tokens
    protocol = Protocol(vocabulary, settings.protocol(crop), wording)
    episode = settings.episode_settings()
    with_tools = episode.dispatch != "none"
    if settings.native_video and episode.frames:
        factor = vision.patch_size * vision.spatial_merge_size
        overview = video_tokens(protocol, episode.frames, factor, _LATEST_FRAME, with_tools)
    else:
        overview = overview_tokens(
            protocol, episode.frames, frame_tokens(pixels, vision), _LATEST_FRAME, with_tools
        )
    overview += settings.question_tokens
    if subtitled:
        overview += settings.subtitle_tokens
    return protocol, overview, crop


def _planned(
    settings: BenchmarkSettings,
    config: Qwen3VLConfig,
    protocol: Protocol,
    prompt: int,
    crop: int,
    replicas: int,
) -> MemoryPlan:
    """The memory that the engine needs for prompts of `prompt` and `crop` tokens."""
    sizes = sizes_for_single_episodes(
        protocol, prompt, crop, settings.episodes, settings.cache_tokens
    )
    return plan_memory(settings, config, sizes, planned_paged(), replicas)


def _endpoint(
    settings: BenchmarkSettings,
    files: Served,
    videos: VideoFolder,
    stack: contextlib.ExitStack,
) -> tuple[FrameImages, Sampler]:
    """A sampler that sends requests to the endpoint, with frames as images."""
    images = FrameImages(files.config, settings.pixels(), videos.root, source=video)
    server = ServerSettings(
        settings.endpoint, timeout=settings.request_seconds, concurrency=settings.concurrency
    )
    sampler = EndpointSampler(
        server, settings.endpoint_model, files.vocabulary, images, files.ids_per_token
    )
    return images, stack.enter_context(contextlib.closing(sampler))


def _engine(
    settings: BenchmarkSettings,
    folder: pathlib.Path,
    config: Qwen3VLConfig,
    videos: VideoFolder,
    protocol: Protocol,
    overview: int,
    crop: int,
    devices: Devices,
) -> tuple[FrameFeatures, Sampler]:
    """The engine with the model in `folder`, sized for prompts of `overview` and `crop` tokens."""
    mesh = None
    if settings.tensor > 1:
        mesh = make_mesh(1, 1, settings.tensor, devices or device_groups(settings.tensor)[0])
    model = load_model(folder, config, mesh=mesh, dtype=settings.dtype, param_dtype=settings.dtype)
    features = FrameFeatures(model.vision, config, settings.pixels(), videos.root, source=video)
    sizes = sizes_for_single_episodes(
        protocol, overview, crop, settings.episodes, settings.cache_tokens
    )
    return features, Engine(model, features, sizes)


# --- playing and reporting ---


def _play(work: _Work, items: Sequence[Item], folder: EvaluationFolder, proven: bool) -> None:
    """Play the items on all hosts, and append the lines to the folder.

    Args:
        work: what is evaluated.
        items: the items that have no result yet, the same on all hosts.
        folder: the folder of the evaluation.
        proven: whether an endpoint has answered questions in an earlier start.

    Raises:
        EndpointError: see `ServerWatch`.
        HostsError: another host failed.
    """
    settings = work.settings
    subtitled = any(item.subtitles or item.question.subtitles for item in items)
    with contextlib.ExitStack() as stack:
        groups = hosts.on_all(lambda: [()] if settings.endpoint else device_groups(settings.tensor))
        players = hosts.on_all(lambda: _load_players(work, subtitled, groups, stack))
        peers = meet(work.out)
        deal = Deal(units_of(items, settings.episodes), peers)
        progress = _Progress(_split(work.settings), len(items), deal)
        stack.enter_context(progress)
        watch = ServerWatch(settings.endpoint, proven) if settings.endpoint else None
        stack.enter_context(peers.together())
        playing = play_all(players, groups, _taking(work, players, deal, stack), peers.check)
        for line in stack.enter_context(contextlib.closing(playing)):
            folder.append(line)
            progress.add(line)
            if watch:
                watch.add(line)
        if watch:
            watch.finish()


def _taking(
    work: _Work, players: Sequence[Player], deal: Deal, stack: contextlib.ExitStack
) -> Callable[[], Iterator[Item]]:
    """How replicas take items: with overviews that are read ahead, unless there are none."""
    settings = work.settings
    frames = settings.episode_settings().frames
    # A native video's size follows from its length, which is not known before it is opened.
    if not frames or settings.native_video:
        return deal.items
    features = players[0].environment.features
    rules = features.settings.rules(features.config.vision)
    count = settings.episodes * len(players)
    ahead = stack.enter_context(ReadAhead(work.videos, frames, rules, count))
    for player in players:
        player.environment.features.source = ahead
    return lambda: ahead.items(deal)


class _Progress(Progress):
    """Counts finished questions and shows score, calls per question and questions left out."""

    def __init__(self, title: str, total: int, deal: Deal):
        super().__init__(title, "question", every=10.0, shown=hosts.is_first())
        self._total = total
        self._deal = deal
        self._left_out = 0
        self._played = 0
        self._calls = 0
        self._scores: list[float] = []  # of closed questions, as in the summary

    def add(self, line: Line) -> None:
        """Count a finished question."""
        if "left_out" in line:
            self._left_out += 1
        else:
            self._played += 1
            if line["kind"] != QuestionKind.OPEN_ENDED:
                self._scores.append(line["score"])
            self._calls += line["calls"]
        figures: dict[str, float] = {}
        if self._scores:
            figures["score"] = 100 * sum(self._scores) / len(self._scores)
        if self._played:
            figures["calls"] = self._calls / self._played
        if self._left_out:
            figures["left out"] = self._left_out
        elsewhere = self._deal.given_to_others() if hosts.is_first() else 0
        self.update(elsewhere + self._left_out + self._played, self._total, figures)


def _report(summary: Line, out: pathlib.Path) -> Iterator[str]:
    """Format the summary as lines of text."""
    title = title_of(summary["benchmark"])
    rows = rows_of(summary)
    score = score_of(summary)
    if not summary["n"]:
        yield f"{title}: none of {rows} questions was played"
    elif score is not None:
        closed = summary["n"] - summary.get("open_ended", {}).get("n", 0)
        interval = _with_interval(score, summary["interval"])
        yield f"{title}: {interval} on {closed} of {rows} questions"
    if "open_ended" in summary:
        found = summary["open_ended"]
        interval = _with_interval(found["score"], found["interval"])
        yield (
            f"{title}, open-ended questions alone: {interval} on {found['n']} questions, "
            f"{found['without_answer']} without an answer"
        )
    for name, found in summary.get("other_readings", {}).items():
        if found["differ"]:
            interval = _with_interval(found["score"], found["interval"])
            yield (
                f"  as the {name} reads the same answers: {interval}; "
                f"{found['differ']} of {found['n']} questions differ"
            )
    if "lmms_eval_score" in summary:
        found = summary["lmms_eval"]
        yield (
            f"  by lmms-eval's own functions: {100 * summary['lmms_eval_score']:.1f} "
            f"({found['task']}, {found['n']} answers)"
        )
    if summary["n"]:
        if summary["refused_reports"]:
            yield f"  {summary['refused_reports']} requests of sub-agents were refused"
        yield (
            f"  {summary['calls']:.2f} calls per question, "
            f"{100 * summary['share_with_calls']:.0f} % with calls, "
            f"{summary['without_answer']} without an answer, "
            f"{summary['unread']} whose answer names no option or span, "
            f"{summary['seconds_per_question']:.2f} s per question"
        )
    for cause, found in summary["left_out"].items():
        example, reason = next(iter(found["videos"].items()))
        counts = f"{found['questions']} questions on {len(found['videos'])} videos"
        yield f"  left out, {cause.replace('_', ' ')}: {counts}, such as {example}: {reason}"
    if summary["broken_rows"]:
        number, reason = next(iter(summary["broken_rows"].items()))
        yield f"  broken rows: {len(summary['broken_rows'])}, such as {number}: {reason}"
    yield f"  {out / 'summary.json'}"


def _with_interval(score: float, interval: Sequence[float]) -> str:
    low, high = interval
    return f"{100 * score:.1f} [{100 * low:.1f}, {100 * high:.1f}]"
