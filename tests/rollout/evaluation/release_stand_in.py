"""A checkout laid out like the ParaVT release, with texts of its own."""

from __future__ import annotations

import pathlib

DRIVER = '''
import functools, json, os
from paravt.eval import utils

raise RuntimeError("this file is parsed, never executed")

TOOL_SCHEMA = json.dumps(
    {
        "type": "function",
        "function": {
            "name": "crop_video",
            "description": "Cut out a piece.",
            "parameters": {"type": "object", "properties": {"start_time": {"type": "number"}}},
        },
    }
)

DIRECT_SYSTEM = (
    "Watch, then "
    "say it in <answer></answer>."
)
REASONING_SYSTEM = "First <think>...</think>, " + "then <answer>...</answer>."
GENERAL_AGENTIC_SYSTEM = """You cut videos.
<tools>
{tool_schema}
</tools>
Write <tool_call>{{"name": "crop_video"}}</tool_call>."""
MINIMAL_AGENTIC_SYSTEM = """# Cut
{tool_schema}"""


def eval_one(client, sample, prompt_mode="agentic_general"):
    q_text = sample["question"]
    if prompt_mode.startswith("agentic_") and "file" not in q_text.lower():
        q_text = f"{q_text} Its file is {os.path.basename(vpath)}"
    for turn in range(4):
        for tc in calls:
            cropped = utils.crop_frames(vpath, st, et)
            if cropped:
                content.append(
                    {
                        "type": "text",
                        "text": (
                            f"<tool_response>\\n{len(cropped)} pictures, "
                            f"{st:.1f}s until {et:.1f}s.\\n</tool_response>"
                        ),
                    }
                )
            else:
                messages.append({"content": f"<tool_response>\\n[{st:.1f}]\\n</tool_response>"})
        if turn == 3:
            if sample["is_mcq"]:
                force = "Only the letter now."
                force_max = 64
            else:
                force = (
                    "Now say when, "
                    "as 'X - Y seconds'."
                )
                force_max = 128
'''

LOADERS = """
import os

raise RuntimeError("this file is parsed, never executed")


def parse_srt(path):
    return ""


def load_samples(dataset_name: str, hf_home: str, prompt_mode: str = "agentic_general"):
    ending = (
        "Step by step, then <answer>X</answer>."
        if prompt_mode == "direct"
        else "Just the letter."
    )

    if dataset_name == "videomme":
        samples = []
        for item in ds:
            opts = item.get("options", [])
            if isinstance(opts, list):
                opts_str = "\\n".join(f"{chr(65 + i)}. {o}" for i, o in enumerate(opts))
            else:
                opts_str = str(opts)
            question = f"Asked: {item['question']}\\nChoices:\\n{opts_str}\\n{ending}"
            samples.append({"id": item["videoID"], "question": question, "is_mcq": True})
        return samples

    if dataset_name == "videomme_wsub":
        samples = []
        for item in ds:
            opts_str = "\\n".join(f"{chr(65 + i)}. {o}" for i, o in enumerate(item["options"]))
            sub_text = parse_srt(os.path.join(sub_dir, f"{item['videoID']}.srt"))
            before = f"They say:\\n{sub_text}\\n\\n" if sub_text else ""
            question = f"{before}Asked: {item['question']}\\nChoices:\\n{opts_str}\\n{ending}"
            samples.append({"question": question})
        return samples

    if dataset_name == "longvideobench":
        for item in ds:
            opts = []
            for i in range(5):
                opt = item.get(f"option{i}", "")
                if opt and opt != "N/A":
                    opts.append(opt)
            opts_str = "\\n".join(f"({chr(ord('A') + i)}) {o}" for i, o in enumerate(opts))
            samples.append({"question": f"{item['question']}\\n{opts_str}\\n{ending}"})
        return samples

    if dataset_name == "lvbench":
        for item in ds:
            samples.append({"question": f"{item['question']}\\n{ending}"})
        return samples

    if dataset_name == "mlvu":
        for i, item in enumerate(ds):
            opts = item.get("candidates", [])
            if isinstance(opts, list):
                opts_str = "\\n".join(f"{chr(65 + j)}. {o}" for j, o in enumerate(opts))
            else:
                opts_str = str(opts)
            samples.append({"question": f"Long: {item['question']}\\n{opts_str}\\n{ending}"})
        return samples

    if dataset_name == "mmvu":
        for item in ds:
            choices = item.get("choices", {}) or {}
            opts_str = "\\n".join(
                f"{k}. {v}" for k, v in sorted(choices.items()) if v not in (None, "")
            )
            samples.append({"question": f"Expert: {item['question']}\\n{opts_str}\\n{ending}"})
        return samples

    if dataset_name == "charades":
        for i, item in enumerate(ds):
            caption = item["caption"]
            samples.append(
                {
                    "question": (
                        "Find the moment, as 'from - to'. "
                        f'Look for "{caption}". '
                        "Say from and to."
                    ),
                    "is_mcq": False,
                }
            )
        return samples

    raise ValueError(dataset_name)
"""


def write_release(folder: pathlib.Path, **changes: tuple[str, str]) -> pathlib.Path:
    """Write the checkout; `driver` and `loaders` replace a text of a file by another."""
    root = folder / "paravt" / "eval"
    root.mkdir(parents=True)
    for name, file, text in (("driver", "driver.py", DRIVER), ("loaders", "utils.py", LOADERS)):
        old, new = changes.get(name, ("", ""))
        assert old in text
        (root / file).write_text(text.replace(old, new, 1) if old else text)
    return folder
