"""Feeds damaged and hostile files to every reader: `python -m benchmarks.foreign_files`.

    python -m benchmarks.foreign_files --videos FOLDER --strace
    python -m benchmarks.foreign_files --kinds media rows --cases 100

Every case is a whole file or row that was changed at random: bytes flipped, cut, repeated or set to
extremes; values of JSON replaced by others. Case n of a kind depends on the seed and n only. Then
this holds, or the command fails and names the cases, whose files stay in `--folder`:

- A case is read, or refused by the error that its reader documents, in one line that names it.
- No case takes longer than `SECONDS`.
- With `--strace`: no file of the folder `outside` is read, to which cases refer in every way that
  their format has; and no connection is made.
"""

from __future__ import annotations

import argparse
import collections
import copy
import dataclasses
import functools
import io
import json
import pathlib
import random
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import av
import numpy as np
from PIL import Image

from models.family import family
from models.qwen3_vl.sizes import tiny
from models.weights import folder as model_folder
from models.weights import tensor_file
from models.weights.hf_config import from_hf, to_hf
from paravt_extras import published_format
from paravt_extras.published_format import call, conclude, question_record, say, show, think
from paravt_jax.data import archives, tokenizer_file
from paravt_jax.data.archives import ArchiveError
from paravt_jax.data.example_reading import Example, ExampleReading, read_example
from paravt_jax.data.frame_reader import FrameReader
from paravt_jax.data.frames import PixelRules, ReadTask, VideoError
from paravt_jax.data.published import open_table, read_table
from paravt_jax.data.question_files import read_questions
from paravt_jax.data.workers import Workers
from paravt_jax.method.protocol import ProtocolSettings
from paravt_jax.method.records import Question, QuestionKind
from paravt_jax.world.vocabulary import build_vocabulary

SECONDS = 30.0
"""Upper bound on the time of a case."""

CASES = {
    "media": 5_000,
    "rows": 20_000,
    "tables": 500,
    "archives": 2_000,
    "weights": 2_000,
    "configurations": 2_000,
    "questions": 2_000,
}
"""Number of cases by kind."""

STRACE = ("strace", "-f", "-y", "-qq", "-e", "trace=open,openat,connect")
"""Watches the files that a command opens, and its connections."""

_HEADER = 4096  # bytes at a file's start that are changed more often
_DEEP = 20_000
# Tags of EXIF data.
_ORIENTATION, _ARTIST, _X_RESOLUTION = 0x0112, 0x013B, 0x011A


@dataclasses.dataclass(frozen=True)
class Folders:
    """Folders of a run."""

    folder: pathlib.Path

    @property
    def inside(self) -> pathlib.Path:
        """The root, below which everything may be read."""
        return self.folder / "inside"

    @property
    def outside(self) -> pathlib.Path:
        """Files that nothing may open."""
        return self.folder / "outside"


class Unexpected(Exception):
    """A case ended in another way than its reader documents."""


# --- changes ---


def changed_bytes(data: bytes, rng: random.Random) -> bytes:
    """Return a file with one to eight changes, most of them near its start."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4, 8))):
        if not changed:
            break
        end = min(len(changed), _HEADER) if rng.random() < 0.7 else len(changed)
        start = rng.randrange(end)
        length = rng.choice((1, 1, 2, 4, 8, 64))
        match rng.randrange(6):
            case 0:
                changed[start] ^= 1 << rng.randrange(8)
            case 1:
                changed[start : start + length] = rng.randbytes(length)
            case 2:
                changed[start : start + length] = rng.choice((b"\xff", b"\0", b"\x7f")) * length
            case 3:
                del changed[start:]
            case 4:
                changed[start:start] = changed[start : start + 64 * length]
            case 5:
                del changed[start : start + length]
    return bytes(changed)


def changed_value(value: Any, rng: random.Random, hostile: Sequence[Any]) -> Any:
    """Return a JSON value with one to three parts replaced, removed or repeated."""
    value = copy.deepcopy(value)
    for _ in range(rng.choice((1, 1, 2, 3))):
        places = list(_places(value))
        if not places:
            return copy.deepcopy(rng.choice(hostile))
        parent, key = rng.choice(places)
        match rng.randrange(4):
            case 0 | 1:
                parent[key] = copy.deepcopy(rng.choice(hostile))
            case 2:
                del parent[key]
            case 3:
                other, other_key = rng.choice(places)
                try:
                    parent[key] = copy.deepcopy(other[other_key])
                except LookupError:
                    parent[key] = None
    return value


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every entry of every list and dictionary in a value."""
    entries = enumerate(value) if isinstance(value, list) else ()
    entries = value.items() if isinstance(value, dict) else entries
    for key, entry in list(entries):
        yield value, key
        yield from _places(entry)


