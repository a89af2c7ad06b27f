"""Sizes of the engine. They determine which programs are compiled and how much memory is used.

`rollout.engine.sizing` derives all `EngineSizes` from a recipe's `EngineSettings` and from the
lengths of a run.
"""

from __future__ import annotations

import dataclasses

from paravt_jax.checks import require_at_least


@dataclasses.dataclass(frozen=True)
class EngineSizes:
    """All sizes of an engine. Lengths are in tokens, ascending, and multiples of `page`.

    Every length is the size of a compiled program. A sequence takes the smallest that fits.
    """

    row_lengths: tuple[int, ...]
    """Tokens a row reads on its own pages, without a shared prefix. The largest bounds a whole
    sequence."""
    prefill_lengths: tuple[int, ...]
    """Tokens prefilled of one sequence in one call."""
    prefix_lengths: tuple[int, ...] = ()
    """Tokens of a prefix that several rows read from one copy. Empty: nothing is shared."""
    slots: int = 64
    """Sequences decoded side by side."""
    rows_per_prefix: int = 8
    """Upper bound on the rows that read one copy of a prefix."""
    page: int = 16
    """Tokens per page of the KV cache."""
    pages: int = 4096
    """Pages in the KV cache."""
    prefill_tokens: int = 4096
    """Tokens prefilled per call, over all sequences."""
    read_tokens: int = 65_536
    """Unshared tokens read per call, over all rows; longer sequences get fewer rows."""
    steps: int = 16
    """Tokens decoded per call, between scheduling decisions."""
    paged: bool | None = None
    """Decode on the pages themselves, without shared prefixes. None: on TPU. Otherwise a row's
    pages are copied to dense arrays once per call."""

    def __post_init__(self):
        self._check_each()
        shortest = self.row_lengths[0]
        longest = self.row_lengths[-1]
        # A layout with shared prefixes always has all slots as rows.
        if self.prefix_lengths and self.rows(shortest) < self.slots:
            raise ValueError(
                f"EngineSizes.read_tokens: {self.read_tokens}; with prefix_lengths, all "
                f"{self.slots} slots read row_lengths[0] = {shortest} tokens at once, "
                f"make it {self.slots * shortest} or more"
            )
        if self.slots % self.rows_per_prefix:
            raise ValueError(
                f"EngineSizes.slots: {self.slots}; make it a multiple of rows_per_prefix = "
                f"{self.rows_per_prefix}"
            )
        if self.pages * self.page < longest:
            raise ValueError(
                f"EngineSizes.pages: {self.pages} of {self.page} tokens; one sequence may have "
                f"{longest} tokens, give at least {longest // self.page}"
            )

    def _check_each(self) -> None:
        tokens = ("prefill_tokens", "read_tokens", "steps")
        counts = ("slots", "rows_per_prefix", "page", "pages")
        require_at_least("EngineSizes", self, 1, *counts, *tokens)
        for name in ("row_lengths", "prefill_lengths", "prefix_lengths"):
            lengths = getattr(self, name)
            ascending = list(lengths) == sorted(set(lengths))
            missing = not lengths and name != "prefix_lengths"
            if missing or not ascending or any(n < 1 or n % self.page for n in lengths):
                raise ValueError(
                    f"EngineSizes.{name}: {lengths}; give ascending multiples of page = {self.page}"
                )

    def width(self, tokens: int) -> int:
        """Return the smallest row length that holds `tokens` tokens; 0 if there are none."""
        return next(length for length in (0, *self.row_lengths) if length >= tokens)

    def rows(self, width: int) -> int:
        """Return the rows of a program that reads `width` tokens per row."""
        return max(1, min(self.slots, self.read_tokens // max(1, width)))

    def prefill_rows(self, length: int, before: int) -> int:
        """Return the rows of a program that prefills `length` tokens after `before` cached ones."""
        return max(1, min(self.rows(self.width(before)), self.prefill_tokens // length))

    def only_text(self, length: int) -> bool:
        """Return whether the prefill programs of this length have no visual input.

        These are the programs of the shortest of several lengths: what they compute is mostly the
        results of tools. All others take visual tokens and text, so each length is compiled once.
        """
        return len(self.prefill_lengths) > 1 and length == self.prefill_lengths[0]

    def piece(self, missing: int, visual: bool) -> int:
        """Return the smallest prefill length that holds `missing` tokens.

        If there are too many, the largest: prefill then takes several calls.

        Args:
            missing: tokens to compute.
            visual: whether some of them are visual.
        """
        for length in self.prefill_lengths:
            if length >= missing and not (visual and self.only_text(length)):
                return length
        return self.prefill_lengths[-1]

    @property
    def bank_tokens(self) -> int:
        """Upper bound on the visual tokens of one call of prefill."""
        return max(self.prefill_rows(length, 0) * length for length in self.prefill_lengths)
