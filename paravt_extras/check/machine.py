"""What this host has: versions, devices, memory, decoders of videos, the project's code."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import pathlib
import platform

import jax
from packaging.requirements import Requirement

from models import gpu
from models.device_memory import host_memory
from paravt_extras.check import sizes
from paravt_extras.check.finding import Finding, failed
from paravt_extras.check.subject import Subject
from paravt_extras.fit import GIB, fit
from paravt_extras.slices import Devices, Topology, found_devices
from paravt_jax.data import video
from paravt_jax.processes.cluster import has_tpu_chips
from paravt_jax.processes.hosts import process_count
from paravt_jax.progress import size
from train.settings import Run

_PROJECT = "paravt-jax"
_SHOWN = ("jax", "jaxlib", "flax", "libtpu")
_ROOT = pathlib.Path(__file__).parents[2]
_ROOMS = ("paravt_jax", "paravt_extras", "models", "rollout", "train", "configs")


def installed(package: str) -> str:
    """The installed version of a package; empty if there is none."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def requirements() -> list[Requirement]:
    """The project's requirements with those of its extras; none if it is not installed."""
    try:
        lines = importlib.metadata.requires(_PROJECT) or []
    except importlib.metadata.PackageNotFoundError:
        lines = []
    return [Requirement(line) for line in lines]


def versions(subject: Subject) -> list[Finding]:
    """Versions of jax and of all packages that the project requires, against pyproject's bounds."""
    found = [f"python {platform.python_version()}"]
    found += [f"{name} {version}" for name in _SHOWN if (version := installed(name))]
    needed = []
    remedies = []
    problem = ""
    for requirement in requirements():
        of_tpu = requirement.marker is not None and 'extra == "tpu"' in str(requirement.marker)
        environment = {"extra": "tpu"} if of_tpu else {"extra": ""}
        if requirement.marker is not None and not requirement.marker.evaluate(environment):
            continue
        if of_tpu and not has_tpu_chips():
            continue
        version = installed(requirement.name)
        if version and requirement.specifier.contains(version, prereleases=True):
            continue
        needed.append(f"{requirement.name}{requirement.specifier}")
        if not version or not of_tpu:
            problem = "error"
        else:
            # Another libtpu may run, but the memory plan does not hold for it (docs/tpu.md).
            problem = problem or "warning"
        if requirement.name not in _SHOWN:
            found.append(f"{requirement.name} {version or 'not installed'}")
        elif not version:
            found.append(f"{requirement.name} not installed")
        remedies.append("pip install -e '.[tpu]'" if of_tpu else f"pip install '{needed[-1]}'")
    remedy = "\n".join(dict.fromkeys(remedies))
    return [
        Finding("versions", ", ".join(found), ", ".join(needed), remedy, problem, must_agree=True)
    ]


def devices(subject: Subject) -> list[Finding]:
    """Devices, the sizes that are chosen for them, and the estimated memory, against theirs."""
    try:
        available = _available(subject)
        if not subject.topology:
            gpu.require_type("model.dtype", subject.run.model.dtype)
    except ValueError as error:
        return [failed("devices", error)]
    hosts = f" on {available.hosts} hosts" if available.hosts > 1 else ""
    memory = "memory unknown"
    if available.memory is not None:
        memory = f"{available.memory / GIB:.2f} GiB each"
    named = f"{available.name}{hosts}, {memory}"
    if subject.topology:
        named = f"{available.count} device{'s' * (available.count > 1)} of {named}"
    try:
        fitted = fit(subject.run, available)
    except ValueError as error:
        needed, _, remedy = str(error).rpartition("; ")
        return [Finding("devices", named, needed, _hidden_chips(subject) + remedy, "error")]
    findings = [Finding("devices", named, fitted.describe())]
    if fitted.needs and available.memory is not None:
        estimates = ", ".join(f"{part} {need / GIB:.1f}" for part, need in fitted.needs.items())
        limit = f"at most {available.memory / GIB:.2f} GiB per device"
        findings.append(Finding("memory plan", f"estimates in GiB: {estimates}", limit))
    return findings


def _available(subject: Subject) -> Devices:
    """The devices to check for. Raises ValueError if the topology is not one."""
    if subject.topology:
        return Topology(subject.topology).available
    return subject.devices or found_devices()


def _fitted(subject: Subject) -> Run:
    """The run with sizes chosen for its devices; as it is if that fails, which `devices` tells."""
    with contextlib.suppress(ValueError):
        return fit(subject.run, _available(subject)).run
    return subject.run


def _hidden_chips(subject: Subject) -> str:
    """The remedy for TPU chips that JAX does not see; empty if there are none."""
    if not subject.topology and has_tpu_chips() and jax.default_backend() != "tpu":
        return "jax does not see the TPU chips of this host: pip install -e '.[tpu]'\n"
    return ""


def memory(subject: Subject) -> list[Finding]:
    """The memory of this host against the arrays that a run keeps there."""
    on_cpu = jax.default_backend() == "cpu"
    parts = sizes.host_memory(_fitted(subject), process_count(), on_cpu)
    needed = sum(parts.values())
    total = host_memory()
    found = f"{size(total)} of memory"
    if needed < 0.9 * total:
        return [Finding("host memory", found, f"{size(needed)} for arrays, and libraries")]
    largest = sorted(parts.items(), key=lambda part: -part[1])
    named = ", ".join(f"{name} {size(count)}" for name, count in largest if count > needed / 20)
    remedy = "more hosts, each of which holds a share; or a lower --frames.cache-mib"
    if on_cpu:
        remedy = "run this recipe on TPUs or GPUs: on a CPU, weights and optimizer are here too"
    problem = "error" if needed > total else "warning"
    return [Finding("host memory", found, f"{size(needed)}: {named}", remedy, problem)]


def videos(subject: Subject) -> list[Finding]:
    """The decoders that read the frames of videos."""
    found = f"PyAV {installed('av')}"
    if video.decord is not None:
        found += f", decord {installed('decord')}"
    return [Finding("videos", found)]


def code(subject: Subject) -> list[Finding]:
    """A digest of the project's code, which all hosts have to share."""
    digest = hashlib.sha256()
    files = [file for room in _ROOMS for file in sorted((_ROOT / room).rglob("*.py"))]
    for file in files:
        digest.update(file.relative_to(_ROOT).as_posix().encode())
        digest.update(file.read_bytes())
    return [
        Finding(
            "code",
            f"{len(files)} files with digest {digest.hexdigest()[:12]}",
            remedy="git pull, and pip install -e . on every host",
            must_agree=True,
        )
    ]