def hostile_values(folders: Folders) -> list[Any]:
    """Values that readers trip over, and ways to name the private video."""
    private = folders.outside / "private.mp4"
    names = [
        str(private),
        f"file://{private}",
        "../outside/private.mp4",
        f"concat:{private}",
        "http://127.0.0.1:9/private.mp4",
        "link.mp4",
        "list.m3u8",
        "list.mp4",
    ]
    texts = ["", "\0", "\ud800", "\u2028", "x" * 100_000, "[" * _DEEP, "<|im_end|>", "𝟘", "١٢"]
    numbers = [0, -1, 1 << 63, 10**400, 1e308, float("nan"), float("inf"), True]
    return [*names, *texts, *numbers, None, [], {}, [[]], {"text": []}, "tool", "assistant"]


# --- kinds ---


@dataclasses.dataclass(frozen=True)
class FileKind:
    """A kind of file: its cases, and the reader of a case.

    `read` returns the name of the outcome, and raises `Unexpected` or any exception.
    """

    make: Callable[[random.Random], Any]
    read: Callable[[Any], str]
    close: Callable[[], None] = lambda: None


def media(folders: Folders, seeds: dict[str, bytes]) -> FileKind:
    """Videos and pictures, read by worker processes as in training and evaluation."""
    reader = FrameReader(workers=2, deadline=SECONDS / 2)

    def make(rng: random.Random) -> tuple[str, bytes]:
        name = rng.choice(sorted(seeds))
        return name, changed_bytes(seeds[name], rng)

    def read(case: tuple[str, bytes]) -> str:
        name, data = case
        path = folders.inside / f"case-{name}"
        path.write_bytes(data)
        try:
            found = reader.request(ReadTask(str(path), 4, PixelRules())).result()
            return "read" if len(found.frames) else "no frames"
        except VideoError as error:
            return refused(error, path)

    return FileKind(make, read, reader.close)


def refused(error: Exception, path: pathlib.Path) -> str:
    """Return the outcome of a refused case. Its message has to be one line that names the case."""
    text = str(error)
    if str(path) not in text or "\n" in text or len(text) > 600 + len(str(path)):
        raise Unexpected(f"not one short line that names the file: {text[:800]!r}")
    return f"refused ({type(error).__name__})"


def read_file(path: pathlib.Path, data: bytes, reader: Callable[[pathlib.Path], object]) -> str:
    """Write a case to a file and read it; return the outcome."""
    path.write_bytes(data)
    try:
        reader(path)
    except ValueError as error:
        return refused(error, path)
    return "read"


