"""Atomic writing of files and folders: write beside the target, then rename; folders are flushed to the disk before. And the
writing of safetensors one tensor at a time.

The invariant: at any moment, also after a crash (of the process; for folders also of the machine), a target is absent, or holds
its old or its new content whole. It has the permissions of an ordinary file by the umask, so that a policy server of another
user may read it (safetensors alone would write 0600).
"""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from safetensors import SafetensorError

from lightning.errors import EngineError
from lightning.policy_server.model_folder import DTYPES

if TYPE_CHECKING:
    import torch

_KINDS = {f"torch.{torchs}": own for own, torchs in DTYPES.items()}
_WIDEST = 8
"""Bytes of the widest number. Readers need each tensor at a multiple of its own numbers' size."""


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


def write_tensors(
    path: Path,
    tensors: Iterable[tuple[str, torch.Tensor]],
    names: Iterable[str],
    about: Callable[[Mapping[str, int]], Mapping[str, str]] = lambda written: {"format": "pt"},
) -> dict[str, int]:
    """Write tensors as one safetensors file, each as it comes, so that no more than one needs to be in memory. Return the bytes
    of each.

    `names` are all names that may come: the header, which stands before the tensors and is written last, gets room for them.
    `about` returns the header's metadata from the written tensors.
    """
    import torch

    room = 1024 + sum(256 + 2 * len(json.dumps(json.dumps(name))) for name in names) // _WIDEST * _WIDEST
    header: dict[str, object] = {}
    written: dict[str, int] = {}
    odd: list[tuple[str, torch.Tensor]] = []

    def put(file: BinaryIO, name: str, tensor: torch.Tensor) -> None:
        start = file.tell() - 8 - room
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        file.write(flat.view(torch.uint8).numpy().data)
        places = [start, start + tensor.nbytes]
        header[name] = {"dtype": _KINDS[str(tensor.dtype)], "shape": list(tensor.shape), "data_offsets": places}
        written[name] = tensor.nbytes

    with path.open("wb") as file:
        file.seek(8 + room)
        for name, tensor in tensors:
            if tensor.nbytes % _WIDEST:
                odd.append((name, tensor))
            else:
                put(file, name, tensor)
        for name, tensor in sorted(odd, key=lambda pair: -pair[1].itemsize):
            put(file, name, tensor)
        told = json.dumps({"__metadata__": dict(about(written)), **header}).encode()
        if len(told) > room:
            raise EngineError(
                f"the header of {path} needs {len(told)} bytes, and {room} were reserved: please report this"
            )
        file.seek(0)
        file.write(struct.pack("<Q", room) + told.ljust(room))
    return written
