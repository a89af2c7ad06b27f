"""rewards.json against our rewards: the think, the calls, the format, the tool reward, the total.

test_golden_answers has the answer and its score. Excuses give the reason for a difference
(REFERENCE 4); what is true here instead is computed from the readings in `texts`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from paravt_jax.method.parsing import has_substantive_think
from paravt_jax.method.records import CallStatus, CropCall, Question, QuestionKind, Turn
from paravt_jax.method.rewards import Rewards, RewardSettings
from paravt_jax.method.scoring import score
from tests.golden.answer_excuses import ACCURACIES, ANSWERS, RIGHT, flooded, judged, of
from tests.golden.excuses import Excuse, check_examples, falls_under
from tests.golden.texts import (
    ANY_TAG,
    BLOCKS,
    CODE,
    GOOD,
    OTHER,
    Readings,
    alone,
    close,
    closed_answers,
    completion,
    final_answer,
    our_readings,
    summed,
    thought,
)
from tests.turns import read_calls, turn_of

A_CALL = f"<tool_call>{GOOD}</tool_call>"


# --- the think ---


THINKS = {
    "unclosed": Excuse(
        why=(
            "A think that is never closed ends at the next tag of any block. In the release it "
            "ends at the next call, answer or end of turn."
        ),
        applies=lambda r: (
            (len(thought(r["completion"], ANY_TAG)) >= 10)
            != (len(thought(r["completion"], r"<tool_|<answer>|<\|im_end\|>")) >= 10)
        ),
        holds=lambda r, got: got == (len(thought(r["completion"], ANY_TAG)) >= 10),
        example=completion("<think>hm</answer> a lot of text", has_substantive_think=True),
        innocent=completion("<think>hm<answer>B</answer>", has_substantive_think=False),
        wrong=True,
    )
}


def thinks(record: dict) -> bool:
    return has_substantive_think(record["completion"])


def test_thinks(records, hold):
    hold(
        records("rewards"),
        thinks,
        lambda r, got: got == r["expected"]["has_substantive_think"],
        THINKS,
    )


def test_excuses_of_thinks():
    check_examples(thinks, THINKS)


# --- calls ---


def has_crop(record: dict, got: bool) -> bool:
    return got == bool(alone(record["completion"]))


CALLED = completion(A_CALL, has_parseable_tool_call=True)

DEEP = "<tool_call>" + "[" * 10**5 + "</tool_call>"

CALLS = {
    "raises": Excuse(
        why=(
            "JSON nested too deeply is no call. In the release it raises out of the reward "
            "(REFERENCE 4, 12)."
        ),
        applies=lambda r: r["expected"]["has_parseable_tool_call"] is None,
        holds=has_crop,
        example=completion(DEEP, has_parseable_tool_call=None),
        innocent=CALLED,
        wrong=True,
    ),
    "code": Excuse(
        why=(
            "`<tool_code>` earns nothing (REFERENCE 2). In the release any line of it with a "
            "parenthesis does."
        ),
        applies=lambda r: (
            bool(r["expected"]["has_parseable_tool_call"])
            and "<tool_code>" in r["completion"]
            and not alone(r["completion"])
        ),
        holds=has_crop,
        example=completion(CODE, has_parseable_tool_call=True),
        innocent=CALLED,
        wrong=True,
    ),
    "any call": Excuse(
        why=(
            "A call is crop_video with two times and a closing tag. In the release any JSON with "
            "a name is one."
        ),
        applies=lambda r: (
            bool(r["expected"]["has_parseable_tool_call"]) and not alone(r["completion"])
        ),
        holds=has_crop,
        example=completion(f"<tool_call>{OTHER}</tool_call>", has_parseable_tool_call=True),
        innocent=CALLED,
        wrong=True,
    ),
    "spoilt": Excuse(
        why=(
            "A call is read even if another one breaks off before it, or a line breaks in its "
            "strings. The release reads neither."
        ),
        applies=lambda r: (
            not r["expected"]["has_parseable_tool_call"] and bool(alone(r["completion"]))
        ),
        holds=has_crop,
        example=completion(f"<tool_call>{{bad {A_CALL}", has_parseable_tool_call=False),
        innocent=completion("<tool_call>{bad}</tool_call>", has_parseable_tool_call=False),
        wrong=False,
    ),
}


def calls(record: dict) -> bool:
    return any(isinstance(call, CropCall) for call in read_calls(record["completion"]))


def test_calls(records, hold):
    hold(
        records("rewards"),
        calls,
        lambda r, got: got == r["expected"]["has_parseable_tool_call"],
        CALLS,
    )


def test_excuses_of_calls():
    check_examples(calls, CALLS)


# --- the format ---


def their_readings(record: dict) -> Readings:
    """The same as the release reads it."""
    text, expected = record["completion"], record["expected"]
    think = expected["has_substantive_think"]
    answer = any(closed_answers(text))
    closed = "</think>" in text
    return {
        "think": think,
        "answer": answer,
        "order": think
        and bool(expected["has_parseable_tool_call"])
        and expected["think_before_tool"],
        "closed": think and closed,
        "flow": think and closed and answer,
        "left open": "<think>" in text and not closed,
        "balance": all(
            text.count(f"<{name}>") == text.count(f"</{name}>")
            for name in BLOCKS
            if name != "tool_response"
        ),
    }


def our_sum(record: dict) -> float:
    return min(max(summed(our_readings(record["completion"]), record["knobs"]), 0.0), 1.0)


def ours_summed(record: dict, got: float) -> bool:
    return got == close(our_sum(record))


def differ(name: str) -> Callable[[dict], bool]:
    """Whether a reading differs and R_fmt shows it: the cap hides some differences."""
    return lambda r: (
        our_readings(r["completion"])[name] != their_readings(r)[name]
        and r["expected"]["compute_format_reward"] != close(our_sum(r))
    )


def formatted(
    text: str, value: float | None, call: bool = False, before: bool = False, think: bool = True
) -> dict:
    columns = {
        "has_parseable_tool_call": call,
        "think_before_tool": before,
        "has_substantive_think": think,
        "extract_answer": "?",
    }
    return completion(text, compute_format_reward=value, **columns)


LONG = "<think>a thought of some length</think>"
WELL = formatted(f"{LONG}<answer>B</answer>", 1.0)

FORMATS = {
    "raises": Excuse(
        why="No text raises. In the release JSON nested too deeply does (REFERENCE 4, 12).",
        applies=lambda r: r["expected"]["compute_format_reward"] is None,
        holds=ours_summed,
        example=formatted(f"{LONG}{DEEP}<answer>B</answer>", None),
        innocent=WELL,
        wrong=0.0,
    ),
    "answer": Excuse(
        why="The answer block is another one or none (see ANSWERS).",
        applies=differ("answer"),
        holds=ours_summed,
        example=formatted(
            "<think>a thought with <answer>B</answer></think>", 0.3 + 0.3 + 0.1 + 0.35
        ),
        innocent=WELL,
        wrong=1.0,
    ),
    "think": Excuse(
        why="A think that is never closed ends elsewhere (see THINKS).",
        applies=differ("think"),
        holds=ours_summed,
        example=formatted("<think>hm</answer> a lot of text", 0.3 - 0.15),
        innocent=WELL,
        wrong=0.3 - 0.15,
    ),
    "order": Excuse(
        why=(
            "Calls differ (see CALLS), and have to follow a closed think. The release looks at "
            "the first tags only."
        ),
        applies=differ("order"),
        holds=ours_summed,
        example=formatted(f"{LONG}{CODE}", 0.3 + 0.3 + 0.1 + 0.2, call=True, before=True),
        innocent=formatted(f"{LONG}{A_CALL}", 0.3 + 0.3 + 0.1 + 0.2, call=True, before=True),
        wrong=0.3 + 0.3 + 0.1 + 0.2,
    ),
    "closing": Excuse(
        why="A `</think>` before `<think>` closes nothing. In the release any one does.",
        applies=lambda r: differ("closed")(r) or differ("left open")(r),
        holds=ours_summed,
        example=formatted("</think><think>a thought of some length", 0.3 + 0.2 + 0.1),
        innocent=WELL,
        wrong=0.3 + 0.2 + 0.1,
    ),
    "flow": Excuse(
        why="An answer before or inside the think does not follow it. In the release it does.",
        applies=differ("flow"),
        holds=ours_summed,
        example=formatted(f"<answer>B</answer>{LONG}", 1.0),
        innocent=WELL,
        wrong=1.0,
    ),
    "balance": Excuse(
        why="A `<tool_response>` that the model writes has to balance too.",
        applies=differ("balance"),
        holds=ours_summed,
        example=formatted("<tool_response><answer>B</answer>", 0.4, think=False),
        innocent=WELL,
        wrong=0.4,
    ),
    "negative": Excuse(
        why="R_fmt is cut to [0, 1]. The release has no lower bound (REFERENCE 4, 12).",
        applies=lambda r: summed(their_readings(r), r["knobs"]) < 0,
        holds=lambda r, got: got == 0,
        example=formatted("<think>hm", -0.15, think=False),
        innocent=WELL,
        wrong=-0.15,
    ),
}


def as_episode(text: str) -> Turn:
    """A completion as one turn.

    In the release a `<tool_response>` in the text marks an executed call; here a call has a status.
    """
    status = CallStatus.EXECUTED if "<tool_response>" in text else CallStatus.TOO_MANY
    return turn_of(text, status)


def rewarded(record: dict) -> Rewards:
    knobs = record["knobs"]
    settings = RewardSettings(
        format_weight=float(knobs["FORMAT_WEIGHT"]),
        tool_weight=1.0,
        answer_suffix=knobs["ANSWER_SUFFIX"] == "1",
        gamma=0.3,
        format_cap=True,
        open_ended=knobs["REWARD_MODE"],
    )
    question = Question(
        record["id"], "v", "?", QuestionKind(record["question_type"]), record["answer"]
    )
    return score(
        question,
        [as_episode(record["completion"])],
        settings,
        anchor_weight=float(knobs["ANCHOR_WEIGHT"]),
    )


def format_of(record: dict) -> float:
    return rewarded(record).format


def test_formats(records, hold):
    hold(
        records("rewards"),
        format_of,
        lambda r, got: got == close(r["expected"]["compute_format_reward"]),
        FORMATS,
        least=0.3,
    )


def test_excuses_of_formats():
    check_examples(format_of, FORMATS)


# --- the tool reward and the total ---


def added_up(record: dict, got: Rewards) -> bool:
    """Whether R_acc, R_tool and the total follow from our readings of the text."""
    text = record["completion"]
    tool = 0.0
    if alone(text):
        executed = "<tool_response>" in text
        tool = (0.3 if executed else 0.1) + 0.5 * (got.accuracy > 0)
    total = got.accuracy + float(record["knobs"]["FORMAT_WEIGHT"]) * got.format + got.tool
    return (
        got.accuracy == close(of(record, final_answer(text)))
        and got.tool == close(tool)
        and got.total == close(total)
    )


def whole(record: dict, **expected: Any) -> dict:
    """A record with all columns that the sums look at."""
    columns = {
        "has_parseable_tool_call": False,
        "think_before_tool": False,
        "has_substantive_think": False,
    }
    columns |= {"format_reward": 0.4, "compute_format_reward": 0.4}
    return record | {
        "expected": columns | record["expected"] | {"tool_reward": 0.0, "total": 1.4} | expected
    }


SUM = whole(RIGHT)
UNREAD = dataclasses.replace(rewarded(RIGHT), tool=0.6, total=1.6)

SUMS = {
    "accuracy": Excuse(
        why="R_acc differs (see ANSWERS and ACCURACIES).",
        applies=lambda r: (
            (falls_under(ANSWERS, r) or falls_under(ACCURACIES, r))
            and r["expected"]["acc_reward"] != close(of(r, final_answer(r["completion"])))
        ),
        holds=added_up,
        example=whole(judged("12.5 - 20.0", "[10.0, 20.0]", "tvg", 0.0)),
        innocent=SUM,
        wrong=UNREAD,
    ),
    "calls": Excuse(
        why="The calls differ (see CALLS).",
        applies=lambda r: falls_under(CALLS, r),
        holds=added_up,
        example=whole(
            RIGHT | {"completion": f"{CODE}<answer>B</answer>"}, has_parseable_tool_call=True
        ),
        innocent=SUM,
        wrong=UNREAD,
    ),
    "format": Excuse(
        why="R_fmt differs (see FORMATS).",
        applies=lambda r: flooded(r) or falls_under(FORMATS, r),
        holds=added_up,
        example=whole(
            RIGHT | {"completion": "<tool_response><answer>B</answer>"}, compute_format_reward=0.4
        ),
        innocent=SUM,
        wrong=UNREAD,
    ),
}


def sums_agree(record: dict, got: Rewards) -> bool:
    expected = record["expected"]
    return (
        got.accuracy == close(expected["acc_reward"])
        and got.format == close(expected["format_reward"])
        and got.tool == close(expected["tool_reward"])
        and got.total == close(expected["total"])
    )


def test_totals(records, hold):
    hold(records("rewards"), rewarded, sums_agree, SUMS, least=0.25)


def test_excuses_of_totals():
    check_examples(rewarded, SUMS)
