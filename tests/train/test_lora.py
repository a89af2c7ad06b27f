"""Training adapters: what moves, what is shared, what a checkpoint holds, which faults show."""

from __future__ import annotations

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models import peft_folder
from models.fingerprint import fingerprint
from models.lora import LoRASettings, add_adapters, split
from models.peft_folder import merge_adapters
from models.sharding import make_mesh, param_shardings
from models.trained import Skeleton
from models.weights.hf import load
from rollout.engine.engine import Engine
from tests.train.steps import actor_of, road_learner, take_step
from train.durable.checkpoint import CheckpointError
from train.export import Export, export
from train.learn.sft import SFTBatches, make_sft_updater, sft_step
from train.learn.weight_sync import WeightSync
from train.run import execute

LORA = LoRASettings(rank=4, alpha=8.0)


@pytest.fixture(scope="module")
def adapted(road, small, tmp_path_factory):
    """The road with adapters."""
    return small.adapted(road)


def host(tree):
    return jax.tree.map(np.array, tree)


def equal(a, b) -> bool:
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all((np.asarray(x) == np.asarray(y)).all() for x, y in pairs)


def cold_start(road):
    """The adapters after two steps of SFT."""
    model = nnx.merge(road.graph, road.weights, road.frozen)
    model.layers.adapters = nnx.Dict()
    add_adapters(model, LORA, seed=0)
    graph, weights, frozen = split(model)
    settings = dataclasses.replace(road.run.sft, microbatches=1)
    mesh = make_mesh()
    weights, frozen = (
        jax.device_put(host(state), param_shardings(state, mesh)) for state in (weights, frozen)
    )
    batches = SFTBatches(settings, road.data, None, 0, road.environment, mesh)
    updater = make_sft_updater(Skeleton(graph, frozen), weights, settings, batches.shape)
    state = updater.initial
    for left in (1, 0):
        state, _, metrics = sft_step(updater, state, batches, left)
    return host(state.weights), metrics


@pytest.mark.slow
def test_a_cold_start_trains_adapters_and_nothing_else(adapted):
    before = host((adapted.weights, adapted.frozen))
    weights, metrics = cold_start(adapted)
    assert np.isfinite(float(metrics["loss"]))
    for path, leaf in jax.tree.leaves_with_path(weights):
        assert np.abs(leaf).max() > 0, path
    assert not equal(weights, before[0])
    assert equal(adapted.frozen, before[1])


def test_training_and_engine_share_one_base(adapted):
    """On one device, the engine's base lies in the very buffers that updates read."""
    base = adapted.base()
    weights = adapted.fresh()
    sync = WeightSync(weights, np.float32, base)
    nnx.update(adapted.model.text, sync(weights), sync.base)
    engine = Engine(adapted.model, adapted.environment.features, adapted.run.engine_sizes)
    held = {x.unsafe_buffer_pointer() for x in jax.tree.leaves(engine.weights)}
    given = {x.unsafe_buffer_pointer() for x in jax.tree.leaves((base, weights))}
    assert held == given
    loaded = sync.load(engine, weights, 1, adapted.environment.features)
    assert loaded == fingerprint(weights, base)
    assert {x.unsafe_buffer_pointer() for x in jax.tree.leaves(engine.weights)} == given


@pytest.mark.slow
def test_the_reference_is_the_base_with_the_adapters_that_rl_starts_from(adapted, small):
    """Before the first update nothing has moved, so the KL term is 0."""
    road = small.lay_road(adapted.run, adapted.data)
    bare = road_learner(road).reference
    rng = np.random.default_rng(0)
    # As after a cold start: adapters that change what the base computes.
    for adapter in road.weights["layers"]["adapters"].values():
        adapter["b"].set_value(jnp.asarray(rng.normal(0, 0.2, adapter["b"].shape), jnp.float32))
    engine = Engine(road.model, road.environment.features, road.run.engine_sizes)

    def first_step(reference=None):
        learner = road_learner(road)
        if reference is not None:
            learner.reference = reference
        actor_of(learner, engine, road.environment).load(learner.initial.weights, 0)
        questions = road.data.questions[:2]
        _, metrics = take_step(
            learner, learner.initial, engine, road.environment, questions, seed=0
        )
        return metrics

    metrics = first_step()
    assert abs(metrics["kl_reference"]) < 1e-5
    assert metrics["logprob_gap"] < 1e-4
    assert abs(first_step(bare)["kl_reference"]) > 1e-2


