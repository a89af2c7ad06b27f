"""rewards.json against our rewards: the think, the calls, the format, the tool reward, the total.

The answer and its score stand in test_golden_answers. Where readings differ there is an excuse with its reason (REFERENCE 4), and what
is true here instead is summed up from readings of the tests' own.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

from paravt_jax.method.parsing import has_substantive_think
from paravt_jax.method.records import CallStatus, CropCall, Question, QuestionKind, Turn
from paravt_jax.method.rewards import Rewards, RewardSettings, score
from tests.golden.conftest import Excuse, check_examples
from tests.golden.test_golden_answers import (
    ACCURACIES,
    ANSWERS,
    ANY_TAG,
    BLOCKS,
    RIGHT,
    close,
    closed_answers,
    completion,
    falls_under,
    final_answer,
    flooded,
    judged,
    of,
)
from tests.golden.test_golden_parsing import CODE, GOOD, OTHER, alone
from tests.turns import read_calls, turn_of

A_CALL = f"<tool_call>{GOOD}</tool_call>"


# The think -----------------------------------------------------------------------------------------------------------------------


def thought(text: str, ends: str) -> str:
    """The first think block, up to its `</think>`, or where nothing closes it up to one of `ends`."""
    _, _, rest = text.partition("<think>")
    return (
        rest.partition("</think>")[0] if "</think>" in rest else re.split(ends, rest, maxsplit=1)[0]
    ).strip()


THINKS = {
    "unclosed": Excuse(
        "a think that nothing closes ends at the next tag of any block; in the release at the next call, answer or end of turn",
        lambda r: (
            (len(thought(r["completion"], ANY_TAG)) >= 10)
            != (len(thought(r["completion"], r"<tool_|<answer>|<\|im_end\|>")) >= 10)
        ),
        lambda r, got: got == (len(thought(r["completion"], ANY_TAG)) >= 10),
        completion("<think>hm</answer> a lot of text", has_substantive_think=True),
        completion("<think>hm<answer>B</answer>", has_substantive_think=False),
        True,
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


# Calls ---------------------------------------------------------------------------------------------------------------------------


def has_crop(record: dict, got: bool) -> bool:
    return got == bool(alone(record["completion"]))


CALLED = completion(A_CALL, has_parseable_tool_call=True)

DEEP = "<tool_call>" + "[" * 10**5 + "</tool_call>"

CALLS = {
    "raises": Excuse(
        "JSON nested too deeply is no call; in the release it raises out of the reward (REFERENCE 4, 12)",
        lambda r: r["expected"]["has_parseable_tool_call"] is None,
        has_crop,
        completion(DEEP, has_parseable_tool_call=None),
        CALLED,
        True,
    ),
    "code": Excuse(
        "`<tool_code>` is not paid (REFERENCE 2); in the release any line of it with a parenthesis is",
        lambda r: (
            bool(r["expected"]["has_parseable_tool_call"])
            and "<tool_code>" in r["completion"]
            and not alone(r["completion"])
        ),
        has_crop,
        completion(CODE, has_parseable_tool_call=True),
        CALLED,
        True,
    ),
    "any call": Excuse(
        "a call is crop_video with two times, and closed; in the release any JSON with a name is one",
        lambda r: bool(r["expected"]["has_parseable_tool_call"]) and not alone(r["completion"]),
        has_crop,
        completion(f"<tool_call>{OTHER}</tool_call>", has_parseable_tool_call=True),
        CALLED,
        True,
    ),
    "spoilt": Excuse(
        "a call is read although another one is broken off before it, or a line breaks in its strings; not so in the release",
        lambda r: not r["expected"]["has_parseable_tool_call"] and bool(alone(r["completion"])),
        has_crop,
        completion(f"<tool_call>{{bad {A_CALL}", has_parseable_tool_call=False),
        completion("<tool_call>{bad}</tool_call>", has_parseable_tool_call=False),
        False,
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


# The format ----------------------------------------------------------------------------------------------------------------------

Readings = dict[str, bool]


def our_readings(text: str) -> Readings:
    """What R_fmt pays for, as it is read here."""
    before, opened, rest = text.partition("<think>")
    _, shut, rest = rest.partition("</think>")
    think = len(thought(text, ANY_TAG)) >= 10
    closed = think and bool(shut)
    return {
        "think": think,
        "answer": final_answer(text) is not None,
        "order": closed and bool(alone(rest)) and not alone(before),
        "closed": closed,
        "flow": closed and final_answer(rest) is not None,
        "left open": bool(opened) and not shut,
        "balance": all(text.count(f"<{name}>") == text.count(f"</{name}>") for name in BLOCKS),
    }


def their_readings(record: dict) -> Readings:
    """The same as the release reads it."""
    text, expected = record["completion"], record["expected"]
    think, answer, closed = (
        expected["has_substantive_think"],
        any(closed_answers(text)),
        "</think>" in text,
    )
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


def summed(read: Readings, knobs: dict) -> float:
    """R_fmt of one response before it is cut to [0, 1] (REFERENCE 3)."""
    suffix = knobs["ANSWER_SUFFIX"] == "1"
    base = (
        (0.2 if suffix else 0.3) * read["think"]
        + (0.5 if suffix else 0.3) * read["answer"]
        + 0.3 * read["order"]
    )
    anchor = float(knobs["ANCHOR_WEIGHT"]) * (
        0.4 * read["closed"] + 0.3 * read["flow"] - 0.3 * read["left open"]
    )
    return base + anchor + 0.1 * (read["balance"] and base > 0)


def our_sum(record: dict) -> float:
    return min(max(summed(our_readings(record["completion"]), record["knobs"]), 0.0), 1.0)


def ours_summed(record: dict, got: float) -> bool:
    return got == close(our_sum(record))


def differ(name: str) -> Callable[[dict], bool]:
    """Whether a reading differs, in a response that R_fmt depends on it for: the cap hides some."""
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
        "no text raises; in the release JSON nested too deeply does (REFERENCE 4, 12)",
        lambda r: r["expected"]["compute_format_reward"] is None,
        ours_summed,
        formatted(f"{LONG}{DEEP}<answer>B</answer>", None),
        WELL,
        0.0,
    ),
    "answer": Excuse(
        "the answer block is another one or none (see ANSWERS)",
        differ("answer"),
        ours_summed,
        formatted("<think>a thought with <answer>B</answer></think>", 0.3 + 0.3 + 0.1 + 0.35),
        WELL,
        1.0,
    ),
    "think": Excuse(
        "an unclosed think ends elsewhere (see THINKS)",
        differ("think"),
        ours_summed,
        formatted("<think>hm</answer> a lot of text", 0.3 - 0.15),
        WELL,
        0.3 - 0.15,
    ),
    "order": Excuse(
        "a call is another thing (see CALLS), and it follows a closed think; the release looks at the first tags only",
        differ("order"),
        ours_summed,
        formatted(f"{LONG}{CODE}", 0.3 + 0.3 + 0.1 + 0.2, call=True, before=True),
        formatted(f"{LONG}{A_CALL}", 0.3 + 0.3 + 0.1 + 0.2, call=True, before=True),
        0.3 + 0.3 + 0.1 + 0.2,
    ),
    "closing": Excuse(
        "a `</think>` before `<think>` closes nothing; in the release any one does",
        lambda r: differ("closed")(r) or differ("left open")(r),
        ours_summed,
        formatted("</think><think>a thought of some length", 0.3 + 0.2 + 0.1),
        WELL,
        0.3 + 0.2 + 0.1,
    ),
    "flow": Excuse(
        "an answer that comes before the think, or inside it, does not follow it; in the release it does",
        differ("flow"),
        ours_summed,
        formatted(f"<answer>B</answer>{LONG}", 1.0),
        WELL,
        1.0,
    ),
    "balance": Excuse(
        "a `<tool_response>` that the model writes has to balance as well",
        differ("balance"),
        ours_summed,
        formatted("<tool_response><answer>B</answer>", 0.4, think=False),
        WELL,
        0.4,
    ),
    "negative": Excuse(
        "R_fmt is cut to [0, 1]; the release bounds it from above only (REFERENCE 4, 12)",
        lambda r: summed(their_readings(r), r["knobs"]) < 0,
        lambda r, got: got == 0,
        formatted("<think>hm", -0.15, think=False),
        WELL,
        -0.15,
    ),
}


def as_episode(text: str) -> Turn:
    """A completion as one turn. The release knows of an executed call by a `<tool_response>` in the text; here it is an outcome."""
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


# The tool reward and the total ---------------------------------------------------------------------------------------------------


def added_up(record: dict, got: Rewards) -> bool:
    """R_acc of the final answer, R_tool of the calls here, and the total is their weighted sum with R_fmt."""
    text = record["completion"]
    tool = (
        (0.3 if "<tool_response>" in text else 0.1) + 0.5 * (got.accuracy > 0)
        if alone(text)
        else 0.0
    )
    total = got.accuracy + float(record["knobs"]["FORMAT_WEIGHT"]) * got.format + got.tool
    return (
        got.accuracy == close(of(record, final_answer(text)))
        and got.tool == close(tool)
        and got.total == close(total)
    )


def whole(record: dict, **expected: Any) -> dict:
    """A record with all that the sums look at."""
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
        "R_acc differs (see ANSWERS and ACCURACIES)",
        lambda r: (
            (falls_under(ANSWERS, r) or falls_under(ACCURACIES, r))
            and r["expected"]["acc_reward"] != close(of(r, final_answer(r["completion"])))
        ),
        added_up,
        whole(judged("12.5 - 20.0", "[10.0, 20.0]", "tvg", 0.0)),
        SUM,
        UNREAD,
    ),
    "calls": Excuse(
        "the calls differ (see CALLS)",
        lambda r: falls_under(CALLS, r),
        added_up,
        whole(RIGHT | {"completion": f"{CODE}<answer>B</answer>"}, has_parseable_tool_call=True),
        SUM,
        UNREAD,
    ),
    "format": Excuse(
        "R_fmt differs (see FORMATS)",
        lambda r: flooded(r) or falls_under(FORMATS, r),
        added_up,
        whole(
            RIGHT | {"completion": "<tool_response><answer>B</answer>"}, compute_format_reward=0.4
        ),
        SUM,
        UNREAD,
    ),
}


def sums_agree(record: dict, got: Rewards) -> bool:
    expected = record["expected"]
    same = got.accuracy == close(expected["acc_reward"]) and got.format == close(
        expected["format_reward"]
    )
    return (
        same
        and got.tool == close(expected["tool_reward"])
        and got.total == close(expected["total"])
    )


def test_totals(records, hold):
    hold(records("rewards"), rewarded, sums_agree, SUMS, least=0.25)


def test_excuses_of_totals():
    check_examples(rewarded, SUMS)
