"""The weights that a run starts from: a folder, or a repository of the hub and its cache."""

from __future__ import annotations

import pathlib

import huggingface_hub
from huggingface_hub import constants

from models.weights.folder import CONFIG, local_folder, weights_files
from models.weights.tensor_file import read_header
from paravt_extras.check import asking, sizes
from paravt_extras.check.asking import Download, NoAccess, NoAnswer
from paravt_extras.check.finding import Finding, failed
from paravt_extras.check.subject import Subject
from paravt_jax.data.buckets import cache_folder
from paravt_jax.data.frames import is_address
from paravt_jax.data.hub import is_hub_id
from paravt_jax.method import tokenizer
from paravt_jax.progress import size
from train.published_model import config_of

# Weights, configuration and tokenizer; the run downloads little more.
PATTERNS = ("*.safetensors", "*.json", "*.jinja", "*.txt")


def weights(subject: Subject) -> list[Finding]:
    """Whether the initial weights are here, complete and of the recipe's size."""
    path = subject.run.model.path
    if not path:
        return []
    if is_address(path):
        return [_in_a_bucket(subject, path)]
    if pathlib.Path(path).is_dir() or not is_hub_id(path):
        return [_folder(subject, path)]
    snapshot = asking.cached_snapshot(path, "model")
    if snapshot is not None and _is_complete(snapshot):
        return [_folder(subject, path, snapshot)]
    return [_on_the_hub(subject, path)]


def _folder(subject: Subject, path: str, snapshot: pathlib.Path | None = None) -> Finding:
    """Checks a folder of weights; `snapshot` is that of a repository in the hub's cache."""
    try:
        folder = snapshot or local_folder(path, weights=False)
        config_of(str(folder), subject.run.model)
        names = weights_files(folder)
        for name in names:
            read_header(folder / name)  # raises if the file was cut off
    except (FileNotFoundError, ValueError) as error:
        return failed("weights", error)
    if not (folder / tokenizer.FILE).is_file():
        needed = f"{tokenizer.FILE} beside the weights"
        remedy = f"copy {tokenizer.FILE} of the published model to {folder}"
        return Finding("weights", f"{path}: no {tokenizer.FILE}", needed, remedy, "error")
    count = sum((folder / name).stat().st_size for name in names)
    place = "in the hub's cache" if snapshot else "in the folder"
    return Finding("weights", f"{path}: {size(count)} {place}")


def _in_a_bucket(subject: Subject, path: str) -> Finding:
    """Lists the weights behind an address. The run fetches them."""
    try:
        files = subject.asked.answer(asking.ask_bucket, path)
    except (NoAnswer, ModuleNotFoundError) as error:
        remedy = "check the address and the credentials, or copy the folder here and name it"
        return Finding("weights", f"{path}: {error}", "an answer", remedy, "error")
    missing = [name for name in (CONFIG, tokenizer.FILE) if name not in files]
    count = sum(asking.matching(files, ("*.safetensors",)).values())
    if missing or not count:
        named = ", ".join([*missing, *([] if count else ["*.safetensors"])])
        remedy = "give the address of a folder in the Hugging Face layout"
        return Finding("weights", f"{path}: lacks {named}", "a model's folder", remedy, "error")
    found = f"{path}: {size(count)} in the bucket"
    return Finding("weights", found, f"{size(count)} in {cache_folder(path)}")


def _is_complete(snapshot: pathlib.Path) -> bool:
    """Whether the cache has all files of the weights, the configuration and the tokenizer."""
    try:
        weights_files(snapshot)
    except (FileNotFoundError, ValueError):
        return False
    return all((snapshot / name).is_file() for name in (CONFIG, tokenizer.FILE))


def _on_the_hub(subject: Subject, path: str) -> Finding:
    """The finding for a repository that is not complete in the cache."""
    cached = sum(file.stat().st_size for file in asking.cache_folder(path, "model").glob("blobs/*"))
    here = f"{size(cached)} in the hub's cache" if cached else "not in the hub's cache"
    command = f"hf download {path}"
    try:
        repository = subject.asked.answer(asking.ask_hub, path, "model")
    except NoAccess as error:
        return Finding(
            "weights",
            f"{path}: {here}; {error}",
            f"a token with access{_token()}",
            access_remedy(f"{constants.ENDPOINT}/{path}", command),
            "error",
        )
    except NoAnswer as error:
        return Finding(
            "weights",
            f"{path}: {here}; {error}",
            f"about {size(sizes.published_bytes(subject.run))} from the hub",
            f"{command}\nor copy its folder here, and name that instead of {path}",
            "error",
        )
    names = repository.files
    if CONFIG not in names or not any(name.endswith(".safetensors") for name in names):
        needed = f"a repository with *.safetensors and {CONFIG}"
        remedy = "check the id: --model.path or --cold-started"
        return Finding("weights", f"{path}: no such files", needed, remedy, "error")
    found = asking.download(path, "model", repository, PATTERNS)
    if found.present:
        here = f"half downloaded, {size(found.present)} of {size(found.total)} in the hub's cache"
    needed = f"{size(found.missing)}, which the run downloads"
    return Finding("weights", f"{path}: {here}", needed, command, "warning")


def to_download(subject: Subject) -> Download:
    """What the hub's cache lacks of the weights. Raises NoAnswer or NoAccess."""
    path = subject.run.model.path
    found = subject.asked.answer(asking.ask_hub, path, "model")
    return asking.download(path, "model", found, PATTERNS)


def access_remedy(page: str, command: str) -> str:
    """How to get access to a repository, as commands."""
    return f"check that there is {page}\nhf auth login\naccept its terms, if it has any\n{command}"


def _token() -> str:
    return "; there is a token" if huggingface_hub.get_token() else "; there is none"
