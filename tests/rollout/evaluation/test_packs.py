"""Prompt packs: what is written can be read, broken packs are refused, and the words are asked."""

from __future__ import annotations

import pathlib

import pytest

from paravt_extras.release import read_release
from paravt_jax.method.protocol import Protocol, ProtocolSettings
from paravt_jax.method.records import Frame, Question, QuestionKind, Subtitle
from paravt_jax.method.wording import OUR_WORDING
from rollout import evaluate as command
from rollout.evaluation.benchmarks import BrokenRow, Item, load
from rollout.evaluation.pack_folder import as_the_pack_plays, read_pack, write_pack
from rollout.evaluation.packs import Pack, PackError, own_pack
from rollout.evaluation.published_protocol import PLAY
from rollout.evaluation.run import evaluate
from rollout.evaluation.settings import BenchmarkSettings
from tests.paravt_jax.benchmarks import published
from tests.rollout.evaluation.release_stand_in import write_release

SAID = (Subtitle(1.0, 2.0, "Hello"), Subtitle(3.0, 4.0, "Good\nbye"))


@pytest.fixture
def ours(tmp_path) -> pathlib.Path:
    """Our wording as a folder."""
    folder = tmp_path / "pack"
    write_pack(own_pack(), folder)
    return folder


@pytest.fixture
def release(tmp_path) -> Pack:
    return read_release(write_release(tmp_path / "release"))


def asked(pack, benchmark, row, tmp_path, prompt="agentic", subtitles=()) -> str:
    """The text with which a pack asks the question of a published row."""
    data = published.write_split(benchmark, tmp_path / f"rows-{benchmark}", [row])
    (item,) = load(benchmark, str(data)).items
    return pack.question(benchmark, prompt, item, subtitles)


def test_special_tokens_of_a_pack_stay_and_those_of_rows_are_broken(small_vocabulary, tmp_path):
    words = "{row.question} {raw_options} as <think>...</think>"
    pack = Pack(
        "x", {**own_pack().texts} | {"question.mcq": words, "subtitled": "{spoken} {question}"}
    )
    row = published.EXAMPLES["videomme"][0] | {"question": "A <tool_call>?"}
    data = published.write_split("videomme", tmp_path / "rows", [row])
    (item,) = load("videomme", str(data)).items
    protocol = Protocol(small_vocabulary, ProtocolSettings(), pack.wording("videomme", "agentic"))
    said = (Subtitle(1.0, 2.0, "</think>"),)
    text = pack.question("videomme", "agentic", item, said, protocol.filled)
    assert text.startswith("< /think> A < tool_call>? ")
    assert text.endswith(" as <think>...</think>")
    # Halves of a token do not make a whole one.
    assert protocol.filled("{a}{b}", a="<thi", b="nk>") == "< think>"
    # Without columns of the row, the protocol fills in the template.
    template = {"question.mcq": "{question}{options} as <think>...</think>"}
    wording = Pack("x", {**own_pack().texts} | template).wording("", "agentic")
    asked = Question("q", "v.mp4", "A <tool_call>?", QuestionKind.MULTIPLE_CHOICE, "A", ("x", "y"))
    ids = Protocol(small_vocabulary, ProtocolSettings(), wording).question(asked).ids
    shown = small_vocabulary.decode(ids)
    assert shown.startswith("A < tool_call>?\nA. x\nB. y as <think>...</think><|im_end|>")


# --- folders ---


def test_a_written_pack_reads_back_as_the_same_words(ours):
    pack = read_pack(ours)
    assert pack.digest == own_pack().digest
    assert pack.wording("videomme", "agentic") == OUR_WORDING
    assert pack.name == "pack"


def test_a_pack_of_every_benchmark_reads_back_as_the_same_words(release, tmp_path):
    write_pack(release, tmp_path / "copy")
    copy = read_pack(tmp_path / "copy")
    assert copy.digest == release.digest
    for benchmark in ("videomme_wsub", "charades", "mmvu"):
        for prompt in ("direct", "agentic"):
            assert copy.wording(benchmark, prompt) == release.wording(benchmark, prompt)
            assert copy.style(benchmark, prompt) == release.style(benchmark, prompt)