def rows(folders: Folders) -> FileKind:
    """Rows of training data."""
    seeds = [
        row
        for file in sorted((folders.folder / "published" / "annotations").glob("*.parquet"))
        for table in [open_table(file)]
        for row in read_table(table)
    ]
    vocabulary = folders.folder / "tokenizer"
    reading = ExampleReading(
        str(folders.inside), str(vocabulary), family().dialect, ProtocolSettings()
    )
    workers = Workers(functools.partial(read_example, reading), 1, SECONDS)
    hostile = hostile_values(folders)

    def make(rng: random.Random) -> dict[str, Any]:
        row = dict(rng.choice(seeds))
        if "messages" in row:
            messages = changed_value(json.loads(row["messages"]), rng, hostile)
            return {"messages": json.dumps(messages)}
        if rng.random() < 0.5:
            extra = changed_value(json.loads(row["extra_info"]), rng, hostile)
            return row | {"extra_info": json.dumps(extra)}
        return changed_value(row, rng, hostile)

    def read(row: dict[str, Any]) -> str:
        found = workers.submit(Example("case:0", "case", row)).result()
        return f"left out ({found.reason})" if found.record is None else "kept"

    return FileKind(make, read, workers.close)


def tables(folders: Folders) -> FileKind:
    """Parquet files of rows."""
    files = sorted((folders.folder / "published" / "annotations").glob("*.parquet"))
    seeds = [file.read_bytes() for file in files]

    def make(rng: random.Random) -> bytes:
        data = rng.choice(seeds)
        # Their header is at the end.
        return changed_bytes(data[::-1], rng)[::-1]

    def reader(path: pathlib.Path) -> None:
        for _ in read_table(open_table(path)):
            pass

    return FileKind(make, lambda data: read_file(folders.inside / "case.parquet", data, reader))


def archived(folders: Folders) -> FileKind:
    """Archives. What is unpacked must stay in the folder, and be at most 50 times as large."""
    members = {
        "a/b.mp4": random.Random(0).randbytes(20),
        "a/c.srt": b"1\n00:00:01,000 --> 00:00:02,000\nhello\n" * 20,
        "../outside/planted.mp4": b"planted",
        f"{folders.outside}/planted.mp4": b"planted",
    }
    seeds = []
    for count in (1, 2, 3, 4):
        stream = io.BytesIO()
        with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as file:
            for name, content in list(members.items())[:count]:
                file.writestr(name, content)
        seeds.append(stream.getvalue())

    def make(rng: random.Random) -> bytes:
        data = rng.choice(seeds)
        if rng.random() < 0.5:  # its directory is at the end
            return changed_bytes(data[::-1], rng)[::-1]
        return changed_bytes(data, rng)

    def read(data: bytes) -> str:
        source = folders.folder / "archives"
        target = folders.folder / "unpacked"
        shutil.rmtree(source, ignore_errors=True)
        shutil.rmtree(target, ignore_errors=True)
        source.mkdir()
        path = source / "case.zip"
        path.write_bytes(data)
        try:
            archives.unpack(path.name, source, target)
            outcome = "unpacked"
        except ArchiveError as error:
            outcome = refused(error, source)
        written = sum(file.stat().st_size for file in target.rglob("*") if file.is_file())
        links = [file for file in target.rglob("*") if file.is_symlink()]
        if written > 50 * len(data) + 2**20 or links:
            raise Unexpected(f"{written} bytes from {len(data)}, links {links}")
        if (folders.outside / "planted.mp4").exists():
            raise Unexpected("a file was written outside")
        return outcome

    return FileKind(make, read)


def weights(folders: Folders) -> FileKind:
    """Headers of safetensors files."""
    tensors = {"a": np.zeros((3, 2), np.float32), "b.weight": np.zeros((4, 1), np.float16)}
    types = {name: (x.dtype, x.shape) for name, x in tensors.items()}
    path = folders.inside / "case.safetensors"
    tensor_file.write(path, types, tensors.values())
    body = bytes(32)
    content = path.read_bytes().removesuffix(body)
    entries = json.loads(content[8:])
    hostile = hostile_values(folders)

    def make(rng: random.Random) -> bytes:
        if rng.random() < 0.5:
            return changed_bytes(content + body, rng)
        text = json.dumps(changed_value(entries, rng, hostile)).encode()
        return len(text).to_bytes(8, "little") + text + body

    return FileKind(make, lambda data: read_file(path, data, tensor_file.read_header))


