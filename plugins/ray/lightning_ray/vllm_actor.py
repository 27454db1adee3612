"""The actor that starts a vLLM on a node of a Ray cluster.

The invariant: vLLM ends with the actor, however that ended, and is not started on a node that has another release of lightning
or another model than the trainer, or does not see the trainer's files where these bring the weights.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import lightning
from lightning.config import config_model
from lightning.errors import LightningError
from lightning.policy_server.auto_settings import Demand
from lightning.policy_server.model_folder import check_model_folder, read_facts
from lightning.policy_server.owner_secret import SECRET
from lightning.policy_server.vllm_server import OwnedVLLM
from lightning.policy_server.weights import FromDisk
from pydantic import ValidationError

LONGEST_PIECE = 1 << 20
"""Most bytes of the log in one answer."""


class _Takes(FromDisk):
    """The part of the trainer's weight transfer that vLLM needs at its start."""

    def __init__(self, args: Sequence[str], extension: str) -> None:
        self._args, self.extension = args, extension

    def args(self, alias: str) -> Sequence[str]:
        """Return the trainer's arguments, which are the same under every name."""
        return self._args


def digest_of_model(folder: Path) -> str:
    """Return a digest of a model's shape, vocabulary and chat templates. Raises `PolicyServerError` for an incomplete
    folder."""
    check_model_folder(folder)
    return hashlib.sha256(repr(read_facts(folder)).encode()).hexdigest()


class VLLMHost:
    """The actor that runs one vLLM, which serves the model in this folder."""

    def __init__(self, model: str) -> None:
        self._model = Path(model)
        self._log: Path | None = None
        self._server: OwnedVLLM | None = None

    async def look(self, version: str, digest: str, file: str) -> tuple[str, str, str]:
        """Return what is wrong with the node (empty: nothing), its id, and its address. `version` is the trainer's release,
        `digest` that of its model, `file` one that the node must see (empty: none)."""
        ray: Any = import_module("ray")
        wrong = await asyncio.to_thread(self._why_not, version, digest, file)
        return wrong, str(ray.get_runtime_context().get_node_id()), str(ray.util.get_node_ip_address())

    def _why_not(self, version: str, digest: str, file: str) -> str:
        if version != lightning.__version__:
            return f"it has lightning {lightning.__version__}, the trainer {version}: install the same release on all nodes"
        try:
            same = digest_of_model(self._model) == digest
        except LightningError as error:
            return (
                f"{error}. The node needs the trainer's model under the same path: copy it there, or put it on a share"
            )
        if not same:
            return f"the model in {self._model} is another one there: give the node the trainer's"
        if file and not Path(file).exists():
            return (
                f"it does not see the run's folder {Path(file).parent}, through which the weights go: set "
                "policy_server.weight_transfer = 'gloo' (over the network), or put the folder on a share (--out)"
            )
        return ""

    async def start(
        self,
        section: str,
        secret: str,
        takes: tuple[Sequence[str], str],
        demand: Mapping[str, Any],
        version: int,
        updates: bool,
    ) -> tuple[str, str, str]:
        """Start vLLM with the settings `policy_server` (as JSON) and the folder's weights as `version`. Return what is wrong
        (empty: nothing), its URL, and the name of the model that is new at each start."""
        self._log = Path(tempfile.mkdtemp(prefix="lightning-vllm-")) / "vllm.log"
        logger = logging.getLogger("lightning")  # what was chosen for vLLM, and why, stands before its output
        logger.addHandler(logging.FileHandler(self._log))
        logger.setLevel(logging.INFO)
        os.environ[SECRET] = secret
        try:
            config = config_model().model_validate({"policy_server": json.loads(section)}).policy_server
            self._server = OwnedVLLM(
                self._model,
                config,
                _Takes(*takes),
                log=self._log,
                version=version,
                updates=updates,
                demand=Demand(**demand),
            )
            await self._server.start()
        except (LightningError, ValidationError) as error:
            return str(error), "", ""
        return "", self._server.url, self._server.alias

    def more(self, start: int) -> bytes:
        """Return what vLLM's log has from this byte on, up to `LONGEST_PIECE`."""
        if self._log is None:
            return b""
        with self._log.open("rb") as file:
            file.seek(start)
            return file.read(LONGEST_PIECE)

    async def stop(self) -> None:
        """End vLLM and every process it started, and remove its log."""
        if self._server is not None:
            await self._server.close()
        if self._log is not None:
            shutil.rmtree(self._log.parent, ignore_errors=True)
            self._log = None
