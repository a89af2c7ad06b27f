"""`--protocol`: opens prompt packs, reads and writes their folders, and plays as they say.

pack.toml                 name, order of turns, settings to play with
system.agentic.txt        the text "system.agentic"; a line break at its end is not part of it
question.mcq.txt
schemas.crop_video.json   a tool's schema
charades/question.tvg.txt replaces a text for one benchmark
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import tomllib
from collections.abc import Collection, Mapping
from typing import Any

from rollout.evaluation.benchmarks import BENCHMARKS
from rollout.evaluation.packs import TURNS, Pack, PackError, file_of, own_pack
from rollout.evaluation.published_protocol import PLAY
from rollout.evaluation.settings import NOT_IDENTITY, BenchmarkSettings

FORMAT = 1
"""Version of the folder's layout."""

_FILE = "pack.toml"
_KEYS = ("format", "name", "turns", "play")
_LIKE = "like"  # the key of [play] that begins with the settings of another protocol
_MOST_BYTES = 1 << 20
# What is scored and where is no matter of a protocol.
_NOT_PLAYED = (*NOT_IDENTITY, "benchmark", "open_ended", "judge", "judge_model", "dtype", "seed")
PLAYED = {
    field.name: field.default
    for field in dataclasses.fields(BenchmarkSettings)
    if field.name not in _NOT_PLAYED
}
"""Settings that a pack may decide, with their defaults."""


def open_pack(name: str) -> Pack:
    """Open this project's own pack, or the one in a folder.

    Raises:
        PackError: it cannot be used, or is the release's, which only the command opens.
    """
    if name == "published":
        raise PackError(
            "--protocol published: only the command `paravt evaluate` opens it; use the command, "
            "or pass pack="
        )
    return own_pack() if name == "own" else read_pack(name)


def read_pack(folder: str | os.PathLike) -> Pack:
    """Read a pack.

    Raises:
        PackError: a file is missing, unreadable, unknown or wrong.
    """
    root = pathlib.Path(folder)
    if not root.is_dir():
        raise PackError(
            f"--protocol {folder}: no such folder; give own, published, or the folder "
            "of a pack (--write-protocol writes one)"
        )
    try:
        about = _read_about(root / _FILE)
        texts = dict(_read_text(root, file) for file in _files(root))
        name = about.get("name", root.resolve().name)
        return Pack(name, texts, about["turns"], about["play"])
    except PackError as error:
        raise PackError(f"--protocol {folder}: {error}") from error


def write_pack(pack: Pack, folder: str | os.PathLike) -> None:
    """Write a pack into a new folder.

    Raises:
        PackError: there is something at `folder`, or it cannot be written.
    """
    root = pathlib.Path(folder)
    lines = [f"format = {FORMAT}", f"name = {_toml(root.resolve().name)}", ""]
    tables: dict[str, Mapping[str, Any]] = {"turns": pack.turns}
    for benchmark, values in pack.play.items():
        tables[f"play.{benchmark}" if benchmark else "play"] = values
    for table, values in tables.items():
        lines += [f"[{table}]", *(f"{key} = {_toml(x)}" for key, x in values.items()), ""]
    try:
        root.mkdir(parents=True)
        for name, text in pack.texts.items():
            file = root / file_of(name)
            file.parent.mkdir(exist_ok=True)
            file.write_bytes(f"{text}\n".encode())
        (root / _FILE).write_text("\n".join(lines), encoding="utf-8")
    except FileExistsError as error:
        raise PackError(f"--write-protocol {folder}: exists; name a new folder") from error
    except OSError as error:
        raise PackError(
            f"--write-protocol {folder}: cannot be written ({error}); name another folder"
        ) from error


def as_the_pack_plays(
    settings: BenchmarkSettings, pack: Pack, given: Collection[str] = ()
) -> BenchmarkSettings:
    """Return the settings with the values that the pack decides.

    Args:
        settings: the user's settings.
        pack: the pack.
        given: fields that the user gave, so that a default value among them is no accident.

    Raises:
        PackError: the user wants something else than the pack, in a field that is not open.
    """
    decided = dict(pack.style(settings.benchmark, settings.prompt))
    for name, wanted in decided.items():
        decided[name] = wanted = tuple(wanted) if isinstance(wanted, list) else wanted
        value = getattr(settings, name)
        # Models are trained with different prompts, and some families cannot be shown a native
        # video.
        is_open = name == "prompt" or (name == "native_video" and not value)
        if name in given and is_open:
            decided[name] = value
        elif value != wanted and (value != PLAYED[name] or name in given):
            flag = f"--{name.replace('_', '-')}"
            remedy = "give another protocol"
            if pack.name == "published":
                remedy = "write the pack as a folder (--write-protocol) and change [play] there"
            raise PackError(
                f"{flag} {value}: --protocol {pack.name} plays with {wanted}; "
                f"leave {flag} out, or {remedy}"
            )
    return dataclasses.replace(settings, **decided)


