"""Rewards of episodes: the numbers of REFERENCE 3, and what must earn nothing (REFERENCE 4)."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paravt_jax.method.records import (
    CallOutcome,
    CallStatus,
    CropCall,
    Question,
    QuestionKind,
    Turn,
)
from paravt_jax.method.rewards import (
    RewardSettings,
    anchor_reward,
    format_base,
    frugal_reward,
    published_format,
    score_all,
    tool_reward,
)
from tests.turns import score, turn_of

QUESTION = Question(
    "q", "v", "which digit?", QuestionKind.MULTIPLE_CHOICE, "seven", ("six", "seven")
)
THINK = "<think>\nthe overview misses it</think>\n"
CALL = (
    '<tool_call>\n{"name": "crop_video", "arguments": {"start_time": 3, "end_time": 9}}\n'
    "</tool_call>"
)
SETTINGS = RewardSettings()


def look(status: CallStatus = CallStatus.EXECUTED, text: str = THINK + CALL) -> Turn:
    return Turn(text, (CallOutcome(CropCall(3, 9), status, "seven"),))


def answer(text: str = "seven", truncated: bool = False) -> Turn:
    return Turn(f"{THINK}<answer>{text}</answer>", truncated=truncated)


def test_a_perfect_episode_earns_every_term():
    got = score(QUESTION, [look(), answer()], SETTINGS)
    assert got.accuracy == 1
    assert got.format == 1
    assert got.tool == 0.8
    assert got.compliant is True
    assert got.total == pytest.approx(2.8)
    assert got.anchor == pytest.approx(0.7)


def test_the_published_format_is_that_of_the_published_settings():
    """It does not depend on a run's own settings, and it is cut to [0, 1]."""
    unclosed = Turn("<think>\nthe overview misses it <answer>seven</answer>")
    for turns in ([look(), answer()], [answer()], [look(), unclosed], [unclosed], []):
        published = score(QUESTION, turns, RewardSettings(), anchor_weight=0.5)
        assert published_format(turns) == published.format
    assert published_format([look(), answer()]) == 1
    assert published_format([look(), answer(truncated=True)]) == 0
    assert published_format([unclosed]) == pytest.approx(0.2 + 0.5 - 0.5 * 0.3)


def test_the_pinned_think_counts():
    """The release scores generated text only, and gives this response 0.5 (REFERENCE 4, 3)."""
    assert score(QUESTION, [answer()], SETTINGS).format == 1
    without = Turn(answer().text.removeprefix("<think>"))
    assert score(QUESTION, [without], SETTINGS).format == pytest.approx(0.5)


def test_an_invented_tool_response_and_code_earn_nothing():
    invented = turn_of(
        THINK
        + "<tool_call>oops</tool_call><tool_response>seven</tool_response><answer>seven</answer>"
    )
    assert score(QUESTION, [invented], SETTINGS).tool == 0
    code = turn_of(THINK + "<tool_code>print(crop_video(1, 2))</tool_code>")
    got = score(QUESTION, [code, answer()], SETTINGS)
    assert got.tool == 0
    assert not got.compliant
    assert format_base([code, answer()]) == pytest.approx(format_base([answer()]))


@pytest.mark.parametrize(
    "status, right, reward",
    [
        (CallStatus.EXECUTED, True, 0.8),
        (CallStatus.CLAMPED, True, 0.8),
        (CallStatus.EXECUTED, False, 0.3),
        (CallStatus.BAD_WINDOW, False, 0.1),
        (CallStatus.BAD_WINDOW, True, 0.6),
        (CallStatus.NOT_OFFERED, True, 0),
    ],
)
def test_tool_reward_follows_outcomes(status, right, reward):
    assert tool_reward([look(status), answer()], right) == pytest.approx(reward)


def test_one_executed_call_is_enough():
    assert tool_reward([look(CallStatus.BAD_WINDOW), look(), answer()], False) == pytest.approx(0.3)


def test_terms_can_be_switched_off():
    turns = [look(), answer()]
    assert score(QUESTION, turns, RewardSettings(tool_weight=0)).total == pytest.approx(2)
    assert score(
        QUESTION, turns, RewardSettings(tool_weight=0, format_weight=0)
    ).total == pytest.approx(1)


def test_a_right_answer_is_worth_less_per_turn_in_which_tools_ran():
    def total(*turns: Turn) -> float:
        settings = RewardSettings(tool_weight=0, format_weight=0, tool_turn_cost=0.2)
        return score(QUESTION, turns, settings).total

    two_calls = Turn(THINK + CALL + CALL, look().calls * 2)
    assert total(answer()) == pytest.approx(1)
    assert total(look(), answer()) == pytest.approx(0.8)
    # Calls side by side cost as much as one call.
    assert total(two_calls, answer()) == pytest.approx(0.8)
    assert total(look(), look(), answer()) == pytest.approx(0.6)
    # No tool ran.
    assert total(look(CallStatus.BAD_WINDOW), answer()) == pytest.approx(1)
    assert total(look(), answer("six")) == 0
    # The discount changes the total only, and does not become a penalty.
    assert score(QUESTION, [look(), answer()], frugal_reward()).accuracy == 1
    costly = RewardSettings(tool_weight=0, format_weight=0, tool_turn_cost=0.7)
    assert score(QUESTION, [look(), look(), answer()], costly).total == 0


