"""The texts that the protocol repeats, for the vocabulary of the small world."""

from __future__ import annotations

import re
from collections.abc import Sequence

from paravt_jax.method.parsing import parse_calls
from paravt_jax.method.protocol import TO_ASSISTANT, render_call, system_text
from paravt_jax.method.records import CropCall, FailedCall
from paravt_jax.method.tools.tool import Tool
from paravt_jax.method.wording import OUR_WORDING

# The most frequent malformed calls. Their error responses are in the small world's vocabulary.
_BAD_CALLS = (
    "<tool_code></tool_code>",
    "<tool_call>",
    "<tool_call></tool_call>",
    "<tool_call>{}</tool_call>",
)


def recurring_texts(tools: Sequence[Tool]) -> tuple[str, ...]:
    """Texts that the protocol repeats verbatim. A small vocabulary has a token for each.

    These are the fixed lines of prompts, the parts of a call around its numbers, and the error
    responses to the most frequent malformed calls.
    """
    texts = [
        system_text(tools),
        system_text(()),
        OUR_WORDING.subagent,
        OUR_WORDING.answer_now,
        TO_ASSISTANT,
        "<|im_start|>user\n",
        render_call(CropCall(0, 1)),
    ]
    for bad_call in _BAD_CALLS:
        for call in parse_calls(bad_call, tools):
            if isinstance(call, FailedCall):
                texts.append(f"error: {call.reason}")

    pieces: list[str] = []
    for text in texts:
        for line in re.findall(r"[^\n]*\n+|[^\n]+", text):
            # The times of a call vary, so they are not part of any piece.
            pieces += re.split(r"(?<=_time\": )\d+", line)
    return tuple(dict.fromkeys(pieces))  # each once, in order
