"""`--protocol published`: the prompt pack in a user's checkout of the ParaVT release.

The release's Python files are parsed, never executed. What is read (commit cf55249):

    paravt/eval/driver.py   DIRECT_SYSTEM, REASONING_SYSTEM, GENERAL_AGENTIC_SYSTEM,
                            MINIMAL_AGENTIC_SYSTEM (`{tool_schema}` is the place of the tool)
                            TOOL_SCHEMA, `json.dumps` of a literal
                            eval_one: `force` (the forced answer, multiple choice first),
                            `q_text` (what is added to a question), the text beside a crop
    paravt/eval/utils.py    load_samples: the "question" of each benchmark's samples

Questions are f-strings over a row of the data set. They become templates: a column of the row, the
options and the subtitles turn into placeholders. An expression of another form is refused.
"""

from __future__ import annotations

import ast
import json
import os
import pathlib
import string
from collections.abc import Mapping, Sequence
from typing import Any

from paravt_jax.method.records import QuestionKind
from paravt_jax.method.wording import PLACEHOLDER, Prompt
from rollout.evaluation.pack_folder import open_pack
from rollout.evaluation.packs import Pack, PackError
from rollout.evaluation.published_protocol import PLAY, PLAY_CHARADES

DRIVER = "paravt/eval/driver.py"
LOADERS = "paravt/eval/utils.py"

# Our prompts by the release's modes.
_MODES: Mapping[Prompt, str] = {
    "direct": "direct",
    "reasoning": "reasoning",
    "agentic": "agentic_general",
    "agentic-minimal": "agentic_minimal",
}
_AGENTIC: Mapping[Prompt, str] = {
    "agentic": "GENERAL_AGENTIC_SYSTEM",
    "agentic-minimal": "MINIMAL_AGENTIC_SYSTEM",
}
_ALONE: Mapping[Prompt, str] = {"direct": "DIRECT_SYSTEM", "reasoning": "REASONING_SYSTEM"}
_CHOICE = (QuestionKind.MULTIPLE_CHOICE,)
# The release asks MMVU's open-ended questions like those with options.
_BENCHMARKS: Mapping[str, Sequence[QuestionKind]] = {
    "videomme": _CHOICE,
    "videomme_wsub": _CHOICE,
    "longvideobench": _CHOICE,
    "lvbench": _CHOICE,
    "mlvu": _CHOICE,
    "mmvu": (QuestionKind.MULTIPLE_CHOICE, QuestionKind.OPEN_ENDED),
    "charades": (QuestionKind.TEMPORAL_GROUNDING,),
}

# Beside what `rollout.evaluation.published_protocol` finds in the settings.
_DIFFERENCES = (
    "unreadable calls and those beyond the fifth get an error response",
    "calls that leak into <tool_code> are not carried out",
    "the forced answer may have as many tokens as a turn",
    "a native video has at most 64 frames",
)
_SUBTITLES = "\0"  # marks where a prompt's subtitles stand, while a question is read
_REMEDY = "give a checkout of the ParaVT release at commit cf55249"


def open_any_pack(name: str, release: str = "") -> Pack:
    """Open the pack that `--protocol` and `--release` name.

    Raises:
        PackError: it cannot be used.
    """
    if release and name != "published":
        raise PackError(f"--release {release}: is read by --protocol published only; give both")
    return read_release(release) if name == "published" else open_pack(name)


def read_release(checkout: str | os.PathLike) -> Pack:
    """Read the texts of a checkout.

    Raises:
        PackError: a file or symbol is missing, or has another form.
    """
    if not checkout:
        raise PackError(f"--protocol published: --release is missing; {_REMEDY}")
    root = pathlib.Path(checkout)
    if not root.is_dir():
        raise PackError(f"--release {checkout}: no such folder; {_REMEDY}")
    try:
        driver = _Source(root, DRIVER)
        loaders = _Source(root, LOADERS)
        texts = _driver_texts(driver)
        suffix = _suffix(driver)
        for benchmark, kinds in _BENCHMARKS.items():
            texts |= _question_texts(loaders, benchmark, kinds, suffix)
        return Pack(
            "published",
            texts,
            {"text_first": False, "responses_apart": True},
            {"": PLAY, "charades": PLAY_CHARADES},
            _DIFFERENCES,
        )
    except PackError as error:
        raise PackError(f"--release {checkout}: {error}; {_REMEDY}") from error