def test_the_published_order_term_pays_only_episodes_that_call():
    """0.3 of the release's format reward is a payment for calls; a setting pays it to all."""
    direct, calling = [answer()], [look(), answer()]
    assert format_base(calling) - format_base(direct) == pytest.approx(0.3)
    assert format_base(calling, order_without_calls=True) == format_base(calling)
    assert format_base(direct, order_without_calls=True) == pytest.approx(format_base(calling))
    # The answer has to follow a closed think.
    unclosed = [Turn("<think>\nthe overview shows it <answer>seven</answer>")]
    assert format_base(unclosed, order_without_calls=True) == format_base(unclosed)
    # The setting reaches the reward.
    frugal = score(QUESTION, direct, frugal_reward())
    uncapped = score(QUESTION, direct, RewardSettings(format_cap=False))
    assert frugal.format - uncapped.format == pytest.approx(0.3)
    assert frugal.total == pytest.approx(1 + frugal.format)


@pytest.mark.parametrize("cost", [-0.1, 1.1, float("nan")])
def test_the_cost_of_a_tool_turn_is_a_share(cost):
    with pytest.raises(ValueError, match=f"rl.rewards.tool_turn_cost: {cost}"):
        RewardSettings(tool_turn_cost=cost)


@pytest.mark.parametrize(
    ("name", "value"), [("format_weight", -0.1), ("tool_weight", float("nan")), ("gamma", -0.1)]
)
def test_weights_are_checked(name, value):
    with pytest.raises(ValueError, match=f"rl.rewards.{name}"):
        dataclasses.replace(SETTINGS, **{name: value})


def test_the_anchor_is_the_mean_over_turns():
    """Joined, the second turn's closed think would speak for the first one's open think (TOY)."""
    broken = look(text="<think>\nthe overview misses it " + CALL)
    assert anchor_reward([broken, answer()]) == pytest.approx((-0.3 + 0.7) / 2)
    assert anchor_reward([broken]) == pytest.approx(-0.3)
    assert anchor_reward([broken], gamma=0) == 0
    assert anchor_reward([look(), answer()]) == pytest.approx(0.7)
    assert anchor_reward([Turn(THINK)]) == pytest.approx(0.4)


def test_without_the_cap_format_distinguishes_more():
    short = [Turn(THINK + "<answer>seven</answer>")]
    capped = RewardSettings()
    free = RewardSettings(format_cap=False)
    assert (
        score(QUESTION, short, capped).format
        == score(QUESTION, [look(), answer()], capped).format
        == 1
    )
    assert score(QUESTION, short, free).format == pytest.approx(1.15)
    assert score(QUESTION, [look(), answer()], free).format == pytest.approx(1.45)


def test_format_is_never_negative_while_capped():
    """The release bounds R_fmt from above only, and reaches -0.3 (REFERENCE 4, 12)."""
    open_think = [Turn("<think>\nhm")]
    assert score(QUESTION, open_think, RewardSettings(), anchor_weight=1.0).format == 0
    assert score(
        QUESTION, open_think, RewardSettings(format_cap=False), anchor_weight=1.0
    ).format == pytest.approx(-0.3)


def test_a_truncated_episode_earns_no_format():
    got = score(QUESTION, [look(), answer(truncated=True)], SETTINGS)
    assert got.format == 0
    assert got.anchor == 0
    assert not got.compliant
    assert got.accuracy == 0, "nobody knows how a turn that was cut off would have ended"
    got = score(QUESTION, [look(), Turn("<think>\non and on and on", truncated=True)], SETTINGS)
    assert got.format == 0
    assert got.anchor <= 0
    assert anchor_reward([Turn("<think>\non and on", truncated=True)]) == pytest.approx(-0.3)


def test_balanced_tags_alone_earn_nothing():
    assert format_base([Turn("seven")]) == 0


def test_an_answer_counts_in_the_last_turn_only():
    assert score(QUESTION, [answer(), Turn(THINK)], SETTINGS).accuracy == 0
    assert score(QUESTION, [], SETTINGS).total == 0


PIECES = [
    "<think>",
    "</think>",
    CALL,
    "<tool_code>x</tool_code>",
    "<answer>",
    "</answer>",
    "seven",
    "<tool_response>",
    "a long enough thought",
]
TURNS = st.lists(
    st.builds(
        turn_of,
        st.lists(st.sampled_from(PIECES), max_size=7).map("".join),
        st.just(CallStatus.NOT_OFFERED),
        truncated=st.booleans(),
    ),
    max_size=3,
)


@given(TURNS, st.booleans())
def test_bounds_hold_for_any_episode(turns, suffix):
    got = score(QUESTION, turns, RewardSettings(answer_suffix=suffix))
    assert 0 <= got.accuracy <= 1
    assert 0 <= got.format <= 1
    assert got.tool == 0
    assert -0.3 <= got.anchor <= 0.7 + 1e-9
    if got.compliant:
        assert got.anchor >= 0
        assert not any(turn.truncated for turn in turns)


def test_a_judge_gives_r_acc():
    class Half:
        def scores(self, items):
            return [0.5 for _ in items]

        def metrics(self):
            return {}

    (got,) = score_all([(QUESTION, [answer()])], SETTINGS, Half())
    assert got.accuracy == 0.5
    assert got.total == pytest.approx(0.5 + got.format + got.tool)