def configurations(folders: Folders) -> FileKind:
    """config.json and the index of a model's folder."""
    config = to_hf(tiny(512))
    index = {"metadata": {}, "weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    hostile = hostile_values(folders)
    folder = folders.inside / "model"
    folder.mkdir(exist_ok=True)
    (folder / "model-1.safetensors").touch()
    (folder / "model-2.safetensors").touch()

    def make(rng: random.Random) -> tuple[str, bytes]:
        name, content = rng.choice((("config.json", config), ("index", index)))
        if rng.random() < 0.3:
            return name, changed_bytes(json.dumps(content).encode(), rng)
        text = json.dumps(changed_value(content, rng, hostile))
        return name, text.encode("utf-8", "surrogatepass")

    def read(case: tuple[str, bytes]) -> str:
        name, data = case
        if name == "config.json":
            return read_file(folder / name, data, from_hf)
        path = folder / "model.safetensors.index.json"
        path.write_bytes(data)
        try:
            model_folder.weights_files(folder)
            return "read"
        except (ValueError, FileNotFoundError) as error:
            return refused(error, folder)

    return FileKind(make, read)


def questions(folders: Folders) -> FileKind:
    """Files of questions, with subtitles."""
    seed = {
        "id": "a",
        "video": "own.mp4",
        "question": "What is it?",
        "options": ["a", "b"],
        "answer": "B",
        "subtitles": "own.srt",
        "evidence": [1, 2],
    }
    (folders.inside / "own.srt").write_text("1\n00:00:01,000 --> 00:00:02,000\nhello\n")
    hostile = hostile_values(folders)

    def make(rng: random.Random) -> bytes:
        rows = [seed, changed_value(seed | {"id": "b"}, rng, hostile)]
        text = "\n".join(json.dumps(row) for row in rows).encode()
        return changed_bytes(text, rng) if rng.random() < 0.5 else text

    def reader(path: pathlib.Path) -> None:
        try:
            read_questions(path, folders.inside)
        except ValueError as error:
            # All mistakes of a file are listed, one a line.
            raise ValueError(" ".join(str(error).split())[:600]) from error

    return FileKind(make, lambda data: read_file(folders.inside / "case.jsonl", data, reader))


# --- files to change ---


def write_seeds(folders: Folders, videos: pathlib.Path | None) -> dict[str, bytes]:
    """Write the folders, and return the media by name: small ones, and those of a folder."""
    for folder in (folders.inside, folders.outside, folders.folder / "tokenizer"):
        folder.mkdir(parents=True, exist_ok=True)
    private = folders.outside / "private.mp4"
    _write_video(private, "libx264")
    tokenizer_file.save(build_vocabulary(["a"], family().dialect), folders.folder / "tokenizer")
    _write_rows(folders.folder / "published" / "annotations")
    codecs = {"libx264": "mp4 mkv ts", "mpeg4": "mov avi", "mpeg2video": "mpg", "libvpx": "webm"}
    for codec, suffixes in codecs.items():
        for suffix in suffixes.split():
            _write_video(folders.inside / f"own.{suffix}", codec)
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (48, 64, 3), np.uint8))
    for suffix in ("png", "webp", "bmp"):
        picture.save(folders.inside / f"own.{suffix}")
    exif = Image.Exif()
    exif.update({_ORIENTATION: 6, _ARTIST: "somebody", _X_RESOLUTION: 72.0})
    picture.save(folders.inside / "own.jpg", exif=exif)
    # Files that refer to the private one.
    playlist = f"#EXTM3U\n#EXT-X-TARGETDURATION:5\n#EXTINF:5,\n{private}\n#EXT-X-ENDLIST\n"
    (folders.inside / "list.m3u8").write_text(playlist)
    (folders.inside / "list.mp4").write_text(f"ffconcat version 1.0\nfile '{private}'\n")
    dash = f"<?xml version='1.0'?><MPD><Period><BaseURL>{private}</BaseURL></Period></MPD>"
    (folders.inside / "list.mpd").write_text(dash)
    (folders.inside / "own.eps").write_text(f"%!PS-Adobe-3.0 EPSF-3.0\n({private}) (r) file\n")
    if not (folders.inside / "link.mp4").is_symlink():
        (folders.inside / "link.mp4").symlink_to(private)
    kept = ("own.*", "list.*")
    files = [file for pattern in kept for file in folders.inside.glob(pattern)]
    files += [file for file in videos.rglob("*") if file.is_file()] if videos else []
    return {file.name: file.read_bytes() for file in files if file.stat().st_size < 4 << 20}


