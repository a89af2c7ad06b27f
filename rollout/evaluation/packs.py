"""Prompt packs: the words in which an evaluation asks, and how it plays with them.

`PromptPack` is the interface. `TextPack` is a pack of named texts: this project's own wording, a
folder of a user's (`pack_folder`), or what another evaluator's files say (`release`).
"""

from __future__ import annotations

import abc
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
from rollout.evaluation.benchmarks import BENCHMARKS, BrokenRow, Item, VideoFolder
from rollout.evaluation.native_format import NativeFormat

PROMPTS: tuple[Prompt, ...] = get_args(Prompt)
SINGLE_TURN: tuple[Prompt, ...] = ("direct", "reasoning")
"""Prompts that offer no tool."""

PLACEHOLDERS: Mapping[str, tuple[str, ...] | None] = {
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
    "schemas": None,
}
"""The placeholders that the texts of a field may have; None: it is JSON and has none."""

KEYED: Mapping[str, tuple[str, ...]] = {
    "system": PROMPTS,
    "system_alone": PROMPTS,
    "question": tuple(QuestionKind),
    "hints": (),
    "schemas": (),
}
"""Fields with several texts, and their keys; hints and schemas are keyed by the tool's name."""

_NEEDED: Mapping[str, tuple[str, ...]] = {
    "system": ("tools",),
    "question": ("question",),
    "option": ("option",),
    "subtitled": ("question",),
    "shown": ("frames",),
}
"""The placeholders without which the texts of a field would hide what they are for."""

TURNS = ("text_first", "responses_apart")
"""Fields of `Wording` that are no texts."""

_FORBIDDEN = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")


class PackError(ValueError):
    """A pack cannot be used; the message is one line for people."""


class PromptPack(abc.ABC):
    """The words of an evaluation, and the settings that belong to them."""

    name: str
    """Name in tables and in config.json."""
    digest: str
    """Hash of everything that the pack says and decides."""
    prompt: Prompt | None = None
    """The kind of prompt if the user gives none; None leaves it to the settings."""

    @abc.abstractmethod
    def wording(self, benchmark: str, prompt: Prompt) -> Wording:
        """The texts for one benchmark ("" for a user's own questions) and one kind of prompt."""

    def question(
        self,
        benchmark: str,
        prompt: Prompt,
        item: Item,
        subtitles: Sequence[Subtitle],
        videos: VideoFolder,
        filled: Callable[..., str] = fill,
    ) -> str:
        """The whole text of one question; "" leaves it to the wording.

        Args:
            benchmark: name of the benchmark; "" for a user's own questions.
            prompt: the kind of prompt.
            item: the question. `item.row` is its published row.
            subtitles: the subtitles that the prompt is to show.
            videos: finds files of the benchmark.
            filled: fills in templates, as `fill` does, and makes the values safe.

        Raises:
            BrokenRow: the pack cannot ask this row.
        """
        return ""

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
        return

    def style(self, benchmark: str, prompt: Prompt) -> Mapping[str, Any]:
        """How the pack plays: values of `BenchmarkSettings` by field.

        A user who gives another value for one of these fields gets an error.
        """
        return {}

    def reads(self) -> NativeFormat:
        """How the pack reads what models write."""
        return NativeFormat()

    def differences(self, benchmark: str) -> list[str]:
        """What still differs from the protocol that the pack stands for, as phrases."""
        return []


