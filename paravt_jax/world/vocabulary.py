"""The small world's vocabulary: a tokenizer in the Hugging Face format, with few pieces.

It has the added tokens of a dialect, and a piece for every text that the protocol repeats.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from paravt_jax.method.conversations import rewrite_calls
from paravt_jax.method.parsing import parse_calls
from paravt_jax.method.protocol import ProtocolSettings, render_call, system_text
from paravt_jax.method.records import CropCall, FailedCall
from paravt_jax.method.tokenizer import Dialect, Vocabulary, byte_characters
from paravt_jax.method.tools.tool import Tool
from paravt_jax.method.wording import ANSWER_NOW, SUBAGENT
from paravt_jax.world.text import PIECES

# Log-probabilities of the unigram model, which picks the segmentation with the largest sum. Equal
# scores make that the segmentation with the fewest tokens. Bytes score lower than any piece.
_BYTE_SCORE = -10.0
_PIECE_SCORE = -1.0


# The most frequent malformed calls. Their error responses are in the small world's vocabulary.
_BAD_CALLS = "<tool_code></tool_code><tool_call><tool_call></tool_call><tool_call>{}</tool_call>"


def world_vocabulary(limits: ProtocolSettings, dialect: Dialect) -> Vocabulary:
    """Return the small world's vocabulary."""
    return build_vocabulary((*PIECES, *recurring_texts(limits.make_tools(), dialect)), dialect)


def recurring_texts(tools: Sequence[Tool], dialect: Dialect) -> tuple[str, ...]:
    """Return the texts that the protocol repeats verbatim. A small vocabulary has a token for each.

    These are the fixed lines of prompts, the parts of a call around its numbers, and the error
    responses to the most frequent malformed calls.
    """
    texts = [
        system_text(dialect, tools),
        system_text(dialect, ()),
        SUBAGENT,
        ANSWER_NOW,
        dialect.to_assistant,
        dialect.open("user"),
        rewrite_calls(render_call(CropCall(0, 1)), dialect.calls),
    ]
    failed = parse_calls(_BAD_CALLS, tools, dialect.calls)
    texts += [f"error: {call.reason}" for call in failed if isinstance(call, FailedCall)]

    pieces: list[str] = []
    for text in texts:
        for line in re.findall(r"[^\n]*\n+|[^\n]+", text):
            # The times of a call vary, so they are not part of any piece.
            pieces += re.split(r"(?<![\w.])\d+", line)
    return tuple(dict.fromkeys(pieces))  # each once, in order


def build_vocabulary(pieces: Iterable[str], dialect: Dialect) -> Vocabulary:
    """Build a vocabulary from all 256 bytes, the given pieces and the added tokens of a dialect.

    A text is split into as few tokens as possible, so every occurrence of a piece is one token
    unless a longer piece covers it. Any text survives encoding and decoding.

    Args:
        pieces: Texts that become one token each. Added tokens inside a piece split it.
        dialect: That of the model's family.
    """
    added = re.compile("|".join(map(re.escape, dialect.special + dialect.added)))
    # Dicts as ordered sets: ids follow the order of the pieces.
    parts = dict.fromkeys(part for piece in pieces for part in added.split(piece) if part)
    # A byte-level vocabulary writes each byte as one printable character.
    characters = byte_characters()
    coded = dict.fromkeys("".join(characters[byte] for byte in part.encode()) for part in parts)
    vocabulary = [(c, _PIECE_SCORE if c in coded else _BYTE_SCORE) for c in characters]
    vocabulary += [(text, _PIECE_SCORE) for text in coded if len(text) > 1]
    tokenizer = tokenizers.Tokenizer(models.Unigram(vocabulary))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [tokenizers.AddedToken(t, special=True, normalized=False) for t in dialect.special]
    )
    tokenizer.add_tokens(
        [tokenizers.AddedToken(t, special=False, normalized=False) for t in dialect.added]
    )
    return Vocabulary(tokenizer, dialect)
