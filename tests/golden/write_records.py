"""Writes the committed golden records: `python -m tests.golden.write_records`.

The tables have the shape of those in PARAVT_TEST_GOLDEN, and the same tests read both. Numbers
come from loops in float64 NumPy (`formulas`) and from readers of text (`texts`), which share no
code with what is tested. Gradients are central differences of those loops. Answers to short texts
were written by hand.
"""

from __future__ import annotations

import itertools
import json
import math
import pathlib
import unicodedata
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.golden.formulas import Arrays, Config, normalise_as_released, published_loss, released
from tests.golden.frame_records import frames
from tests.golden.texts import (
    GOOD,
    alone,
    bare,
    completion,
    final_answer,
    lone,
    names,
    our_readings,
    overlap,
    right_letter,
    summed,
    turn,
)

FOLDER = pathlib.Path(__file__).with_name("records")
Case = tuple[Config, Arrays]

NORM = {
    **{"mean_level": "group", "std_level": "group", "group_size": 4, "eps": 1e-5},
    **{"mean_leave1out": False, "std_unbiased": True},
}
RECIPE: Config = {
    **{"reward_bias": -0.2, "reward_scaling": 10.0, "reward_clip": 20.0, "reward_norm": NORM},
    "adv_norm": NORM | {"mean_level": "batch", "std_level": "batch", "group_size": 1},
    **{"kl_ctl": 0.01, "kl_estimator": "k1", "discount": 1.0, "gae_lambda": 1.0},
    **{"mask_no_eos_with_zero": False, "use_decoupled_loss": True, "recompute_logprob": True},
    **{"behav_imp_weight_cap": 5.0, "importance_sampling_level": "token", "error": None},
    **{"eps_clip": 0.2, "eps_clip_higher": None, "c_clip": None, "m2_threshold": None},
    **{"use_sapo_loss": False, "prox_logp_method": "recompute", "temperature": 0.7},
}
"""The published recipe (REFERENCE 3) in the tables' words."""


# --- arrays ---


def normalization(rng: np.random.Generator) -> list[Case]:
    found = []
    levels = [("group", "group"), ("batch", "batch"), ("group", None), (None, "batch")]
    for (mean, std), ragged in itertools.product(levels, (False, True)):
        config = NORM | {"mean_level": mean, "std_level": std, "mean_leave1out": std is None}
        x = rng.normal(1, 3, (8, 6) if ragged else (8, 1)).astype(np.float32)
        mask = rng.random(x.shape) < 0.7 if ragged else np.ones(x.shape, bool)
        y = normalise_as_released(x, mask, config)
        arrays = {"x": x, "mask": mask, "y": y} if ragged else {"x": x[:, 0], "y": y[:, 0]}
        found.append((config, arrays))
    return found


def kl_estimator(rng: np.random.Generator) -> list[Case]:
    found = []
    for kind, clamp in itertools.product(("k1", "k2", "k3"), (True, False)):
        logprobs, base = -rng.exponential(4, (2, 2, 6)).astype(np.float32)
        d = logprobs.astype(np.float64) - base
        kl = {"k1": d, "k2": d * d / 2, "k3": np.exp(-d) - 1 + d}[kind]
        kl = np.clip(kl, -10, 10) if clamp else kl
        config = {"kl_estimator": kind, "apply_clamp": clamp}
        found.append((config, {"log_probs": logprobs, "log_probs_base": base, "kl": kl}))
    return found


