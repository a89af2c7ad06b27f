"""The engine's sizes: all that decides what is compiled and what memory is taken.

`EngineSettings` is what a recipe chooses. `EngineSizes` is the whole: `rollout.engine.sizing` derives it from
that choice and the lengths of a run.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class EngineSettings:
    """What a recipe chooses of the engine; all lengths follow from the run's."""

    slots: int = 64
    """Sequences that are decoded side by side; rounded up to whole groups."""
    page: int = 16
    """Tokens per page of the KV cache."""
    cache_tokens: int = 65_536
    """Tokens whose keys and values the cache holds; at least one whole rollout."""
    prefill_tokens: int = 1024
    """Tokens that are prefilled in one call; at least one whole prompt."""
    read_tokens: int = 65_536
    """Unshared cached tokens that one program reads over all its rows; longer sequences get fewer rows."""
    steps: int = 16
    """Tokens decoded per call, between scheduling decisions."""
    paged: bool | None = None
    """Read pages where they lie instead of copying them into arrays first. None: on TPU."""

    def __post_init__(self):
        for name in ("slots", "page", "cache_tokens", "prefill_tokens", "read_tokens", "steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"engine.{name}: {getattr(self, name)}; give 1 or more")


@dataclasses.dataclass(frozen=True)
class EngineSizes:
    """All sizes of an engine. Lengths are in tokens, rise, and are multiples of `page`.

    `own`: what a sequence may read by itself; the last is the longest sequence there is. `shared`: prompts
    that up to `fan` sequences read in one copy, where there are any. `prefill`: what is prefilled of a
    sequence in one call; `prefill_tokens`: of all sequences in that call. `read_tokens`: what all rows of a
    program read by themselves; where `slots` rows would read more, there are fewer. `steps`: tokens decoded
    per call, between scheduling decisions. `paged`: decoding reads pages where they lie, and nothing is
    shared (None: on a TPU); elsewhere the pages of a row are copied into arrays once per call.
    """

    own: tuple[int, ...]
    prefill: tuple[int, ...]
    shared: tuple[int, ...] = ()
    slots: int = 64
    fan: int = 8
    page: int = 16
    pages: int = 4096
    prefill_tokens: int = 4096
    read_tokens: int = 65_536
    steps: int = 16
    paged: bool | None = None

    def __post_init__(self):
        for name in ("slots", "fan", "page", "pages", "prefill_tokens", "read_tokens", "steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"EngineSizes.{name}: {getattr(self, name)}; give 1 or more")
        for name in ("own", "prefill", "shared"):
            lengths = getattr(self, name)
            if list(lengths) != sorted(set(lengths)) or any(
                length < 1 or length % self.page for length in lengths
            ):
                raise ValueError(
                    f"EngineSizes.{name}: {lengths}; lengths rise and are multiples of page = {self.page}, change them"
                )
        if not self.own or not self.prefill:
            raise ValueError(
                f"EngineSizes.own, prefill: {self.own}, {self.prefill}; give at least one length each"
            )
        if self.shared and self.rows(self.own[0]) < self.slots:
            raise ValueError(
                f"EngineSizes.read_tokens: {self.read_tokens}; with shared prompts all slots = {self.slots} rows read own[0] = "
                f"{self.own[0]} tokens at once, make it {self.slots * self.own[0]} or more"
            )
        if self.slots % self.fan:
            raise ValueError(
                f"EngineSizes.slots: {self.slots}; they are shared out in lines of fan = {self.fan}, make it a multiple"
            )
        if self.pages * self.page < self.own[-1]:
            raise ValueError(
                f"EngineSizes.pages: {self.pages} of {self.page} tokens; one sequence may have {self.own[-1]}, "
                f"give at least {self.own[-1] // self.page}"
            )

    def width(self, tokens: int) -> int:
        """The length in which so many tokens are read; 0 for none."""
        return next(length for length in (0, *self.own) if length >= tokens)

    def rows(self, width: int) -> int:
        """Rows of a program in each of which so many tokens are read."""
        return max(1, min(self.slots, self.read_tokens // max(1, width)))

    def prefill_rows(self, length: int, before: int) -> int:
        """Rows in which pieces of a length are prefilled after so many tokens."""
        return max(1, min(self.rows(self.width(before)), self.prefill_tokens // length))

    def piece(self, missing: int) -> int:
        """The length to prefill so many tokens in, in one piece or, where they are too many, in several."""
        return next((length for length in self.prefill if length >= missing), self.prefill[-1])


@dataclasses.dataclass(frozen=True)
class Lengths:
    """The longest sequences of a run, in tokens. Derived from settings, never set by hand."""

    prompt: int
    """A main agent's prompt: system turn, labelled frames, question."""
    visual: int
    """Visual tokens in that prompt."""
    response: int
    """Everything after the prompt: responses and tool results."""
    crop_prompt: int
    """A sub-agent's prompt."""
    crop_visual: int
    """Visual tokens in a sub-agent's prompt."""
    report: int
    """A sub-agent's report, and the prompt's last token, which stands in the same row."""
