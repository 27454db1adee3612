"""How new weights get into a vLLM: the contract, and the core's own way, which is files. The files lie in shared memory if it
has room, else in the run's folder, until vLLM has read them.

The invariant: in shared memory only this user can read the files, and they are gone when the run ends; the files of a run that
was killed are removed by the next run on the machine.
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
from lightning.policy_server.vllm_arguments import EXTENSION

if TYPE_CHECKING:
    from lightning.policy_server.control import VLLMControl

logger = logging.getLogger(__name__)

FILES = ("auto", "shared_memory", "file")
"""The values of `policy_server.weight_transfer` with which vLLM reads files."""

SHARED = Path("/dev/shm")  # noqa: S108 — Linux's shared memory; what is made there is a folder of this user alone
ROOM_RATIO = 2.2
"""Free room that is required, as a multiple of the weights: the old ones stay until vLLM has loaded the new ones."""
_PREFIX, _UNLOCKED = "lightning-weights-", ".lightning-weights-"


class WeightTransfer(Protocol):
    """How a vLLM gets the tensors of files. Raises `PolicyServerError`."""

    extension: str
    """The import path of the class for vLLM's workers: our worker extension, or a class derived from it."""
    cures: Sequence[tuple[str, str]]
    """Regular expressions of errors with which vLLM may end at its start because of `args`, each with its cure in words."""

    def args(self, alias: str) -> Sequence[str]:
        """Return the arguments that `vllm serve` needs for this transfer, where lightning starts vLLM. The calls of that server
        carry the model name `alias`, or a name of `models`."""

    def models(self, alias: str) -> Sequence[tuple[str, str]]:
        """Return each policy that such a server answers, with the model name that its calls carry. Empty for a server with one
        policy, whose calls carry `alias`."""

    def part(self, weights: Path) -> Path | None:
        """Return the part of a run's new weights that such a server loads: all of them where it has the run's one model. None
        if nothing in them is for it."""

    def check(self, device: Device | None) -> None:
        """Raise `ConfigError` if this cannot work here, or in a vLLM on `device` (None: a vLLM that somebody else runs)."""

    async def ready(self, control: VLLMControl) -> None:
        """Prepare a transfer as far as possible before vLLM is paused."""

    async def load(self, control: VLLMControl, files: Sequence[Path]) -> None:
        """Replace the model's weights by those of the files, in place. Call it while paused."""


class FromDisk:
    """Implements `WeightTransfer`: vLLM reads the files itself."""

    extension = EXTENSION
    cures: Sequence[tuple[str, str]] = ()

    def args(self, alias: str) -> Sequence[str]:
        """Return no arguments: vLLM can always read files."""
        return ()

    def models(self, alias: str) -> Sequence[tuple[str, str]]:
        """Return no names: the server has one policy."""
        return ()

    def part(self, weights: Path) -> Path | None:
        """Return all of the weights."""
        return weights

    def check(self, device: Device | None) -> None:
        """Accept every device: vLLM can always read files."""

    async def ready(self, control: VLLMControl) -> None:
        """Do nothing: files need no preparation."""

    async def load(self, control: VLLMControl, files: Sequence[Path]) -> None:
        """Have vLLM load the files, in place. Call it while paused."""
        await control.load(files)


class WeightsFolder:
    """The folder for the weight files of the `models` that a run serves, made when its path is first asked for. `run` is the
    run's own folder. `here` says whether this process writes the files."""

    def __init__(self, config: PolicyServerConfig, models: Sequence[Path], run: Path, *, here: bool = True) -> None:
        self._config, self._models, self._run, self._here = config, models, run, here
        self._made: Path | None = None
        self._lock = -1

    def path(self) -> Path:
        """Return the folder. The first call makes it, and logs where it is and why it is not in shared memory."""
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
        """Remove the folder from shared memory, if it is there. Idempotent."""
        if self._lock >= 0 and self._made is not None:
            shutil.rmtree(self._made, ignore_errors=True)
            os.close(self._lock)
            self._made, self._lock = None, -1

    def _why_not(self) -> str:
        """Return why the weights cannot go through shared memory; "" if they can."""
        kind = self._config.weight_transfer
        if kind == "file":
            return "policy_server.weight_transfer is 'file'"
        if not self._here:
            return "they are written by a worker that may be on another machine"
        if kind == "auto" and self._config.is_elsewhere:
            return "vLLM is elsewhere and may have a shared memory of its own"
        if not SHARED.is_dir():
            return f"there is no {SHARED}"
        specs = [spec for model in self._models for spec in folder_tensors(model).values()]
        need = ROOM_RATIO * 4 * sum(math.prod(spec.shape) for spec in specs)
        # Shared memory cannot move to a disk when it is full, and it counts for the limit of a container.
        for where, room in ((str(SHARED), shutil.disk_usage(SHARED).free), ("free memory", free_memory())):
            if room is not None and room < need:
                needed = f"{need / 1e9:.2f} GB are needed ({ROOM_RATIO} x the weights)"
                return f"{where} has room for {room / 1e9:.2f} GB, and {needed}"
        return ""


def _private_folder() -> tuple[Path, int]:
    """Make a folder in shared memory that only this user can read. Return it and its lock, which is released when this process
    ends."""
    made = Path(tempfile.mkdtemp(prefix=_UNLOCKED, dir=SHARED))  # mode 0700
    lock = os.open(made, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    return made.rename(SHARED / made.name.replace(_UNLOCKED, _PREFIX, 1)), lock  # nobody finds it without its lock


def _remove_left_behind() -> None:
    """Remove this user's folders in shared memory whose processes have ended, such as those of killed runs."""
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