@pytest.mark.slow
@pytest.mark.parametrize("part", ["adapter", "base"])
def test_a_number_that_changes_on_its_way_to_the_sampler_is_noticed_in_that_step(
    adapted, small, part
):
    class Faulty(small.Script):
        def load(self, weights, version):
            weights, base = (jax.tree.map(jnp.copy, x) for x in (weights, self.frozen))
            leaf = weights["layers"]["adapters"]["k"]["b"] if part == "adapter" else base["norm"]
            value = np.array(leaf[...])
            value.reshape(-1)[3] = np.nextafter(value.reshape(-1)[3], np.float32(9))
            leaf.set_value(jnp.asarray(value))
            super().load(weights, version)
            self.frozen = base

    learner = road_learner(adapted)
    questions = adapted.data.questions[:2]
    with pytest.raises(ValueError, match="after step 1, the sampler of process 0 has weights"):
        take_step(learner, learner.initial, Faulty(adapted), adapted.environment, questions)


def small_run(small, folder, **fields):
    return small.shortened(dataclasses.replace(small.small(), lora=LORA), folder, **fields)


@pytest.fixture(scope="module")
def finished(small, tmp_path_factory):
    """The folder of a finished run with adapters."""
    folder = tmp_path_factory.mktemp("lora") / "run"
    execute(small_run(small, folder))
    return folder


@pytest.mark.slow
def test_checkpoints_hold_adapters_and_optimizer_only(finished):
    for phase in ("sft", "rl"):
        meta = finished / "checkpoints" / phase / "2" / "meta" / "metadata"
        record = json.loads(meta.read_text())
        names = set(record["leaves"])
        assert not any("vision" in name for name in names)
        assert all("adapters" in name for name in names if name.startswith("text"))
        assert len(record["identity"]["base"]) == 8


@pytest.mark.slow
def test_adapters_of_a_base_on_disk_are_exported(small, finished, tmp_path):
    """Alone and merged at the end of the run; merged from its checkpoint, byte for byte."""
    path = tmp_path / "base"
    shutil.copytree(finished / "model", path)
    model = dataclasses.replace(small.small().model, path=str(path))
    folder = tmp_path / "run"
    run = small_run(small, folder, model=model, align=None)
    execute(run)

    export(Export(str(folder), str(tmp_path / "model")))
    written = sorted(file.name for file in (folder / "model").iterdir())
    assert written == sorted(file.name for file in (tmp_path / "model").iterdir())
    for file in written:
        assert (folder / "model" / file).read_bytes() == (tmp_path / "model" / file).read_bytes()
    opened = peft_folder.load(folder / "adapter")
    assert all(np.abs(x).max() > 0 for x in jax.tree.leaves(nnx.state(opened, nnx.LoRAParam)))
    merge_adapters(opened.text)
    merged = load(folder / "model")
    for x, y in zip(*(jax.tree.leaves(nnx.state(m)) for m in (opened, merged)), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-6)

    weights = path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4] + b"abcd")
    weights.with_name("sums.json").unlink()
    with pytest.raises(ValueError, match="adapters belong to a base with the fingerprint"):
        export(Export(str(folder), str(tmp_path / "other")))
    with pytest.raises(ValueError, match="belongs to a base with the fingerprint"):
        peft_folder.load(folder / "adapter")
    (folder / "result.json").unlink()  # a finished run needs no base
    with pytest.raises(CheckpointError, match="base_fingerprint: "):
        execute(run)


def test_a_target_that_the_model_lacks_is_refused_before_any_data_is_made(small, tmp_path):
    lora = LoRASettings(targets=("q", "query"))
    run = dataclasses.replace(small.small(), lora=lora, run_dir=str(tmp_path / "run"))
    with pytest.raises(ValueError, match="lora.targets: query; choose from"):
        execute(run)
    assert not (tmp_path / "run").exists()


def test_muon_does_not_train_adapters(small, tmp_path):
    run = small.small()
    optimizer = dataclasses.replace(run.sft.optimizer, name="muon")
    with pytest.raises(ValueError, match="sft.optimizer.name: 'muon' with lora"):
        dataclasses.replace(run, lora=LORA, sft=dataclasses.replace(run.sft, optimizer=optimizer))