class _Source:
    """A parsed Python file."""

    def __init__(self, root: pathlib.Path, name: str):
        self.name = name
        try:
            self.tree = ast.parse((root / name).read_text(encoding="utf-8"))
        except (OSError, ValueError, SyntaxError, RecursionError) as error:
            raise PackError(f"{name}: cannot be read ({error})") from error

    def constant(self, symbol: str) -> ast.expr:
        """The value that the module assigns to a name."""
        found = _assigned(self.tree.body, symbol)
        if not found:
            raise PackError(f"{self.name}: {symbol}: missing")
        return found[-1]

    def function(self, symbol: str) -> ast.FunctionDef:
        for node in self.tree.body:
            if isinstance(node, ast.FunctionDef) and node.name == symbol:
                return node
        raise PackError(f"{self.name}: {symbol}: missing")


def _assigned(body: Sequence[ast.stmt], symbol: str) -> list[ast.expr]:
    """All values that statements, nested ones included, assign to a name, in order."""
    nodes = [node for statement in body for node in ast.walk(statement)]
    found = [
        node
        for node in nodes
        if isinstance(node, ast.Assign | ast.AnnAssign)
        and any(
            isinstance(target, ast.Name) and target.id == symbol
            for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        )
    ]
    ordered = sorted(found, key=lambda node: (node.lineno, node.col_offset))
    return [node.value for node in ordered if node.value is not None]


def _text(node: ast.expr, place: str) -> str:
    """A text that is written out: a constant, or several joined by +."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _text(node.left, place) + _text(node.right, place)
    raise PackError(f"{place}: not a text that is written out")


def _literal(text: str, place: str) -> str:
    """A text as a part of a template."""
    found = PLACEHOLDER.search(text)
    if found:
        raise PackError(f"{place}: has {found[0]}, which would be a placeholder")
    return text


# --- the driver ---


def _driver_texts(driver: _Source) -> dict[str, str]:
    """Everything but the questions."""
    texts = {"option": "{letter}. {option}", "subtitled": "{question}", "subagent": ""}
    for prompt, symbol in _ALONE.items():
        place = f"{driver.name}: {symbol}"
        texts[f"system_alone.{prompt}"] = _literal(_text(driver.constant(symbol), place), place)
    for prompt, symbol in _AGENTIC.items():
        place = f"{driver.name}: {symbol}"
        texts[f"system.{prompt}"] = _formatted(_text(driver.constant(symbol), place), place)
    texts["schemas.crop_video"] = _schema(driver)
    texts |= _forced_answers(driver)
    texts["window"] = _crop_text(driver)
    texts["shown"] = "{frames}<tool_response>\n{response}\n</tool_response>"
    return texts


def _formatted(text: str, place: str) -> str:
    """A text that `str.format` fills in, as a template."""
    found = ""
    try:
        for literal, field, *_ in string.Formatter().parse(text):
            found += _literal(literal, place)
            if field is not None and field != "tool_schema":
                raise PackError(f"{place}: {{{field}}} is not {{tool_schema}}")
            found += "{tools}" if field else ""
    except ValueError as error:
        raise PackError(f"{place}: not a text for str.format ({error})") from error
    return found


def _schema(driver: _Source) -> str:
    place = f"{driver.name}: TOOL_SCHEMA"
    value = driver.constant("TOOL_SCHEMA")
    if isinstance(value, ast.Call) and value.args:
        value = value.args[0]  # json.dumps
    try:
        schema = ast.literal_eval(value)
        name = schema["function"]["name"]
    except (ValueError, TypeError, KeyError) as error:
        raise PackError(f"{place}: not a schema that is written out") from error
    if name != "crop_video":
        raise PackError(f"{place}: describes {name!r}, not crop_video")
    return json.dumps(schema)


def _forced_answers(driver: _Source) -> dict[str, str]:
    place = f"{driver.name}: eval_one: force"
    found = [_text(node, place) for node in _assigned(driver.function("eval_one").body, "force")]
    if len(found) != 2:
        raise PackError(f"{place}: {len(found)} texts instead of 2")
    choice, grounding = (_literal(text, place) for text in found)
    return {"answer_now": choice, "charades/answer_now": grounding}


def _suffix(driver: _Source) -> str:
    """What agentic prompts add to a question, as a template with `{question}`."""
    place = f"{driver.name}: eval_one: q_text"
    for node in _assigned(driver.function("eval_one").body, "q_text"):
        if isinstance(node, ast.JoinedStr):
            template = ""
            for part, value in _parts(node, place):
                if value is None:
                    template += part
                elif isinstance(value, ast.Name) and value.id == "q_text":
                    template += "{question}"
                elif _called(value) == "basename":
                    template += "{video}"
                else:
                    raise PackError(f"{place}: {{{ast.unparse(value)}}} is not known")
            return template
    raise PackError(f"{place}: no f-string")


def _crop_text(driver: _Source) -> str:
    """The text beside a crop's frames, between the tags of a tool response."""
    place = f"{driver.name}: eval_one: text beside a crop"
    for node in ast.walk(driver.function("eval_one")):
        if not isinstance(node, ast.JoinedStr):
            continue
        parts = _parts(node, place)
        if not any(value is not None and _called(value) == "len" for _, value in parts):
            continue
        names = iter(("{start}", "{end}"))
        text = "".join(
            part
            if value is None
            else "{count}"
            if _called(value) == "len"
            else next(names, "{more}")
            for part, value in parts
        )
        opening, closing = "<tool_response>\n", "\n</tool_response>"
        if text.startswith(opening) and text.endswith(closing) and "{more}" not in text:
            return text.removeprefix(opening).removesuffix(closing)
    raise PackError(f"{place}: no f-string with the number of frames, start and end")


