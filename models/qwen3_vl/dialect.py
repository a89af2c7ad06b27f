"""The dialect of Qwen2.5-VL and Qwen3-VL: ChatML, and calls as JSON."""

from __future__ import annotations

import pathlib

from paravt_jax.method.parsing import JSON_CALLS
from paravt_jax.method.tokenizer import Dialect

DIALECT = Dialect(
    start="<|im_start|>",
    end="<|im_end|>",
    pad="<|endoftext|>",
    vision_start="<|vision_start|>",
    vision_end="<|vision_end|>",
    image="<|image_pad|>",
    video="<|video_pad|>",
    calls=JSON_CALLS,
    chat_template=pathlib.Path(__file__).with_name("chat_template.jinja").read_text("utf-8"),
    # Ids 151643 to 151668 of Qwen3-VL; the last four are text in Qwen2.5-VL.
    special=(
        *("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
        *("<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>", "<|box_end|>"),
        *("<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>"),
        *("<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"),
    ),
    added=(
        *("<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"),
        *("<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<tool_response>", "</tool_response>"),
        *("<think>", "</think>"),
    ),
)
