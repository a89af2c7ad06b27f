"""A PEFT folder is asked and evaluated like the folder of its merged model."""

from __future__ import annotations

import json
import pathlib

import jax.numpy as jnp
import numpy as np
import pytest

from models import peft_folder
from models.lora import LoRASettings, add_adapters
from models.peft_folder import merge_adapters
from models.weights import hf
from paravt_jax.data.stored import SUMS
from paravt_jax.method.protocol import ProtocolSettings
from rollout import evaluate as command
from rollout.evaluation.folder import read_json

LORA = LoRASettings(rank=4, alpha=8.0)
PROTOCOL = ProtocolSettings(max_calls=1, turn_tokens=24, summary_tokens=4, trajectory_tokens=80)


@pytest.fixture(scope="module")
def saved(checkpoint, tmp_path_factory) -> dict[str, pathlib.Path]:
    """Folders of a base, of its adapters, and of both merged."""
    folder = tmp_path_factory.mktemp("adapters")
    model = hf.load(checkpoint)
    digest = peft_folder.base_fingerprint(model)
    add_adapters(model.text, LORA, seed=0)
    rng = np.random.default_rng(0)
    for adapter in model.text.layers.adapters.values():
        adapter.b.set_value(jnp.asarray(rng.normal(0, 0.2, adapter.b.shape), jnp.float32))
    base = str(checkpoint)
    peft_folder.save_adapters(model, LORA, folder / "adapter", base=base, base_digest=digest)
    merge_adapters(model.text)
    others = {"model.safetensors", "config.json", "generation_config.json", SUMS}
    files = [file for file in checkpoint.iterdir() if file.name not in others]
    hf.save(model, folder / "merged", files=files)
    return {"base": checkpoint, "adapter": folder / "adapter", "merged": folder / "merged"}


@pytest.mark.slow
def test_an_evaluation_is_that_of_the_merged_model(saved, split, tmp_path, capfd):
    lines, hashes = {}, set()
    for name, folder in saved.items():
        out = tmp_path / name
        folders = [f"--model={folder}", f"--data={split}", f"--out={out}"]
        sizes = ["--frames=2", "--protocol.turn-tokens=16", "--limit=2", "--dtype=float32"]
        assert command.main([*folders, "--benchmark=videomme", *sizes]) == 0, capfd.readouterr().err
        hashes.add(read_json(out / "config.json")["identity"]["weights"])
        written = (out / "questions.jsonl").read_text().splitlines()
        turns = [turn for line in written for turn in json.loads(line)["turns"]]
        lines[name] = [token["text"] for turn in turns for token in turn["tokens"]]
    assert lines["adapter"] == lines["merged"] != lines["base"]
    assert len(hashes) == 3
