"""`search_subtitles`: returns the entries of the video's subtitles that match a query best."""

from __future__ import annotations

import collections
import re
from collections.abc import Mapping, Sequence
from typing import Any

from paravt_jax.method.records import CallStatus, FailedCall, Subtitle, ToolCall
from paravt_jax.method.tools.tool import Tool, Video

ENTRIES = 8  # upper bound on the entries of one response


class SearchSubtitles(Tool):
    """The tool `search_subtitles`. Off by default; `protocol.tools` turns it on."""

    name = "search_subtitles"
    description = (
        "Search what is said in the video. "
        f"Returns up to {ENTRIES} subtitles that match best, each after its time."
    )
    parameters = {"query": {"type": "string", "description": "Words that may be said."}}
    required = ("query",)
    example = {"query": "the recipe for bread"}
    hint = (
        "Where it matters what is said and when, call search_subtitles with words that may be said."
    )

    def parse(self, arguments: Mapping[str, Any]) -> ToolCall | FailedCall:
        query = arguments.get("query")
        if not isinstance(query, str) or not _words(query):
            return FailedCall("query holds no words. Give words that may be said in the video.")
        return ToolCall(self.name, {"query": query.strip()})

    def run(self, call: ToolCall, video: Video) -> str | FailedCall:
        entries = video.subtitles
        if not entries:
            return FailedCall("This video has no subtitles.", CallStatus.UNREADABLE)
        matches = best_entries(entries, call.arguments["query"])
        return "\n".join(entry.line for entry in matches) or "No subtitle holds any of these words."


def best_entries(entries: Sequence[Subtitle], query: str) -> list[Subtitle]:
    """Return the entries that match a query best, in descending order; ties keep the order of the
    entries.

    Each word of the query scores 1 / (number of entries with that word), so rare words count most.
    """
    wanted = _words(query)
    words_of_entries = [_words(entry.text) for entry in entries]
    frequency = collections.Counter(word for words in words_of_entries for word in words)
    # Sorted, because sums of floats depend on the order, and equal sets must score equally.
    scores = [
        sum(1 / frequency[word] for word in sorted(words & wanted)) for words in words_of_entries
    ]
    ranked = sorted(range(len(entries)), key=lambda n: -scores[n])
    return [entries[n] for n in ranked[:ENTRIES] if scores[n] > 0]


def _words(text: str) -> set[str]:
    return set(re.findall(r"\w+", text.casefold()))
