"""Prompt packs as folders: one small file per text, and `pack.toml` for the rest.

pack.toml                 name, order of turns, settings to play with, how models write
system.agentic.txt        the text "system.agentic"; a line break at its end is not part of it
question.mcq.txt
schemas.crop_video.json   a tool's schema
charades/question.tvg.txt replaces a text for one benchmark

Texts may also stand in pack.toml, under [texts], so that a small pack is one file.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import re
import tomllib
from typing import Any

from rollout.evaluation.benchmarks import BENCHMARKS
from rollout.evaluation.native_format import NativeFormat
from rollout.evaluation.packs import TURNS, PackError, TextPack, file_of
from rollout.evaluation.published_protocol import PLAY
from rollout.evaluation.settings import NOT_IDENTITY, BenchmarkSettings

FORMAT = 1
"""Version of the folder's layout."""

_FILE = "pack.toml"
_KEYS = ("format", "name", "turns", "play", "read", "texts")
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


def read_pack(folder: str | os.PathLike) -> TextPack:
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
        texts = about["texts"]
        for name, text in (_read_text(root, file) for file in _files(root)):
            if name in texts:
                raise PackError(f"{_FILE}: texts.{name}: is also in {file_of(name)}; remove one")
            texts[name] = text
        return TextPack(
            about.get("name", root.resolve().name),
            texts,
            about["turns"],
            about["play"],
            about["read"],
        )
    except PackError as error:
        raise PackError(f"--protocol {folder}: {error}") from error


def write_pack(pack: TextPack, folder: str | os.PathLike) -> None:
    """Write a pack into a new folder.

    Raises:
        PackError: there is something at `folder`, or it cannot be written.
    """
    root = pathlib.Path(folder)
    try:
        root.mkdir(parents=True)
        for name, text in pack.texts.items():
            file = root / file_of(name)
            file.parent.mkdir(exist_ok=True)
            file.write_bytes(f"{text}\n".encode())
        (root / _FILE).write_text(_about(root.resolve().name, pack), encoding="utf-8")
    except FileExistsError as error:
        raise PackError(f"--write-protocol {folder}: exists; name a new folder") from error
    except OSError as error:
        raise PackError(
            f"--write-protocol {folder}: cannot be written ({error}); name another folder"
        ) from error


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
    play = _table(about, "play")
    read = _native_format(_table(about, "read"))
    texts = _read_texts(_table(about, "texts"))
    return about | {"turns": turns, "play": _read_play(play), "read": read, "texts": texts}


def _read_texts(table: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """The texts of [texts] by name. `system.agentic = ...` is a table in TOML."""
    texts: dict[str, str] = {}
    for key, value in table.items():
        name = prefix + key
        if isinstance(value, dict):
            texts |= _read_texts(value, f"{name}.")
        elif isinstance(value, str):
            texts[name] = value.removesuffix("\n")
        else:
            raise PackError(f"{_FILE}: texts.{name}: {value!r}; give a text")
    return texts


def _native_format(read: dict[str, Any]) -> NativeFormat:
    ours = dataclasses.asdict(NativeFormat())
    for key, value in read.items():
        if key not in ours:
            raise PackError(f"{_FILE}: read.{key}: no such key; give {', '.join(ours)}")
        if type(value) is not type(ours[key]):
            wanted = "a text" if isinstance(ours[key], str) else f"a table, [read.{key}]"
            raise PackError(f"{_FILE}: read.{key}: {value!r}; give {wanted}")
    for key, tool in read.get("tools", {}).items():
        if not isinstance(tool, str):
            raise PackError(f"{_FILE}: read.tools.{key}: {tool!r}; give the name of a tool")
    for key, ours in read.get("arguments", {}).items():
        names = ours if isinstance(ours, list) else [ours]
        if not names or not all(isinstance(name, str) for name in names):
            raise PackError(
                f"{_FILE}: read.arguments.{key}: {ours!r}; give the name of an argument, or a "
                "list of names"
            )
    try:
        return NativeFormat(**read)
    except ValueError as error:
        raise PackError(f"{_FILE}: read.{error}") from error


def _toml_key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _toml(name)


def _toml(value: Any) -> str:
    """A number, boolean, text or list in TOML, which writes them as JSON does, but for two points.

    TOML has no pairs of surrogates as escapes, and wants U+007F escaped.
    """
    return json.dumps(value, ensure_ascii=False).replace("\x7f", r"\u007f")


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


def _about(name: str, pack: TextPack) -> str:
    lines = [f"format = {FORMAT}", f"name = {_toml(name)}", ""]
    read = pack.read.settings()
    tables = {"turns": pack.turns, "read": {k: x for k, x in read.items() if isinstance(x, str)}}
    tables |= {f"read.{key}": table for key, table in read.items() if isinstance(table, dict)}
    for benchmark, values in pack.play.items():
        tables["play" + (f".{benchmark}" if benchmark else "")] = values
    for table, values in tables.items():
        lines.append(f"[{table}]")
        lines += [f"{_toml_key(key)} = {_toml(value)}" for key, value in values.items()]
        lines.append("")
    return "\n".join(lines)
