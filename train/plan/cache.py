"""What was compiled before, in a folder, so that a plan that was stopped goes on where it was.

Owns the folder: a JSON file a program. Reads nothing that other code, another compiler or other settings made. Invariant: a program that
took too long, or whose compiler died, is not kept.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import json
import os
import pathlib
from collections.abc import Callable

from paravt_jax.data.atomic import write_atomically
from train.plan.compile import Case, Measured, libtpu_version

ROOT = pathlib.Path(__file__).parents[2]
ROOMS = ("configs", "models", "paravt_jax", "rollout", "train")


def cached(
    folder: pathlib.Path, case: Case, compiled: Callable[[Case], Measured]
) -> tuple[Measured, bool]:
    """What `folder`, which is there, has of a case, else what `compiled` says of it, which it has from then on; and whether it was there.

    What was compiled while the code changed is not kept.
    """
    key = _key(case)
    file = folder / f"{case.place[0].replace(':', '-')}-{case.program.replace(' ', '-')}-{key}.json"
    if file.exists():
        fields = json.loads(file.read_text())
        return Measured(
            **fields | {name: tuple(fields[name]) for name in ("given", "largest")}
        ), True
    measured = compiled(case)
    if (measured.peak or not measured.error) and _key(case) == key:
        write_atomically(file, json.dumps(dataclasses.asdict(measured), indent=1))
    return measured, False


def _key(case: Case) -> str:
    return hashlib.sha256(
        f"{_compiler()} {case.program} {case.place} {case.run!r}".encode()
    ).hexdigest()[:16]


def _compiler() -> str:
    """The versions of what compiles, what the environment tells it, and a digest of what is compiled."""
    digest = hashlib.sha256()
    for file in sorted(file for room in ROOMS for file in (ROOT / room).rglob("*.py")):
        digest.update(str(file.relative_to(ROOT)).encode() + b"\0" + file.read_bytes())
    versions = [
        *(importlib.metadata.version(name) for name in ("jax", "jaxlib", "flax")),
        libtpu_version(),
    ]
    told = [
        f"{name}={value}"
        for name, value in sorted(os.environ.items())
        if name.startswith(("JAX_", "LIBTPU_")) and name != "JAX_PLATFORMS"
    ]
    return " ".join([*versions, *told, digest.hexdigest()])
