"""The text of an answer, as it is handed to lmms-eval."""

from __future__ import annotations

from collections.abc import Sequence

from paravt_jax.method.parsing import extract_answer, find_calls, first_think
from paravt_jax.method.records import Turn


def answer_text(turns: Sequence[Turn]) -> str:
    """The final answer in the model's own words; lmms-eval's tasks read them themselves.

    Returns:
        The content of the last turn's answer block; without a block, all that follows the turn's
        thought, even if it was cut off. "" if the turn has only a thought, or calls a tool.
    """
    if not turns:
        return ""
    text = turns[-1].text
    block = extract_answer(text)
    if block is not None:
        return block
    if find_calls(text):
        return ""
    # The opening of a thought may belong to the prompt.
    rest = first_think(text)[1] if "<think>" in text else text.rpartition("</think>")[2]
    return (rest or "").strip()
