"""Opens any prompt pack of `--protocol`: those of the core, of the release and of lmms-eval."""

from __future__ import annotations

import os

from paravt_extras.lmms_eval.pack import LmmsEvalPack
from paravt_extras.release import read_release
from paravt_jax.processes import hosts
from rollout.evaluation.packs import PackError, PromptPack, TextPack
from rollout.evaluation.protocols import open_text_pack
from rollout.evaluation.settings import BenchmarkSettings


def open_pack(settings: BenchmarkSettings, folder: str | os.PathLike) -> PromptPack:
    """The pack that the settings name. The caller closes it.

    Args:
        settings: the user's settings.
        folder: the folder of the evaluation, where a pack may keep what it was told.

    Raises:
        PackError: it cannot be used.
    """
    python = settings.lmms_eval_python
    if settings.pack == LmmsEvalPack.name and not python:
        raise PackError(
            "--lmms-eval-python is missing: --protocol lmms-eval runs lmms-eval's own functions; "
            "give the interpreter of its environment"
        )
    if python and settings.pack != LmmsEvalPack.name:
        raise PackError(
            f"--lmms-eval-python {python}: --protocol {settings.pack} does not use it; leave it "
            "out, or give --protocol lmms-eval"
        )
    if python:
        return LmmsEvalPack(python, settings.benchmark, folder, hosts.process_index())
    return open_any_text_pack(settings.pack, settings.release)


def open_any_text_pack(name: str, release: str = "") -> TextPack:
    """The pack of texts that `--protocol` and `--release` name.

    Raises:
        PackError: it cannot be used.
    """
    if release and name != "published":
        raise PackError(f"--release {release}: is read by --protocol published only; give both")
    if name == LmmsEvalPack.name:
        raise PackError(
            f"--protocol {name}: its texts come from lmms-eval's functions, so it is no pack of "
            "texts and cannot be written; give own or published"
        )
    if name == "published":
        return read_release(release)
    return open_text_pack(name)
