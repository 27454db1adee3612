"""Tensors from one sender to any number of receivers, by torch's gloo (over TCP, on CPUs) or by vLLM's own NCCL transfer.

The invariant: a receiver gets the sender's bytes or an error. A process that loses a peer gets an error at once; one that is
kept waiting gets it after the group's `seconds`. A group on which a call failed is not used again.

Nothing is encrypted and no process proves who it is, as in every group of torch: use a private network. The sender's store,
where the group is formed, is closed when all have joined; gloo's own ports stay open as long as the group.

Over NCCL tensors go from the trainer's GPU to those of vLLM's workers, packed as the trainer has told vLLM; a process that
waits for a lost peer is freed after the group's `seconds`. This was written from vLLM 0.31's source and has never run, since no
GPU was at hand. The order of calls, and what vLLM is told in them, are the same as over gloo, which has run.

vLLM's own receiver raises in a worker. With several workers (tensor parallelism) vLLM 0.31 passes on the first one's exception
and does not read the other answers, so that every later answer is one call late: after a transfer that broke off such a vLLM
has to be started again. Our receiver, over gloo, does not raise.
"""

from __future__ import annotations

import math
import socket
import threading
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, Protocol

import torch
from lightning.errors import MissingExtraError, PolicyServerError
from torch.distributed import PrefixStore, ProcessGroupGloo, Store, TCPStore  # type: ignore[attr-defined]  # its stubs

from lightning_attach.sending import PACKED_BUFFERS, PACKED_BYTES, Meeting, TensorEntry, tensors

PIECE_BYTES = 64 * 2**20
"""Tensors are sent together in pieces of at most this many bytes; a larger tensor is a piece of its own."""
JOIN_SECONDS = 60.0
"""Seconds to wait for all processes when a group is formed; vLLM computes nothing meanwhile."""
_ALIGNMENT = 16
"""Each tensor begins at a multiple of this many bytes, because a view of another dtype needs a multiple of its items' size."""


class Spec(NamedTuple):
    """What a receiver must know of a tensor before it comes; vLLM takes it as a `ParamMeta`."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor, without padding."""
        return math.prod(self.shape) * self.dtype.itemsize


def _specs(found: Sequence[TensorEntry]) -> list[Spec]:
    return [Spec(entry.name, getattr(torch, entry.dtype), entry.shape) for entry in found]


def address_towards(host: str) -> str:
    """Return the address of this machine at which `host` can reach it. Nothing is sent. Raises `PolicyServerError`."""
    try:
        family, kind, _, _, place = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(place)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise PolicyServerError(f"there is no way from this machine to {host!r} ({error}): look at its name") from error


class _Closable(Store):
    """A store for gloo that can be closed. Gloo never releases its store, whose port would stay open to everybody."""

    def __init__(self, inner: Store) -> None:
        super().__init__()
        self._inner: Store | None = inner

    def close(self) -> None:
        self._inner = None

    def set(self, key: str, value: str) -> None:
        self._open().set(key, value)

    def get(self, key: str) -> bytes:
        return self._open().get(key)

    def wait(self, keys: list[str], *timeout: timedelta) -> None:
        self._open().wait(keys, *timeout)

    def _open(self) -> Store:
        if self._inner is None:
            raise RuntimeError("the sender's store was closed")
        return self._inner


class Door:
    """The sender's port where a group is formed. It listens at one address only."""

    def __init__(self, address: str, world: int, seconds: float) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.create_server((address, 0), family=family) as listening:
            port = listening.getsockname()[1]
            self._store = _Closable(
                TCPStore(
                    address,
                    port,
                    world,
                    is_master=True,
                    timeout=timedelta(seconds=JOIN_SECONDS),
                    wait_for_workers=False,
                    master_listen_fd=listening.detach(),
                    use_libuv=False,  # which takes no socket of ours
                )
            )
        self.meeting = Meeting(address, port, world, seconds)

    def enter(self) -> GlooGroup:
        """Wait until all receivers have joined, and return the sender's end of the group."""
        return GlooGroup(self._store, self.meeting, 0, self.meeting.address)

    def close(self) -> None:
        """Close the port. Receivers may still find one another here after the sender has joined: wait for them first."""
        self._store.close()


class GlooLink:
    """The sender's end of a gloo group. Implements `sending.Link`."""

    def __init__(self, towards: str, world: int, seconds: float) -> None:
        self._door = Door(address_towards(towards), world, seconds)
        self._group: GlooGroup | None = None
        self.meeting = self._door.meeting

    def join(self) -> None:
        """Wait until all receivers have joined."""
        self._group = self._door.enter()

    def send(self, found: Sequence[TensorEntry]) -> None:
        """Send these tensors from CPU memory, and return when they have been sent."""
        if self._group is None:
            raise PolicyServerError("nobody has joined the sender yet")
        self._door.close()  # all have joined: vLLM says so before anything is sent
        self._group.send(tensors(found, "cpu"), _specs(found))

    def leave(self) -> None:
        """Close the port and leave the group."""
        self._door.close()
        if self._group is not None:
            self._group.leave()


def join(meeting: Meeting, rank: int) -> GlooGroup:
    """Join a group as a receiver. Raises `PolicyServerError` when the sender or another receiver does not come."""
    try:
        patience = timedelta(seconds=JOIN_SECONDS)
        store = TCPStore(meeting.address, meeting.port, meeting.world, timeout=patience, wait_for_workers=False)
    except RuntimeError as error:  # torch.distributed's own errors are
        raise PolicyServerError(
            f"the sender's {meeting.address}:{meeting.port} cannot be reached from vLLM's machine: {error}"
        ) from error
    return GlooGroup(store, meeting, rank, address_towards(meeting.address))


