"""`python -m paravt_extras.download` fetches and unpacks the questions and videos of a benchmark.

Archives are unpacked and deleted one after another; parts of one are joined first. You can stop the
command at any moment; the same command continues it. `FOLDER/.done` lists the files that were
deleted, so that they are not fetched again.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import pathlib
import re
import shutil
import sys
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from paravt_jax.command_name import command_name
from paravt_jax.data import hub
from paravt_jax.data.any_path import require_local
from paravt_jax.data.archives import SUFFIXES, unpack
from paravt_jax.data.stored_settings import lock
from paravt_jax.processes.exit_codes import USER_ERRORS
from rollout.evaluation.benchmarks import BENCHMARKS, Benchmark

# The end of a part's name: .001, .part00, .part.aa, -aa ...
_PART = re.compile(
    r"(?P<whole>.+\.(?:zip|tar|tar\.gz|tgz))[._-]?(?:part)?[._-]?(?:\d{1,4}|[a-z]{2,3})",
    re.IGNORECASE,
)
_DONE = ".done"
_JOINED = ".joined"
_PROG = command_name("python -m paravt_extras.download")


def find_archives(names: Iterable[str], joined: Sequence[str] = ()) -> dict[str, list[str]]:
    """Return the archives among some files, each with its parts in order.

    Args:
        names: Paths of the files.
        joined: Patterns of files that are parts although their names do not say so. All files that
            match one pattern make one archive, in the order of the numbers in their names.
    """
    archives: dict[str, list[str]] = {}
    for name in sorted(names, key=_natural):
        pattern = next((pattern for pattern in joined if fnmatchcase(name, pattern)), None)
        part = _PART.fullmatch(name)
        if pattern is not None:
            archives.setdefault(pattern.replace("*", "_joined"), []).append(name)
        elif name.lower().endswith(SUFFIXES):
            archives[name] = [name]
        elif part is not None:
            archives.setdefault(part["whole"], []).append(name)
    return archives


def _natural(name: str) -> tuple[list[str | int], str]:
    """Return a key that sorts 2 before 10."""
    pieces = re.split(r"(\d+)", name)
    return [int(piece) if n % 2 else piece for n, piece in enumerate(pieces)], name


def download(name: str, folder: pathlib.Path) -> None:
    """Download a split into a folder, and unpack its archives there.

    Args:
        name: The split.
        folder: Where everything goes. An interrupted download in it is continued.

    Raises:
        FileNotFoundError: The hub does not give the files.
        ValueError: An archive is damaged or must not be unpacked, or the data set has another
            layout.
        OSError: The disk is full, or another process uses the folder.
    """
    benchmark = BENCHMARKS[name]
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(lock(folder / ".download.lock"))
        except BlockingIOError as error:
            raise OSError(f"--to {folder}: {error}; wait for it, or stop it") from error
        done = folder / _DONE
        skip = done.read_text().splitlines() if done.exists() else []
        for gone in skip:  # of a start that was killed before it deleted them
            (folder / gone).unlink(missing_ok=True)
        patterns = [*benchmark.patterns, *benchmark.media]
        hub.snapshot(benchmark.source, patterns, "dataset", folder, skip)
        # Other files of the folder are the user's.
        listed = hub.list_files(benchmark.source, "dataset")
        names = [name for name in listed if (folder / name).is_file()]
        for wanted in (benchmark.patterns, benchmark.media):
            if wanted and not _matching([*names, *skip], wanted):
                raise ValueError(
                    f"{benchmark.source}: holds none of {', '.join(wanted)}; download and unpack "
                    "it yourself (docs/evaluation.md, 1)"
                )
        archives = find_archives(_matching(names, benchmark.media), benchmark.joined)
        for whole, parts in archives.items():
            if parts != [whole]:
                _join(folder, whole, parts)
                _delete(folder, parts)
        single = [whole for whole, parts in archives.items() if parts == [whole]]
        joined = [f"{_JOINED}/{path.name}" for path in sorted((folder / _JOINED).glob("*"))]
        for number, archive in enumerate([*single, *joined], 1):
            _say(f"{name}: archive {number} of {len(single) + len(joined)}, {archive}")
            unpack(archive, folder, folder)
            _delete(folder, [archive])
        if benchmark.elsewhere:
            _unpack_own(benchmark, folder)
    _say(f"{name}: complete; evaluate with --benchmark {name} --data {folder}")


def _matching(names: Iterable[str], patterns: Sequence[str]) -> list[str]:
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]


def _join(folder: pathlib.Path, whole: str, parts: Sequence[str]) -> None:
    """Join the parts of an archive in a folder of its own, where it appears when it is complete."""
    target = folder / _JOINED / pathlib.PurePath(whole).name
    target.parent.mkdir(exist_ok=True)
    unfinished = target.with_suffix(".unfinished")
    with unfinished.open("wb") as stream:
        for name in parts:
            with (folder / name).open("rb") as part:
                shutil.copyfileobj(part, stream)
    os.replace(unfinished, target)


def _delete(folder: pathlib.Path, names: Sequence[str]) -> None:
    """Delete files, and note them so that they are not fetched again."""
    with (folder / _DONE).open("a") as done:
        done.writelines(f"{name}\n" for name in names)
    for name in names:
        (folder / name).unlink()


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


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code. A failure prints one line and returns 2."""
    parser = argparse.ArgumentParser(prog=_PROG, description=__doc__)
    parser.add_argument("split", choices=BENCHMARKS, metavar="SPLIT", help=", ".join(BENCHMARKS))
    parser.add_argument(
        "--to", default="", metavar="FOLDER", help="where to put it; by default data/SPLIT"
    )
    asked = parser.parse_args(argv)
    try:
        require_local("--to", asked.to)
        download(asked.split, pathlib.Path(asked.to or f"data/{asked.split}"))
    except KeyboardInterrupt:
        _say("stopped; the same command continues")
        return 130
    except USER_ERRORS as error:
        _say(f"{_PROG}: {error}")
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