def _parts(node: ast.JoinedStr, place: str) -> list[tuple[str, ast.expr | None]]:
    """The parts of an f-string: texts, and the expressions between them."""
    found: list[tuple[str, ast.expr | None]] = []
    for part in node.values:
        if isinstance(part, ast.FormattedValue):
            found.append(("", part.value))
        elif isinstance(part, ast.Constant):
            found.append((_literal(str(part.value), place), None))
    return found


def _called(node: ast.expr) -> str:
    """The last name of the function that an expression calls; "" if it calls none."""
    if not isinstance(node, ast.Call):
        return ""
    if isinstance(node.func, ast.Attribute):
        return node.func.attr
    return node.func.id if isinstance(node.func, ast.Name) else ""


# --- the questions ---


def _question_texts(
    loaders: _Source, benchmark: str, kinds: Sequence[QuestionKind], suffix: str
) -> dict[str, str]:
    """The question of one benchmark under every prompt, and how it lists options and subtitles."""
    function = loaders.function("load_samples")
    branch = _branch(function, benchmark)
    place = f"{loaders.name}: load_samples: {benchmark}"
    if branch is None:
        raise PackError(f"{place}: no `if dataset_name == {benchmark!r}`")
    asked = _asked(branch)
    if asked is None:
        raise PackError(f'{place}: no sample with a "question"')
    texts: dict[str, str] = {}
    for prompt, mode in _MODES.items():
        reader = _Question([*function.body, *branch], branch, mode, place)
        template = reader.template(asked)
        if reader.subtitled:
            if not template.startswith(_SUBTITLES) or template.count(_SUBTITLES) > 1:
                raise PackError(f"{place}: subtitles do not stand before the question")
            template = template.removeprefix(_SUBTITLES)
            texts[f"{benchmark}/subtitled"] = reader.subtitled + "{question}"
        if reader.option:
            texts[f"{benchmark}/option"] = reader.option
            texts[f"{benchmark}/between_options"] = reader.between
        if mode.startswith("agentic"):
            template = suffix.replace("{question}", template)
        texts |= {f"{benchmark}/question.{kind}.{prompt}": template for kind in kinds}
    return texts


def _branch(function: ast.FunctionDef, benchmark: str) -> list[ast.stmt] | None:
    """The statements under `if dataset_name == BENCHMARK`."""
    for node in ast.walk(function):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Compare):
            sides = [node.test.left, *node.test.comparators]
            if any(isinstance(side, ast.Constant) and side.value == benchmark for side in sides):
                return node.body
    return None


def _asked(branch: Sequence[ast.stmt]) -> ast.expr | None:
    """The expression of "question" in a sample's dictionary."""
    for statement in branch:
        for node in ast.walk(statement):
            if isinstance(node, ast.Dict):
                for key, value in zip(node.keys, node.values, strict=True):
                    if isinstance(key, ast.Constant) and key.value == "question":
                        return value
    return None


