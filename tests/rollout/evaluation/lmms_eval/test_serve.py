"""The server that plays episodes for lmms-eval."""

from __future__ import annotations

import pytest

from paravt_extras.lmms_eval.answers import answer_text
from paravt_extras.lmms_eval.serve import play, settings_of
from paravt_jax.method.records import Turn
from tests.rollout.evaluation.conftest import PLAN

ANSWER = "it is clear now\n</think>\n<answer> B, two </answer>"


def request(number: int, video, text: str = "How many apples?") -> dict:
    return {"id": number, "name": f"task/{number}", "video": str(video), "text": text}


def test_requests_are_answered_with_the_text_that_the_model_wrote(player, videos) -> None:
    served = player([PLAN, ANSWER])
    requests = [request(number, videos / "data" / f"w{number}.mp4") for number in (0, 1)]
    replies = list(play(served, requests))
    assert sorted(replies, key=lambda reply: reply["id"]) == [
        {"id": 0, "answer": "B, two"},
        {"id": 1, "answer": "B, two"},
    ]


def test_a_bad_request_gets_a_reason_and_the_others_are_played(player, videos) -> None:
    served = player([PLAN, ANSWER])
    requests = [
        request(0, videos / "data" / "noise.mp4"),
        request(1, videos / "gone.mp4"),
        request(2, videos / "data" / "w0.mp4", "apples " * 100),
        request(3, videos / "data" / "w0.mp4"),
    ]
    replies = {reply["id"]: reply for reply in play(served, requests)}
    assert replies[3] == {"id": 3, "answer": "B, two"}
    assert replies[0]["name"] == "task/0"
    assert "error" in replies[0]
    assert replies[1]["error"] == f"no file {videos / 'gone.mp4'}"
    assert replies[2]["error"].startswith("the question has ")


@pytest.mark.parametrize(
    "written, handed_over",
    [
        ("<think>\nhm\n</think>\n<answer>(B) two</answer>", "(B) two"),
        ("<think>\nhm\n</think>\nI believe it is B.", "I believe it is B."),
        ("The answer is B because the", "The answer is B because the"),
        ("<think>\nall of it is thought", ""),
        ("it is clear now\n</think>\nB", "B"),
        ('<think>\nhm\n</think>\n<tool_call>\n{"name": "crop_video"}\n</tool_call>', ""),
        ("<answer>B", "<answer>B"),
    ],
)
def test_an_answer_is_handed_over_as_it_was_written(written, handed_over) -> None:
    assert answer_text([Turn("earlier"), Turn(written, truncated=True)]) == handed_over
    assert answer_text([]) == ""


def test_options_come_from_the_command_line_of_lmms_eval() -> None:
    given = {"frames": 8, "tools": "crop_video+search_subtitles", "temperature": 1, "seed": 3}
    settings = settings_of("folder", given)
    assert settings.model == "folder"
    assert settings.frames == 8
    assert settings.tools == ("crop_video", "search_subtitles")
    assert settings.temperature == 1.0


@pytest.mark.parametrize(
    "given, words",
    [
        ({"frame": 8}, "^frame: no option of paravt_jax; give one of frames"),
        ({"benchmark": "mlvu"}, "^benchmark: no option"),
        ({"frames": "many"}, "^frames = 'many': not of the kind of 64"),
        ({"frames": 0}, "--frames 0: a run without frames"),
    ],
)
def test_a_wrong_option_is_named(given, words) -> None:
    with pytest.raises(ValueError, match=words):
        settings_of("folder", given)