def _write_rows(folder: pathlib.Path) -> None:
    """Write a question of each kind, and a demonstration on a video and one on a picture."""
    folder.mkdir(parents=True, exist_ok=True)
    answers = {"mcq": "A", "tvg": "[0.5, 1.5]", "oe": "noise"}
    questions = [
        Question(kind, "own.mp4", "What is shown?", QuestionKind(kind), answer, ("noise", "a cat"))
        for kind, answer in answers.items()
    ]
    records = [question_record(question) for question in questions]
    published_format.write_questions(folder / "paravt_rl_seeds.parquet", records)
    turn = f"{think('I look at two windows.')}{call('own.mp4', 0, 1)}\n{call('own.mp4', 1, 2)}"
    answer = say("assistant", conclude("It is noise.", "noise"))
    on_video = [
        say("system", published_format.SYSTEM_WITH_TOOL),
        say("user", show("own.mp4"), "The video is own.mp4. What is shown?"),
        say("assistant", turn),
        say("tool", "Noise."),
        say("tool", show("own.mp4"), "Noise."),
        answer,
    ]
    still = {"type": "image_url", "image_url": {"url": "own.png"}}
    on_picture = [say("user", still, "What is shown?"), answer]
    conversations = [on_video, on_picture]
    published_format.write_conversations(folder / "paravt_sft_seeds.parquet", conversations)


def _write_video(path: pathlib.Path, codec: str) -> None:
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=10)
        assert isinstance(stream, av.VideoStream)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        rng = np.random.default_rng(0)
        for _ in range(20):
            pixels = rng.integers(0, 256, (48, 64, 3), np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode(None))


# --- a run ---


@dataclasses.dataclass
class Outcome:
    """What happened to the cases of a kind."""

    outcomes: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    unexpected: list[str] = dataclasses.field(default_factory=list)
    seconds: float = 0.0
    slowest: float = 0.0


def run_kind(name: str, kind: FileKind, seed: int, cases: int, keep: pathlib.Path) -> Outcome:
    """Read all cases of a kind. Unexpected ones are written to the folder `keep`."""
    outcome = Outcome()
    begin = time.monotonic()
    for number in range(cases):
        case = kind.make(random.Random(f"{seed} {name} {number}"))
        start = time.monotonic()
        try:
            outcome.outcomes[kind.read(case)] += 1
        # Broad because anything else than the documented errors is what this looks for.
        except Exception as error:
            reason = f"{name} {number}: {type(error).__name__}: {str(error)[:300]}"
            outcome.unexpected.append(reason)
            keep.mkdir(exist_ok=True)
            (keep / f"{name}-{number}").write_text(repr(case))
        taken = time.monotonic() - start
        if taken > SECONDS:
            outcome.unexpected.append(f"{name} {number}: {taken:.0f} s")
        outcome.slowest = max(outcome.slowest, taken)
        if sys.stderr.isatty() and number % 50 == 0:
            print(f"\r{name} {number}/{cases}", end="", file=sys.stderr)
    kind.close()
    outcome.seconds = time.monotonic() - begin
    return outcome


