"""What transformers makes of the cases of `parity`; needs torch and transformers 5.

`python -m tests.models.parity_theirs` records `parity_*.npz` again.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
import torch  # pyright: ignore[reportMissingImports]  (the extra parity)
import transformers

from tests.models.parity import (
    CASES,
    IMAGE,
    NEW_TOKENS,
    RECORDED,
    VIDEO,
    Case,
    Results,
    Sample,
    is_text,
    make_sample,
)

torch.set_num_threads(1)  # models this small lose more to threads than they gain


def make_model(case: Case) -> Any:
    """Weights large enough that every part shows in the logits and sampling does not stick to one word, norms' scales near 1 as trained
    ones are; all of them float16 numbers."""
    torch.manual_seed(case.seed)
    settings = transformers.Qwen3VLConfig.from_dict(case.config)
    settings._attn_implementation = "eager"
    model = transformers.Qwen3VLForConditionalGeneration(settings).eval().float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scale = "norm" in name and name.endswith("weight")
            parameter.normal_(
                mean=float(scale),
                std=0.3 if "language_model.layers" in name and not scale else 0.15,
            )
            parameter.copy_(parameter.half().float())
    return model


def weights(model: Any) -> dict[str, np.ndarray]:
    """Every parameter by its name; tied embeddings once."""
    return {name: parameter.detach().numpy() for name, parameter in model.named_parameters()}


def inputs_of(sample: Sample) -> dict[str, Any]:
    """What their model takes."""
    ids = torch.tensor(sample.ids, dtype=torch.long)
    inputs = {"input_ids": ids, "attention_mask": torch.tensor(sample.valid).long()}
    if not len(sample.items):
        return inputs
    inputs["mm_token_type_ids"] = ((ids == IMAGE) + 2 * (ids == VIDEO)).int()
    images, videos = sample.grids(IMAGE), sample.grids(VIDEO)
    cut = sum(t * h * w for t, h, w in images)
    if images:
        inputs |= {
            "pixel_values": torch.tensor(sample.patches[:cut]),
            "image_grid_thw": torch.tensor(images),
        }
    if videos:
        inputs |= {
            "pixel_values_videos": torch.tensor(sample.patches[cut:]),
            "video_grid_thw": torch.tensor(videos),
        }
    return inputs


def positions_of(model: Any, sample: Sample) -> np.ndarray:
    """[3, b, t], 0 at padding."""
    inputs = inputs_of(sample)
    if not len(sample.items):
        return np.broadcast_to((sample.valid.cumsum(-1) - 1) * sample.valid, (3, *sample.ids.shape))
    names = ("input_ids", "mm_token_type_ids", "image_grid_thw", "video_grid_thw", "attention_mask")
    return model.model.get_rope_index(**{name: inputs[name] for name in names if name in inputs})[
        0
    ].numpy()


def watch(model: Any) -> dict[str, list[torch.Tensor]]:
    """Fills, as the model runs, what goes into each layer and comes out of all modules: a list a module, images before videos."""
    found: dict[str, list[torch.Tensor]] = {}
    visual, text = model.model.visual, model.model.language_model

    def note(name: str, value: torch.Tensor) -> None:
        found.setdefault(name, []).append(value.detach())

    def before(name: str, module: Any) -> None:
        module.register_forward_pre_hook(
            lambda _, args, kwargs: note(name, args[0] if args else kwargs["hidden_states"]),
            with_kwargs=True,
        )

    def after(name: str, module: Any) -> None:
        module.register_forward_hook(
            lambda _, __, output: note(name, output[0] if isinstance(output, tuple) else output)
        )

    def turns(name: str, module: Any) -> None:  # cosines and sines, each for both halves of a head
        module.register_forward_hook(
            lambda _, __, output: note(
                name, torch.cat([half.chunk(2, -1)[0] for half in output], -1)
            )
        )

    after("patches", visual.patch_embed)
    turns("vision turns", visual.rotary_pos_emb)
    turns("text turns", text.rotary_emb)
    after("norm", text.norm)
    for number, merger in enumerate([visual.merger, *visual.deepstack_merger_list]):
        after(f"level {number}", merger)
    for number, block in enumerate(visual.blocks):
        before(f"block {number}", block)
        parts = {"qkv": block.attn.qkv, "attention": block.attn, "mlp": block.mlp, "output": block}
        for part, module in parts.items():
            after(f"block {number} {part}", module)
    for number, layer in enumerate(text.layers):
        before(f"layer {number}", layer)
        attention = layer.self_attn
        parts = {
            "q_norm": attention.q_norm,
            "k_norm": attention.k_norm,
            "attention": attention,
            "mlp": layer.mlp,
            "output": layer,
        }
        for part, module in parts.items():
            after(f"layer {number} {part}", module)
    return found


def results(model: Any, sample: Sample, prompts: Sample) -> Results:
    """Everything `parity_ours.results` finds, from transformers."""
    inputs = inputs_of(prompts)
    with torch.no_grad():
        tokens = model.generate(
            **inputs, do_sample=False, max_new_tokens=NEW_TOKENS, use_cache=True
        )[:, prompts.ids.shape[1] :]
    inputs, positions, found = inputs_of(sample), positions_of(model, sample), watch(model)
    output = model(
        **inputs, position_ids=torch.tensor(positions), use_cache=True
    )  # alone it would count a text row's padding too
    both = torch.tensor(sample.valid[:, 1:] & sample.valid[:, :-1])
    torch.nn.functional.cross_entropy(
        output.logits[:, :-1][both], inputs["input_ids"][:, 1:][both]
    ).backward()
    for number, layer in enumerate(output.past_key_values.layers):
        found |= {
            f"layer {number} {name}": [x.detach().transpose(1, 2)]
            for name, x in (("keys", layer.keys), ("values", layer.values))
        }
    modules = {name: torch.cat(parts).numpy() for name, parts in found.items()}
    modules = {name: x[sample.valid] if is_text(name) else x for name, x in modules.items()}
    if "block 0" in modules:
        modules["positions"] = modules["block 0"] - modules["patches"]
    modules = {name: x.reshape(len(x), -1) for name, x in modules.items()}
    gradients = {
        name: parameter.grad.numpy()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    return Results(positions, output.logits.detach().numpy(), tokens.numpy(), modules, gradients)


def samples(case: Case) -> tuple[Sample, Sample]:
    """The case's batch, and the same rows padded on the left: tokens can only be added on the right."""
    return make_sample(case), make_sample(dataclasses.replace(case, pad="left"))


def record() -> None:
    """Weights and patches as they are; of each gradient its norm, and as float16 the gradient over its norm."""
    for name, file in RECORDED.items():
        case = CASES[name]
        model, (sample, prompts) = make_model(case), samples(case)
        found = results(model, sample, prompts)
        norms = {name: np.linalg.norm(x) for name, x in found.gradients.items()}
        arrays = {f"sample {name}": x for name, x in sample._asdict().items()}
        arrays |= {
            "config": json.dumps(case.config),
            "sample patches": sample.patches.astype(np.float16),
        }
        arrays |= {
            f"result {name}": getattr(found, name) for name in ("positions", "logits", "tokens")
        }
        arrays |= {f"module {name}": x.astype(np.float32) for name, x in found.modules.items()}
        arrays |= {f"weight {name}": x.astype(np.float16) for name, x in weights(model).items()}
        arrays["norms"] = np.array(list(norms.values()))
        arrays |= {
            f"gradient {name}": (x / norms[name]).astype(np.float16)
            for name, x in found.gradients.items()
        }
        np.savez_compressed(file, allow_pickle=False, **arrays)


if __name__ == "__main__":
    record()