# --- files ---


def _files(root: pathlib.Path) -> list[pathlib.Path]:
    """All files of a pack but pack.toml. Hidden files and README files are skipped."""
    found = []
    for file in sorted(root.rglob("*")):
        local = file.relative_to(root)
        if any(part.startswith(".") for part in local.parts) or file.is_dir():
            continue
        if local.stem != "README" and local != pathlib.Path(_FILE):
            found.append(file)
    return found


def _read_text(root: pathlib.Path, file: pathlib.Path) -> tuple[str, str]:
    """A text's name and content."""
    local = file.relative_to(root)
    name = local.with_suffix("").as_posix()
    if local.as_posix() != file_of(name):
        raise PackError(
            f"{local}: not a text of a pack; rename it to {file_of(name)}, or remove it"
        )
    text = _read(file, str(local))
    return name, text.removesuffix("\n")


def _read(file: pathlib.Path, name: str) -> str:
    try:
        if file.stat().st_size > _MOST_BYTES:
            raise PackError(f"{name}: has more than 1 MiB; shorten it")
        return file.read_bytes().decode("utf-8").replace("\r\n", "\n")
    except FileNotFoundError as error:
        raise PackError(
            f"{name}: missing; write it, or start from a copy of ours (--write-protocol)"
        ) from error
    except UnicodeDecodeError as error:
        raise PackError(f"{name}: is not UTF-8 ({error.reason}); save it as UTF-8") from error
    except OSError as error:
        raise PackError(f"{name}: cannot be read ({error.strerror}); make it readable") from error


# --- pack.toml ---


def _read_about(file: pathlib.Path) -> dict[str, Any]:
    try:
        about = tomllib.loads(_read(file, _FILE))
    except tomllib.TOMLDecodeError as error:
        raise PackError(f"{_FILE}: not TOML ({error}); correct it") from error
    for key in about:
        if key not in _KEYS:
            raise PackError(f"{_FILE}: {key}: no such key; give {', '.join(_KEYS)}")
    if about.get("format") != FORMAT:
        raise PackError(f"{_FILE}: format: {about.get('format')!r}; this version reads {FORMAT}")
    name = about.get("name", "pack")
    if not isinstance(name, str) or not name.strip() or "\n" in name:
        raise PackError(f"{_FILE}: name: {name!r}; give one line of text")
    turns = _table(about, "turns")
    for key, value in turns.items():
        if key not in TURNS:
            raise PackError(f"{_FILE}: turns.{key}: no such key; give {', '.join(TURNS)}")
        if not isinstance(value, bool):
            raise PackError(f"{_FILE}: turns.{key}: {value!r}; give true or false")
    return about | {"turns": turns, "play": _read_play(_table(about, "play"))}


def _table(about: dict[str, Any], key: str) -> dict[str, Any]:
    value = about.get(key, {})
    if not isinstance(value, dict):
        raise PackError(f"{_FILE}: {key}: {value!r}; give a table, [{key}]")
    return value


def _read_play(play: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Settings by benchmark: [play] is for all of them, [play.charades] for one.

    `like = "published"` begins with those of the protocol behind the paper's numbers.
    """
    found: dict[str, dict[str, Any]] = {}
    if _LIKE in play:
        if play[_LIKE] != "published":
            raise PackError(f"{_FILE}: play.{_LIKE}: {play[_LIKE]!r}; give published, or remove it")
        found[""] = dict(PLAY)
    for key, value in play.items():
        if key == _LIKE:
            continue
        benchmark, values = (key, value) if isinstance(value, dict) else ("", {key: value})
        if benchmark and benchmark not in BENCHMARKS:
            raise PackError(
                f"{_FILE}: play.{benchmark}: no such benchmark; give one of {', '.join(BENCHMARKS)}"
            )
        for field, given in values.items():
            place = f"{_FILE}: play.{benchmark + '.' if benchmark else ''}{field}"
            found.setdefault(benchmark, {})[field] = _checked(place, field, given)
    return found


def _checked(place: str, field: str, value: Any) -> Any:
    if field not in PLAYED:
        raise PackError(f"{place}: a pack does not decide this; give {', '.join(PLAYED)}")
    default = PLAYED[field]
    if isinstance(default, tuple) and isinstance(value, list):
        return value
    kinds = str if default is None else (int, float) if type(default) is float else type(default)
    if not isinstance(value, kinds) or isinstance(value, bool) != isinstance(default, bool):
        raise PackError(f"{place}: {value!r}; give a value such as {default!r}")
    return value


def _toml(value: Any) -> str:
    """A number, boolean, text or list in TOML, which writes them as JSON does, but for two points.

    TOML has no pairs of surrogates as escapes, and wants U+007F escaped.
    """
    return json.dumps(value, ensure_ascii=False).replace("\x7f", r"\u007f")
