"""vLLM's end of the gloo transfer: a backend of vLLM's own weight-transfer API, for vLLMs on CPUs as well as on GPUs.

The invariant: after `update_weights` the model computes with exactly the tensors that came, or `problem` says what went
wrong; then the group is left, so that the sender hears of it, and the layers have the tensors that they had. Weights are taken
from the trainer alone whose claim this vLLM has, in the group that it made. No exception is let out: of several workers vLLM
hands on the first one's and leaves the others' answers lying, which it takes for those of later calls.

vLLM finds it by the name `lightning_gloo`, which the worker extension registers. vLLM's own backends cannot take its place:
they want CUDA, and wait for an accelerator after each update. Written for the interface of vLLM 0.31, which is tested; it
changed between releases before.
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
    """Where the sender is, see `sending.Meeting`; the new group's word and the trainer's claim."""

    master_address: str
    master_port: int
    world_size: int
    seconds: float
    group: str
    claim: str


@dataclass
class GlooUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]  # as above
    """What comes, in this order, in which group and from whom; the dtypes are torch's names."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    group: str
    claim: str


class GlooReceiver(WeightTransferEngine):  # type: ignore[misc]  # as above
    """One of vLLM's workers in the group; vLLM calls the methods in the order join, then start, update, finish each time."""

    init_info_cls = GlooInitInfo
    update_info_cls = GlooUpdateInfo
    supports_draft_weight_update = False
    problem = ""
    """What went wrong the last time; empty when nothing did."""
    lightning_state: NetworkState | None = None
    """The worker's, as its extension has given it."""
    _group: GlooGroup | None = None

    def parse_init_info(self, init_dict: dict[str, Any]) -> dict[str, Any]:
        """As it is: `init_transfer_engine` looks at it, where an error goes into `problem`."""
        return init_dict

    def init_transfer_engine(self, init_info: Mapping[str, Any]) -> None:
        """Join the sender's group in place of an older one. Where the trainer is not the owner nothing is done, and it finds
        another group than its own."""
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
        """Nothing: `receive_weights` does all of an update."""

    def finish_weight_update(self) -> None:
        """Nothing, as above."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive all weights and put them in place. vLLM's own would wait for an accelerator, which a CPU is not.

        Where the trainer is not the owner the group is left if it is that trainer's, whose sender waits in it.
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
        """See `update_weights`; raises."""
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