def test_a_pack_like_the_published_one_differs_where_it_says_so(ours):
    with (ours / "pack.toml").open("a") as about:
        about.write('[play]\nlike = "published"\nframe_times = true\n')
    assert read_pack(ours).style("mlvu", "agentic") == {**PLAY, "frame_times": True}


def test_the_command_writes_a_pack_once(tmp_path, capsys):
    folder = tmp_path / "mine"
    assert command.main(["--write-protocol", str(folder)]) == 0
    assert own_pack().digest in capsys.readouterr().out
    assert command.main(["--write-protocol", str(folder)]) == 2
    assert f"--write-protocol {folder}: exists" in capsys.readouterr().err


def test_a_changed_word_changes_the_digest_and_what_is_asked(ours):
    file = ours / "question.mcq.txt"
    assert file.read_text() == "\n{question}{options}\n"
    file.write_text("Look: {question}{options} Which?\r\n")
    (ours / "mlvu").mkdir()
    (ours / "mlvu" / "option.txt").write_text("\n({letter}) {option}\n")
    (ours / "README.md").write_text("A note.")
    pack = read_pack(ours)
    assert pack.digest != own_pack().digest
    kind = QuestionKind.MULTIPLE_CHOICE
    assert pack.wording("lvbench", "agentic").question[kind].endswith(" Which?")
    assert pack.wording("lvbench", "agentic").option == "\n{letter}. {option}"
    assert pack.wording("mlvu", "agentic").option == "\n({letter}) {option}"


def test_a_question_may_be_worded_by_prompt_and_by_benchmark(ours):
    (ours / "question.oe.direct.txt").write_text("Short: {question}")
    (ours / "mmvu").mkdir()
    (ours / "mmvu" / "question.oe.txt").write_text("Expert: {question}")
    pack = read_pack(ours)
    kind = QuestionKind.OPEN_ENDED
    assert pack.wording("", "direct").question[kind] == "Short: {question}"
    assert pack.wording("", "agentic").question[kind] == "\n{question}"
    assert pack.wording("mmvu", "direct").question[kind] == "Expert: {question}"


BROKEN = [
    ("option.txt", None, "option.txt: missing; write it"),
    ("pack.toml", None, "pack.toml: missing"),
    ("pack.toml", b"format = 2", "pack.toml: format: 2; this version reads 1"),
    ("pack.toml", b"format = ", "pack.toml: not TOML"),
    ("pack.toml", b"format = 1\ncolour = 3", "pack.toml: colour: no such key; give format"),
    ("pack.toml", b"format = 1\n[turns]\ntext_first = 1", "pack.toml: turns.text_first: 1"),
    ("pack.toml", b"format = 1\n[play]\nseed = 1", "play.seed: a pack does not decide this"),
    ("pack.toml", b"format = 1\n[play]\nframes = 'a'", "play.frames: 'a'; give a value such as 64"),
    ("pack.toml", b"format = 1\n[play.mlvu]\nblind = 1", "play.mlvu.blind: 1; give a value"),
    ("pack.toml", b"format = 1\n[play]\nlike = 'own'", "play.like: 'own'; give published, or"),
    ("answer_now.txt", b"\xff\xfe", "answer_now.txt: is not UTF-8"),
    ("answer_now.txt", b"{question}", "answer_now.txt: {question} is no placeholder of this text"),
    ("option.txt", b"{Letter} {lettre}", "option.txt: {lettre} is no placeholder of this text"),
    ("option.txt", b"<|image_pad|>", "option.txt: has <|image_pad|>, which stands for"),
    ("options.txt", b"", "options.txt: no such text; the texts are system"),
    ("question.quiz.txt", b"", "question.quiz.txt: no such text; the texts are system"),
    ("system.direct.x.txt", b"", "system.direct.x.txt: no such text"),
    ("nobench/option.txt", b"", "nobench/option.txt: 'nobench' is no benchmark"),
    ("notes.doc", b"", "notes.doc: not a text of a pack; rename it to notes.txt"),
    ("schemas.crop_video.json", b"{", "schemas.crop_video.json: no schema of a tool"),
    ("schemas.crop_video.json", b"[]", "schemas.crop_video.json: no schema of a tool"),
    ("schemas.crop_video.json", b'{"type": 1}', "schemas.crop_video.json: no schema of a tool"),
    (
        "schemas.crop_video.json",
        b'{"type": "function", "function": {"name": "crop"}}',
        "schemas.crop_video.json: no schema of a tool",
    ),
    ("pack.toml", b"format = 1\n[turns]\ntext_fist = true", "turns.text_fist: no such key; give"),
    ("pack.toml", b"format = 1\n[play.mlvv]\nframes = 2", "play.mlvv: no such benchmark; give one"),
    ("question.mcq.txt", b"{options}", "question.mcq.txt: lacks {question}, which the model"),
    ("question.mcq.txt", b"{question}", "question.mcq.txt: lacks {options} or {raw_options}"),
    ("mlvu/question.mcq.direct.txt", b"Which?", "mlvu/question.mcq.direct.txt: lacks {question}"),
    ("question.tvg.txt", b"When?", "question.tvg.txt: lacks {question}"),
    ("option.txt", b"{letter}", "option.txt: lacks {option}"),
    ("subtitled.txt", b"{subtitles}", "subtitled.txt: lacks {question}"),
    ("shown.txt", b"{response}", "shown.txt: lacks {frames}"),
    ("system.agentic.txt", b"Think.", "system.agentic.txt: lacks {tools}"),
]


