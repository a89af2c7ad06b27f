"""Evaluates a model on a split or on your own questions, and writes the results to a folder.

Each finished question is written to disk at once, so Ctrl-C or kill -9 loses only the questions in
flight. The same call continues with the questions that have no result yet.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import sys
from collections.abc import Iterator, Sequence

import jax

from models.compile_cache import use_cache
from models.peft_folder import base_folder
from models.weights.folder import local_folder, require_readable
from paravt_jax.data.frame_reader import FrameReader
from paravt_jax.data.hub import is_hub_id
from paravt_jax.data.question_files import read_questions, require_unique_ids
from paravt_jax.method.records import Question
from paravt_jax.processes import cluster, hosts
from rollout.evaluation.benchmarks import (
    BENCHMARKS,
    Item,
    Loaded,
    VideoFolder,
    load,
    questions_hash,
)
from rollout.evaluation.folder import EvaluationFolder, Line, answered, commit, versions
from rollout.evaluation.players import Setup, load_player, make_setup, open_reader
from rollout.evaluation.replicas import (
    Devices,
    Queue,
    ReadAhead,
    device_groups,
    play_all,
    units_of,
)
from rollout.evaluation.report import PlayProgress, report
from rollout.evaluation.server_watch import ServerWatch
from rollout.evaluation.settings import OWN, BenchmarkSettings
from rollout.evaluation.split import Player
from rollout.evaluation.summary import summarise
from rollout.evaluation.weights_hash import weights_hash
from rollout.evaluation.wording_folder import digest


def evaluate(settings: BenchmarkSettings, questions: Sequence[Question] | None = None) -> Line:
    """Play all questions that have no result yet, then write and return the summary.

    Progress and a short report go to stderr. If several processes have joined
    (`paravt_jax.processes.cluster`), all of them call this, share the work, and return the summary.

    Args:
        settings: the model, the questions, and how to play them.
        questions: questions to play if `settings` names neither a benchmark nor a file. The paths
            of their videos are relative to `settings.videos`.

    Returns:
        The content of summary.json.

    Raises:
        FileNotFoundError, FolderError, ValueError: the run cannot start. The message is one line.
        EndpointError: the server does not answer, or refuses all questions.
        HostsError: another process failed.
    """
    # All checks of files come before the model is loaded, which takes minutes.
    work = hosts.on_all(lambda: _prepare(settings, questions))
    # Hosts share units by their numbers, and `episodes` bounds the size of a unit.
    apart = ("limit", "benchmark", "episodes")
    same = work.identity | {name: getattr(settings, name) for name in apart}
    for name, value in same.items():
        hosts.require_same(f"--{name.replace('_', '-')}", value)
    with contextlib.ExitStack() as stack:
        folder = _open(work, stack)
        # Try questions again that were left out: their videos may have been added since.
        done = hosts.from_first(lambda: answered(work.out))
        items = [
            item for item in work.loaded.items[: settings.limit] if item.question.id not in done
        ]
        if items:
            if not settings.endpoint:
                use_cache(work.out)
            # An endpoint that answered questions in an earlier start needs no proof.
            _play(work, items, folder, proven=bool(done))
        summary = hosts.from_first(lambda: folder.summarise(work.summary))
    if hosts.is_first():
        print("\n".join(report(summary, work.out)), file=sys.stderr)
    return summary


@dataclasses.dataclass(frozen=True)
class _Work:
    """What is evaluated, once all files have been found."""

    setup: Setup
    loaded: Loaded
    out: pathlib.Path
    identity: Line

    def summary(self, config: Line, lines: Iterator[Line]) -> Line:
        """Return the content of summary.json."""
        benchmark = BENCHMARKS.get(self.setup.settings.benchmark)
        score = benchmark.score if benchmark else "accuracy"
        return summarise(config, lines, len(self.loaded.items), self.loaded.broken, score)


def _prepare(settings: BenchmarkSettings, questions: Sequence[Question] | None) -> _Work:
    """Find the questions, the videos and the model."""
    if not (settings.benchmark or settings.questions or questions):
        raise ValueError(
            "--benchmark, --questions: there is nothing to play; give the name of a split "
            f"({', '.join(BENCHMARKS)}), or a file of questions"
        )
    videos = VideoFolder(_videos(settings))
    loaded = _load(settings, questions, videos.root)
    folder = local_folder(settings.model, weights=not settings.endpoint)
    setup = make_setup(settings, videos, folder)
    weights = None  # an endpoint does not reveal its weights
    if not settings.endpoint:
        base = base_folder(folder)
        require_readable(base)  # before hashing, which takes minutes
        weights = "+".join(weights_hash(each) for each in dict.fromkeys((base, folder)))
    identity = settings.identity() | {
        "weights": weights,
        "questions": questions_hash(loaded.items),
        "wording": digest(setup.wording),
        # Limits count tokens. With the engine, the hash of the model covers its tokenizer.
        **({"tokenizer": setup.vocabulary.digest} if settings.endpoint else {}),
    }
    return _Work(setup, loaded, out_folder(settings), identity)


def _open(work: _Work, stack: contextlib.ExitStack) -> EvaluationFolder:
    """Open the folder on all hosts, which must see the same one. `stack` closes it."""
    details = {
        "name": _name(work.setup.settings),
        "settings": dataclasses.asdict(work.setup.settings),
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
    else:
        require_unique_ids(questions)
    return Loaded(tuple(Item(question) for question in questions), {})


def out_folder(settings: BenchmarkSettings) -> pathlib.Path:
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
    folder = pathlib.Path(settings.model).resolve()
    if not folder.is_dir():
        return settings.model
    return folder.parent.name if folder.name == "model" else folder.name


def _videos(settings: BenchmarkSettings) -> str:
    """The folder of the videos."""
    if settings.videos:
        return settings.videos
    if settings.questions:
        return str(pathlib.Path(settings.questions).parent)
    if settings.data and pathlib.Path(settings.data).is_dir():
        return settings.data
    if settings.data and not (pathlib.Path(settings.data).exists() or is_hub_id(settings.data)):
        raise FileNotFoundError(
            f"--data {settings.data}: no such file or folder, and no hub id (owner/name); "
            "give the split's published files, or leave it out to read them from the hub"
        )
    raise ValueError(
        "--videos is missing: give the folder of the videos; `paravt download` fetches those of a "
        "split"
    )


# --- playing ---


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
    settings = work.setup.settings
    subtitled = any(item.subtitles or item.question.subtitles for item in items)
    units = units_of(items, settings.episodes)[hosts.process_index() :: hosts.process_count()]
    with contextlib.ExitStack() as stack:
        groups = hosts.on_all(lambda: [()] if settings.endpoint else device_groups(settings.tensor))
        reader = stack.enter_context(open_reader(work.setup, len(groups)))
        players = hosts.on_all(lambda: _load_players(work, reader, subtitled, groups, stack))
        progress = PlayProgress(_split(settings), sum(map(len, units)))
        stack.enter_context(progress)
        watch = ServerWatch(settings.endpoint, proven) if settings.endpoint else None
        queue = Queue(units, _read_ahead(work, reader, len(players)))

        def play() -> None:
            for line in stack.enter_context(contextlib.closing(play_all(players, groups, queue))):
                folder.append(line)
                progress.add(line)
                if watch:
                    watch.add(line)

        hosts.on_all(play)


def _load_players(
    work: _Work,
    reader: FrameReader,
    subtitled: bool,
    groups: Sequence[Devices],
    stack: contextlib.ExitStack,
) -> list[Player]:
    """One player per group of devices."""
    players = []
    for devices in groups:
        with jax.default_device(devices[0]) if len(groups) > 1 else contextlib.nullcontext():
            players.append(load_player(work.setup, reader, subtitled, stack, devices, len(groups)))
    return players


def _read_ahead(work: _Work, reader: FrameReader, replicas: int) -> ReadAhead | None:
    """What reads overviews ahead; None if there are none."""
    settings = work.setup.settings
    if not settings.k:
        return None
    return ReadAhead(reader, work.setup.videos, settings.k, settings.episodes * replicas)