class GlooGroup:
    """One process's end of a gloo group. Its methods raise `PolicyServerError`."""

    def __init__(self, store: Store, meeting: Meeting, rank: int, address: str) -> None:
        kind: Any = ProcessGroupGloo  # torch's stubs leave most of it out
        options = kind._Options()  # noqa: SLF001 — torch's only way to choose the address
        options._timeout = timedelta(seconds=JOIN_SECONDS)  # noqa: SLF001 — as above
        options._devices = [kind.create_device(hostname=address)]  # noqa: SLF001 — as above
        self._store: Store | None = store
        try:
            self._gloo: Any = kind(PrefixStore("weights", store), rank, meeting.world, options)
        except RuntimeError as error:
            raise PolicyServerError(f"not all of {meeting.world} processes came to send weights: {error}") from error
        self._gloo._set_default_timeout(timedelta(seconds=meeting.seconds))  # noqa: SLF001 — as above

    def leave(self) -> None:
        """Close the connections, so that the other processes get an error. Idempotent."""
        gloo, self._gloo, self._store = self._gloo, None, None
        if gloo is not None:
            gloo.abort()

    def send(self, tensors: Iterable[torch.Tensor], specs: Iterable[Spec]) -> None:
        """Send tensors that match the specs; the receivers must be receiving them."""
        given = iter(tensors)
        for piece in _pieces(specs):
            buffer, places = _room(piece)
            for place, tensor in zip(places, given, strict=False):
                place.copy_(tensor.contiguous().reshape(-1).view(torch.uint8))
            self._broadcast(buffer)

    def receive(self, specs: Iterable[Spec]) -> Iterator[tuple[str, torch.Tensor]]:
        """Receive tensors, one by one. Tensors of one piece share memory."""
        for piece in _pieces(specs):
            buffer, places = _room(piece)
            self._broadcast(buffer)
            for spec, place in zip(piece, places, strict=True):
                yield spec.name, place.view(spec.dtype).view(spec.shape)

    def _broadcast(self, buffer: torch.Tensor) -> None:
        if self._gloo is None:
            raise PolicyServerError("the group was left")
        try:
            # In parts, so that no part is larger than what gloo has been seen to carry.
            for start in range(0, len(buffer), PIECE_BYTES):
                self._gloo.broadcast(buffer[start : start + PIECE_BYTES], 0).wait()
        except RuntimeError as error:
            raise PolicyServerError(f"the connection broke: {str(error).splitlines()[0]}") from error


def _pieces(specs: Iterable[Spec]) -> Iterator[list[Spec]]:
    """Yield groups of consecutive tensors that are sent together. Both sides use this rule."""
    piece: list[Spec] = []
    size = 0
    for spec in specs:
        if piece and size + spec.nbytes > PIECE_BYTES:
            yield piece
            piece, size = [], 0
        piece.append(spec)
        size += spec.nbytes
    if piece:
        yield piece


def _room(piece: list[Spec]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return a buffer for some tensors, and the part of it with each one's bytes."""
    starts = [0]
    for spec in piece:
        starts.append(-(-(starts[-1] + spec.nbytes) // _ALIGNMENT) * _ALIGNMENT)
    buffer = torch.empty(starts[-1], dtype=torch.uint8)
    return buffer, [buffer[start : start + spec.nbytes] for start, spec in zip(starts, piece, strict=False)]


class NcclLink:
    """The sender's end of an NCCL group, on a CUDA device that no other rank of the group uses. Implements `sending.Link`."""

    def __init__(self, device: str, towards: str, world: int, seconds: float) -> None:
        address = address_towards(towards)
        with socket.create_server((address, 0)) as free:  # vLLM's own code will listen there
            port = free.getsockname()[1]
        self.meeting = Meeting(address, port, world, seconds)
        # Threads begin on device 0, whatever this one's is.
        self._device = f"cuda:{torch.cuda.current_device()}" if device == "cuda" else device
        self._source = _Source(self._device)
        self._engine: _VLLMTrainerSide | None = None

    def join(self) -> None:
        """Wait until all receivers have joined. vLLM's own code waits for five minutes at most."""
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
        """Send these tensors, and return when they have been sent. A thread sends, because NCCL waits for ever for a lost peer;
        after the group's `seconds` this raises `PolicyServerError`."""
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
        """Leave the group, if it was joined."""
        engine, self._engine = self._engine, None
        if engine is not None:
            group = engine.model_update_group
            engine.shutdown()
            if group is not None:
                group.destroy()  # also frees a thread that waits in it


class _VLLMTrainerSide(Protocol):
    """The used part of vLLM's `NCCLTrainerWeightTransferEngine`."""

    model_update_group: _Communicator | None

    def send_weights(self) -> None: ...

    def shutdown(self) -> None: ...


class _Communicator(Protocol):
    def destroy(self) -> None: ...


class _Elsewhere:
    """A `VLLMWeightSyncClient` that does nothing: the trainer itself makes these calls, since the sender may not reach vLLM's
    port."""

    def init_weight_transfer_engine(self, init_info: object) -> None: ...

    def start_weight_update(self) -> None: ...

    def update_weights(self, update_info: object) -> None: ...

    def finish_weight_update(self, weight_version: str | None = None) -> None: ...


class _Source:
    """A `WeightSource` of vLLM that reads the tensors of files."""

    def __init__(self, device: str) -> None:
        self._device = device
        self.found: Sequence[TensorEntry] = ()

    def metadata(self) -> list[Spec]:
        return _specs(self.found)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        names = [entry.name for entry in self.found]
        return zip(names, tensors(self.found, self._device), strict=True)
