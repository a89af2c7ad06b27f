"""`--protocol`: opens a prompt pack, and applies how it plays to the settings."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any

from rollout.evaluation.pack_folder import read_pack
from rollout.evaluation.packs import PackError, PromptPack, TextPack, own_pack
from rollout.evaluation.settings import BenchmarkSettings


def open_text_pack(name: str, release: str = "") -> TextPack:
    """Open this project's own pack, or the one in a folder.

    Raises:
        PackError: It cannot be used, or is the release's, which only the command opens.
    """
    if release or name == "published":
        raise PackError(
            f"--protocol {name}, --release {release!r}: the command `paravt evaluate` opens "
            "published; use it, or pass pack="
        )
    return own_pack() if name == "own" else read_pack(name)


def as_the_pack_plays(
    settings: BenchmarkSettings, pack: PromptPack, given: Collection[str] = ()
) -> BenchmarkSettings:
    """The settings with the values that the pack decides.

    Args:
        settings: the user's settings.
        pack: the pack.
        given: fields that the user gave, so that a default value among them is no accident.

    Raises:
        PackError: the user wants something else than the pack, in a field that is not open.
    """
    if pack.prompt and settings.prompt == _default("prompt") and "prompt" not in given:
        settings = dataclasses.replace(settings, prompt=pack.prompt)
    decided = dict(pack.style(settings.benchmark, settings.prompt))
    for field in dataclasses.fields(settings):
        if field.name not in decided:
            continue
        wanted = decided[field.name]
        decided[field.name] = wanted = tuple(wanted) if isinstance(wanted, list) else wanted
        value = getattr(settings, field.name)
        if field.name in given and _user_may_override(field.name, value):
            decided[field.name] = value
        elif value != wanted and (value != field.default or field.name in given):
            flag = field.name.replace("_", "-")
            raise PackError(
                f"--{flag} {value}: --protocol {pack.name} plays with {wanted}; "
                f"leave --{flag} out, or {_other_ways(pack)}"
            )
    return dataclasses.replace(settings, **decided)


def _user_may_override(field: str, value: Any) -> bool:
    """Whether a user may choose a value whatever the pack says.

    Models are trained with different prompts, and some families cannot be shown a native video.
    """
    return field == "prompt" or (field == "native_video" and not value)


def _other_ways(pack: PromptPack) -> str:
    """What else a user can do who wants a value that the pack does not play with."""
    if pack.name == "published":
        return "write the pack as a folder (--write-protocol) and change [play] there"
    return "give another protocol"


def _default(name: str) -> Any:
    """The default of a setting."""
    return next(f.default for f in dataclasses.fields(BenchmarkSettings) if f.name == name)
