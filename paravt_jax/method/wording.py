"""Every text that an agent reads, apart from its video, its question and what its tools find.

`Protocol` renders these texts, with which this project's agents are trained.

A template is a text with placeholders such as `{question}`. Only lower-case names in braces are
placeholders, so JSON can stand in a template as it is.
"""

from __future__ import annotations

import re
from typing import Literal

from paravt_jax.method.records import QuestionKind

Prompt = Literal["direct", "reasoning", "agentic", "agentic-minimal"]

PLACEHOLDER = re.compile(r"\{([a-z_]+)\}")


def fill(template: str, **values: str) -> str:
    """Fill in a template. Braces within the values stay as they are."""
    return PLACEHOLDER.sub(lambda match: values[match[1]], template)


# The texts below are part of the trained behaviour: a changed word changes every prompt.
_TASK = "You answer a question about a video. You see a few frames of it, each after its time.\n"
_FORM = (
    "Think first, then call the tool or give the final answer as <answer>answer</answer>; "
    "a span of time is [start, end] in seconds."
)
_ANSWER = (
    "give the final answer as <answer>answer</answer>; a span of time is [start, end] in seconds."
)
_TOOLS = (
    "\n\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n{tools}"
    "\n</tools>\n\n{request}"
)

SYSTEM = {
    "agentic": f"{_TASK}{{hints}}{_FORM}{_TOOLS}",
    "agentic-minimal": f"{_ANSWER.capitalize()}{_TOOLS}",
}
"""System turns that offer tools, by prompt. `{hints}` is one line per tool, which says when to call
it; `{tools}` is one line of JSON per tool, its schema; `{request}` says how the model's family
writes a call."""
SYSTEM_ALONE = {
    "direct": f"{_TASK}Do not think aloud: {_ANSWER}",
    "reasoning": f"{_TASK}Think first, between <think> and </think>, then {_ANSWER}",
    "agentic": f"{_TASK}{_FORM}",
    "agentic-minimal": _ANSWER.capitalize(),
}
"""System turns without tools, by prompt."""
SYSTEM_PICTURES = _FORM
"""The system turn of conversations about pictures or text alone."""
QUESTION = {
    QuestionKind.MULTIPLE_CHOICE: "\n{question}{options}",
    QuestionKind.TEMPORAL_GROUNDING: "\n{question}",
    QuestionKind.OPEN_ENDED: "\n{question}",
}
"""A question in its prompt, by kind. `{options}` are the rendered options."""
OPTION = "\n{letter}. {option}"
"""One option of multiple choice."""
SUBTITLED = "What is said in the video:\n{subtitles}\n{question}"
"""A question's text with the subtitles of its video: lines with times, each with its end."""
SUBAGENT = "\nSay in one short sentence what these frames show, with times in seconds."
"""A sub-agent's task, after its frames."""
ANSWER_NOW = "\nNo more calls can be made. Give the final answer."
"""The request for the answer, after the last turn with tools."""
