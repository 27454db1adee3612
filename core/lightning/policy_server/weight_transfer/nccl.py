"""The sending side of vLLM's own NCCL transfer: from the trainer's GPU to those of vLLM's workers, over whatever joins them.

The invariant: what is sent are the tensors of the files in the order of `layout.entries`, packed as the trainer has told
vLLM; whoever waits for a peer that is gone is freed after the seconds the group was made with.

It was written from vLLM 0.31's source and has never run, since no GPU was at hand. The order of calls, and what vLLM is told
in them, is that of gloo, which has.

vLLM's own receiver raises in a worker. Of several workers (tensor parallelism) vLLM 0.31 hands on the first one's exception
and leaves the others' answers lying, so that every later answer is one call late: after a transfer that broke off such a
vLLM has to be started again. Ours, over gloo, does not raise.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import torch

from lightning.errors import MissingExtraError, PolicyServerError
from lightning.policy_server.weight_transfer.gloo import address_towards
from lightning.policy_server.weight_transfer.layout import PACKED_BUFFERS, PACKED_BYTES, Meeting, TensorEntry, tensors


class NcclLink:
    """Implements `layout.Link` from a CUDA device, on which no other rank of the group may be."""

    def __init__(self, device: str, towards: str, world: int, seconds: float) -> None:
        address = address_towards(towards)
        with socket.create_server((address, 0)) as free:  # vLLM's own listens there in a moment
            port = free.getsockname()[1]
        self.meeting = Meeting(address, port, world, seconds)
        # Threads begin on device 0, whatever this one's is.
        self._device = f"cuda:{torch.cuda.current_device()}" if device == "cuda" else device
        self._source = _Source(self._device)
        self._engine: _VLLMTrainerSide | None = None

    def join(self) -> None:
        """See `Link.join`. vLLM's own waiting ends after five minutes."""
        try:
            from vllm.distributed.weight_transfer import WeightTransferTrainerFactory
            from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo
        except ImportError as error:
            raise MissingExtraError("vllm", error.name or "vllm") from error
        meeting = self.meeting
        told = NCCLTrainerInitInfo(
            meeting.address, meeting.port, meeting.world, True, PACKED_BYTES, PACKED_BUFFERS, rank=0
        )
        with torch.cuda.device(self._device):
            self._engine = WeightTransferTrainerFactory.trainer_init(told, client=_Elsewhere(), source=self._source)

    def send(self, found: Sequence[TensorEntry]) -> None:
        """NCCL waits for ever for a peer that is gone: so another thread does the waiting, and is freed after a while."""
        engine, problems = self._engine, list[BaseException]()
        if engine is None:
            raise PolicyServerError("nobody has joined the sender yet")
        self._source.found = found

        def work() -> None:
            try:
                with torch.cuda.device(self._device):
                    engine.send_weights()
            except BaseException as error:  # noqa: BLE001 — raised below, in the caller's thread
                problems.append(error)

        thread = threading.Thread(target=work, name="lightning-nccl", daemon=True)
        thread.start()
        thread.join(self.meeting.seconds)
        if thread.is_alive():
            raise PolicyServerError(f"the weights were not away after {self.meeting.seconds:.0f} s")
        if problems:
            raise problems[0]

    def leave(self) -> None:
        """See `Link.leave`."""
        engine, self._engine = self._engine, None
        if engine is not None:
            group = engine.model_update_group
            engine.shutdown()
            if group is not None:
                group.destroy()  # also frees a thread that waits in it


class _VLLMTrainerSide(Protocol):
    """vLLM's `NCCLTrainerWeightTransferEngine`."""

    model_update_group: _Communicator | None

    def send_weights(self) -> None: ...

    def shutdown(self) -> None: ...


class _Communicator(Protocol):
    def destroy(self) -> None: ...


class _Elsewhere:
    """vLLM's `VLLMWeightSyncClient`, whose calls the trainer makes itself: the sender may be where vLLM's port is not seen."""

    def init_weight_transfer_engine(self, init_info: object) -> None: ...

    def start_weight_update(self) -> None: ...

    def update_weights(self, update_info: object) -> None: ...

    def finish_weight_update(self, weight_version: str | None = None) -> None: ...


class _Source:
    """vLLM's `WeightSource`: the tensors of files."""

    def __init__(self, device: str) -> None:
        self._device = device
        self.found: Sequence[TensorEntry] = ()

    def metadata(self) -> list[_Meta]:
        return [_Meta(entry.name, getattr(torch, entry.dtype), entry.shape) for entry in self.found]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        names = [entry.name for entry in self.found]
        return zip(names, tensors(self.found, self._device), strict=True)


class _Meta(NamedTuple):
    """vLLM's `ParamMeta`."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