def rollouts(rng: np.random.Generator, words: int = 7, width: int = 12) -> Arrays:
    """Eight rollouts in groups of four: a prompt, words with a tool's words between, padding."""
    lengths = rng.integers(width - 3, width, 8)
    at = np.arange(width)
    real = at < lengths[:, None]
    mask = real & (at >= 3) & ~((at >= 5) & (at < 5 + rng.integers(0, 3, (8, 1))))
    behaviour = np.where(mask, -rng.exponential(1, real.shape), 0)
    following = np.concatenate([behaviour[:, 1:], np.zeros((8, 1))], 1)
    return {
        "in_input_ids": rng.integers(0, words, real.shape),
        "in_attention_mask": real,
        "in_loss_mask": mask.astype(np.int32),
        "in_logprobs": behaviour.astype(np.float32),
        "in_rewards": rng.choice([0.0, 0.5, 1.3, 2.1, 2.8], 8).astype(np.float32),
        "in_prox_logp": (following + rng.normal(0, 0.3, real.shape)).astype(np.float32),
        "in_ref_logp": (following + rng.normal(0, 0.5, real.shape)).astype(np.float32),
    }


def advantages(rng: np.random.Generator) -> list[Case]:
    dr_grpo = {"reward_norm": NORM | {"std_level": None}, "kl_estimator": "k2"}
    rloo = {"reward_norm": NORM | {"std_level": None, "mean_leave1out": True}, "reward_clip": 9.0}
    found = []
    for change in ({}, {}, dr_grpo, rloo, {"kl_estimator": "k3", "kl_ctl": 0.1}, {"kl_ctl": 0.0}):
        config, arrays = RECIPE | change, rollouts(rng)
        scaled, normed, out = released(config, arrays, mistakes=True)
        middle = {"mid_reward_scaled_clipped": scaled, "mid_reward_normed": normed}
        found.append((config, arrays | middle | {"out_advantages": out}))
    return found


def by_differences(f: Callable[[np.ndarray], float], x: np.ndarray) -> np.ndarray:
    """The gradient of f at x: central differences in float64."""
    x, out, step = x.astype(np.float64), np.zeros(x.shape), 1e-5
    for i in np.ndindex(*x.shape):
        values = []
        for sign in (1, -1):
            moved = x.copy()
            moved[i] += sign * step
            values.append(f(moved))
        out[i] = (values[0] - values[1]) / (2 * step)
    return out


LOSSES = (
    {},
    {"eps_clip_higher": 0.28, "c_clip": 3.0},
    {"importance_sampling_level": "sequence", "eps_clip": 0.05},
    {"behav_imp_weight_cap": None},
    {"behav_imp_weight_cap": 1.2, "c_clip": 1.5},
)


def grpo_loss(rng: np.random.Generator) -> list[Case]:
    """Padded rows and packed ones in turn."""
    found = []
    for number, change in enumerate((*LOSSES, {"use_decoupled_loss": False})):
        config, shape = RECIPE | change, (3, 8)
        mask = rng.random(shape) < 0.7
        old = -rng.exponential(1, shape)
        arrays = {
            "in_old_logp": old,
            "in_prox_logp": old + rng.normal(0, 0.5, shape),
            "in_logprobs": old + rng.normal(0, 0.5, shape),
            "in_advantages": np.where(mask, rng.normal(0, 1, shape), 0),
            "in_loss_mask": mask,
        }
        arrays = {name: x.astype(np.float32) for name, x in arrays.items()}
        if number % 2:
            arrays = {name: x.reshape(-1) for name, x in arrays.items()}
            arrays["in_cu_seqlens"] = np.array([0, 5, 16, 24], np.int32)
        exact = {
            name: x if name == "in_cu_seqlens" else x.astype(np.float64)
            for name, x in arrays.items()
        }

        def loss(x: np.ndarray, config: Config = config, exact: Arrays = exact) -> float:
            return published_loss(config, exact | {"in_logprobs": x})

        arrays["out_loss"] = np.array(loss(exact["in_logprobs"]))
        arrays["grad_logprobs"] = by_differences(loss, exact["in_logprobs"])
        found.append((config, arrays))
    return found


def ppo_loss(rng: np.random.Generator) -> list[Case]:
    """The same losses as the function below the recipe's takes them."""
    renamed = {"in_old_logp": "in_old_logprobs", "in_prox_logp": "in_proximal_logprobs"}
    found = []
    for config, arrays in grpo_loss(rng)[: len(LOSSES)]:
        arrays = {renamed.get(name, name): x for name, x in arrays.items()}
        mask = arrays["in_loss_mask"] > 0
        weight = np.exp(arrays["in_proximal_logprobs"] - arrays["in_old_logprobs"])[mask]
        kept = weight <= (config["behav_imp_weight_cap"] or math.inf)
        found.append((config, arrays | {"derived_behave_kept_ratio": np.array(kept.mean())}))
    return found


