"""Source distributions and environments of `make test-official`, kept in a folder that git ignores.

The invariant: a source distribution is used only if its digest is the committed one, an environment only if it holds what the
list says.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path

from tests.official.listing import CACHE, HERE, Source

ROOT = HERE.parents[1]
MINUTES = 15
"""How long one download or installation may take."""


def fetch(source: Source) -> None:
    """Download and unpack a source distribution, unless it is there. Raises `ValueError` for another digest."""
    if source.folder.exists():
        return
    downloads = CACHE / "downloads"
    downloads.mkdir(parents=True, exist_ok=True)
    wanted = f"{source.name}=={source.version}"
    options = ("--quiet", "--no-deps", "--no-binary", source.name, "--dest", str(downloads))
    _run(sys.executable, "-m", "pip", "download", *options, wanted)
    file = downloads / f"{source.name.replace('-', '_')}-{source.version}.tar.gz"
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    if digest != source.sha256:
        raise ValueError(f"{file.name} has the SHA-256 {digest}, and tests/official/programs.toml says {source.sha256}")
    with tarfile.open(file) as archive:
        archive.extractall(source.folder.parent / "unpacking", filter="data")
    (source.folder.parent / "unpacking" / file.name.removesuffix(".tar.gz")).rename(source.folder)


def environment(name: str, packages: Sequence[str]) -> Path:
    """The interpreter of an environment with lightning and these packages, made unless it is there."""
    folder = CACHE / "venvs" / name
    stamp, holds = folder / "packages.txt", "\n".join(packages)
    python = folder / "bin" / "python"
    if not stamp.exists() or stamp.read_text(encoding="utf-8") != holds:
        uv = str(Path(sys.executable).with_name("uv"))
        _run(uv, "venv", "--quiet", "--clear", "--python", sys.executable, str(folder))
        _run(uv, "pip", "install", "--quiet", "--python", str(python), "-e", str(ROOT), "psutil", *packages)
        stamp.write_text(holds, encoding="utf-8")
    return python


def _run(*command: str) -> None:
    subprocess.run(command, check=True, timeout=60 * MINUTES, cwd=ROOT)