def run(
    folder: pathlib.Path,
    kinds: Sequence[str] = tuple(CASES),
    cases: int | None = None,
    seed: int = 0,
    videos: pathlib.Path | None = None,
) -> dict[str, Outcome]:
    """Read cases of some kinds.

    Args:
        folder: for the files.
        kinds: names of the kinds, see `CASES`.
        cases: number of cases per kind; None: as in `CASES`.
        seed: of the changes.
        videos: a folder of further media to change, each of at most 4 MiB.
    """
    folders = Folders(folder.resolve())
    seeds = write_seeds(folders, videos)
    makers: dict[str, Callable[[], FileKind]] = {
        "media": lambda: media(folders, seeds),
        "rows": lambda: rows(folders),
        "tables": lambda: tables(folders),
        "archives": lambda: archived(folders),
        "weights": lambda: weights(folders),
        "configurations": lambda: configurations(folders),
        "questions": lambda: questions(folders),
    }
    keep = folder / "unexpected"
    return {
        name: run_kind(name, makers[name](), seed, CASES[name] if cases is None else cases, keep)
        for name in kinds
    }


# With -y, strace writes the file that was opened behind the new descriptor, without links.
_OPENED = re.compile(r"= \d+<([^>]+)>$")


def forbidden(trace: pathlib.Path, folders: Folders) -> list[str]:
    """Return the calls in the output of strace that read a private file, or connect to a server."""
    calls = []
    for line in trace.read_text(errors="replace").splitlines():
        opened = _OPENED.search(line)
        private = opened and opened[1].startswith(f"{folders.outside}/")
        # The command itself writes private files before the first case.
        if (private and "O_CREAT" not in line) or re.search(r"connect\(.*sin6?_port", line):
            calls.append(line[:200])
    return calls


def table(by_kind: dict[str, Outcome]) -> str:
    """Return a Markdown table with a line per kind."""
    lines = ["| files | cases | outcomes | unexpected | slowest | seconds |", "|---" * 6 + "|"]
    for name, kind in by_kind.items():
        outcomes = ", ".join(f"{count:,} {what}" for what, count in kind.outcomes.most_common())
        cases = sum(kind.outcomes.values()) + len(kind.unexpected)
        lines.append(
            f"| {name} | {cases:,} | {outcomes} | {len(kind.unexpected)} | {kind.slowest:.1f} s "
            f"| {kind.seconds:.0f} |"
        )
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--folder", type=pathlib.Path, help="keeps the files; default: temporary")
    parser.add_argument("--videos", type=pathlib.Path, help="a folder of further media")
    parser.add_argument("--kinds", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--cases", type=int, help="number of cases per kind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--strace", action="store_true", help="watch files and connections")
    asked = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as temporary:
        folder = asked.folder or pathlib.Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        if asked.strace:
            return _traced(asked, folder)
        outcomes = run(folder, asked.kinds, asked.cases, asked.seed, asked.videos)
    print(table(outcomes))
    peak = max(resource.getrusage(who).ru_maxrss for who in _WHOSE) / 2**20
    print(f"\nlargest process: {peak:.1f} GiB")
    unexpected = [reason for kind in outcomes.values() for reason in kind.unexpected]
    print("\n".join(unexpected))
    return 1 if unexpected else 0


_WHOSE = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)


def _traced(asked: argparse.Namespace, folder: pathlib.Path) -> int:
    """Return the same command under strace, and what it has seen."""
    trace = folder / "strace.txt"
    command = [*STRACE, "-o", str(trace), sys.executable, "-m", "benchmarks.foreign_files"]
    command += ["--folder", str(folder)]
    command += ["--seed", str(asked.seed), "--kinds", *asked.kinds]
    command += ["--cases", str(asked.cases)] if asked.cases is not None else []
    command += ["--videos", str(asked.videos)] if asked.videos else []
    code = subprocess.run(command, check=False).returncode
    calls = forbidden(trace, Folders(folder.resolve()))
    print(f"private files read, or connections made: {len(calls)}")
    print("\n".join(calls[:20]))
    return 1 if calls else code


if __name__ == "__main__":
    raise SystemExit(main())
