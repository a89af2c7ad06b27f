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


def results(model: Any, sample: Sample, prompts: Sample) -> Results:
    """The results of transformers, as `parity_ours.results`."""
    inputs = inputs_of(prompts)
    options = {"do_sample": False, "max_new_tokens": NEW_TOKENS, "use_cache": True}
    with torch.no_grad():
        tokens = model.generate(**inputs, **options)[:, prompts.ids.shape[1] :]
    inputs = inputs_of(sample)
    positions = positions_of(model, sample)
    # Without position_ids, transformers would count the padding of text rows too.
    output = model(**inputs, position_ids=torch.tensor(positions))
    both = torch.tensor(sample.valid[:, 1:] & sample.valid[:, :-1])
    targets = inputs["input_ids"][:, 1:][both]
    torch.nn.functional.cross_entropy(output.logits[:, :-1][both], targets).backward()
    gradients = {
        name: in_file(name, parameter.grad.numpy())
        for name, parameter in parameters_of(model).items()
        if parameter.grad is not None
    }
    return Results(positions, output.logits.detach().numpy(), tokens.numpy(), gradients)


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
        arrays |= {f"weight {name}": x.astype(np.float16) for name, x in weights(model).items()}
        arrays["norms"] = np.array(list(norms.values()))
        arrays |= {
            f"gradient {name}": (x / norms[name]).astype(np.float16)
            for name, x in found.gradients.items()
        }
        np.savez_compressed(file, allow_pickle=False, **arrays)


if __name__ == "__main__":
    record()
