"""`python -m paravt_extras.fits`: which recipes fit the devices here; nothing is fetched."""

from __future__ import annotations

import types

import jax

import paravt_extras.fits as command
from paravt_extras.fit import GIB
from paravt_extras.slices import Devices


def put_here(devices: Devices, monkeypatch, capability: str = "8.9") -> None:
    monkeypatch.setattr(command, "found_devices", lambda: devices)
    device = types.SimpleNamespace(
        platform=devices.platform, device_kind=devices.name, compute_capability=capability
    )
    monkeypatch.setattr(jax, "local_devices", lambda: [device])


def verdicts(capsys) -> dict[str, str]:
    _, *lines = capsys.readouterr().out.splitlines()
    return dict(line.strip().split(": ", 1) for line in lines)


def test_a_cpu_trains_the_tiny_recipes_only_and_names_chips_for_the_others(capsys):
    assert command.main(["paravt_2b_lora", "paravt_tiny"]) == 1
    verdict = verdicts(capsys)
    assert verdict["paravt_tiny"] == "fits"
    assert verdict["paravt_2b_lora"].startswith("needs a TPU or a GPU") and "v5e:1x1" in str(
        verdict
    )


def test_one_chip_takes_2b_and_says_what_8b_lacks(capsys):
    assert command.main(["paravt_2b_lora", "paravt_8b_lora", "--topology", "v5e:1x1"]) == 0
    verdict = verdicts(capsys)
    assert verdict["paravt_2b_lora"] == "fits"
    assert "GiB per device" in verdict["paravt_8b_lora"] and "v5e:" in verdict["paravt_8b_lora"]


def test_a_gpu_of_24_gb_takes_2b_and_one_without_bfloat16_the_tiny_recipes(capsys, monkeypatch):
    put_here(Devices("1 x NVIDIA L4", 1, 1, 20.2 * GIB, "gpu"), monkeypatch)
    assert command.main(["paravt_2b_lora", "paravt_8b_lora"]) == 0
    assert "too small" in verdicts(capsys)["paravt_8b_lora"]
    put_here(Devices("1 x Tesla T4", 1, 1, 13 * GIB, "gpu"), monkeypatch, "7.5")
    assert command.main(["paravt_2b_lora", "paravt_tiny"]) == 1
    verdict = verdicts(capsys)
    assert verdict["paravt_tiny"] == "fits"
    assert (
        "no bfloat16" in verdict["paravt_2b_lora"] and "tiny recipes" in verdict["paravt_2b_lora"]
    )
