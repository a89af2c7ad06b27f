"""rewards.json against our rewards: the think, the calls, the format, the tool reward, the total.

test_golden_answers has the answer and its score. Excuses give the reason for a difference
(REFERENCE 4); what is true here instead is computed from the readings in `texts`.
"""

from __future__ import annotations

from collections.abc import Callable

from paravt_jax.method.parsing import has_substantive_think
from paravt_jax.method.records import CallStatus, CropCall, Question, QuestionKind, Turn
from paravt_jax.method.rewards import Rewards, RewardSettings
from paravt_jax.method.scoring import Rules, score_all
from tests.golden.answer_excuses import ACCURACIES, ANSWERS, flooded, of
from tests.golden.excuses import Excuse, falls_under
from tests.golden.texts import (
    ANY_TAG,
    BLOCKS,
    Readings,
    alone,
    close,
    closed_answers,
    final_answer,
    our_readings,
    summed,
    thought,
)
from tests.turns import read_calls, turn_of

# --- the think ---


THINKS = {
    # A think that is never closed ends at the next tag of any block. In the release it ends at
    # the next call, answer or end of turn.
    "unclosed": Excuse(
        applies=lambda r: (
            (len(thought(r["completion"], ANY_TAG)) >= 10)
            != (len(thought(r["completion"], r"<tool_|<answer>|<\|im_end\|>")) >= 10)
        ),
        holds=lambda r, got: got == (len(thought(r["completion"], ANY_TAG)) >= 10),
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


# --- calls ---


def has_crop(record: dict, got: bool) -> bool:
    return got == bool(alone(record["completion"]))


CALLS = {
    # JSON nested too deeply is no call. In the release it raises out of the reward (REFERENCE 4,
    # 12).
    "raises": Excuse(
        applies=lambda r: r["expected"]["has_parseable_tool_call"] is None,
        holds=has_crop,
    ),
    # `<tool_code>` earns nothing (REFERENCE 2). In the release any line of it with a parenthesis
    # does.
    "code": Excuse(
        applies=lambda r: (
            bool(r["expected"]["has_parseable_tool_call"])
            and "<tool_code>" in r["completion"]
            and not alone(r["completion"])
        ),
        holds=has_crop,
    ),
    # A call is crop_video with two times and a closing tag. In the release any JSON with a name
    # is one.
    "any call": Excuse(
        applies=lambda r: (
            bool(r["expected"]["has_parseable_tool_call"]) and not alone(r["completion"])
        ),
        holds=has_crop,
    ),
    # A call is read even if another one breaks off before it, or a line breaks in its strings.
    # The release reads neither.
    "spoilt": Excuse(
        applies=lambda r: (
            not r["expected"]["has_parseable_tool_call"] and bool(alone(r["completion"]))
        ),
        holds=has_crop,
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


FORMATS = {
    # No text raises. In the release JSON nested too deeply does (REFERENCE 4, 12).
    "raises": Excuse(
        applies=lambda r: r["expected"]["compute_format_reward"] is None,
        holds=ours_summed,
    ),
    # The answer block is another one or none (see ANSWERS).
    "answer": Excuse(
        applies=differ("answer"),
        holds=ours_summed,
    ),
    # A think that is never closed ends elsewhere (see THINKS).
    "think": Excuse(
        applies=differ("think"),
        holds=ours_summed,
    ),
    # Calls differ (see CALLS), and have to follow a closed think. The release looks at the first
    # tags only.
    "order": Excuse(
        applies=differ("order"),
        holds=ours_summed,
    ),
    # A `</think>` before `<think>` closes nothing. In the release any one does.
    "closing": Excuse(
        applies=lambda r: differ("closed")(r) or differ("left open")(r),
        holds=ours_summed,
    ),
    # An answer before or inside the think does not follow it. In the release it does.
    "flow": Excuse(
        applies=differ("flow"),
        holds=ours_summed,
    ),
    # A `<tool_response>` that the model writes has to balance too.
    "balance": Excuse(
        applies=differ("balance"),
        holds=ours_summed,
    ),
    # R_fmt is cut to [0, 1]. The release has no lower bound (REFERENCE 4, 12).
    "negative": Excuse(
        applies=lambda r: summed(their_readings(r), r["knobs"]) < 0,
        holds=lambda r, got: got == 0,
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
    )
    question = Question(
        record["id"], "v", "?", QuestionKind(record["question_type"]), record["answer"]
    )
    played = [(question, [as_episode(record["completion"])])]
    rules, weight = Rules(knobs["REWARD_MODE"]), float(knobs["ANCHOR_WEIGHT"])
    return score_all(played, settings, rules, anchor_weight=weight)[0]


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


SUMS = {
    # R_acc differs (see ANSWERS and ACCURACIES).
    "accuracy": Excuse(
        applies=lambda r: (
            (falls_under(ANSWERS, r) or falls_under(ACCURACIES, r))
            and r["expected"]["acc_reward"] != close(of(r, final_answer(r["completion"])))
        ),
        holds=added_up,
    ),
    # The calls differ (see CALLS).
    "calls": Excuse(
        applies=lambda r: falls_under(CALLS, r),
        holds=added_up,
    ),
    # R_fmt differs (see FORMATS).
    "format": Excuse(
        applies=lambda r: flooded(r) or falls_under(FORMATS, r),
        holds=added_up,
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
