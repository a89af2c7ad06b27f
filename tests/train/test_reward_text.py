"""The report's sentence about the reward."""

from paravt_extras.report.reward import describe
from paravt_jax.method.rewards import RewardSettings, frugal_reward


def test_a_reward_says_what_it_pays():
    published = "the published reward, for right answers, format and calls"
    assert describe(RewardSettings()) == describe(RewardSettings(format_cap=False)) == published
    frugal = describe(frugal_reward())
    assert frugal.startswith("the frugal reward, for right answers (worth 20 % less")
    assert frugal.endswith(" and format")
    assert describe(RewardSettings(format_weight=0, tool_weight=0)) == "a reward, for right answers"
    # Without R_tool, the order term still pays for calls.
    assert describe(RewardSettings(tool_weight=0)).endswith("format and calls")
    # A reward with a changed weight is not the published one.
    assert describe(RewardSettings(gamma=0)).startswith("a reward, ")
