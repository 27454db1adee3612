"""New weights over the network, from the process that has them to vLLM's workers, which need not see its disk: the contract of
both sides, and what is sent in which order, every tensor of some safetensors files under its own name.

The invariant: whoever reads the same files derives the same order, dtypes and shapes, so that the side that tells vLLM
what will come and the side that sends it need not speak with one another.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from lightning.policy_server.model_folder import read_header

if TYPE_CHECKING:
    import torch

DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu", "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8",
    "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8", "BOOL": "bool",
}  # fmt: skip
"""torch's names of safetensors' dtypes."""
BACKENDS = {"gloo": "lightning_gloo", "nccl": "nccl"}
"""What vLLM calls the values of `policy_server.weight_transfer`."""
PACKED_BYTES = 256 * 2**20
PACKED_BUFFERS = 2
"""How vLLM packs tensors for NCCL, told to both sides."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a file; `dtype` is torch's name of it, such as `bfloat16`."""

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where a group of processes is made: the sender, which is rank 0, listens at this address; `world` counts it, too, and
    whoever waits for the others waits so many seconds."""

    address: str
    port: int
    world: int
    seconds: float


class Link(Protocol):
    """One group of one backend, seen from its sender. May raise anything."""

    meeting: Meeting

    def join(self) -> None:
        """Wait until all have come."""

    def send(self, found: Sequence[TensorEntry]) -> None:
        """Send these tensors, and return once they are away."""

    def leave(self) -> None:
        """Leave the group, if it was joined."""


@runtime_checkable
class Sender(Protocol):
    """The process that has the weights, wherever it is. Methods block: call them off the event loop. All raise
    `PolicyServerError`."""

    def check(self, backend: str) -> None:
        """Raise `ConfigError` when it cannot send in this way at all."""

    def hold(self) -> bool:
        """Keep its process from all else until `release`; false when it is doing something now. Never blocks. A transfer
        is held from before vLLM is told to wait: vLLM gives up on a sender that first computes a step."""

    def release(self) -> None:
        """End what `hold` began. Never blocks."""

    def listen(self, backend: str, towards: str, world: int, seconds: float) -> Meeting:
        """Leave the group there was and open the place where a new one is made, at the address of this machine that the
        host `towards` reaches. A transfer, too, may take so many seconds."""

    def join(self, group: str) -> None:
        """Wait until all have come; the group is known by this word from now on."""

    def group(self) -> str:
        """The word of the group it is in; empty when it is in none, as after it was started again."""

    def send(self, files: Sequence[Path]) -> None:
        """Send every tensor of some safetensors files to all others, and return once they are away. On an error the group
        is left."""

    def leave(self) -> None:
        """Leave the group, if it is in one. A `send` over NCCL that waits for others then ends with an error; over gloo it
        ends when they leave."""


def entries(files: Sequence[Path]) -> list[TensorEntry]:
    """What is sent for some files. Raises `PolicyServerError` for one that cannot be read."""
    return [
        TensorEntry(file, name, DTYPES[spec.dtype], spec.shape)
        for file in files
        for name, spec in sorted(read_header(file).items())
    ]


def tensors(found: Sequence[TensorEntry], device: str) -> Iterator[torch.Tensor]:
    """The tensors themselves, read one by one."""
    from safetensors import safe_open

    for file, own in itertools.groupby(found, key=lambda entry: entry.file):
        with safe_open(file, framework="pt", device=device) as handle:
            for entry in own:
                yield handle.get_tensor(entry.name)
