"""New weights over the network, from the process that has them to vLLM's workers, which need not see its disk. This is the
contract of both sides, and the order in which the tensors of safetensors files are sent, each under its own name.

The invariant: reading the same files gives the same order, dtypes and shapes, so that the side that tells vLLM what will come
and the side that sends it need not talk to each other.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from lightning.policy_server.model_folder import DTYPES, read_header

if TYPE_CHECKING:
    import torch

BACKENDS = {"gloo": "lightning_gloo", "nccl": "nccl"}
"""vLLM's names for the values of `policy_server.weight_transfer`."""
PACKED_BYTES = 256 * 2**20
PACKED_BUFFERS = 2
"""How vLLM packs tensors for NCCL; both sides must use the same values."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a file; `dtype` is torch's name, such as `bfloat16`."""

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Meeting:
    """The address at which a group of processes is formed. The sender, rank 0, listens at this address. `world` is the number
    of processes including the sender; `seconds` is the longest time that a process waits for the others."""

    address: str
    port: int
    world: int
    seconds: float


class Link(Protocol):
    """The sender's end of one group of one backend. Its methods may raise any exception."""

    meeting: Meeting

    def join(self) -> None:
        """Wait until all receivers have joined."""

    def send(self, found: Sequence[TensorEntry]) -> None:
        """Send these tensors, and return when they have been sent."""

    def leave(self) -> None:
        """Leave the group, if it was joined."""


@runtime_checkable
class Sender(Protocol):
    """The process that has the weights, on any machine. Methods block, so call them off the event loop. All but `check` raise
    `PolicyServerError`."""

    def check(self, backend: str) -> None:
        """Raise `ConfigError` if this process cannot send weights to vLLM over `backend` ("nccl" or "gloo")."""

    def hold(self) -> bool:
        """Reserve the process for a transfer until `release`; return False when it is busy. Never blocks. Call it before vLLM
        is told to wait, because vLLM gives up on a sender that first computes a step."""

    def release(self) -> None:
        """Release the process that `hold` reserved. Never blocks."""

    def listen(self, backend: str, towards: str, world: int, seconds: float) -> Meeting:
        """Leave the present group and listen for a new one, at the address of this machine that the host `towards` reaches.
        `world` counts all processes; a transfer may take `seconds`."""

    def join(self, group: str) -> None:
        """Wait until all receivers have joined; the new group has the name `group`."""

    def group(self) -> str:
        """Return the name of the present group; empty if there is no group, for example after a restart of the process."""

    def send(self, files: Sequence[Path]) -> None:
        """Send every tensor of some safetensors files to all receivers, and return when they have been sent. On an error the
        group is left."""

    def leave(self) -> None:
        """Leave the group, if there is one. Over NCCL, a `send` that waits for receivers then ends with an error; over gloo, it
        ends when the receivers leave."""


def entries(files: Sequence[Path]) -> list[TensorEntry]:
    """Return the tensors of some files, in the order in which they are sent. Raises `PolicyServerError` for an unreadable
    file."""
    return [
        TensorEntry(file, name, DTYPES[spec.dtype], spec.shape)
        for file in files
        for name, spec in sorted(read_header(file).items())
    ]


def tensors(found: Sequence[TensorEntry], device: str) -> Iterator[torch.Tensor]:
    """Read these tensors from their files to `device`, one by one."""
    from safetensors import safe_open

    for file, own in itertools.groupby(found, key=lambda entry: entry.file):
        with safe_open(file, framework="pt", device=device) as handle:
            for entry in own:
                yield handle.get_tensor(entry.name)
