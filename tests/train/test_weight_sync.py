"""The sampler gets the trainer's weights on its process's own devices."""

import json
import pathlib

import pytest
from flax import nnx

from models.config import ModelConfig
from models.model import abstract_model
from models.qwen3_vl.sizes import qwen3_vl, tiny
from train.learn.weight_sync import sampler_devices

PROGRAM = str(pathlib.Path(__file__).with_name("hosts_program.py"))


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_weights_cross_processes_unchanged(together, tmp_path, processes):
    for ended in together([PROGRAM, "hand-over", str(tmp_path)], processes, devices=8 // processes):
        assert ended.code == 0, ended.err[-3000:]
        assert json.loads(ended.out.splitlines()[-1]) == {"devices": 8 // processes}


def test_a_sampler_uses_as_many_devices_as_divide_its_model():
    def devices(config: ModelConfig, count: int) -> int:
        return sampler_devices(nnx.state(abstract_model(config).text), count)

    assert [devices(qwen3_vl("8b"), count) for count in (1, 2, 4, 8, 16)] == [1, 2, 4, 8, 8]
    assert devices(tiny(467), 4) == 1 and devices(tiny(464), 8) == 2