@pytest.mark.parametrize(("file", "content", "message"), BROKEN, ids=[b[2] for b in BROKEN])
def test_a_broken_folder_is_refused_by_file_and_field(ours, file, content, message):
    target = ours / file
    target.parent.mkdir(exist_ok=True)
    if content is None:
        target.unlink()
    else:
        target.write_bytes(content)
    with pytest.raises(PackError) as error:
        read_pack(ours)
    assert str(error.value).startswith(f"--protocol {ours}: ")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


# --- the release ---


def test_the_release_asks_rows_as_its_loader_does(release, tmp_path):
    row = published.videomme("1-1", "w0", "A", question="How many?", options=["A. one", "B. two"])
    text = asked(release, "videomme", row, tmp_path)
    end = "Just the letter. Its file is w0.mp4"
    assert text == f"Asked: How many?\nChoices:\nA. A. one\nB. B. two\n{end}"
    text = asked(release, "videomme", row, tmp_path, "direct")
    assert text.endswith("B. B. two\nStep by step, then <answer>X</answer>.")


def test_the_release_shows_subtitles_before_the_question_where_there_are_any(release, tmp_path):
    row = published.videomme("1-1", "w0", "A", question="How many?", options=["one", "two"])
    text = asked(release, "videomme_wsub", row, tmp_path, "reasoning", SAID)
    assert text.startswith("They say:\nHello\nGood\nbye\n\nAsked: How many?\nChoices:\nA. one\n")
    without = asked(release, "videomme_wsub", row, tmp_path, "reasoning")
    assert without == text.partition("\n\n")[2]


LETTER = "Just the letter."
ROWS = [
    (
        "longvideobench",
        published.longvideobench("a", "a.mp4", 1, ["a cat", "a dog"]),
        f"What is written on the sign?\n(A) a cat\n(B) a dog\n{LETTER}",
    ),
    (
        "lvbench",
        published.lvbench("0", "a.mp4"),
        "What year is shown at the start?\n(A) 1636\n(B) 1366\n(C) 1363\n(D) 1633\n" + LETTER,
    ),
    (
        "mlvu",
        published.mlvu("a.mp4"),
        "Long: What does the man buy?\n"
        f"A. a red car\nB. a blue car\nC. a boat\nD. nothing\n{LETTER}",
    ),
    (
        "mmvu",
        published.mmvu("v", "Art", 1),
        "Expert: Which algorithm is shown?\n"
        f"A. Quick sort\nB. Merge sort\nC. Heap sort\nD. Radix sort\nE. Shell sort\n{LETTER}",
    ),
    (
        "mmvu",
        published.mmvu("v", "Art", 1, open_ended=True),
        f"Expert: Which algorithm is shown?\n\n{LETTER}",
    ),
    (
        "charades",
        published.charades("a.mp4"),
        "Find the moment, as 'from - to'. Look for \"person turn a light on.\". Say from and to.",
    ),
]


