"""Evaluates a model on a split or on your own questions, and writes the results to a folder.

Each finished question is written to disk at once, so Ctrl-C or kill -9 loses only the questions in
flight. The same call continues with the questions that have no result yet.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import statistics
import sys
from collections import defaultdict
from collections.abc import Sequence

import jax
from tqdm import tqdm

from models.compilation import use_cache
from models.peft_folder import base_folder
from models.weights.folder import require_readable, weights_hash
from paravt_jax.data.question_files import read_columns, require_unique_ids
from paravt_jax.data.stored import write_atomically
from paravt_jax.method.records import Question
from paravt_jax.processes import cluster, hosts
from paravt_jax.remote.judge import RemoteJudge
from rollout.evaluation.benchmarks import BENCHMARKS, Item, Loaded, load
from rollout.evaluation.files import VideoFolder
from rollout.evaluation.folder import EvaluationFolder, Line, commit, latest, read_json, read_lines
from rollout.evaluation.players import Setup, load_player, make_setup, open_reader
from rollout.evaluation.replicas import Queue, device_groups, play_all, units_of
from rollout.evaluation.settings import OWN, BenchmarkSettings
from rollout.evaluation.split import SplitPlayer
from rollout.evaluation.summary import report, summarise, table_of


def evaluate(settings: BenchmarkSettings, questions: Sequence[Question] | None = None) -> Line:
    """Play all questions that have no result yet, then write and return the summary.

    Progress and a short report go to stderr. If several processes have joined
    (`paravt_jax.processes.cluster`), all of them call this, share the work, and return the summary.

    Args:
        settings: the model, the questions, and how to play them.
        questions: questions to play if `settings` names no benchmark. The paths of their videos are
            relative to `settings.data`.

    Returns:
        The content of summary.json.

    Raises:
        FileNotFoundError, FolderError, ValueError: the run cannot start. The message is one line.
        HostsError: another process failed.
    """
    # All checks of files come before the model is loaded, which takes minutes.
    setup, identity = hosts.on_all(lambda: _prepare(settings, questions))
    loaded = setup.loaded
    # Hosts share units by their numbers, and `episodes` bounds the size of a unit.
    same = identity | {name: getattr(settings, name) for name in ("limit", "episodes")}
    same["data"] = [item.content for item in loaded.items]
    for name, value in same.items():
        hosts.require_same(f"--{name.replace('_', '-')}", value)
    with contextlib.ExitStack() as stack:
        folder = _open(setup, identity, stack)
        # Try questions again that were left out: their videos may have been added since.
        done = hosts.from_first(lambda: _answered(folder))
        items = [item for item in loaded.items[: settings.limit] if item.content not in done]
        if done and hosts.is_first():
            kept = sum(item.content in done for item in loaded.items)
            print(f"{kept} answers are kept; {len(items)} questions are asked", file=sys.stderr)
        if items:
            use_cache(folder.path)
            _play_split(setup, items, folder)
        summary = hosts.from_first(lambda: _summarise(folder, loaded))
    if hosts.is_first():
        print("\n".join(report(summary, folder.path)), file=sys.stderr)
    return summary


def _prepare(
    settings: BenchmarkSettings, questions: Sequence[Question] | None
) -> tuple[Setup, Line]:
    """Find the questions, the videos and the model. Returns the identity of the evaluation, too."""
    loaded, videos = _load(settings, questions)
    setup = make_setup(settings, loaded, videos)
    base = base_folder(setup.folder)
    require_readable(base)  # before hashing, which takes minutes
    hashes = map(weights_hash, dict.fromkeys((base, setup.folder)))
    return setup, settings.identity() | {"weights": "+".join(hashes)}


def _open(setup: Setup, identity: Line, stack: contextlib.ExitStack) -> EvaluationFolder:
    """Open the folder on all hosts, which must see the same one. `stack` closes it."""
    settings = setup.settings
    out = _out(settings)
    contents = [item.content for item in setup.loaded.items]
    details = {"settings": dataclasses.asdict(settings), "questions": contents}

    def open_own() -> EvaluationFolder:
        process = hosts.process_index()
        return stack.enter_context(EvaluationFolder(out, identity, details, commit(), process))

    folder = hosts.on_all(lambda: open_own() if hosts.is_first() else None)
    cluster.require_shared(out, "--out")
    return hosts.on_all(lambda: folder or open_own())


def _answered(folder: EvaluationFolder) -> set[str]:
    """Return what was asked in the questions that were played."""
    return {key for key, line in latest(read_lines(folder.path)).items() if "left_out" not in line}


def _summarise(folder: EvaluationFolder, loaded: Loaded) -> Line:
    """Write summary.json and questions.csv, of the questions as they are now."""
    known = latest(read_lines(folder.path))
    lines = [
        known[item.content] | {"id": item.question.id, "columns": item.columns}
        for item in loaded.items
        if item.content in known
    ]
    config = read_json(folder.path / "config.json")
    del config["questions"]
    summary = summarise(config, lines, len(loaded.items), loaded.broken)
    folder.write("summary.json", summary)
    write_atomically(folder.path / "questions.csv", table_of(lines))
    return summary


# --- the questions ---


def _load(
    settings: BenchmarkSettings, questions: Sequence[Question] | None
) -> tuple[Loaded, VideoFolder]:
    """Load the questions of a split or of a file, or take those from Python."""
    if settings.benchmark and questions is not None:
        raise ValueError(f"--benchmark {settings.benchmark}: leave it out to play own questions")
    if not settings.data:
        raise ValueError(
            "--data is missing; give the folder of a split (docs/evaluation.md, 1) or a "
            "file of questions"
        )
    if settings.benchmark:
        loaded = load(settings.benchmark, settings.data)
        return loaded, VideoFolder(settings.data)
    videos = VideoFolder(settings.data, exact=True)
    if questions is None:
        if not pathlib.Path(settings.data).is_file():
            raise ValueError(
                f"--benchmark is missing, and --data {settings.data!r} is no file of questions; "
                f"give one of {', '.join(BENCHMARKS)}, or a file"
            )
        table = read_columns(settings.data, videos.root)
        return Loaded(tuple(Item(question, columns=own) for question, own in table), {}), videos
    require_unique_ids(questions)
    return Loaded(tuple(Item(question) for question in questions), {}), videos


def _split(settings: BenchmarkSettings) -> str:
    """Return the name of the questions."""
    data = pathlib.Path(settings.data)
    return settings.benchmark or (data.stem if data.is_file() else OWN)


def _out(settings: BenchmarkSettings) -> pathlib.Path:
    """Return the folder of the results.

    By default, it lies in one named as the model: NAME for `runs/NAME/model`, else by the model's
    folder or hub id.
    """
    if settings.out:
        return pathlib.Path(settings.out)
    folder = pathlib.Path(settings.model).resolve()
    name = settings.model
    if folder.is_dir():
        name = folder.parent.name if folder.name == "model" else folder.name
    return pathlib.Path("evaluations", name.replace("/", "--"), _split(settings))


# --- playing ---


def _play_split(setup: Setup, items: Sequence[Item], folder: EvaluationFolder) -> None:
    """Play the items on all hosts, and append the lines to the folder.

    Args:
        setup: what is evaluated.
        items: the items that have no result yet, the same on all hosts.
        folder: the folder of the evaluation.

    Raises:
        HostsError: another host failed.
    """
    settings = setup.settings
    units = units_of(items, settings.episodes)[hosts.process_index() :: hosts.process_count()]
    with contextlib.ExitStack() as stack:
        groups = hosts.on_all(lambda: device_groups(settings.tensor))
        reader = stack.enter_context(open_reader(setup, len(groups)))
        judge = None
        if judged := settings.rewards().judge:
            judge = RemoteJudge(judged)
            stack.callback(judge.client.close)

        def load_all() -> list[SplitPlayer]:
            players = []
            for devices in groups:
                with jax.default_device(devices[0] if len(groups) > 1 else None):
                    players.append(load_player(setup, reader, judge, devices))
            return players

        players = hosts.on_all(load_all)

        def read_ahead(video: str) -> None:
            path = setup.videos.find(video)
            if settings.k and path:
                # All players share the reader.
                players[0].environment.features.ahead(path, settings.k)

        queue = Queue(units, read_ahead, settings.episodes * len(groups))
        shown = hosts.is_first()
        total = sum(map(len, units))
        bar = tqdm(desc=_split(settings), total=total, unit="question", disable=not shown)
        stack.enter_context(bar)

        def play_items() -> None:
            # A mean over several kinds would be meaningless.
            scores: dict[str, list[float]] = defaultdict(list)
            lines = stack.enter_context(contextlib.closing(play_all(players, groups, queue)))
            for done, line in enumerate(lines, 1):
                folder.append(line)
                if "left_out" not in line:
                    scores[line["kind"]].append(line["score"])
                means = {kind: 100 * statistics.fmean(known) for kind, known in scores.items()}
                left_out = done - sum(map(len, scores.values()))
                bar.set_postfix(means | {"left out": left_out}, refresh=False)
                bar.update()

        hosts.on_all(play_items)
