"""`python -m paravt_extras.download` fetches and unpacks the questions and videos of a benchmark.

Archives are downloaded, unpacked and deleted one after another; parts of one are joined first. You
can stop the command at any moment; the same command continues it.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import pathlib
import re
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

from paravt_extras import data_sets
from paravt_jax.command_name import command_name
from paravt_jax.data.any_path import require_local
from paravt_jax.data.archives import SUFFIXES, mark_of, unpack
from paravt_jax.data.stored_settings import lock
from paravt_jax.processes.exit_codes import USER_ERRORS
from paravt_jax.progress import size
from rollout.evaluation.benchmarks import BENCHMARKS, Benchmark

# The end of a part's name: .001, .part00, .part.aa, -aa ...
_PART = re.compile(
    r"(?P<whole>.+\.(?:zip|tar|tar\.gz|tgz))[._-]?(?:part)?[._-]?(?:\d{1,4}|[a-z]{2,3})",
    re.IGNORECASE,
)
_PROG = command_name("python -m paravt_extras.download")


@dataclasses.dataclass(frozen=True)
class Archive:
    """An archive of a data set, whole or in parts."""

    name: str
    """Path of the whole archive."""
    parts: tuple[str, ...]
    """Paths of its files, in order."""
    size: int
    """Bytes of all parts."""


def find_archives(sizes: Mapping[str, int], joined: Sequence[str] = ()) -> list[Archive]:
    """Return the archives among some files.

    Args:
        sizes: Bytes of the files by path.
        joined: Patterns of files that are parts although their names do not say so. All files that
            match one pattern make one archive, in the order of the numbers in their names.
    """
    parts: dict[str, list[str]] = {}
    for name in sorted(sizes, key=_natural):
        pattern = next((pattern for pattern in joined if fnmatchcase(name, pattern)), None)
        part = _PART.fullmatch(name)
        if pattern is not None:
            parts.setdefault(pattern.replace("*", "_joined"), []).append(name)
        elif name.lower().endswith(SUFFIXES):
            parts[name] = [name]
        elif part is not None:
            parts.setdefault(part["whole"], []).append(name)
    return [
        Archive(whole, tuple(names), sum(sizes[name] for name in names))
        for whole, names in parts.items()
    ]


def _natural(name: str) -> tuple[list[str | int], str]:
    """Return a key that sorts 2 before 10."""
    pieces = re.split(r"(\d+)", name)
    return [int(piece) if n % 2 else piece for n, piece in enumerate(pieces)], name


def join_parts(archive: Archive, folder: pathlib.Path) -> None:
    """Join the parts of an archive. Each is deleted when it was copied, to save room."""
    if archive.parts == (archive.name,):
        return
    with (folder / archive.name).open("wb") as whole:
        for name in archive.parts:
            with (folder / name).open("rb") as part:
                shutil.copyfileobj(part, whole)
            (folder / name).unlink()


def _is_whole(archive: Archive, folder: pathlib.Path) -> bool:
    """Whether a folder holds the whole archive, with its parts joined."""
    whole = folder / archive.name
    return whole.exists() and whole.stat().st_size == archive.size


@dataclasses.dataclass(frozen=True)
class Plan:
    """What belongs to a split, of the files of its data set."""

    revision: str
    questions: Mapping[str, int]
    """Bytes of the files with questions, by path."""
    videos: Mapping[str, int]
    """Bytes of videos and subtitles outside of archives, by path."""
    archives: tuple[Archive, ...]
    parts: Mapping[str, int]
    """Bytes of the files of the archives, by path."""

    @property
    def loose(self) -> dict[str, int]:
        """Bytes of all files that are not archives, by path."""
        return {**self.questions, **self.videos}

    @property
    def packed(self) -> int:
        """Bytes of all archives. Videos hardly shrink, so their files take about as much."""
        return sum(self.parts.values())

    @property
    def room(self) -> int:
        """Bytes on disk while the split is downloaded, if archives are deleted one by one."""
        largest = max((archive.size for archive in self.archives), default=0)
        return sum(self.loose.values()) + self.packed + largest


def plan_of(benchmark: Benchmark, listing: data_sets.Listing) -> Plan:
    """Choose the files of a split.

    Raises:
        ValueError: The data set does not hold them.
    """
    names = sorted(listing.sizes)
    questions: list[str] = []
    for pattern in benchmark.patterns:
        questions = questions or [name for name in names if fnmatchcase(name, pattern)]
    media = {
        name: listing.sizes[name]
        for name in names
        if name not in questions and any(fnmatchcase(name, p) for p in benchmark.media)
    }
    for patterns, found in ((benchmark.patterns, questions), (benchmark.media, media)):
        if patterns and not found:
            raise ValueError(
                f"{benchmark.source}: holds none of {', '.join(patterns)} among its {len(names)} "
                "files; download and unpack it yourself (docs/evaluation.md, 1)"
            )
    archives = find_archives(media, benchmark.joined)
    parts = {part: media[part] for archive in archives for part in archive.parts}
    return Plan(
        revision=listing.revision,
        questions={name: listing.sizes[name] for name in questions},
        videos={name: count for name, count in media.items() if name not in parts},
        archives=tuple(archives),
        parts=parts,
    )


def download(name: str, folder: pathlib.Path, keep_archives: bool = False) -> None:
    """Download a split into a folder, and unpack its archives there.

    Args:
        name: The split.
        folder: Where everything goes. An interrupted download in it is continued.
        keep_archives: Whether to keep archives that have been unpacked.

    Raises:
        ConnectionError, FileNotFoundError: The hub does not give the files.
        ValueError: An archive is damaged or must not be unpacked, or the data set has another
            layout.
        OSError: The disk is full, or another process uses the folder.
    """
    benchmark = BENCHMARKS[name]
    plan = plan_of(benchmark, data_sets.data_set_files(benchmark.source))
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder):
        _say(
            f"{name}: {len(plan.loose)} files, {size(sum(plan.loose.values()))}; with its "
            f"archives it takes up to {size(plan.room)} of disk"
        )
        data_sets.download(benchmark.source, plan.revision, plan.loose, folder)
        for number, archive in enumerate(plan.archives, 1):
            if not mark_of(archive.name, archive.size, folder).exists():
                place = f"{number} of {len(plan.archives)}"
                _say(f"{name}: archive {place}, {archive.name}, {size(archive.size)}")
                # An earlier start may have been stopped while it unpacked this one.
                if not _is_whole(archive, folder):
                    data_sets.download(benchmark.source, plan.revision, archive.parts, folder)
                    join_parts(archive, folder)
                unpack(archive.name, folder, folder)
            if not keep_archives:
                (folder / archive.name).unlink(missing_ok=True)
        if benchmark.elsewhere:
            _unpack_own(benchmark, folder)
    _say(f"{name}: complete; evaluate with --benchmark {name} --data {folder}")


def _locked(folder: pathlib.Path) -> contextlib.AbstractContextManager:
    try:
        return lock(folder / ".download.lock")
    except BlockingIOError as error:
        raise OSError(f"--to {folder}: {error}; wait for it, or stop it") from error


def _unpack_own(benchmark: Benchmark, folder: pathlib.Path) -> None:
    """Unpack archives that the user has put into the folder. They are kept."""
    archives = [file.name for file in folder.iterdir() if file.name.lower().endswith(SUFFIXES)]
    for name in archives:
        unpack(name, folder, folder)
    if not archives:
        _say(
            f"{benchmark.name}: its videos are not on the hub; put {benchmark.elsewhere} into "
            f"{folder} and repeat the command, or unpack it there"
        )


def sizes_table(names: Iterable[str]) -> tuple[str, bool]:
    """Ask the hub what the splits take.

    Returns:
        A table in plain text, and whether the hub answered for all of them.
    """
    lines = [_row("split", "questions", "videos", "archives", "disk")]
    problems = []
    listings: dict[str, data_sets.Listing] = {}
    for name in names:
        benchmark = BENCHMARKS[name]
        try:
            if benchmark.source not in listings:
                listings[benchmark.source] = data_sets.data_set_files(benchmark.source)
            plan = plan_of(benchmark, listings[benchmark.source])
        except (OSError, ValueError) as error:
            lines.append(_row(name, "?", "?", "?", "?"))
            problems.append(f"{name}: {error}")
            continue
        videos = sum(plan.videos.values()) + plan.packed
        lines.append(
            _row(
                name,
                size(sum(plan.questions.values())),
                "elsewhere" if benchmark.elsewhere else size(videos),
                str(len(plan.archives)),
                size(plan.room),
            )
        )
        if benchmark.elsewhere:
            problems.append(f"{name}: its videos are not on the hub, but {benchmark.elsewhere}")
    complete = not any(line.endswith("?") for line in lines)
    lines.append("disk: room that is needed while one archive after another is unpacked")
    return "\n".join([*lines, *problems]), complete


def _row(split: str, *cells: str) -> str:
    return f"{split:<16}" + "".join(f"{cell:>12}" for cell in cells)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code. A failure prints one line and returns 2."""
    parser = argparse.ArgumentParser(prog=_PROG, description=__doc__)
    parser.add_argument(
        "split",
        nargs="*",
        metavar="SPLIT",
        help=f"one of {', '.join(BENCHMARKS)}",
    )
    parser.add_argument(
        "--to", default="", metavar="FOLDER", help="where to put it; by default data/SPLIT"
    )
    parser.add_argument(
        "--sizes",
        action="store_true",
        help="only print what the hub says that the splits take; by default of all splits",
    )
    parser.add_argument(
        "--keep-archives", action="store_true", help="keep archives that have been unpacked"
    )
    asked = parser.parse_args(argv)
    for name in asked.split:
        if name not in BENCHMARKS:
            parser.error(f"{name}: no such split; give one of {', '.join(BENCHMARKS)}")
    if asked.sizes:
        table, complete = sizes_table(asked.split or BENCHMARKS)
        print(table)
        return 0 if complete else 2
    if len(asked.split) != 1:
        parser.error(f"SPLIT: {len(asked.split)} given; name one, or add --sizes")
    (name,) = asked.split
    try:
        require_local("--to", asked.to)
        download(name, pathlib.Path(asked.to or f"data/{name}"), asked.keep_archives)
    except KeyboardInterrupt:
        _say("stopped; the same command continues")
        return 130
    except USER_ERRORS as error:
        _say(f"{_PROG}: {error}")
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
