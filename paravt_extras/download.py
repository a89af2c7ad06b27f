"""`python -m paravt_extras.download` fetches and unpacks the questions and videos of a benchmark.

Archives are unpacked one after another, and deleted when all of them are. You can stop the command
at any moment; the same command continues it.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import shutil
import sys
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from paravt_jax.data import sources
from paravt_jax.data.any_path import require_local
from paravt_jax.data.archives import SUFFIXES, unpack
from paravt_jax.data.stored import lock, write_atomically
from paravt_jax.processes.cluster import run_command
from rollout.evaluation.benchmarks import BENCHMARKS, Benchmark

_JOINED = ".joined"


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
    with lock(folder / ".download.lock"):
        # Splits may share a data set.
        complete = folder / f".{benchmark.source.replace('/', '--')}.complete"
        if not complete.exists():
            archives = _fetch(benchmark, folder)
            write_atomically(complete, "\n".join(archives))
        # Those that a killed command has not deleted must not be fetched again.
        for archive in complete.read_text(encoding="utf-8").splitlines():
            (folder / archive).unlink(missing_ok=True)
    if benchmark.elsewhere:
        _say(f"{name}: its videos are not on the hub; unpack {benchmark.elsewhere} in {folder}")
    _say(f"{name}: complete; evaluate with --benchmark {name} --data {folder}")


def _fetch(benchmark: Benchmark, folder: pathlib.Path) -> list[str]:
    """Fetch all files, unpack the archives among them, and return the names of these."""
    # Where the hub does not answer, its client would take the folder as it is for the download.
    listed = sources.list_files(benchmark.source, "dataset")
    sources.snapshot(benchmark.source, [*benchmark.patterns, *benchmark.media], "dataset", folder)
    # Other files of the folder are the user's.
    names = [name for name in listed if (folder / name).is_file()]
    for wanted in (benchmark.patterns, benchmark.media):
        if wanted and not _matching(names, wanted):
            raise ValueError(
                f"{benchmark.source}: holds none of {', '.join(wanted)}; download and unpack it "
                "yourself (docs/evaluation.md, 1)"
            )
    media = _matching(names, benchmark.media)
    slices = _matching(media, benchmark.joined)
    archives = [name for name in media if name.lower().endswith(SUFFIXES) and name not in slices]
    for number, name in enumerate(archives, 1):
        _say(f"{benchmark.name}: archive {number} of {len(archives)}, {name}")
        unpack(name, folder, folder)
    if slices:
        _say(f"{benchmark.name}: {len(slices)} slices of one archive")
        unpack(_join(folder, slices), folder, folder)
        shutil.rmtree(folder / _JOINED)
    return [*archives, *slices]


def _matching(names: Iterable[str], patterns: Sequence[str]) -> list[str]:
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]


def _join(folder: pathlib.Path, slices: Sequence[str]) -> str:
    """Join the slices of an archive, and return its name in the folder."""
    ordered = sorted(slices)
    suffix = next(suffix for suffix in SUFFIXES if suffix in ordered[0].lower())
    target = folder / _JOINED / f"slices{suffix}"
    target.parent.mkdir(exist_ok=True)
    unfinished = target.with_name("unfinished")
    with unfinished.open("wb") as stream:
        for name in ordered:
            with (folder / name).open("rb") as piece:
                shutil.copyfileobj(piece, stream)
    os.replace(unfinished, target)
    return target.relative_to(folder).as_posix()


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m paravt_extras.download", description=__doc__)
    parser.add_argument("split", choices=BENCHMARKS, metavar="SPLIT", help=", ".join(BENCHMARKS))
    parser.add_argument(
        "--to", default="", metavar="FOLDER", help="where to put it; by default data/SPLIT"
    )
    asked = parser.parse_args(argv)
    folder = asked.to or f"data/{asked.split}"

    def work() -> None:
        require_local("--to", folder)
        download(asked.split, pathlib.Path(folder))

    return run_command(work)


if __name__ == "__main__":
    raise SystemExit(main())
