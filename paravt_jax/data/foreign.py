"""Reads small files that come from strangers: model folders, tables, subtitles.

They are read whole, so their size is limited. Whatever is wrong with one ends in a single line that
names it. Media are opened by `media_files`, archives by `archives`.
"""

from __future__ import annotations

import io
import json
import os
import re
import stat
from typing import Any

from paravt_jax.method.records import Subtitle

MOST_BYTES = 64 << 20
"""Upper bound on a file's size. The largest such file of a model, its tokenizer, has 11 MB."""

_LFS = b"version https://git-lfs.github.com/spec/"
_STAMP = r"(?:([0-9]{1,4}):)?([0-9]{1,4}):([0-9]{1,4}(?:[.,][0-9]{1,6})?)"
# Some files have a position on the screen after the times.
_TIMES = re.compile(rf"^[ \t]*{_STAMP}[ \t]*-->[ \t]*{_STAMP}(?:[ \t].*)?\r?$", re.MULTILINE)
# "{\an8}" puts a line at the top of the screen.
_MARKUP = re.compile(r"</?[A-Za-z][^<>]*>|\{\\[^{}]*\}")


class ForeignFileError(ValueError):
    """A file cannot be used; the message is one line that names it, the reason and the remedy."""


def read_bytes(path: str | os.PathLike, most: int = MOST_BYTES) -> bytes:
    """Read a whole file.

    Raises:
        OSError: There is no such file, or it cannot be read.
        ForeignFileError: It is too large; see also `open_regular`.
    """
    with open_regular(path) as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise ForeignFileError(f"{path}: larger than {most / 1e6:,.0f} MB; give the right file")
    return data


def open_regular(path: str | os.PathLike) -> io.BufferedReader:
    """Open a file to read.

    Raises:
        OSError: There is no such file, it is a folder, or it cannot be read.
        ForeignFileError: It is a pipe or a device, which may never end, or a pointer of git-lfs to
            the real file.
    """
    mode = os.stat(path).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise ForeignFileError(f"{path}: no regular file; give the right file")
    file = open(path, "rb")
    if file.peek(len(_LFS)).startswith(_LFS):
        file.close()
        raise ForeignFileError(
            f"{path}: only a pointer of git-lfs, not the file itself; run git lfs pull there, or "
            "download the folder with hf download"
        )
    return file


def read_object(path: str | os.PathLike, remedy: str = "fetch it again") -> dict[str, Any]:
    """Read a file that contains a JSON object.

    Args:
        path: The file.
        remedy: What a user can do about a damaged one.

    Raises:
        OSError: There is no such file, or it cannot be read.
        ForeignFileError: It is too large, not JSON, or no object.
    """
    data = read_bytes(path)
    try:
        content = json.loads(data)
    # ValueError: not UTF-8 or not JSON. RecursionError: nested too deeply.
    except (ValueError, RecursionError) as error:
        raise ForeignFileError(f"{path}: not JSON ({shortened(error)}); {remedy}") from error
    if not isinstance(content, dict):
        kind = type(content).__name__
        raise ForeignFileError(f"{path}: holds a {kind}, not a JSON object; {remedy}")
    return content


def shortened(error: Exception | str, most: int = 100) -> str:
    """Return a message in one line of at most `most` characters. Errors may quote a file's
    content."""
    text = " ".join(str(error).split())
    return text if len(text) <= most else f"{text[: most - 3]}..."


def read_text(path: str | os.PathLike, most: int = MOST_BYTES) -> str:
    """Read a file of UTF-8. Lines end in "\\n".

    Raises:
        OSError: There is no such file, or it cannot be read.
        ForeignFileError: It has another encoding; see also `read_bytes`.
    """
    try:
        text = read_bytes(path, most).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ForeignFileError(
            f"{path}: its text cannot be decoded ({error}); save it as UTF-8"
        ) from error
    # English text in UTF-16 is also UTF-8, with a NUL at every other character.
    if "\0" in text:
        raise ForeignFileError(f"{path}: has NUL characters; save it as UTF-8")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def read_srt(file: str | os.PathLike[str]) -> list[Subtitle]:
    """Read the entries of a SubRip file; see `parse_srt`.

    Raises:
        OSError: There is no such file, or it cannot be read.
        ForeignFileError: It is not UTF-8, or it has text but no line of times.
    """
    text = read_text(file)
    if text.strip() and not _TIMES.search(text):
        raise ForeignFileError(
            f"{file}: has no line of times such as 00:01:13,500 --> 00:01:15,000; give an .srt file"
        )
    return parse_srt(text)


def parse_srt(text: str) -> list[Subtitle]:
    """Read the entries of a SubRip file's text, in the order of the file.

        12
        00:01:13,500 --> 00:01:15,000
        <i>Add the yeast</i>

    An entry ends at the next line of times, so it may contain blank lines. Text above the first
    line of times is skipped. Markup and entries without words are dropped. No text makes this
    raise.
    """
    entries = []
    times = list(_TIMES.finditer(text))
    ends = [following.start() for following in times[1:]]
    for match, end in zip(times, [*ends, None], strict=False):
        lines = text[match.end() : end].split("\n")
        # The number of the next entry is directly above its times.
        if end is not None and lines[-2].strip().isdecimal():
            lines[-2] = ""
        stripped = [_MARKUP.sub("", line).strip() for line in lines]
        words = "\n".join(line for line in stripped if line)
        if words:
            begin, finish = _seconds(*match.group(1, 2, 3)), _seconds(*match.group(4, 5, 6))
            entries.append(Subtitle(begin, finish, words))
    return entries


def _seconds(hours: str | None, minutes: str, seconds: str) -> float:
    return int(hours or 0) * 3600 + int(minutes) * 60 + float(seconds.replace(",", "."))
