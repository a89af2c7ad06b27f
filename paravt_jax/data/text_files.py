"""Reads the text files of users: subtitles and questions."""

from __future__ import annotations

import codecs
import os

from paravt_jax.data import foreign
from paravt_jax.data.foreign import ForeignFileError

# UTF-32 goes first: its little-endian mark begins with that of UTF-16.
_MARKS = {
    codecs.BOM_UTF8: "utf-8-sig",
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}


def read_text(path: str | os.PathLike, most: int = foreign.MOST_BYTES) -> str:
    """Read a file of UTF-8, or of what its byte order mark says. Lines end in "\\n".

    Raises:
        OSError: There is no such file, or it cannot be read.
        ForeignFileError: It has another encoding; see also `foreign.read_bytes`.
    """
    data = foreign.read_bytes(path, most)
    encoding = next((name for mark, name in _MARKS.items() if data.startswith(mark)), "utf-8")
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError as error:
        raise ForeignFileError(
            f"{path}: its text cannot be decoded ({error}); save it as UTF-8"
        ) from error
    # English text in UTF-16 without a mark is also UTF-8, with a NUL at every other character.
    if "\0" in text:
        raise ForeignFileError(f"{path}: has NUL characters; save it as UTF-8")
    return text.replace("\r\n", "\n").replace("\r", "\n")
