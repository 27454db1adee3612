"""Locked versions of what an image installs, by uv: for Linux on x86-64, with the digest of each file.

The invariant: a library that is installed here, and is in the image of agents or servers, has this machine's version there. The
trainer's are chosen anew: vLLM's CUDA build wants other versions than the CPU build that may be here.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from lightning import __version__
from lightning.errors import ConfigError, MissingExtraError
from lightning.installation import Origin, source

from lightning_deploy.agent_sources import canonical

PLATFORM = "x86_64-manylinux_2_28"
SECONDS = 300


def own_source() -> Origin:
    """The checkout or the wheel that lightning is installed from. Raises `ConfigError` if that is not known: the images need
    it, and the index's `lightning` is another program."""
    found = source()
    if not found.place:
        raise ConfigError(
            "the images need lightning's wheel, and where this lightning was installed from is not known: install it by the "
            f"wheel's path, which `make dist` builds in the checkout (pip install --force-reinstall --no-deps "
            f"dist/lightning-{__version__}-py3-none-any.whl)"
        )
    return found


def lock(extras: Sequence[str], requirements: Sequence[str], python: str) -> str:
    """A requirements file with digests for lightning with these extras, and these requirements beside it; lightning itself is
    left out, because its wheel is copied. Raises `ConfigError` with uv's words when there is no such set of versions."""
    own = f"lightning[{','.join(extras)}]" if extras else "lightning"
    own += f" @ {Path(own_source().place).as_uri()}"
    options = ["--python-version", python, "--python-platform", PLATFORM, "--generate-hashes", "--no-annotate"]
    command = [*_uv(), "pip", "compile", "--quiet", "--no-header", *options, "--no-emit-package", "lightning", "-"]
    try:
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraints:
            constraints.write("".join(f"{line}\n" for line in ([] if "vllm" in extras else _installed())))
            constraints.flush()
            ran = subprocess.run(  # noqa: S603 — uv, without a shell
                [*command, "--constraints", constraints.name],
                input="\n".join([own, *requirements, ""]),
                capture_output=True,
                text=True,
                timeout=SECONDS,
                check=False,
            )
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"uv found no versions for the images in {SECONDS} s: is there a network?") from error
    if ran.returncode:
        raise ConfigError(f"the images' versions cannot be locked: {' '.join(ran.stderr.split())}")
    return ran.stdout


def _installed() -> list[str]:
    """What is installed here from an index, as `name==version`."""
    found: dict[str, metadata.Distribution] = {}
    for one in metadata.distributions():  # the first on the path is the one that is imported
        if one.metadata["Name"]:
            found.setdefault(canonical(one.metadata["Name"]), one)
    return sorted(
        f"{name}=={one.version}"
        for name, one in found.items()
        if "+" not in one.version and one.read_text("direct_url.json") is None
    )


def _uv() -> list[str]:
    if find_spec("uv") is not None:
        return [sys.executable, "-m", "uv"]
    if found := shutil.which("uv"):
        return [found]
    raise MissingExtraError("deploy", "uv")