class _Question:
    """Turns the expression of a question into a template, under one of the release's modes."""

    def __init__(
        self, scope: Sequence[ast.stmt], branch: Sequence[ast.stmt], mode: str, place: str
    ):
        """Prepare to read.

        Args:
            scope: the statements of the function, for names that all benchmarks share.
            branch: the statements of the benchmark.
            mode: the value of `prompt_mode`.
            place: file and function, for errors.
        """
        self._scope = [node for node in scope if not isinstance(node, ast.If)]
        self._branch = branch
        self._mode = mode
        self._place = place
        self.option = ""
        self.between = ""
        self.subtitled = ""

    def template(self, node: ast.expr) -> str:
        """The template of an expression."""
        if isinstance(node, ast.Constant):
            return _literal(_text(node, self._place), self._place)
        if isinstance(node, ast.JoinedStr):
            parts = _parts(node, self._place)
            return "".join(part if value is None else self.template(value) for part, value in parts)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            return self.template(node.left) + self.template(node.right)
        if isinstance(node, ast.IfExp):
            return self._conditional(node)
        column = _column_of(node)
        if column:
            return f"{{row.{column}}}"
        if _called(node) == "join":
            return self._options(node)
        if _called(node) == "parse_srt":
            return "{spoken}"
        if isinstance(node, ast.Name):
            return self._name(node)
        raise self._unknown(node)

    def _name(self, node: ast.Name) -> str:
        values = _assigned(self._branch, node.id) or _assigned(self._scope, node.id)
        # Options that are no list are written as they are, which no row of the splits needs.
        values = [value for value in values if _called(value) != "str"]
        if len(values) != 1:
            raise self._unknown(node)
        return self.template(values[0])

    def _conditional(self, node: ast.IfExp) -> str:
        """`A if prompt_mode == MODE else B`, or a text that is there if there are subtitles."""
        test = node.test
        if isinstance(test, ast.Compare) and len(test.comparators) == 1:
            mode = test.comparators[0]
            named = isinstance(test.left, ast.Name) and test.left.id == "prompt_mode"
            if named and isinstance(mode, ast.Constant) and isinstance(test.ops[0], ast.Eq):
                return self.template(node.body if mode.value == self._mode else node.orelse)
        if isinstance(test, ast.Name) and self.template(test) == "{spoken}":
            if isinstance(node.orelse, ast.Constant) and node.orelse.value == "":
                self.subtitled = self.template(node.body)
                return _SUBTITLES
        raise self._unknown(node)

    def _options(self, node: ast.expr) -> str:
        """`SEPARATOR.join(f"..." for number, option in enumerate(options))` and its like."""
        assert isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        listed = node.args[0] if len(node.args) == 1 else None
        if isinstance(listed, ast.Name | ast.Subscript):
            self.option = "{option}"
        elif isinstance(listed, ast.GeneratorExp | ast.ListComp):
            self.option = self._option(listed)
        else:
            raise self._unknown(node)
        self.between = _text(node.func.value, self._place)
        return "{raw_options}"

    def _option(self, listed: ast.GeneratorExp | ast.ListComp) -> str:
        """The template of one option: a letter, or the key of the option, and the option."""
        loop = listed.generators[0]
        if not isinstance(listed.elt, ast.JoinedStr) or not isinstance(loop.target, ast.Tuple):
            raise self._unknown(listed)
        counted, option = (ast.unparse(name) for name in loop.target.elts)
        keyed = isinstance(loop.iter, ast.Call) and _called(loop.iter) in ("items", "sorted", "zip")
        letters = {f"chr(65 + {counted})", f"chr({counted} + 65)", f"chr(ord('A') + {counted})"}
        letters |= {f"{alphabet!r}[{counted}]" for alphabet in _alphabets()}
        letters |= {f"string.ascii_uppercase[{counted}]"}
        template = ""
        for part, value in _parts(listed.elt, self._place):
            written = "" if value is None else ast.unparse(value)
            if value is None:
                template += part
            elif written == option:
                template += "{option}"
            elif written in letters or (keyed and written == counted):
                template += "{letter}"
            else:
                raise self._unknown(value)
        return template

    def _unknown(self, node: ast.AST) -> PackError:
        return PackError(
            f"{self._place}: line {getattr(node, 'lineno', '?')}: the form of "
            f"`{ast.unparse(node)[:60]}` is not known"
        )


def _alphabets() -> list[str]:
    return [string.ascii_uppercase[:count] for count in range(2, 27)]


def _column_of(node: ast.expr) -> str:
    """The column of the row that an expression takes: `item["x"]` or `item.get("x", ...)`."""
    key: Any = None
    if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
        key = node.slice
    elif _called(node) == "get" and isinstance(node, ast.Call) and node.args:
        key = node.args[0]
    if isinstance(key, ast.Constant) and isinstance(key.value, str) and key.value.isidentifier():
        return key.value
    return ""
