"""What runs inside vLLM's worker where weights come over the network: the core's extension, and the group that they come in.

The invariant is the core's; whoever starts vLLM names this class (`--worker-extension-cls`), and no call to vLLM names another.
vLLM imports the module in each worker, by which `--weight-transfer-config` can name the receiver of this package.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import ClassVar

from lightning.policy_server.worker import Answer, State, WorkerExtension, told


@dataclass(slots=True)
class NetworkState(State):
    """What is known of a worker; its `GlooReceiver` shares it."""

    group: str = ""
    """The word of the group in which weights come over the network; empty while this worker is in none."""


class NetworkExtension(WorkerExtension):
    """Methods for `/collective_rpc`, as those of the core's."""

    _lightning_state: NetworkState
    _LIGHTNING_STATE: ClassVar[type[State]] = NetworkState

    @told
    def lightning_transfer(self) -> Answer:
        """How weights may come over the network, the group this worker is in, and what went wrong there the last time."""
        found = getattr(getattr(self, "vllm_config", None), "weight_transfer_config", None)
        backend = str(getattr(found, "backend", "")) if found is not None else ""
        problem = str(getattr(getattr(self, "weight_transfer_engine", None), "problem", ""))
        return {"backend": backend, "group": self._lightning_known().group, "problem": problem}

    @told
    def lightning_group(self, group: str) -> Answer:
        """The word of the group that vLLM has made this worker join, where its receiver does not keep it: over NCCL."""
        self._lightning_known().group = group
        return {"group": group}

    @told
    def lightning_expect(self, claim: str) -> Answer:
        """Weights will come over the network: from now on they are those of no version, and an update that an earlier trainer
        has left half done is ended."""
        state = self._lightning_known()
        if state.claim != claim:
            return {"owner": state.claim}
        self._lightning_void()
        return {"version": None}

    @told
    def lightning_leave(self) -> Answer:
        """Leave the group that weights come in."""
        self._lightning_known().group = ""
        if (engine := getattr(self, "weight_transfer_engine", None)) is not None:
            engine.shutdown()
        return {"group": ""}

    def _lightning_known(self) -> NetworkState:
        """As the core's; the receiver has it, too."""
        super()._lightning_known()
        if (engine := getattr(self, "weight_transfer_engine", None)) is not None:
            engine.lightning_state = self._lightning_state
        return self._lightning_state

    def _lightning_void(self) -> None:
        """As the core's. An update over the network that was begun and never ended is ended: vLLM would begin no other, and
        over NCCL its layers lie open, also after an update that vLLM has given up by itself."""
        broken = self._lightning_known().version is None or bool(getattr(self, "_weight_update_active", False))
        super()._lightning_void()
        # Without these none was ever begun, and vLLM's `finish` raises.
        able = getattr(self, "weight_transfer_engine", None) is not None and hasattr(self, "_weight_update_is_draft")
        if broken and able:
            setattr(self, "_weight_update_active", True)  # noqa: B010 — vLLM's worker; its `finish` wants it
            try:
                getattr(self, "finish_weight_update")()  # noqa: B009 — as above
            finally:
                setattr(self, "_weight_update_active", False)  # noqa: B010 — as above


def _offer_gloo() -> None:
    """Let `--weight-transfer-config` name our receiver. A vLLM without that API has the files."""
    try:
        from vllm.distributed.weight_transfer import WeightTransferEngineFactory
    except ImportError:
        return
    WeightTransferEngineFactory.register_engine("lightning_gloo", "lightning_attach.receiver", "GlooReceiver")


if "vllm.v1" in sys.modules:  # not where only the names here are wanted: importing vLLM takes seconds
    _offer_gloo()