def log_softmax(x: np.ndarray) -> np.ndarray:
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def logprobs(rng: np.random.Generator) -> list[Case]:
    found = []
    for temperature in (1.0, 0.7):
        logits = rng.normal(0, 3, (9, 11)).astype(np.float32)
        labels, weight = rng.integers(0, 11, 9), rng.normal(0, 1, 9).astype(np.float32)
        each = log_softmax(logits.astype(np.float64) / temperature)
        gradient = (np.eye(11)[labels] - np.exp(each)) * weight[:, None] / temperature
        arrays = {"in_logits": logits, "in_labels": labels, "in_weight": weight}
        arrays |= {"out_logprobs": each[np.arange(9), labels]}
        found.append(
            ({"temperature": temperature}, arrays | {"grad_logits_of_weighted_sum": gradient})
        )
    return found


def train_step(rng: np.random.Generator) -> list[Case]:
    """A model whose logits are a table by the word before; two minibatches of two micro-batches."""
    found = []
    for change in ({}, {"c_clip": 3.0, "eps_clip_higher": 0.3}):
        config, arrays = RECIPE | change, rollouts(rng)
        w = rng.normal(0, 1, (7, 7)).astype(np.float32)
        ids, real = arrays["in_input_ids"], arrays["in_attention_mask"]
        mask = arrays["in_loss_mask"] > 0

        def chosen(table: np.ndarray, temperature: float, ids: np.ndarray = ids) -> np.ndarray:
            """Log-probs of each row's next word, aligned with the word before it."""
            each = log_softmax(table.astype(np.float64) / temperature)[ids[:, :-1], ids[:, 1:]]
            return np.concatenate([each, np.zeros((len(ids), 1))], 1)

        def near(table: np.ndarray = w) -> np.ndarray:
            return chosen(table + rng.normal(0, 0.2, table.shape), 0.7)

        drawn = near()
        token = np.concatenate([np.zeros((8, 1)), drawn[:, :-1]], 1)
        arrays["in_logprobs"] = np.where(mask, token, 0).astype(np.float32)
        arrays["in_prox_logp"] = near().astype(np.float32)
        arrays["in_ref_logp"] = chosen(w + rng.normal(0, 0.2, w.shape), 1.0).astype(np.float32)
        credit = released(config, arrays, mistakes=True)[2]
        arrays |= {"W": w, "out_advantages": credit, "out_prox_logp": arrays["in_prox_logp"]}
        arrays["out_logprobs"] = np.concatenate([arrays["in_logprobs"][:, 1:], np.zeros((8, 1))], 1)
        next_mask = np.concatenate([mask[:, 1:], np.zeros((8, 1), bool)], 1)

        def loss(
            table: np.ndarray,
            rows: np.ndarray,
            whole: np.ndarray,
            config: Config = config,
            arrays: Arrays = arrays,
            mask: np.ndarray = next_mask,
            chosen: Callable[..., np.ndarray] = chosen,
        ) -> float:
            """Of some rows of a minibatch, over the tokens of the whole one."""
            parts = {
                "in_logprobs": chosen(table, 0.7)[rows],
                "in_prox_logp": arrays["out_prox_logp"][rows].astype(np.float64),
                "in_old_logp": arrays["out_logprobs"][rows].astype(np.float64),
                "in_advantages": arrays["out_advantages"][rows],
                "in_loss_mask": mask[rows],
            }
            return published_loss(config, parts) * mask[rows].sum() / mask[whole].sum()

        order = rng.permutation(8)
        lengths, plans, losses = real.sum(1), [], []
        for number, rows in enumerate(np.split(order, 2)):
            gradient = by_differences(lambda x, rows=rows, loss=loss: loss(x, rows, rows), w)
            arrays[f"grad_W_minibatch{number}"] = gradient
            micro = [np.array([2, 0]), np.array([1, 3])]
            sizes = [int(lengths[rows[part]].sum()) for part in micro]
            plans.append({"order": np.concatenate(micro).tolist(), "group_lens": sizes})
            losses += [loss(w, rows[part], rows) for part in micro]
        config = config | {"minibatch_row_order": order.tolist(), "minibatch_sizes": [4, 4]}
        config |= {"microbatches": plans, "microbatch_scaled_losses": losses}
        found.append((config, arrays))
    return found