@pytest.mark.parametrize(("benchmark", "row", "text"), ROWS)
def test_every_benchmark_keeps_its_own_words_and_options(release, tmp_path, benchmark, row, text):
    assert asked(release, benchmark, row, tmp_path, "reasoning") == text
    agentic = asked(release, benchmark, row, tmp_path / "agentic", "agentic-minimal")
    assert agentic == f"{text} Its file is {'1.mp4' if benchmark == 'mmvu' else 'a.mp4'}"


def test_a_row_without_a_column_of_the_question_is_broken(release):
    kind = QuestionKind.MULTIPLE_CHOICE
    item = Item(Question("q", "v.mp4", "How many?", kind, "A", ("one", "two")))
    with pytest.raises(BrokenRow, match="question is missing"):
        release.question("videomme", "agentic", item, ())
    with pytest.raises(BrokenRow, match="no wording for questions of kind mcq"):
        release.question("charades", "agentic", item, ())


def test_the_release_has_its_own_system_turn_tool_and_requests(release, small_vocabulary):
    limits = ProtocolSettings(pin_think=False, frame_times=False)
    rules = Protocol(small_vocabulary, limits, release.wording("videomme", "agentic"))
    tool = (
        '{"type": "function", "function": {"name": "crop_video", "description": "Cut out a piece.",'
        ' "parameters": {"type": "object", "properties": {"start_time": {"type": "number"}}}}}'
    )
    assert rules.system() == (
        f"<|im_start|>system\nYou cut videos.\n<tools>\n{tool}\n</tools>\n"
        'Write <tool_call>{"name": "crop_video"}</tool_call>.<|im_end|>\n'
    )
    frame = Frame("v.mp4", 0, 0.0)
    text = rules.window_text(1, (2.0, 9.5), " (cut)")
    found = rules.tool_results([text, "error: no"], True, True, [[frame], []], image_tokens=2)
    image = "<|vision_start|><|image_pad|><|image_pad|><|vision_end|>"
    assert small_vocabulary.decode(found.ids) == (
        f"\n<|im_start|>user\n{image}<tool_response>\n1 pictures, 2.0s until 9.5s.\n"
        "</tool_response><|im_end|>\n"
        "<|im_start|>user\n<tool_response>\nerror: no\n</tool_response><|im_end|>\n"
        "<|im_start|>user\nOnly the letter now.<|im_end|>\n<|im_start|>assistant\n"
    )
    grounding = release.wording("charades", "agentic-minimal")
    assert grounding.answer_now == "Now say when, as 'X - Y seconds'."


OTHER = [
    ("driver", ("DIRECT_SYSTEM = (", "DIRECT = ("), "driver.py: DIRECT_SYSTEM: missing"),
    ("driver", ('"First <think>', 'other + "First'), "driver.py: REASONING_SYSTEM: not a text"),
    ("driver", ("{tool_schema}\n</tools>", "{schema}"), "GENERAL_AGENTIC_SYSTEM: {schema} is not"),
    ("driver", ('"Cut out a piece."', "text"), "driver.py: TOOL_SCHEMA: not a schema"),
    ("driver", ('"crop_video",', '"zoom",'), "driver.py: TOOL_SCHEMA: describes 'zoom'"),
    ("driver", ("force =", "forced ="), "driver.py: eval_one: force: 1 texts instead of 2"),
    ("driver", ("def eval_one", "def eval_two"), "driver.py: eval_one: missing"),
    ("driver", ("len(cropped)", "count"), "driver.py: eval_one: text beside a crop"),
    ("driver", ("basename(vpath)", "stem(vpath)"), "driver.py: eval_one: q_text"),
    ("driver", ("import functools", "import ("), "driver.py: cannot be read"),
    ("loaders", ("def load_samples", "def load"), "utils.py: load_samples: missing"),
    ("loaders", ('== "mlvu"', '== "MLVU"'), "utils.py: load_samples: mlvu: no `if dataset_name"),
    ("loaders", ('"question": question', '"asked": question'), "load_samples: videomme: no sample"),
    ("loaders", ("chr(65 + i)", "f(i)"), "load_samples: videomme: line"),
    ("loaders", ("{item['question']}", "{shorten(item)}"), "`shorten(item)` is not known"),
    ("loaders", ("{before}Asked", "Asked {before}"), "videomme_wsub: subtitles do not stand"),
    ("loaders", ("Long: ", "Long {{x}}: "), "load_samples: mlvu: has {x}, which would be"),
]


