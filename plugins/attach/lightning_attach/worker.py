"""The part in vLLM's worker where weights come over the network: the core's worker extension, and the group that weights come
in.

The invariant is that of the core's extension. vLLM must be started with this class (`--worker-extension-cls`); no request to
vLLM names another one. vLLM imports the module in each worker, so that `--weight-transfer-config` can name this package's
receiver.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import ClassVar

from lightning.policy_server.worker import Answer, State, WorkerExtension, told


@dataclass(slots=True)
class NetworkState(State):
    """The state of a worker, which it shares with its `GlooReceiver`."""

    group: str = ""
    """The name of the group in which weights come over the network; empty without one."""


class NetworkExtension(WorkerExtension):
    """The worker extension with methods for `/collective_rpc` about weights over the network, besides the core's."""

    _lightning_state: NetworkState
    _LIGHTNING_STATE: ClassVar[type[State]] = NetworkState

    @told
    def lightning_transfer(self) -> Answer:
        """Answer with the backend of the network transfer, the group of this worker, and the last error there."""
        found = getattr(getattr(self, "vllm_config", None), "weight_transfer_config", None)
        backend = str(getattr(found, "backend", "")) if found is not None else ""
        problem = str(getattr(getattr(self, "weight_transfer_engine", None), "problem", ""))
        return {"backend": backend, "group": self._lightning_known().group, "problem": problem}

    @told
    def lightning_group(self, group: str) -> Answer:
        """Keep the name of the group that vLLM has made this worker join; needed over NCCL, where the receiver does not keep
        it."""
        self._lightning_known().group = group
        return {"group": group}

    @told
    def lightning_expect(self, claim: str) -> Answer:
        """Prepare for weights over the network: the worker's weights have no version from now on, and an unfinished update of
        an earlier trainer is ended. Nothing is done where another trainer has the claim."""
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
        """Return the worker's state, and give it to the receiver."""
        super()._lightning_known()
        if (engine := getattr(self, "weight_transfer_engine", None)) is not None:
            engine.lightning_state = self._lightning_state
        return self._lightning_state

    def _lightning_void(self) -> None:
        """Mark the weights as having no version, as the core does. An unfinished update over the network is ended: otherwise
        vLLM would begin no other, and over NCCL its layers stay open, even after an update that vLLM itself gave up."""
        broken = self._lightning_known().version is None or bool(getattr(self, "_weight_update_active", False))
        super()._lightning_void()
        # Without these no update was ever begun, and vLLM's `finish` raises.
        able = getattr(self, "weight_transfer_engine", None) is not None and hasattr(self, "_weight_update_is_draft")
        if broken and able:
            setattr(self, "_weight_update_active", True)  # noqa: B010 — vLLM's worker; its `finish` wants it
            try:
                getattr(self, "finish_weight_update")()  # noqa: B009 — as above
            finally:
                setattr(self, "_weight_update_active", False)  # noqa: B010 — as above


def _offer_gloo() -> None:
    """Register this package's receiver for `--weight-transfer-config`. A vLLM without that API takes weights from files."""
    try:
        from vllm.distributed.weight_transfer import WeightTransferEngineFactory
    except ImportError:
        return
    WeightTransferEngineFactory.register_engine("lightning_gloo", "lightning_attach.receiver", "GlooReceiver")


if "vllm.v1" in sys.modules:  # not where only the names here are wanted: importing vLLM takes seconds
    _offer_gloo()