# --- texts ---


def words(text: str) -> list[str]:
    """All words but articles, or the articles where there are no others."""
    found = bare(unicodedata.normalize("NFKC", text).lower()).split()
    return [word for word in found if word not in ("a", "an", "the")] or found


def f1(said: str, answer: str) -> float:
    shared = len(set(words(said)) & set(words(answer)))
    lengths = len(words(said)) + len(words(answer))
    return 2 * shared / lengths if shared else 0.0


def rewards() -> list[dict]:
    think = "<think>\nThe first crop shows a red kite above the beach.\n</think>\n"
    call, shown = f"<tool_call>\n{GOOD}\n</tool_call>", "<tool_response>\na kite\n</tool_response>"
    shapes = (
        "{think}<answer>{answer}</answer>",
        "<think>no</think><answer>{answer}</answer>",
        "<answer>{answer}</answer>",
        "{think}{call}{shown}<answer>{answer}</answer>",
        "{think}{call}",
        "{call}{think}<answer>{answer}</answer>",
        "<think>\nA thought that nobody closes",
        "{answer}",
    )
    asked = (
        *(("mcq", "B", said) for said in ("B", "B. a kite", "C", "option B")),
        *(("tvg", "[4.0, 10.0]", said) for said in ("[4.0, 10.0]", "[6.0, 12.0]", "[20, 30]")),
        *(("oe", "a red kite", said) for said in ("red kite", "the kite", "a blue boat")),
    )
    knobs = (
        {"ANSWER_SUFFIX": "1", "ANCHOR_WEIGHT": "0.5", "FORMAT_WEIGHT": "1.0", "REWARD_MODE": "f1"},
        {
            **{"ANSWER_SUFFIX": "0", "ANCHOR_WEIGHT": "0.0"},
            **{"FORMAT_WEIGHT": "0.5", "REWARD_MODE": "exact"},
        },
    )
    found = []
    for shape, (kind, answer, said), knob in itertools.product(shapes, asked, knobs):
        text = shape.format(think=think, call=call, shown=shown, answer=said)
        record = completion(text, answer, kind) | {"id": f"{len(found)}", "knobs": knob}
        found.append(record | {"expected": reward_columns(record)})
    return found


def reward_columns(record: dict) -> dict[str, Any]:
    """What a record expects, from the readers of the tests."""
    text, answer, knobs = record["completion"], record["answer"], record["knobs"]
    said, read = final_answer(text) or "", our_readings(record["completion"])
    same = words(said) == words(answer) != []
    letter = right_letter(record)
    heard = {"expected": {"extract_answer": said}, "answer": answer}
    scores = {
        "mcq": float(lone(said) == letter or names(said) == [letter]) if letter else float(same),
        "tvg": overlap(heard),
        "oe": f1(said, answer),
    }
    by_kind = 1.0 if same else scores[record["question_type"]]
    if record["question_type"] == "oe" and knobs["REWARD_MODE"] == "exact":
        by_kind = float(same)
    form = min(max(summed(read, knobs), 0.0), 1.0)
    tool = (0.3 if "<tool_response>" in text else 0.1) + 0.5 * (by_kind > 0) if alone(text) else 0.0
    return {
        "error": None,
        "extract_answer": said,
        "normalize_extracted": " ".join(words(said)),
        "normalize_answer": " ".join(words(answer)),
        "has_parseable_tool_call": bool(alone(text)),
        "has_substantive_think": read["think"],
        "think_before_tool": read["order"],
        "compute_f1": scores["oe"],
        "compute_mcq_acc": scores["mcq"],
        "compute_temporal_iou": scores["tvg"],
        "compute_format_reward": form,
        "acc_reward": by_kind,
        "format_reward": form,
        "tool_reward": tool,
        "total": by_kind + float(knobs["FORMAT_WEIGHT"]) * form + tool,
    }


