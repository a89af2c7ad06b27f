"""rewards.json against our rewards: the think, the calls, the format, the tool reward, the total.

test_golden_answers has the answer and its score. Where the release differs (REFERENCE 4), what is
true here is computed from the readings in `texts`.
"""

from __future__ import annotations

from paravt_jax.method import rewards
from paravt_jax.method.parsing import has_substantive_think
from paravt_jax.method.records import CallStatus, CropCall
from paravt_jax.method.rewards import Rewards, RewardSettings, combine
from tests.golden.conftest import Excuse, accuracy_of
from tests.golden.texts import (
    ANY_TAG,
    alone,
    close,
    final_answer,
    our_readings,
    summed,
    thought,
)
from tests.turns import read_calls, turn_of

# --- the think ---


def thinks(record: dict) -> bool:
    return len(thought(record["completion"], ANY_TAG)) >= 10


THINKS = {
    # A think that is never closed ends at the next tag of any block. In the release it ends at
    # the next call, answer or end of turn.
    "unclosed": Excuse(
        applies=lambda r: r["expected"]["has_substantive_think"] != thinks(r),
        holds=lambda r, got: got == thinks(r),
    )
}


def test_thinks(records, hold):
    hold(
        records("rewards"),
        lambda r: has_substantive_think(r["completion"]),
        lambda r, got: got == r["expected"]["has_substantive_think"],
        THINKS,
    )


# --- calls ---


CALLS = {
    # A call is crop_video with two times and a closing tag, even if another one breaks off before
    # it or a line breaks in its strings. In the release any JSON with a name is one, and any line
    # of `<tool_code>` with a parenthesis (REFERENCE 2); JSON nested too deeply raises out of the
    # reward (REFERENCE 4, 12).
    "other calls": Excuse(
        applies=lambda r: r["expected"]["has_parseable_tool_call"] != bool(alone(r["completion"])),
        holds=lambda r, got: got == bool(alone(r["completion"])),
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


def our_sum(record: dict) -> float:
    return min(max(summed(our_readings(record["completion"]), record["knobs"]), 0.0), 1.0)


FORMATS = {
    # A think, an answer or a call is read otherwise (see above), and calls have to follow a closed
    # think: the release looks at the first tags only. A `</think>` before `<think>` closes nothing,
    # and an answer before or inside the think does not follow it. A `<tool_response>` that the
    # model writes has to balance too. R_fmt is cut to [0, 1]: the release has no lower bound, and
    # JSON nested too deeply raises (REFERENCE 4, 12).
    "readings": Excuse(
        applies=lambda r: r["expected"]["compute_format_reward"] != close(our_sum(r)),
        holds=lambda r, got: got == close(our_sum(r)),
    ),
}


def rewarded(record: dict) -> Rewards:
    """Our rewards of a completion as one turn.

    In the release a `<tool_response>` in the text marks an executed call; here a call has a status.
    """
    knobs, text = record["knobs"], record["completion"]
    settings = RewardSettings(
        format_weight=float(knobs["FORMAT_WEIGHT"]),
        tool_weight=1.0,
        answer_suffix=knobs["ANSWER_SUFFIX"] == "1",
        gamma=0.3,
        format_cap=True,
    )
    status = CallStatus.EXECUTED if "<tool_response>" in text else CallStatus.TOO_MANY
    turns = [turn_of(text, status)]
    r_acc = accuracy_of(record, rewards.final_answer(turns))
    return combine(turns, r_acc, settings, float(knobs["ANCHOR_WEIGHT"]))


def test_formats(records, hold):
    hold(
        records("rewards"),
        lambda r: rewarded(r).format,
        lambda r, got: got == close(r["expected"]["compute_format_reward"]),
        FORMATS,
        least=0.3,
    )


# --- the tool reward and the total ---


def added_up(record: dict) -> list[float]:
    """R_acc, R_fmt, R_tool and the total that follow from our readings of the text."""
    knobs, text = record["knobs"], record["completion"]
    right = accuracy_of(record, final_answer(text))
    tool = 0.0
    if alone(text):
        tool = (0.3 if "<tool_response>" in text else 0.1) + 0.5 * (right > 0)
    form = our_sum(record)
    return [right, form, tool, right + float(knobs["FORMAT_WEIGHT"]) * form + tool]


def released(record: dict) -> list[float]:
    names = ("acc_reward", "format_reward", "tool_reward", "total")
    return [record["expected"][name] for name in names]


SUMS = {
    # The answer, the calls or the format are read otherwise (see above).
    "readings": Excuse(
        applies=lambda r: released(r) != close(added_up(r)),
        holds=lambda r, got: got == close(added_up(r)),
    ),
}


def test_totals(records, hold):
    def ours(record: dict) -> list[float]:
        earned = rewarded(record)
        return [earned.accuracy, earned.format, earned.tool, earned.total]

    hold(records("rewards"), ours, lambda r, got: got == close(released(r)), SUMS, least=0.25)
