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
    """All sizes of an engine. Lengths are in tokens, ascending, and multiples of `page`."""

    row_lengths: tuple[int, ...]
    """Sizes of what a row reads by itself, without a shared prefix. The largest also bounds a whole
    sequence."""
    prefill_lengths: tuple[int, ...]
    """Sizes of what is prefilled of one sequence in one call."""
    prefix_lengths: tuple[int, ...] = ()
    """Sizes of a prefix that several rows read in one copy. Empty: nothing is shared."""
    slots: int = 64
    """Sequences that are decoded side by side."""
    rows_per_prefix: int = 8
    """Rows that read one copy of a prompt, at most."""
    page: int = 16
    """Tokens per page of the KV cache."""
    pages: int = 4096
    """Pages in the cache."""
    prefill_tokens: int = 4096
    """Tokens of all sequences that are prefilled in one call."""
    read_tokens: int = 65_536
    """Unshared tokens that all rows of a program read together; longer sequences get fewer rows."""
    steps: int = 16
    """Tokens decoded per call, between scheduling decisions."""
    paged: bool | None = None
    """Decoding reads pages where they lie, and nothing is shared. None: on a TPU. Elsewhere the
    pages of a row are copied into arrays once per call."""

    def __post_init__(self):
        for name in (
            "slots",
            "rows_per_prefix",
            "page",
            "pages",
            "prefill_tokens",
            "read_tokens",
            "steps",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"EngineSizes.{name}: {getattr(self, name)}; give 1 or more")
        for name in ("row_lengths", "prefill_lengths", "prefix_lengths"):
            lengths = getattr(self, name)
            if list(lengths) != sorted(set(lengths)) or any(
                length < 1 or length % self.page for length in lengths
            ):
                raise ValueError(
                    f"EngineSizes.{name}: {lengths}; lengths rise and are multiples of page = {self.page}, change them"
                )
        if not self.row_lengths or not self.prefill_lengths:
            raise ValueError(
                f"EngineSizes.row_lengths, prefill_lengths: {self.row_lengths}, {self.prefill_lengths}; give at least one length each"
            )
        if self.prefix_lengths and self.rows(self.row_lengths[0]) < self.slots:
            raise ValueError(
                f"EngineSizes.read_tokens: {self.read_tokens}; with shared prompts all slots = {self.slots} rows read row_lengths[0] = "
                f"{self.row_lengths[0]} tokens at once, make it {self.slots * self.row_lengths[0]} or more"
            )
        if self.slots % self.rows_per_prefix:
            raise ValueError(
                f"EngineSizes.slots: {self.slots}; make it a multiple of rows_per_prefix = "
                f"{self.rows_per_prefix}"
            )
        if self.pages * self.page < self.row_lengths[-1]:
            raise ValueError(
                f"EngineSizes.pages: {self.pages} of {self.page} tokens; one sequence may have {self.row_lengths[-1]}, "
                f"give at least {self.row_lengths[-1] // self.page}"
            )

    def width(self, tokens: int) -> int:
        """The length in which so many tokens are read; 0 for none."""
        return next(length for length in (0, *self.row_lengths) if length >= tokens)

    def rows(self, width: int) -> int:
        """Rows of a program in each of which so many tokens are read."""
        return max(1, min(self.slots, self.read_tokens // max(1, width)))

    def prefill_rows(self, length: int, before: int) -> int:
        """Rows in which pieces of a length are prefilled after so many tokens."""
        return max(1, min(self.rows(self.width(before)), self.prefill_tokens // length))

    def piece(self, missing: int) -> int:
        """The length to prefill so many tokens in, in one piece or, where they are too many, in several."""
        return next(
            (length for length in self.prefill_lengths if length >= missing),
            self.prefill_lengths[-1],
        )


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