def tool_parser() -> list[dict]:
    def call(start: Any, end: Any) -> dict:
        return {"name": "crop_video", "arguments": {"start_time": start, "end_time": end}}

    def block(value: Any) -> str:
        return f"<tool_call>\n{json.dumps(value)}\n</tool_call>"

    one, two, text = call(3, 9), call("0:12", 20.5), "<think>\nLet me look.\n</think>\n"
    return [
        turn(""),
        turn("There is a kite."),
        turn(f"{text}<answer>B</answer>"),
        turn(block(one), one),
        turn(f"{text}{block(one)}", one),
        turn(f"{text}{block(one)}\n{block(two)}", one, two),
        turn(f"{block(two)}{block(one)}{block(two)}<|im_end|>", two, one, two),
        turn(f"{text}<tool_call></tool_call>"),
        turn(f"{text}<tool_call>{{'name': 'crop_video'}}</tool_call>"),
        turn("</tool_call>"),
    ]


CALL = {"name": "crop_video", "arguments": {"start_time": 1, "end_time": 2}}
READINGS: dict[str, list[tuple[Any, Any]]] = {
    "parse_tool_calls": [
        ("", []),
        ("nothing to look at", []),
        (f"<tool_call>{GOOD}</tool_call>", [CALL]),
        (f"so\n<tool_call>\n{GOOD}\n</tool_call>\n<tool_call>{GOOD}</tool_call>", [CALL, CALL]),
        (f"<tool_call>{{</tool_call><tool_call>{GOOD}</tool_call>", [CALL]),
    ],
    "parse_video_zoom_calls": [("", []), ("<video_zoom>nothing</video_zoom>", [])],
    "extract_letter": [
        ("<answer>B</answer>", "B"),
        ("<answer>C.</answer>", "C"),
        ("<answer>(D) the third kite</answer>", "D"),
        ("D", "D"),
        ("The answer is C", "C"),
        ("", ""),
    ],
    "extract_time_from_response": [
        ("[3.5, 8]", [3.5, 8.0]),
        ("3 - 8 seconds", [3.0, 8.0]),
        ("from 12.25 to 30", [12.25, 30.0]),
        ("01:05 - 01:20", [65.0, 80.0]),
        ("when the kite falls", None),
        ("", None),
    ],
    "parse_time_val": [
        (7, 7.0),
        (2.25, 2.25),
        ("14", 14.0),
        (" 3.5 ", 3.5),
        ("2:05", 125.0),
        ("1:00:01.5", 3601.5),
    ],
    "temporal_iou": [
        ([[0, 4], [2, 6]], 1 / 3),
        ([[1, 2], [3, 4]], 0.0),
        ([[0, 8], [2, 4]], 0.25),
        ([[5.5, 6.5], [5.5, 6.5]], 1.0),
        ([[4, 3], [0, 9]], 0.0),
    ],
    "parse_srt": [
        ("1\n00:00:02,000 --> 00:00:04,500\nA kite rises\n", "A kite rises"),
        (
            "1\n00:00:00,000 --> 00:00:01,000\n<b>One</b>\nand two\n\n"
            "2\n00:01:00,000 --> 00:01:02,000\nthree\n",
            "One\nand two\nthree",
        ),
        ("", ""),
    ],
}


# --- frames ---


