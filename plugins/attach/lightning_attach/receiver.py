"""vLLM's end of the gloo transfer: a backend of vLLM's own weight-transfer API, for vLLMs on CPUs as well as on GPUs.

The invariant: after `update_weights` the model computes with exactly the tensors that came, or `problem` says what went wrong;
then the group is left, so that the sender notices, and the layers keep their old tensors. Weights are taken only from the
trainer whose claim this vLLM has, in the group that this trainer made. No exception leaves a method: with several workers vLLM
passes on the first one's exception and does not read the other answers, which it then takes for those of later calls.

vLLM finds the backend by the name `lightning_gloo`, which the worker extension registers. vLLM's own backends cannot replace
it: they need CUDA, and wait for an accelerator after each update. Written for the interface of vLLM 0.31, which is tested; it
changed between earlier releases.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from lightning.errors import PolicyServerError
from lightning.policy_server.worker import replace_weights
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from lightning_attach.links import GlooGroup, Spec, join
from lightning_attach.sending import Meeting
from lightning_attach.worker import NetworkState


@dataclass
class GlooInitInfo(WeightTransferInitInfo):  # type: ignore[misc]  # vLLM has no types here
    """Where to join the sender (see `sending.Meeting`), the new group's name, and the trainer's claim."""

    master_address: str
    master_port: int
    world_size: int
    seconds: float
    group: str
    claim: str


@dataclass
class GlooUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]  # as above
    """The tensors that come, in this order, in which group and from whose claim; dtypes have torch's names."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    group: str
    claim: str


class GlooReceiver(WeightTransferEngine):  # type: ignore[misc]  # as above
    """One worker's receiver. vLLM calls the methods in this order: join, then start, update, finish for each update."""

    init_info_cls = GlooInitInfo
    update_info_cls = GlooUpdateInfo
    supports_draft_weight_update = False
    problem = ""
    """The last error; empty when there was none."""
    lightning_state: NetworkState | None = None
    """The worker's state, set by its extension; None before."""
    _group: GlooGroup | None = None

    def parse_init_info(self, init_dict: dict[str, Any]) -> dict[str, Any]:
        """Return the input unchanged: `init_transfer_engine` checks it, because errors there go into `problem`."""
        return init_dict

    def init_transfer_engine(self, init_info: Mapping[str, Any]) -> None:
        """Join the sender's group in place of an older one. For a trainer that does not have the claim nothing is done; the
        trainer then sees that the worker is not in its group."""
        if self.lightning_state is not None and init_info.get("claim") != self.lightning_state.claim:
            return
        try:
            state = self._known()
            told = GlooInitInfo(**init_info)
            self.shutdown()
            self.problem = ""
            parallel = self.parallel_config
            rank = 1 + parallel.data_parallel_index * parallel.world_size + parallel.rank
            self._group = join(Meeting(told.master_address, told.master_port, told.world_size, told.seconds), rank)
            state.group = told.group
        except Exception as error:  # noqa: BLE001 — see the module's invariant
            self.problem = f"{type(error).__name__}: {error}"

    def start_weight_update(self) -> None:
        """Do nothing: `receive_weights` does the whole update."""

    def finish_weight_update(self) -> None:
        """Do nothing, as above."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive all weights and put them in place. vLLM's own method would wait for an accelerator, which a CPU is not.

        Nothing is done for a trainer that has neither the claim nor the group. One that has only the group fails: the group is
        left, so that its waiting sender ends.
        """
        state = self.lightning_state
        if state is not None and state.group != update_info.get("group") and state.claim != update_info.get("claim"):
            return
        self.problem = ""
        try:
            self.receive_weights(GlooUpdateInfo(**update_info))
        except Exception as error:  # noqa: BLE001 — see the module's invariant
            self.problem = f"{type(error).__name__}: {error}"
            self.shutdown()

    def receive_weights(self, update_info: GlooUpdateInfo) -> None:
        """Receive all weights and put them in place. Raises `PolicyServerError` when the claim or the group is another, or the
        transfer fails."""
        state = self._known()
        if state.claim != update_info.claim:
            raise PolicyServerError("this vLLM is another trainer's now")
        if self._group is None:
            raise PolicyServerError("this worker is in no group: the trainer must make one first")
        if state.group != update_info.group:
            raise PolicyServerError("this worker is in another group than the one in which weights are sent to it")
        specs = [
            Spec(name, getattr(torch, dtype), tuple(shape))
            for name, dtype, shape in zip(update_info.names, update_info.dtype_names, update_info.shapes, strict=True)
        ]
        replace_weights(self.model, self.model_config, self.device, self._group.receive(specs))

    def shutdown(self) -> None:
        """Leave the group."""
        group, self._group = self._group, None
        if self.lightning_state is not None:
            self.lightning_state.group = ""
        if group is not None:
            group.leave()

    def _known(self) -> NetworkState:
        if self.lightning_state is None:
            raise PolicyServerError("nobody has attached to this vLLM: the trainer must do so first")
        return self.lightning_state
