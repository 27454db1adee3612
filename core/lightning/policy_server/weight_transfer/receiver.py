"""vLLM's end of the gloo transfer: a backend of vLLM's own weight-transfer API, for vLLMs on CPUs as well as on GPUs.

The invariant: after `update_weights` the model computes with exactly the tensors that came, or the call says what went
wrong; then the group is left, so that the sender hears of it, and the layers have the tensors that they had.

vLLM finds it by the name `lightning_gloo`, which the worker extension registers. vLLM's own backends cannot take its place:
they want CUDA, and wait for an accelerator after each update. Written for the interface of vLLM 0.31, which is tested; it
changed between releases before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from lightning.policy_server.weight_transfer.gloo import Group, Spec, join
from lightning.policy_server.weight_transfer.layout import Meeting
from lightning.policy_server.worker import replace_weights


@dataclass
class GlooInitInfo(WeightTransferInitInfo):  # type: ignore[misc]  # vLLM has no types here
    """Where the sender is; see `layout.Meeting`."""

    master_address: str
    master_port: int
    world_size: int
    seconds: float


@dataclass
class GlooUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]  # as above
    """What comes, in this order; the dtypes are torch's names."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]


class GlooReceiver(WeightTransferEngine):  # type: ignore[misc]  # as above
    """One of vLLM's workers in the group; vLLM calls the methods in the order join, then start, update, finish each time."""

    init_info_cls = GlooInitInfo
    update_info_cls = GlooUpdateInfo
    supports_draft_weight_update = False
    problem = ""
    """What went wrong the last time."""
    _group: Group | None = None

    def init_transfer_engine(self, init_info: GlooInitInfo) -> None:
        """Join the sender's group in place of an older one."""
        self.shutdown()
        self.problem = ""
        parallel = self.parallel_config
        rank = 1 + parallel.data_parallel_index * parallel.world_size + parallel.rank
        meeting = Meeting(init_info.master_address, init_info.master_port, init_info.world_size, init_info.seconds)
        try:
            self._group = join(meeting, rank)
        except Exception as error:
            self.problem = str(error)
            raise

    def start_weight_update(self) -> None:
        """Nothing: `receive_weights` does all of an update."""

    def finish_weight_update(self) -> None:
        """Nothing, as above."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive all weights and put them in place. vLLM's own would wait for an accelerator, which a CPU is not."""
        try:
            self.receive_weights(self.parse_update_info(update_info))
        except BaseException as error:
            self.problem = f"{type(error).__name__}: {error}"
            self.shutdown()
            raise

    def receive_weights(self, update_info: GlooUpdateInfo) -> None:
        """See `update_weights`."""
        if self._group is None:
            raise RuntimeError("this worker is in no group: the trainer must make one first")
        specs = [
            Spec(name, getattr(torch, dtype), tuple(shape))
            for name, dtype, shape in zip(update_info.names, update_info.dtype_names, update_info.shapes, strict=True)
        ]
        replace_weights(self.model, self.model_config, self.device, self._group.receive(specs))

    def shutdown(self) -> None:
        """Leave the group."""
        group, self._group = self._group, None
        if group is not None:
            group.leave()