@pytest.mark.parametrize(("file", "change", "message"), OTHER, ids=[o[2] for o in OTHER])
def test_another_layout_is_refused_by_file_and_symbol(tmp_path, file, change, message):
    checkout = write_release(tmp_path / "release", **{file: change})
    with pytest.raises(PackError) as error:
        read_release(checkout)
    assert message in str(error.value)
    assert "give a checkout of the ParaVT release" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_folder_that_is_no_checkout_is_refused(tmp_path):
    with pytest.raises(PackError, match=r"driver\.py: cannot be read"):
        read_release(tmp_path)
    with pytest.raises(PackError, match="--release is missing"):
        read_release("")
    with pytest.raises(PackError, match=r"^--release .*nowhere: no such folder; give a checkout"):
        read_release(tmp_path / "nowhere")


def test_the_release_plays_as_its_evaluator(release):
    settings = BenchmarkSettings("m", "charades")
    played = as_the_pack_plays(settings, release)
    assert (played.prompt, played.dispatch, played.pin_think) == (
        "agentic-minimal",
        "frames",
        False,
    )
    assert (played.max_pixels, played.crop_max_pixels) == (602_112, 50_176)
    baseline = BenchmarkSettings("m", "charades", prompt="direct")
    assert as_the_pack_plays(baseline, release).episode_settings().dispatch == "none"


@pytest.mark.parametrize(
    ("fields", "given", "message"),
    [
        ({"frames": 8}, (), "--frames 8: --protocol published plays with 64"),
        ({"max_pixels": 50_176}, ("max_pixels",), "--max-pixels 50176: --protocol published"),
        ({"dispatch": "parallel"}, (), "--dispatch parallel: --protocol published"),
    ],
)
def test_an_option_that_contradicts_the_pack_is_refused(release, fields, given, message):
    with pytest.raises(PackError, match=message) as error:
        as_the_pack_plays(BenchmarkSettings("m", "videomme", **fields), release, given)
    assert str(error.value).endswith("as a folder (--write-protocol) and change [play] there")


def test_the_prompt_and_images_instead_of_a_native_video_may_be_chosen(release):
    """The release asks other models about Charades-STA in the prompt of the other benchmarks, and
    not every family can be shown a native video (docs/model.md)."""
    settings = BenchmarkSettings("m", "charades", prompt="agentic", native_video=False)
    played = as_the_pack_plays(settings, release)
    assert (played.prompt, played.native_video) == ("agentic-minimal", True)
    chosen = as_the_pack_plays(settings, release, {"prompt", "native_video"})
    assert (chosen.prompt, chosen.native_video) == ("agentic", False)


def test_a_release_without_its_protocol_is_refused(tmp_path, capsys):
    argv = ["--model", "m", "--benchmark", "mlvu", "--videos", str(tmp_path)]
    assert command.main([*argv, "--release", "somewhere"]) == 2
    assert "--release somewhere: is read by --protocol published only" in capsys.readouterr().err


def test_evaluate_refuses_the_pack_that_only_the_command_opens():
    with pytest.raises(PackError, match="only the command `paravt evaluate` .* or pass pack="):
        evaluate(BenchmarkSettings("model", pack="published"))


def test_missing_videos_have_a_remedy_that_is_a_command():
    with pytest.raises(ValueError, match="--videos is missing: .*; `paravt download` fetches"):
        evaluate(BenchmarkSettings("model", benchmark="mlvu"))