def spread(start: int, end: int, count: int) -> list[int]:
    """Evenly spread numbers in float32; the second half is counted from the end."""
    step = np.float32(end - start) / np.float32(max(count - 1, 1))
    first = [float(step) * i + start for i in range(count // 2)]
    last = [end - float(np.float32(step)) * (count - 1 - i) for i in range(count // 2, count)]
    return [round(float(np.float32(value))) for value in (*first, *last)]


def overviews_and_crops() -> list[dict]:
    found = []
    for total, count, fps in itertools.product((17, 250, 1801), (2, 4, 8, 16), (2.0, 29.97)):
        found.append(frames(total, spread(0, total - 1, count), fps, nframes=count))
    for start, end in ((0, 8), (10, 19), (3.5, 12.25)):
        first, last = math.ceil(start * 25), math.floor(end * 25)
        asked = {"video_start": start, "video_end": end, "fps": 1.0, "max_frames": 16}
        record = frames(1000, spread(first, last, 2 * round((end - start) / 2)), 25.0)
        found.append(record | {"ele": asked})
    return found


def resized(height: int, width: int, least: int, most: int, factor: int) -> list[int] | None:
    """The size in multiples of `factor` nearest to a frame's, with `least` to `most` pixels."""
    if max(height, width) > 200 * min(height, width):
        return None
    sides = [max(factor, round(side / factor) * factor) for side in (height, width)]
    area = height * width
    if sides[0] * sides[1] > most:
        scale = math.sqrt(area / most)
        sides = [max(factor, int(side / scale // factor) * factor) for side in (height, width)]
    elif sides[0] * sides[1] < least:
        scale = math.sqrt(least / area)
        sides = [math.ceil(side * scale / factor) * factor for side in (height, width)]
    return sides


def sizes() -> tuple[list[dict], list[dict]]:
    """Of single frames, and of frames of a video that names its own limits."""
    shapes = ((720, 1280), (1080, 1920), (333, 500), (40, 60), (17, 2000), (8, 4000))
    limits = ((784, 50_176), (65_536, 602_112))
    single, shared = [], []
    for (height, width), (least, most), factor in itertools.product(shapes, limits, (28, 32)):
        got = resized(height, width, least, most, factor)
        size = {"height": height, "width": width, "resized": got}
        named = {"min_pixels": least, "max_pixels": most}
        single.append(size | named | {"factor": factor, "error": None if got else "ValueError"})
        shared.append(size | {"nframes": 8, "image_patch_size": factor // 2, "ele": named})
    return single, shared


# --- files ---


def numbered(records: list[dict]) -> list[dict]:
    return [record | {"id": str(number)} for number, record in enumerate(records)]


def write_json(name: str, **parts: list[dict]) -> None:
    text = json.dumps(parts, ensure_ascii=False, separators=(",", ":"))
    (FOLDER / f"{name}.json").write_text(text.replace('},{"', '},\n{"') + "\n", encoding="utf-8")


def write_npz(name: str, cases: list[Case]) -> None:
    table: dict[str, np.ndarray] = {}
    for number, (config, arrays) in enumerate(cases):
        table[f"c{number:02}__config_json"] = np.array(json.dumps(config))
        for field, x in arrays.items():
            exact = x.astype(np.float32) if x.dtype == np.float64 else x
            table[f"c{number:02}__{field}"] = exact
    np.savez_compressed(FOLDER / f"{name}.npz", **table)  # pyright: ignore[reportArgumentType]


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    arrays = (normalization, kl_estimator, advantages, grpo_loss, ppo_loss, logprobs, train_step)
    for number, make in enumerate(arrays):
        write_npz(make.__name__, make(np.random.default_rng(number)))
    write_json("rewards", records=rewards())
    write_json("tool_parser", records=numbered(tool_parser()))
    readings = {
        name: numbered([{"input": a, "expected": b, "error": None} for a, b in pairs])
        for name, pairs in READINGS.items()
    }
    write_json("eval_parsing", **readings)
    single, shared = sizes()
    write_json(
        "frame_sampling",
        frame_sampling=numbered(overviews_and_crops()),
        smart_resize=numbered(single),
        fetch_video_resize=numbered(shared),
    )


if __name__ == "__main__":
    main()
