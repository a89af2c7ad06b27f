"""What the hub does not give, and whether a supervisor should ask again."""

from __future__ import annotations

import httpx2
import huggingface_hub
import pytest
from huggingface_hub import constants

from paravt_jax.data import sources
from paravt_jax.processes.exit_codes import FAILED, TEMPORARY, exit_code


def test_an_offline_hub_is_not_asked_again(monkeypatch, tmp_path):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(OSError, match="owner/none: .*HF_HUB_OFFLINE is set") as error:
        sources.snapshot("owner/none", ["*.json"])
    assert exit_code(error.value) == FAILED


def test_a_network_that_does_not_answer_is_asked_again(monkeypatch):
    def fail(*_, **__):
        raise httpx2.ConnectError("no route to host")

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(OSError, match="owner/none: .*no route to host; check the network") as error:
        sources.snapshot("owner/none", ["*.json"])
    assert exit_code(error.value) == TEMPORARY
