"""The sender in the process that has the weights: the trainer's, or that of a worker that an engine has elsewhere.

The invariant: what is sent are the tensors of the files, in the order of `layout.entries`; after an error the process is in
no group any more, so that the next transfer begins with a new one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from lightning.errors import ConfigError, LightningError, MissingExtraError, PolicyServerError
from lightning.policy_server.weight_transfer.layout import Link, Meeting, entries


class LocalSender:
    """Implements `layout.Sender` for weights that this process reads from its disk. `device` is where NCCL sends from: a CUDA
    device of its own, since NCCL lets no two ranks share one; `auto` is torch's present one."""

    def __init__(self, device: str = "auto") -> None:
        self._device = "cuda" if device == "auto" else device
        self._link: Link | None = None
        self._group = ""

    def check(self, backend: str) -> None:
        """See `Sender.check`."""
        try:
            import torch
        except ImportError as error:
            raise MissingExtraError("torch", "torch") from error
        if backend == "nccl" and not (self._device.startswith("cuda") and torch.cuda.is_available()):
            raise no_cuda("where the trainer's weights are")

    def hold(self) -> bool:
        """See `Sender.hold`. Files are read and sent beside whatever this process does."""
        return True

    def release(self) -> None:
        """See `Sender.release`."""

    def listen(self, backend: str, towards: str, world: int, seconds: float) -> Meeting:
        """See `Sender.listen`."""
        self.leave()
        with self._doing(f"listening for vLLM at the address that {towards} reaches"):
            if backend == "nccl":
                from lightning.policy_server.weight_transfer.nccl import NcclLink

                self._link = NcclLink(self._device, towards, world, seconds)
            else:
                from lightning.policy_server.weight_transfer.gloo import GlooLink

                self._link = GlooLink(towards, world, seconds)
            return self._link.meeting

    def join(self, group: str) -> None:
        """See `Sender.join`."""
        with self._doing("waiting for vLLM to join"):
            self._linked().join()
        self._group = group

    def group(self) -> str:
        """See `Sender.group`."""
        return self._group

    def send(self, files: Sequence[Path]) -> None:
        """See `Sender.send`."""
        with self._doing("sending weights"):
            self._linked().send(entries(files))

    def leave(self) -> None:
        """See `Sender.leave`."""
        link, self._link, self._group = self._link, None, ""
        if link is not None:
            link.leave()

    def _linked(self) -> Link:
        if self._link is None:
            raise PolicyServerError("the process that has the weights was started again, and is in no group")
        return self._link

    @contextmanager
    def _doing(self, what: str) -> Iterator[None]:
        """Leaves the group and raises `PolicyServerError` when the block fails, however."""
        try:
            yield
        except Exception as error:
            self.leave()
            told = str(error) if isinstance(error, LightningError) else f"{type(error).__name__}: {error}"
            raise PolicyServerError(f"{what} failed: {told}") from error


def no_cuda(where: str) -> ConfigError:
    """NCCL was asked for, and there is no GPU."""
    return ConfigError(
        f"policy_server.weight_transfer = 'nccl' needs a CUDA device {where}, and there is none: set it to 'gloo', which sends "
        "over TCP from any machine, or to 'file' where vLLM sees the trainer's disk"
    )
