"""How new weights come to a vLLM: the contract, and the core's own way, which is files. These lie in shared memory where it has
room, else in the run's folder, until vLLM has read them.

The invariant: in shared memory nobody but this user reads them, and they are gone when the run ends; those of a run that was
killed are removed by the next one on the machine.
"""

from __future__ import annotations

import fcntl
import logging
import math
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from lightning.config.sections import PolicyServerConfig
from lightning.policy_server.auto_settings import Device, free_memory
from lightning.policy_server.model_folder import folder_tensors
from lightning.policy_server.profiles import EXTENSION

if TYPE_CHECKING:
    from lightning.policy_server.control import VLLMControl

logger = logging.getLogger(__name__)

FILES = ("auto", "shared_memory", "file")
"""The values of `policy_server.weight_transfer` with which vLLM reads files."""

SHARED = Path("/dev/shm")  # noqa: S108 — Linux's shared memory; what is made there is a folder of this user alone
ROOM_RATIO = 2.2
"""How many times the weights must fit: the old ones stay until vLLM has taken the new ones."""
_PREFIX, _UNLOCKED = "lightning-weights-", ".lightning-weights-"


class WeightTransfer(Protocol):
    """How a vLLM gets the tensors of files. Raises `PolicyServerError`."""

    args: Sequence[str]
    """What `vllm serve` needs for it, where lightning starts vLLM."""
    extension: str
    """The class that has to stand in vLLM's workers, by its import path: our worker extension, or one derived from it."""

    def check(self, device: Device | None) -> None:
        """Raise `ConfigError` when it cannot work here at all, or in a vLLM on `device`; None: that somebody else runs."""

    async def ready(self, control: VLLMControl) -> None:
        """Do what can be done before vLLM is paused."""

    async def load(self, control: VLLMControl, files: Sequence[Path]) -> None:
        """Replace the model's weights by those of the files, in place. Call it while paused."""


class FromDisk:
    """Implements `WeightTransfer`: vLLM reads the files itself."""

    args: Sequence[str] = ()
    extension = EXTENSION

    def check(self, device: Device | None) -> None:
        """Nothing can be wrong yet."""

    async def ready(self, control: VLLMControl) -> None:
        """There is nothing to do before."""

    async def load(self, control: VLLMControl, files: Sequence[Path]) -> None:
        """See `WeightTransfer.load`."""
        await control.load(files)


class WeightsFolder:
    """The folder for the weights of a `model`, made when it is first asked for; `run` is the run's own folder. `here` says
    whether this process writes the files."""

    def __init__(self, config: PolicyServerConfig, model: Path, run: Path, *, here: bool = True) -> None:
        self._config, self._model, self._run, self._here = config, model, run, here
        self._made: Path | None = None
        self._lock = -1

    def path(self) -> Path:
        """The folder; says the first time which it is, and why it is not shared memory."""
        if self._made is None:
            _remove_left_behind()
            why_not, by_name = self._why_not(), self._config.weight_transfer == "shared_memory"
            if why_not:
                self._made = self._run / "weights"
                self._made.mkdir(exist_ok=True)
                tell = logger.warning if by_name else logger.info
                cure = (
                    ". Give /dev/shm more room (docker run --shm-size), or set policy_server.weight_transfer = 'file'"
                )
                tell("weights go through files in %s: %s%s", self._made, why_not, cure if by_name else "")
            else:
                self._made, self._lock = _private_folder()
                logger.info("weights go through shared memory, in %s", self._made)
        return self._made

    def close(self) -> None:
        """Remove what is in shared memory. Idempotent."""
        if self._lock >= 0 and self._made is not None:
            shutil.rmtree(self._made, ignore_errors=True)
            os.close(self._lock)
            self._made, self._lock = None, -1

    def _why_not(self) -> str:
        """Why the weights cannot go through shared memory; empty where they can."""
        kind = self._config.weight_transfer
        if kind == "file":
            return "policy_server.weight_transfer is 'file'"
        if not self._here:
            return "they are written by a worker that may be on another machine"
        if kind == "auto" and self._config.attach:
            return "the vLLM at policy_server.attach may have a shared memory of its own"
        if not SHARED.is_dir():
            return f"there is no {SHARED}"
        need = ROOM_RATIO * 4 * sum(math.prod(spec.shape) for spec in folder_tensors(self._model).values())
        # What is in shared memory cannot be written to a disk instead, and counts for the limit of a container.
        for where, room in ((str(SHARED), shutil.disk_usage(SHARED).free), ("free memory", free_memory())):
            if room is not None and room < need:
                needed = f"{need / 1e9:.2f} GB are needed ({ROOM_RATIO} x the weights)"
                return f"{where} has room for {room / 1e9:.2f} GB, and {needed}"
        return ""


def _private_folder() -> tuple[Path, int]:
    """A new folder that only this user reads, and its lock, which goes with this process."""
    made = Path(tempfile.mkdtemp(prefix=_UNLOCKED, dir=SHARED))  # mode 0700
    lock = os.open(made, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    return made.rename(SHARED / made.name.replace(_UNLOCKED, _PREFIX, 1)), lock  # nobody finds it without its lock


def _remove_left_behind() -> None:
    """Remove this user's folders whose process was killed."""
    for folder in SHARED.glob(f"{_PREFIX}*"):
        try:
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            lock = os.open(folder, os.O_RDONLY)
        except OSError as error:  # it went meanwhile
            logger.debug("%s was not looked at: %s", folder, error)
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        except BlockingIOError:
            logger.debug("%s is another run's", folder)
        finally:
            os.close(lock)