class TextPack(PromptPack):
    """A pack of named texts.

    A text's name is its field and key ("system.agentic", "option"). A question may also be worded
    by kind and prompt ("question.mcq.direct"). Texts under "BENCHMARK/NAME" replace those under
    NAME for one benchmark.
    """

    def __init__(
        self,
        name: str,
        texts: Mapping[str, str],
        turns: Mapping[str, bool] | None = None,
        play: Mapping[str, Mapping[str, Any]] | None = None,
        read: NativeFormat | None = None,
    ):
        """Check the texts.

        Args:
            name: the pack's name.
            texts: the texts by name.
            turns: values of `TURNS`.
            play: values of settings, by benchmark; "" for all.
            read: how models write; by default in our form.

        Raises:
            PackError: a text is missing, or has a placeholder that it cannot have.
        """
        self.name = name
        self.texts = dict(texts)
        self.turns = dict(turns or {})
        self.play = {benchmark: dict(values) for benchmark, values in (play or {}).items()}
        self.read = read or NativeFormat()
        for text_name, text in self.texts.items():
            check_text(text_name, text, self.read.has_own_calls)
        missing = sorted(_REQUIRED - self.texts.keys())
        if missing:
            raise PackError(f"{file_of(missing[0])}: missing; {_WRITE}")
        self.digest = digest_of(self.texts, self.turns, self.play, self.read.settings())

    def reads(self) -> NativeFormat:
        return self.read

    def wording(self, benchmark: str, prompt: Prompt) -> Wording:
        texts = self._texts(benchmark)
        keyed: dict[str, dict[str, str]] = {field: {} for field in KEYED}
        fields: dict[str, Any] = {"system_pictures": "", **self.turns}
        for name, text in texts.items():
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
        wording = self.wording(benchmark, prompt)
        systems = wording.system if tools else wording.system_alone
        if prompt not in systems:
            file = file_of(f"{'system' if tools else 'system_alone'}.{prompt}")
            raise PackError(f"{file}: missing; {_WRITE}, or give another --prompt")
        rows: dict[QuestionKind, list[Mapping[str, Any]]] = {}
        for item in items:
            rows.setdefault(item.question.kind, []).append(item.row)
        for kind, of_kind in rows.items():
            places = (f"{benchmark}/question.{kind}", f"question.{kind}")
            named = [name for place in places for name in (f"{place}.{prompt}", place)]
            used = (name for name in named if name in self.texts)
            file = file_of(next(used, f"question.{kind}"))
            if kind not in wording.question:
                raise PackError(f"{file}: missing; {_WRITE}")
            _check_columns(file, wording.question[kind], of_kind)
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
        videos: VideoFolder,
        filled: Callable[..., str] = fill,
    ) -> str:
        wording = self.wording(benchmark, prompt)
        asked = item.question
        if asked.kind not in wording.question:
            raise BrokenRow(f"the protocol has no wording for questions of kind {asked.kind}")
        template = wording.question[asked.kind]
        wanted = PLACEHOLDER.findall(template)
        if not any(_reads_row(name) for name in wanted):
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
        values = self.play.get("", {}) | self.play.get(benchmark, {})
        asked = (text for name, text in self._texts(benchmark).items() if name[:9] == "question.")
        if any(_reads_row(found) for text in asked for found in PLACEHOLDER.findall(text)):
            # Options of the published row keep their order, whatever the right answer becomes.
            values = {"shuffle": False} | values
        if prompt in SINGLE_TURN:  # a baseline's prompt; it offers no tool to dispatch
            values = {k: v for k, v in values.items() if k not in ("prompt", "dispatch")}
        return values

    def _texts(self, benchmark: str) -> dict[str, str]:
        """The texts for a benchmark. Its own wording of a kind replaces all shared ones."""
        shared = {name: text for name, text in self.texts.items() if "/" not in name}
        prefix = f"{benchmark}/"
        own = {
            name.removeprefix(prefix): text
            for name, text in self.texts.items()
            if name.startswith(prefix)
        }
        replaced = tuple(f"{name}." for name in own if name.startswith("question."))
        return {n: t for n, t in shared.items() if not n.startswith(replaced)} | own


def _reads_row(placeholder: str) -> bool:
    return placeholder == "raw_options" or placeholder.startswith("row.")


def is_schema(name: str) -> bool:
    """Whether a text is a tool's schema, which is JSON."""
    return name.rpartition("/")[2].startswith("schemas.")


def file_of(name: str) -> str:
    """The file of a text in a pack's folder."""
    return f"{name}.{'json' if is_schema(name) else 'txt'}"


