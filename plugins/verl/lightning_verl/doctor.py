"""The checks of verl in `lightning doctor`: flash attention, verl's workers, Megatron.

The invariant: verl, whose import takes half a minute, is imported only if the user asked for it, in a separate process.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator

from lightning.cli.check import Check, ProbeError, probe
from lightning.installation import install_command, version_of

from lightning_verl.gpus import list_gpus

VERL_SECONDS = 300
"""Time limit for importing verl, in seconds."""
OLDEST, TOO_NEW = (0, 9, 1), (0, 10)
"""The range of verl's versions: the first with the workers that are used, and the first that was not tested."""


def check_verl(tried: str | None) -> Iterator[Check]:
    """Check verl and what its engine needs; with `--try verl` also import its workers."""
    if tried:
        yield Check(
            "verl", "low", f"--try verl={tried} names something, and verl has nothing to choose", "use --try verl"
        )
    try:
        gpus = bool(list_gpus())
    except ProbeError:  # the check of GPUs reports it
        gpus = False
    if gpus:
        yield _flash_attention()
    yield _verl(try_it=tried is not None)
    if tried is not None:
        yield from _megatron(gpus=gpus)


def _flash_attention() -> Check:
    if importlib.util.find_spec("flash_attn") is not None:
        return Check("flash-attn", "ok", version_of("flash-attn") or "installed")
    detail = "the verl engine takes torch's attention instead, which computes what lies between packed rows, too"
    return Check("flash-attn", "missing", detail, "pip install flash-attn --no-build-isolation")


def _verl(*, try_it: bool) -> Check:
    found = version_of("verl")
    if found is None:
        return Check("verl", "missing", "for training on many GPUs (--engine verl)", install_command("verl"))
    if not OLDEST <= _numbers(found) < TOO_NEW:
        detail = f"{found} has not the workers that the verl engine uses"
        return Check("verl", "broken", detail, "pip install 'verl>=0.9.1,<0.10'")
    if not try_it:
        return Check(
            "verl", "ok", f"{found}; `lightning doctor --try verl` imports its workers, which takes half a minute"
        )
    try:
        answer = probe("lightning_verl.probe", "worker", seconds=VERL_SECONDS)
    except ProbeError as error:
        detail = f"{found}, but its workers cannot be imported: {error}"
        return Check("verl", "broken", detail, f"{install_command('verl')} --upgrade")
    return Check("verl", "ok", f"{found}; its workers can be imported, and would compute on {answer['device']}")


def _megatron(*, gpus: bool) -> Iterator[Check]:
    """Check what the strategy `megatron` needs."""
    found, install = version_of("megatron-core"), install_command("verl-megatron")
    if found is None:
        yield Check("megatron", "missing", "for engine.verl.strategy = megatron; fsdp2 needs none", install)
        return
    if version_of("mbridge") is None:
        yield Check("mbridge", "missing", "engine.verl.strategy = megatron loads and exports models by it", install)
    if gpus and version_of("transformer-engine") is None:
        cure = "pip install --no-build-isolation 'transformer-engine[pytorch]'"
        yield Check("transformer-engine", "missing", "engine.verl.strategy = megatron computes with it on GPUs", cure)
    try:
        answer = probe("lightning_verl.probe", "megatron", seconds=VERL_SECONDS)
    except ProbeError as error:
        yield Check("megatron", "broken", f"{found}, but verl's engine over it cannot be imported: {error}", install)
    else:
        detail = f"{found}; verl's engine over it can be imported, and would compute on {answer['device']}"
        yield Check("megatron", "ok", detail)


def _numbers(version: str) -> tuple[int, ...]:
    """Return the release part of a version as numbers."""
    release = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in release.group().split(".")) if release else ()
