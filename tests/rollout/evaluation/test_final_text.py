"""The text that is scored."""

from __future__ import annotations

import pytest

from paravt_jax.method.records import Turn
from rollout.evaluation.split import final_text


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<think>\nhm\n</think>\n<answer> B </answer>", "B"),
        ("<think>\nhm\n</think>\nB. two", "B. two"),
        ("<think>\nhm\n</think>\n<answer>B", "B"),
        ("B", "B"),
        ("", None),
        ("<think>\nit is B", None),
        ('<think>\nx\n</think>\n<tool_call>{"name": "crop_video"}</tool_call> B', None),
        ("<think>\nx\n</think>\n<answer></answer>", None),
    ],
)
def test_the_final_text_is_the_answer_or_what_follows_the_thought(text, answer):
    assert final_text([Turn("<think>\nfirst\n</think>\n<answer>A</answer>"), Turn(text)]) == answer
    assert final_text([Turn(text, truncated=True)]) is None


def test_an_episode_without_turns_has_no_final_text():
    assert final_text([]) is None