def check_text(name: str, text: str, own_calls: bool = False) -> None:
    """Check a text's name and its placeholders. Raises PackError, without the pack's name.

    A system turn for models with their own form of calls may describe their tools itself.
    """
    file = file_of(name)
    benchmark, slash, local = name.rpartition("/")
    field, _, key = local.partition(".")
    if slash and benchmark not in BENCHMARKS:
        raise PackError(
            f"{file}: {benchmark!r} is no benchmark; give one of {', '.join(BENCHMARKS)}"
        )
    if field not in PLACEHOLDERS:
        raise PackError(f"{file}: no such text; the texts are {', '.join(PLACEHOLDERS)}")
    keys = KEYED.get(field)
    kind, _, prompt = key.partition(".")
    by_prompt = field == "question" and prompt in ("", *PROMPTS)
    known = bool(key) if keys == () else (kind in keys and by_prompt if keys else not key)
    if keys and not by_prompt:
        known = key in keys
    if not known:
        remedy = f"give one of {', '.join(f'{field}.{one}' for one in keys)}" if keys else "rename"
        raise PackError(f"{file}: no such text; {remedy}")
    allowed = PLACEHOLDERS[field]
    if allowed is None:
        _check_schema(file, key, text)
        return
    for found in PLACEHOLDER.findall(text):
        if found in allowed or (field == "question" and found.startswith("row.")):
            continue
        names = ", ".join(f"{{{one}}}" for one in allowed) or "none"
        raise PackError(
            f"{file}: {{{found}}} is no placeholder of this text, which may have {names}; "
            "correct its name, or leave it out"
        )
    for special in _FORBIDDEN:
        if special in text:
            raise PackError(
                f"{file}: has {special}, which stands for a frame; leave it out, frames are "
                "placed by the protocol"
            )
    if not (field == "system" and own_calls):
        _check_needed(file, field, kind, text)


def _check_needed(file: str, field: str, kind: str, text: str) -> None:
    """Check that a text shows what it is for: a question its words and options, and so on."""
    found = PLACEHOLDER.findall(text)
    if field == "question" and any(name.startswith("row.") for name in found):
        return  # columns of the row may hold the question and its options
    if field == "system" and not text:
        return  # no system turn
    needed: list[tuple[str, ...]] = [(name,) for name in _NEEDED.get(field, ())]
    if field == "question" and kind == QuestionKind.MULTIPLE_CHOICE:
        needed.append(("options", "raw_options"))
    for names in needed:
        if not set(names) & set(found):
            wanted = " or ".join(f"{{{name}}}" for name in names)
            raise PackError(f"{file}: lacks {wanted}, which the model must see; write it there")


def _check_schema(file: str, tool: str, text: str) -> None:
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PackError(f"{file}: not JSON ({error}); write the tool's schema as JSON") from error
    if not isinstance(schema, dict):
        raise PackError(f"{file}: not a JSON object; write the tool's schema as one")
    function = schema.get("function")
    if schema.get("type") != "function" or not isinstance(function, dict):
        raise PackError(f'{file}: no schema of a tool; give "type": "function" and a "function"')
    if function.get("name") != tool:
        raise PackError(
            f"{file}: function.name: {function.get('name')!r}; give {tool!r}, as the file is called"
        )


def raw_options(row: Mapping[str, Any]) -> list[str]:
    """The options of a published row as its data set writes them, letters included."""
    for column in ("options", "candidates", "choices"):
        found = row.get(column)
        if isinstance(found, dict):
            found = [found[key] for key in sorted(found)]
        if isinstance(found, list | tuple) and found:
            return [str(option) for option in found if option not in (None, "")]
    numbered = (row.get(f"option{number}") for number in range(10))
    return [str(option) for option in numbered if option not in (None, "", "N/A")]


def _check_columns(file: str, template: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Check that at least one row has each column of a question's template."""
    for name in PLACEHOLDER.findall(template):
        column = name.removeprefix("row.")
        if name != column and not any(column in row for row in rows):
            columns = ", ".join(rows[0]) or "none, your own questions have no published row"
            raise PackError(f"{file}: {{{name}}}: no row has this column; there are {columns}")


def _column(row: Mapping[str, Any], placeholder: str) -> str:
    column = placeholder.removeprefix("row.")
    value = row.get(column)
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise BrokenRow(f"{column} is missing, which the protocol's question shows")
    return str(value)


def texts_of(wording: Wording) -> dict[str, str]:
    """The texts of a wording by name, as `TextPack` takes them."""
    found: dict[str, str] = {}
    for field in PLACEHOLDERS:
        value = getattr(wording, field)
        if isinstance(value, str):
            found[field] = value
            continue
        for key, text in value.items():
            found[f"{field}.{key}"] = json.dumps(text) if field == "schemas" else text
    return found


def own_pack() -> TextPack:
    """This project's wording."""
    return TextPack("own", texts_of(OUR_WORDING), {name: False for name in TURNS})


def digest_of(*contents: Any) -> str:
    """Hash JSON values, as 32 hexadecimal digits. The order of keys is ignored."""
    text = json.dumps(contents, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


_WRITE = "write it, or copy ours (--write-protocol)"
_REQUIRED = frozenset(("option", "subtitled", "subagent", "answer_now"))
