"""The published tokenizer as older families have it: `<think>` and others are ordinary text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

CUT = ("<tool_response>", "</tool_response>", "<think>", "</think>")


def cut_tokenizer(folder: Path) -> dict[str, Any]:
    """The content of the folder's tokenizer.json without the tokens `CUT`."""
    content = json.loads((folder / "tokenizer.json").read_text())
    content["added_tokens"] = [x for x in content["added_tokens"] if x["content"] not in CUT]
    return content
