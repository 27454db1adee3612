"""Atomic writing of files and folders: write beside the target, then rename; folders are flushed to the disk before.

The invariant: at any moment, also after a crash (of the process; for folders also of the machine), a target is absent, or holds
its old or its new content whole. It has the permissions of an ordinary file by the umask, so that a policy server of another
user may read it (safetensors alone would write 0600).
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from lightning.errors import EngineError


@contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """Yield a new, empty folder that becomes `target` (replacing an older one) when the block ends without an error. Raises
    `EngineError` if it cannot be written."""
    fresh, old = _beside(target, "new"), _beside(target, "old")
    try:
        _remove(fresh)
        fresh.mkdir(parents=True)
        mode = _ordinary_mode(fresh / ".mode")
        yield fresh
        for path in fresh.rglob("*"):
            if path.is_file():
                path.chmod(mode)
            _flush(path)
        _flush(fresh)
        if target.exists():
            _remove(old)
            target.rename(old)
        fresh.rename(target)
        _flush(target.parent)
        _remove(old)
    except (OSError, SafetensorError) as error:
        raise EngineError(f"cannot write {target}: {error}. Is the disk full?") from error
    finally:
        _remove(fresh)


def recover(target: Path) -> None:
    """Put the old folder back at `target` if a crash stopped `whole_folder` between its two renames."""
    old = _beside(target, "old")
    if old.exists() and not target.exists():
        old.rename(target)


@contextmanager
def whole_file(target: Path) -> Iterator[Path]:
    """Yield a path that becomes `target` (replacing an older file) when the block ends without an error. Raises `EngineError`
    if it cannot be written.

    The file is not flushed to the disk: it carries weights to vLLM, which are written anew after a crash of the machine.
    """
    fresh = _beside(target, "new")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        mode = _ordinary_mode(fresh)
        yield fresh
        fresh.chmod(mode)
        fresh.replace(target)
    except (OSError, SafetensorError) as error:
        raise EngineError(f"cannot write {target}: {error}. Is the disk full?") from error
    finally:
        fresh.unlink(missing_ok=True)


def _beside(target: Path, kind: str) -> Path:
    return target.with_name(f".{target.name}.{kind}")


def _remove(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)


def _ordinary_mode(file: Path) -> int:
    """Return the permissions of an ordinary new file at this path, by creating and deleting `file`.

    The umask cannot be read without setting it, which would affect all threads of the process.
    """
    file.unlink(missing_ok=True)
    file.touch()
    mode = file.stat().st_mode & 0o777
    file.unlink()
    return mode


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
