"""`--wording`: a folder of texts that replace this project's wording in an evaluation.

system.agentic.txt   the text "agentic" of `Wording.system`
question.mcq.txt     a question of multiple choice
option.txt           `Wording.option`

A line break at the end of a file is not part of its text. A text that the folder lacks is ours.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import pathlib
from typing import Any

from paravt_jax.method.records import QuestionKind
from paravt_jax.method.tokenizer import Dialect
from paravt_jax.method.wording import OUR_WORDING, PLACEHOLDER, Wording

# The placeholders that a text needs, because the model must see what they stand for, and those that
# it may have.
_PLACEHOLDERS: dict[str, tuple[set[str], set[str]]] = {
    "system": ({"tools"}, {"hints", "request"}),
    f"question.{QuestionKind.MULTIPLE_CHOICE}": ({"question", "options"}, {"video"}),
    "question": ({"question"}, {"video"}),
    "option": ({"option"}, {"letter"}),
    "subtitled": ({"question"}, {"subtitles", "spoken"}),
    "subagent": (set(), {"start", "end", "question"}),
    "window": (set(), {"count", "start", "end", "note"}),
}


def read_wording(folder: pathlib.Path, dialect: Dialect) -> Wording:
    """Read a folder of texts for models with this dialect.

    Raises:
        ValueError: the folder is missing, or a text is unknown, unreadable, or lacks a placeholder.
    """
    if not folder.is_dir():
        raise ValueError(
            f"--wording {folder}: no such folder; write ours with --write-wording, and change it"
        )
    texts = _texts(OUR_WORDING)
    for file in sorted(folder.glob("*.txt")):
        if file.stem not in texts:
            raise ValueError(f"{file}: no such text; the texts are {', '.join(texts)}")
        try:
            text = file.read_text(encoding="utf-8").removesuffix("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{file}: cannot be read ({error}); save it as UTF-8") from error
        _check(file, text, dialect)
        texts[file.stem] = text
    return _wording(texts)


def write_wording(folder: pathlib.Path) -> None:
    """Write this project's wording into a new folder, one file per text."""
    if folder.exists():
        raise ValueError(f"--write-wording {folder}: exists; name a new folder")
    folder.mkdir(parents=True)
    for name, text in _texts(OUR_WORDING).items():
        (folder / f"{name}.txt").write_text(f"{text}\n", encoding="utf-8")


def digest(wording: Wording) -> str:
    """Return the hash of all texts, as 32 hexadecimal digits."""
    text = json.dumps(_texts(wording), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _texts(wording: Wording) -> dict[str, str]:
    """Return all texts by name: "option", or with a key, "system.agentic"."""
    texts: dict[str, str] = {}
    for field, value in dataclasses.asdict(wording).items():
        named = {"": value} if isinstance(value, str) else value
        texts |= {f"{field}.{key}".removesuffix("."): text for key, text in named.items()}
    return texts


def _wording(texts: dict[str, str]) -> Wording:
    """Return the opposite of `_texts`."""
    fields: dict[str, Any] = {}
    for name, text in texts.items():
        field, _, key = name.partition(".")
        fields[field] = fields.get(field, {}) | {key: text} if key else text
    questions = {QuestionKind(kind): text for kind, text in fields.pop("question").items()}
    return Wording(**fields, question=questions)


def _check(file: pathlib.Path, text: str, dialect: Dialect) -> None:
    """Raise ValueError if a text has unknown placeholders, or lacks one that the model must see."""
    field = file.stem.partition(".")[0]
    nothing: tuple[set[str], set[str]] = (set(), set())
    needed, optional = _PLACEHOLDERS.get(file.stem, _PLACEHOLDERS.get(field, nothing))
    found = set(PLACEHOLDER.findall(text))
    for name in sorted(needed - found):
        raise ValueError(f"{file}: lacks {{{name}}}, which the model must see; write it there")
    for name in sorted(found - needed - optional):
        allowed = ", ".join(f"{{{name}}}" for name in sorted(needed | optional)) or "none"
        raise ValueError(
            f"{file}: {{{name}}} is no placeholder of this text, which may have {allowed}; "
            "correct its name, or leave it out"
        )
    for special in filter(text.__contains__, dialect.visual.values()):
        raise ValueError(
            f"{file}: has {special}, which stands for a frame; leave it out, the protocol places "
            "frames"
        )
