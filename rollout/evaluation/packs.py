"""Prompt packs: the words in which an evaluation asks, and how it plays with them.

A pack is this project's own wording, a user's folder (`pack_folder`), or what the paper's release
says (`paravt_extras.release`).
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import pathlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, get_args

from paravt_jax.method.protocol import subtitle_texts
from paravt_jax.method.records import QuestionKind, Subtitle
from paravt_jax.method.tools.crop_video import CropVideo
from paravt_jax.method.tools.search_subtitles import SearchSubtitles
from paravt_jax.method.wording import OUR_WORDING, PLACEHOLDER, Prompt, Wording, fill
from rollout.evaluation.benchmarks import BENCHMARKS, BrokenRow, Item

PROMPTS: tuple[Prompt, ...] = get_args(Prompt)
SINGLE_TURN: tuple[Prompt, ...] = ("direct", "reasoning")
"""Prompts that offer no tool."""

PLACEHOLDERS: Mapping[str, tuple[str, ...]] = {
    "system": ("hints", "tools"),
    "system_alone": (),
    "system_pictures": (),
    "question": ("question", "options", "video", "raw_options"),  # and row.COLUMN
    "option": ("letter", "option"),
    "between_options": (),
    "subtitled": ("subtitles", "spoken", "question"),
    "subagent": ("start", "end", "question"),
    "answer_now": (),
    "window": ("count", "start", "end", "note"),
    "shown": ("frames", "response"),
    "hints": (),
    "schemas": (),
}
"""The texts of a pack, and the placeholders that each may have."""

KEYED = ("system", "system_alone", "question", "hints", "schemas")
"""Texts with keys: a prompt, a kind of question, or a tool."""

_NEEDED: Mapping[str, tuple[str, ...]] = {
    "system": ("tools",),
    "question": ("question",),
    "option": ("option",),
    "subtitled": ("question",),
    "shown": ("frames",),
}
"""The placeholders without which a text would hide what it is for."""

TURNS = ("text_first", "responses_apart")
"""Fields of `Wording` that are no texts."""

_FORBIDDEN = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
_REQUIRED = frozenset(("option", "subtitled", "subagent", "answer_now"))
_WRITE = "write it, or copy ours (--write-protocol)"


class PackError(ValueError):
    """A pack cannot be used; the message is one line for people."""


@dataclasses.dataclass(frozen=True)
class Pack:
    """Named texts, and the settings that belong to them.

    A text's name is its field and key ("system.agentic", "option"). A question may also be worded
    by kind and prompt ("question.mcq.direct"). Texts under "BENCHMARK/NAME" replace those under
    NAME for one benchmark.

    Raises:
        PackError: a text is missing, unknown, or has a placeholder that it cannot have.
    """

    name: str
    """Name in tables and in config.json."""
    texts: Mapping[str, str]
    """The texts by name."""
    turns: Mapping[str, bool] = dataclasses.field(default_factory=dict)
    """Values of `TURNS`."""
    play: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    """Settings to play with (`BenchmarkSettings`) by benchmark; "" for all. A user who gives
    another value for one of them gets an error."""
    differences: tuple[str, ...] = ()
    """How it still differs from the protocol that it stands for, as phrases."""

    def __post_init__(self):
        for name, text in self.texts.items():
            check_text(name, text)
        missing = sorted(_REQUIRED - self.texts.keys())
        if missing:
            raise PackError(f"{file_of(missing[0])}: missing; {_WRITE}")

    @functools.cached_property
    def digest(self) -> str:
        """Hash of everything that the pack says and decides, as 32 hexadecimal digits."""
        content = [dict(self.texts), dict(self.turns), {k: dict(v) for k, v in self.play.items()}]
        text = json.dumps(content, sort_keys=True, ensure_ascii=False)
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]

    def wording(self, benchmark: str, prompt: Prompt) -> Wording:
        """Return the texts for one benchmark ("" for a user's own questions) and prompt."""
        keyed: dict[str, dict[str, str]] = {field: {} for field in KEYED}
        fields: dict[str, Any] = {"system_pictures": "", **self.turns}
        for name, text in self._texts(benchmark).items():
            field, _, key = name.partition(".")
            if field in KEYED:
                keyed[field][key] = text
            else:
                fields[field] = text
        asked = keyed["question"]
        questions = {
            kind: asked.get(f"{kind}.{prompt}", asked.get(kind, ""))
            for kind in QuestionKind
            if {kind, f"{kind}.{prompt}"} & asked.keys()
        }
        if not questions:
            raise PackError(
                f"has no wording for questions of {benchmark or 'your own'}; "
                "give another protocol, or a split that it words"
            )
        return Wording(
            system=keyed["system"],
            system_alone=keyed["system_alone"],
            question=questions,
            hints=keyed["hints"],
            schemas={tool: json.loads(text) for tool, text in keyed["schemas"].items()},
            **fields,
        )

    def check(
        self, benchmark: str, prompt: Prompt, items: Sequence[Item], tools: Collection[str]
    ) -> None:
        """Check that the pack has what the run needs, before the model is loaded.

        Args:
            benchmark: name of the benchmark; "" for a user's own questions.
            prompt: the kind of prompt.
            items: the questions.
            tools: names of the tools that prompts offer.

        Raises:
            PackError: it lacks something. The message does not name the pack.
        """
        wording = self.wording(benchmark, prompt)
        systems = wording.system if tools else wording.system_alone
        if prompt not in systems:
            file = file_of(f"{'system' if tools else 'system_alone'}.{prompt}")
            raise PackError(f"{file}: missing; {_WRITE}, or give another --prompt")
        rows: dict[QuestionKind, list[Mapping[str, Any]]] = {}
        for item in items:
            rows.setdefault(item.question.kind, []).append(item.row)
        for kind, of_kind in rows.items():
            if kind not in wording.question:
                raise PackError(f"{file_of(f'question.{kind}')}: missing; {_WRITE}")
            _check_columns(f"question.{kind}", wording.question[kind], of_kind)
        if tools:
            known = {*tools, CropVideo.name, SearchSubtitles.name}
            for name in self._texts(benchmark):
                field, _, tool = name.partition(".")
                if field in ("hints", "schemas") and tool not in known:
                    names = ", ".join(sorted(known))
                    raise PackError(f"{file_of(name)}: no such tool; rename it to one of {names}")

    def question(
        self,
        benchmark: str,
        prompt: Prompt,
        item: Item,
        subtitles: Sequence[Subtitle],
        filled: Callable[..., str] = fill,
    ) -> str:
        """Return the whole text of one question; "" leaves it to the wording.

        Args:
            benchmark: name of the benchmark; "" for a user's own questions.
            prompt: the kind of prompt.
            item: the question. `item.row` is its published row.
            subtitles: the subtitles that the prompt is to show.
            filled: fills in templates, as `fill` does, and makes the values safe.

        Raises:
            BrokenRow: the pack cannot ask this row.
        """
        wording = self.wording(benchmark, prompt)
        asked = item.question
        if asked.kind not in wording.question:
            raise BrokenRow(f"the protocol has no wording for questions of kind {asked.kind}")
        template = wording.question[asked.kind]
        wanted = PLACEHOLDER.findall(template)
        if not any(map(_reads_row, wanted)):
            return ""
        values = {
            "question": asked.text,
            "options": wording.listed([option.strip() for option in asked.options]),
            "video": pathlib.PurePosixPath(asked.video).name,
            "raw_options": wording.listed(raw_options(item.row)),
        }
        columns = {name: _column(item.row, name) for name in wanted if name.startswith("row.")}
        if subtitles:
            template = wording.subtitled.replace("{question}", template)
            values |= subtitle_texts(subtitles)
        return filled(template, **values, **columns)

    def style(self, benchmark: str, prompt: Prompt) -> Mapping[str, Any]:
        """Return how the pack plays: values of `BenchmarkSettings` by field."""
        values = {**self.play.get("", {}), **self.play.get(benchmark, {})}
        if prompt in SINGLE_TURN:  # a baseline's prompt; it offers no tool to dispatch
            values = {k: v for k, v in values.items() if k not in ("prompt", "dispatch")}
        return values

    def _texts(self, benchmark: str) -> dict[str, str]:
        """The texts for a benchmark. Its own wording of a kind replaces all shared ones."""
        prefix = f"{benchmark}/"
        shared = {name: text for name, text in self.texts.items() if "/" not in name}
        own = {
            name.removeprefix(prefix): text
            for name, text in self.texts.items()
            if name.startswith(prefix)
        }
        replaced = tuple(f"{name}." for name in own if name.startswith("question."))
        return {n: t for n, t in shared.items() if not n.startswith(replaced)} | own


def own_pack() -> Pack:
    """Return this project's wording."""
    texts: dict[str, str] = {}
    for field in PLACEHOLDERS:
        value = getattr(OUR_WORDING, field)
        if isinstance(value, str):
            texts[field] = value
            continue
        for key, text in value.items():
            texts[f"{field}.{key}"] = json.dumps(text) if field == "schemas" else text
    return Pack("own", texts, {name: False for name in TURNS})


# --- rows ---


def raw_options(row: Mapping[str, Any]) -> list[str]:
    """Return the options of a published row as its data set writes them, letters included."""
    for column in ("options", "candidates", "choices"):
        found = row.get(column)
        if isinstance(found, dict):
            found = [found[key] for key in sorted(found)]
        if isinstance(found, list | tuple) and found:
            return [str(option) for option in found if option not in (None, "")]
    numbered = (row.get(f"option{number}") for number in range(10))
    return [str(option) for option in numbered if option not in (None, "", "N/A")]


def _reads_row(placeholder: str) -> bool:
    return placeholder == "raw_options" or placeholder.startswith("row.")


def _column(row: Mapping[str, Any], placeholder: str) -> str:
    column = placeholder.removeprefix("row.")
    value = row.get(column)
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise BrokenRow(f"{column} is missing, which the protocol's question shows")
    return str(value)


def _check_columns(name: str, template: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Check that at least one row has each column of a question's template."""
    for placeholder in PLACEHOLDER.findall(template):
        column = placeholder.removeprefix("row.")
        if column != placeholder and not any(column in row for row in rows):
            columns = ", ".join(rows[0]) or "none, your own questions have no published row"
            raise PackError(
                f"{file_of(name)}: {{{placeholder}}}: no row has this column; there are {columns}"
            )


# --- texts ---


def is_schema(name: str) -> bool:
    """Return whether a text is a tool's schema, which is JSON."""
    return name.rpartition("/")[2].startswith("schemas.")


def file_of(name: str) -> str:
    """Return the file of a text in a pack's folder."""
    return f"{name}.{'json' if is_schema(name) else 'txt'}"


def check_text(name: str, text: str) -> None:
    """Check a text's name and its placeholders. Raises PackError, without the pack's name."""
    file = file_of(name)
    benchmark, slash, local = name.rpartition("/")
    field, _, key = local.partition(".")
    if slash and benchmark not in BENCHMARKS:
        raise PackError(
            f"{file}: {benchmark!r} is no benchmark; give one of {', '.join(BENCHMARKS)}"
        )
    if not _is_known(field, key):
        raise PackError(
            f"{file}: no such text; the texts are {', '.join(PLACEHOLDERS)}, with the keys that "
            "docs/evaluation.md lists"
        )
    if field == "schemas":
        _check_schema(file, key, text)
        return
    found = PLACEHOLDER.findall(text)
    allowed = PLACEHOLDERS[field]
    for placeholder in found:
        if placeholder in allowed or (field == "question" and placeholder.startswith("row.")):
            continue
        names = ", ".join(f"{{{one}}}" for one in allowed) or "none"
        raise PackError(
            f"{file}: {{{placeholder}}} is no placeholder of this text, which may have {names}; "
            "correct its name, or leave it out"
        )
    for special in _FORBIDDEN:
        if special in text:
            raise PackError(
                f"{file}: has {special}, which stands for a frame; leave it out, frames are "
                "placed by the protocol"
            )
    # Columns of the row may hold the question and its options; without a text, there is no system
    # turn.
    if not any(one.startswith("row.") for one in found) and (text or field != "system"):
        _check_needed(file, field, key, found)


def _is_known(field: str, key: str) -> bool:
    """Whether there may be a text of this field and key."""
    if field in ("hints", "schemas"):
        return bool(key)
    if field == "question":
        kind, dot, prompt = key.partition(".")
        return kind in tuple(QuestionKind) and (not dot or prompt in PROMPTS)
    if field in KEYED:
        return key in PROMPTS
    return field in PLACEHOLDERS and not key


def _check_needed(file: str, field: str, key: str, found: Sequence[str]) -> None:
    """Check that a text shows what it is for: a question its words and options, and so on."""
    needed: list[tuple[str, ...]] = [(name,) for name in _NEEDED.get(field, ())]
    if field == "question" and key.partition(".")[0] == QuestionKind.MULTIPLE_CHOICE:
        needed.append(("options", "raw_options"))
    for names in needed:
        if not set(names) & set(found):
            wanted = " or ".join(f"{{{name}}}" for name in names)
            raise PackError(f"{file}: lacks {wanted}, which the model must see; write it there")


def _check_schema(file: str, tool: str, text: str) -> None:
    try:
        schema = json.loads(text)
        named = schema["type"] == "function" and schema["function"]["name"] == tool
    except (ValueError, RecursionError, TypeError, KeyError):
        named = False
    if not named:
        raise PackError(
            f'{file}: no schema of a tool; give JSON with "type": "function" and a "function" of '
            f"the name {tool!r}"
        )
