"""A folder of texts: what is written is read again and asked, and broken texts are named."""

from __future__ import annotations

import dataclasses

import pytest

from models.qwen3_vl.dialect import DIALECT
from paravt_jax.method.protocol import Protocol, ProtocolSettings
from paravt_jax.method.records import Question, QuestionKind
from paravt_jax.method.wording import OUR_WORDING
from rollout import evaluate as command
from rollout.evaluation.wording_folder import digest, read_wording, write_wording


@pytest.fixture
def ours(tmp_path):
    folder = tmp_path / "ours"
    write_wording(folder)
    return folder


def test_what_is_written_is_read_again(ours):
    assert read_wording(ours, DIALECT) == OUR_WORDING
    (ours / "option.txt").unlink()
    assert read_wording(ours, DIALECT) == OUR_WORDING, "a text that is missing is ours"


def test_a_changed_text_is_asked_and_has_another_digest(ours, small_vocabulary):
    (ours / "question.mcq.txt").write_text("{options}\n{question} Is it one?\n")
    wording = read_wording(ours, DIALECT)
    assert dataclasses.replace(wording, question=OUR_WORDING.question) == OUR_WORDING
    assert digest(wording) != digest(OUR_WORDING)
    asked = Question("q", "v", "How many?", QuestionKind.MULTIPLE_CHOICE, "A", ("1", "2"))
    protocol = Protocol(small_vocabulary, ProtocolSettings(), wording)
    text = small_vocabulary.decode(protocol.question(asked).ids)
    assert text.startswith("\nA. 1\nB. 2\nHow many? Is it one?<|im_end|>")


BROKEN = [
    ("system.agentic.txt", b"no place for tools", r"lacks \{tools\}"),
    ("question.mcq.txt", b"{question}", r"lacks \{options\}"),
    ("question.oe.txt", b"", r"lacks \{question\}"),
    ("option.txt", b"{option} {question}", r"\{question\} is no placeholder of this text"),
    ("answer_now.txt", b"{letter}", "which may have none"),
    ("subagent.txt", b"<|image_pad|>", "stands for a frame"),
    ("subagent.txt", b"\xff", "save it as UTF-8"),
    ("quesion.mcq.txt", b"{question}", "no such text; the texts are system.agentic,"),
]


@pytest.mark.parametrize(("name", "content", "message"), BROKEN)
def test_a_broken_text_is_named(ours, name, content, message):
    (ours / name).write_bytes(content)
    with pytest.raises(ValueError, match=f"{name}: .*{message}"):
        read_wording(ours, DIALECT)


def test_the_command_writes_our_texts_into_a_new_folder_only(tmp_path, capsys):
    folder = tmp_path / "mine"
    assert command.main(["--write-wording", str(folder)]) == 0
    assert read_wording(folder, DIALECT) == OUR_WORDING
    assert command.main(["--write-wording", str(folder)]) == 2
    assert "exists; name a new folder" in capsys.readouterr().err
