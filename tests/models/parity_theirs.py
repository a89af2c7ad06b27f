"""The results of transformers on the cases of `parity`. Needs torch and transformers 5.

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

# With models this small, threads cost more than they gain.
torch.set_num_threads(1)


def make_model(case: Case) -> Any:
    """A model with random weights, all of them float16 numbers.

    They are large, so that every part shows in the logits and generated tokens vary. The scales of
    norms are near 1, as in trained models.
    """
    torch.manual_seed(case.seed)
    settings = transformers.AutoConfig.for_model(**case.config)
    settings._attn_implementation = "eager"
    model = transformers.AutoModelForImageTextToText.from_config(settings).eval().float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scale = "norm" in name and name.endswith("weight")
            is_matrix = "language_model.layers" in name and not scale
            parameter.normal_(mean=float(scale), std=0.3 if is_matrix else 0.15)
            parameter.copy_(parameter.half().float())
    return model


def parameters_of(model: Any) -> dict[str, Any]:
    """Every parameter by its name in published files; tied embeddings once."""
    found = dict(model.named_parameters())
    if model.config.model_type != "qwen2_5_vl":
        return found
    renamed = {"model.visual.": "visual.", "model.language_model.": "model."}
    for ours, published in renamed.items():
        found = {name.replace(ours, published): value for name, value in found.items()}
    return found


def in_file(name: str, array: Any) -> Any:
    """A parameter, or its gradient, as files have it: transformers holds experts transposed."""
    return array.swapaxes(1, 2) if ".experts." in name else array


def weights(model: Any) -> dict[str, np.ndarray]:
    """Every parameter by its name; tied embeddings once."""
    return {
        name: in_file(name, parameter.detach().numpy())
        for name, parameter in parameters_of(model).items()
    }


def inputs_of(sample: Sample) -> dict[str, Any]:
    """Inputs of their model."""
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
    given = {name: inputs[name] for name in names if name in inputs}
    positions, _ = model.model.get_rope_index(**given)
    return positions.numpy()


def watch(model: Any) -> dict[str, list[torch.Tensor]]:
    """Hooks that collect inputs of layers and outputs of modules while the model runs.

    A module of the tower runs on images first, then on videos.
    """
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

    def turns(name: str, module: Any) -> None:
        # Cosines and sines, each repeated for both halves of a head.
        module.register_forward_hook(
            lambda _, __, output: note(name, torch.cat([x.chunk(2, -1)[0] for x in output], -1))
        )

    after("patches", visual.patch_embed)
    turns("text turns", text.rotary_emb)
    after("norm", text.norm)
    if model.config.model_type == "qwen2_5_vl":
        # Inside of the tower patches have another order.
        visual.register_forward_hook(lambda _, __, output: note("level 0", output.pooler_output))
        mergers, blocks = [], []
    else:
        turns("vision turns", visual.rotary_pos_emb)
        mergers, blocks = [visual.merger, *visual.deepstack_merger_list], visual.blocks
    for number, merger in enumerate(mergers):
        after(f"level {number}", merger)
    for number, block in enumerate(blocks):
        before(f"block {number}", block)
        parts = {"qkv": block.attn.qkv, "attention": block.attn, "mlp": block.mlp, "output": block}
        for part, module in parts.items():
            after(f"block {number} {part}", module)
    for number, layer in enumerate(text.layers):
        before(f"layer {number}", layer)
        attention = layer.self_attn
        parts = {
            "attention": attention,
            "mlp": layer.mlp,
            "output": layer,
        }
        if hasattr(attention, "q_norm"):
            parts |= {"q_norm": attention.q_norm, "k_norm": attention.k_norm}
        for part, module in parts.items():
            after(f"layer {number} {part}", module)
    return found


def results(model: Any, sample: Sample, prompts: Sample) -> Results:
    """The results of transformers, as `parity_ours.results`."""
    inputs = inputs_of(prompts)
    options = {"do_sample": False, "max_new_tokens": NEW_TOKENS, "use_cache": True}
    with torch.no_grad():
        tokens = model.generate(**inputs, **options)[:, prompts.ids.shape[1] :]
    inputs = inputs_of(sample)
    positions = positions_of(model, sample)
    found = watch(model)
    # Without position_ids, transformers would count the padding of text rows too.
    output = model(**inputs, position_ids=torch.tensor(positions), use_cache=True)
    both = torch.tensor(sample.valid[:, 1:] & sample.valid[:, :-1])
    targets = inputs["input_ids"][:, 1:][both]
    torch.nn.functional.cross_entropy(output.logits[:, :-1][both], targets).backward()
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
        name: in_file(name, parameter.grad.numpy())
        for name, parameter in parameters_of(model).items()
        if parameter.grad is not None
    }
    return Results(positions, output.logits.detach().numpy(), tokens.numpy(), modules, gradients)


def samples(case: Case) -> tuple[Sample, Sample]:
    """The case's batch, and the same rows padded on the left, for generation."""
    return make_sample(case), make_sample(dataclasses.replace(case, pad="left"))


def record() -> None:
    """Writes the files of RECORDED: weights, patches, and each gradient as norm and direction."""
    for name, file in RECORDED.items():
        case = CASES[name]
        model = make_model(case)
        sample, prompts = samples(case)
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
