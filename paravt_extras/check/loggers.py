"""Where metrics go, and the judge that scores answers."""

from __future__ import annotations

import importlib.util
import netrc
import os
import urllib.parse

import httpx2

from paravt_extras.check.asking import REQUEST, NoAnswer
from paravt_extras.check.finding import Finding
from paravt_extras.check.subject import Subject
from paravt_jax.method.judge import JudgeSettings
from paravt_jax.remote.client import Client

_WANDB = "https://api.wandb.ai"


def loggers(subject: Subject) -> list[Finding]:
    """tensorboardX, and Weights & Biases if the run uses it."""
    log = subject.run.log
    findings = []
    if log.tensorboard:
        if importlib.util.find_spec("tensorboardX") is None:
            remedy = "pip install tensorboardX, or --log.no-tensorboard"
            findings.append(Finding("loggers", "no tensorboardX", "tensorboardX", remedy, "error"))
        else:
            findings.append(Finding("loggers", "tensorboardX"))
    if log.wandb:
        findings.append(_wandb())
    return findings


def _wandb() -> Finding:
    if importlib.util.find_spec("wandb") is None:
        remedy = "pip install -e '.[wandb]'\nor --log.no-wandb"
        return Finding("loggers", "wandb is not installed", "wandb", remedy, "error")
    if os.environ.get("WANDB_MODE") in ("offline", "disabled"):
        return Finding("loggers", f"wandb, {os.environ['WANDB_MODE']} (WANDB_MODE)")
    if os.environ.get("WANDB_API_KEY") or _in_netrc():
        return Finding("loggers", "wandb, logged in")
    remedy = "wandb login\nor WANDB_MODE=offline, or --log.no-wandb"
    return Finding("loggers", "wandb, not logged in", "a key of Weights & Biases", remedy, "error")


def _in_netrc() -> bool:
    """Whether `wandb login` has stored a key."""
    host = urllib.parse.urlsplit(os.environ.get("WANDB_BASE_URL", _WANDB)).hostname or ""
    try:
        return netrc.netrc().authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def judge(subject: Subject) -> list[Finding]:
    """Whether the judge of open-ended answers replies at its address."""
    rl = subject.run.rl
    settings = None if rl is None else rl.rewards.judge
    if settings is None:
        return []
    needed = f"an OpenAI-compatible server with {settings.model}"
    remedy = "start it, or token F1 scores open-ended answers"
    try:
        status = subject.asked.answer(ask_judge, settings)
    except NoAnswer as error:
        found = f"{settings.endpoint}: {error}"
        return [Finding("judge", found, needed, remedy, "warning")]
    found = f"{settings.endpoint}: answers with status {status}"
    if status in (401, 403):
        variable = settings.key_variable or "rl.rewards.judge.key_variable"
        return [Finding("judge", found, "a key that it accepts", f"set {variable}", "error")]
    if status >= 500:
        return [Finding("judge", found, needed, remedy, "warning")]
    return [Finding("judge", found)]


def ask_judge(settings: JudgeSettings) -> int:
    """The HTTP status of the server's list of models. Raises NoAnswer if there is none."""
    client = Client(settings)
    try:
        key = client.key()
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        address = f"{settings.endpoint.rstrip('/')}/models"
        return httpx2.get(address, headers=headers, timeout=REQUEST).status_code
    except httpx2.HTTPError as error:
        raise NoAnswer(f"no answer ({type(error).__name__})") from error
    finally:
        client.close()
