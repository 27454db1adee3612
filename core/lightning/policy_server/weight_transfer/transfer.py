"""A vLLM gets weights over the network: it is told over HTTP what comes, and the sender, in the process that has the weights,
sends it meanwhile.

The invariant: both sides are in the very group that this trainer has made, or a new one is made before anything is sent;
while weights come, and after a transfer that broke off, vLLM says of none of its versions that it has it. What is sent are the
tensors of the files, in the order of `weight_transfer.entries`; after an error the sender is in no group any more, so that the
next transfer begins with a new one.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol
from urllib.parse import urlsplit

from lightning.errors import ConfigError, LightningError, MissingExtraError, PolicyServerError
from lightning.policy_server.control import NotOursError
from lightning.policy_server.weight_transfer import (
    BACKENDS,
    PACKED_BUFFERS,
    PACKED_BYTES,
    Link,
    Meeting,
    Sender,
    TensorEntry,
    entries,
)

if TYPE_CHECKING:
    from lightning.config.sections import PolicyServerConfig
    from lightning.policy_server.control import VLLMControl


class LocalSender:
    """Implements `weight_transfer.Sender` for weights that this process reads from its disk. `device` is where NCCL sends
    from: a CUDA device of its own, since NCCL lets no two ranks share one; `auto` is torch's present one."""

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
                from lightning.policy_server.weight_transfer.links import NcclLink

                self._link = NcclLink(self._device, towards, world, seconds)
            else:
                from lightning.policy_server.weight_transfer.links import GlooLink

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


logger = logging.getLogger(__name__)

GRACE_SECONDS = 60.0
"""vLLM is asked for longer than a transfer may take, so that its own error comes first."""
HOLD_SECONDS = 0.02
"""How often a sender that is busy is asked whether it is free."""


class Loader(Protocol):
    """How a vLLM gets the tensors of files. Raises `PolicyServerError`."""

    def check(self) -> None:
        """Raise `ConfigError` when it cannot work here at all."""

    async def ready(self, control: VLLMControl) -> None:
        """Do what can be done before vLLM is paused."""

    async def load(self, control: VLLMControl, files: Sequence[Path]) -> None:
        """Replace the model's weights by those of the files, in place. Call it while paused."""


class FromDisk:
    """vLLM reads the files itself."""

    def check(self) -> None:
        """Nothing can be wrong yet."""

    async def ready(self, control: VLLMControl) -> None:
        """There is nothing to do before."""

    async def load(self, control: VLLMControl, files: Sequence[Path]) -> None:
        """See `Loader.load`."""
        await control.load(files)


class OverNetwork:
    """The sender reads the files and sends them; `seconds` is how long that may take."""

    def __init__(self, backend: str, sender: Sender, seconds: float) -> None:
        self._backend, self._sender, self._seconds = backend, sender, seconds
        self._used = False
        """Whether weights have come in the group of now: one that broke since is made anew before anything is given up."""

    def check(self) -> None:
        """See `Loader.check`."""
        self._sender.check(self._backend)

    async def ready(self, control: VLLMControl) -> None:
        """Have both sides in one group: the last one, unless one of them was started again or a transfer broke off."""
        async with self._held():
            await self._ready(control)

    async def _ready(self, control: VLLMControl) -> None:
        states = await control.transfer_states()
        self._check_backend(control, {state.backend for state in states})
        known = {state.group for state in states}
        if known == {await asyncio.to_thread(self._sender.group)} and known != {""}:
            return
        group, self._used = secrets.token_hex(8), False
        world = 1 + await control.world_size()
        towards = urlsplit(control.url).hostname or "127.0.0.1"
        meeting = await asyncio.to_thread(self._sender.listen, self._backend, towards, world, self._seconds)
        await self._both(
            control,
            self._join(control, meeting, group),
            asyncio.to_thread(self._sender.join, group),
            f"vLLM could not join the trainer's {self._backend} group at {meeting.address}:{meeting.port}",
        )
        logger.info("weights go to %s over %s from %s", control.url, self._backend, meeting.address)

    async def load(self, control: VLLMControl, files: Sequence[Path]) -> None:
        """See `Loader.load`."""
        async with self._held():
            await self._ready(control)
            try:
                await self._send(control, files)
            except PolicyServerError as error:
                if not self._used or isinstance(error, NotOursError):
                    raise
                await control.check_ours()  # a vLLM that refuses us leaves the sender waiting for it
                logger.warning("the group that weights went in before has broken, a new one is made: %s", error)
                await asyncio.to_thread(self._sender.leave)
                await self._ready(control)
                await self._send(control, files)
            self._used = True

    async def _join(self, control: VLLMControl, meeting: Meeting, group: str) -> None:
        told = _told(self._backend, meeting, group, control.claimed_as)
        await control.join_transfer(told, self._seconds + GRACE_SECONDS)
        if self._backend != "gloo":
            await control.know_group(group)
        await self._confirm(control, group)

    async def _send(self, control: VLLMControl, files: Sequence[Path]) -> None:
        found = await asyncio.to_thread(entries, files)
        group = await asyncio.to_thread(self._sender.group)
        await control.expect_weights()
        await control.start_transfer()
        await self._both(
            control,
            self._receive(control, found, group),
            asyncio.to_thread(self._sender.send, files),
            f"the weights did not come over {self._backend}",
        )
        await control.finish_transfer()

    async def _receive(self, control: VLLMControl, found: Sequence[TensorEntry], group: str) -> None:
        told = _described(self._backend, found, group, control.claimed_as)
        await control.receive(told, self._seconds + GRACE_SECONDS)
        await self._confirm(control, group)

    async def _confirm(self, control: VLLMControl, group: str) -> None:
        """Our receivers do not raise: they are asked."""
        states = await control.transfer_states()
        problems = dict.fromkeys(state.problem for state in states if state.problem)
        if problems:
            raise PolicyServerError("; ".join(problems))
        if any(state.group != group for state in states):
            raise PolicyServerError(f"the workers of the vLLM at {control.url} are not in this trainer's group")

    @asynccontextmanager
    async def _held(self) -> AsyncIterator[None]:
        """Hold the sender, once it does nothing else. Asked again and again: a thread that waited could not be cancelled."""
        while not self._sender.hold():  # noqa: ASYNC110 — it is a lock of threads
            await asyncio.sleep(HOLD_SECONDS)
        try:
            yield
        finally:
            self._sender.release()

    def _check_backend(self, control: VLLMControl, found: set[str]) -> None:
        wanted = BACKENDS[self._backend]
        if found != {wanted}:
            has = f"takes weights over {', '.join(sorted(found))}" if found != {""} else "was not started for that"
            raise PolicyServerError(
                f"policy_server.weight_transfer is {self._backend!r}, but the vLLM at {control.url} {has}: start it with "
                f"""--weight-transfer-config '{{"backend": "{wanted}"}}', or set policy_server.weight_transfer = 'file'"""
            )

    async def _both(
        self,
        control: VLLMControl,
        asked: Coroutine[object, object, None],
        done: Coroutine[object, object, None],
        what: str,
    ) -> None:
        """vLLM's part and the sender's at once. When one fails the other is freed and waited for before the error is raised."""
        theirs, ours = asyncio.ensure_future(asked), asyncio.ensure_future(done)
        await asyncio.wait([theirs, ours], return_when=asyncio.FIRST_EXCEPTION)
        if theirs.done() and theirs.exception() and not ours.done():
            await control.leave_transfer()
            await asyncio.to_thread(self._sender.leave)
        await asyncio.wait([theirs, ours])
        failed = [error for task in (theirs, ours) if (error := task.exception())]
        if failed:
            await asyncio.to_thread(self._sender.leave)
            problem = await control.transfer_problem()
            reasons = "; ".join(dict.fromkeys([*map(str, failed), *([problem] if problem else [])]))
            raise PolicyServerError(f"{what}: {reasons}") from failed[0]


def make_loader(config: PolicyServerConfig, sender: Sender | None) -> Loader:
    """What `config.weight_transfer` asks for; without a sender this process sends."""
    if config.weight_transfer not in BACKENDS:
        return FromDisk()
    return OverNetwork(config.weight_transfer, sender or LocalSender(), config.transfer_timeout)


def _told(backend: str, meeting: Meeting, group: str, claim: str) -> Mapping[str, object]:
    """What vLLM's workers must know to join."""
    place = {"master_address": meeting.address, "master_port": meeting.port, "world_size": meeting.world}
    if backend == "gloo":
        return {**place, "seconds": meeting.seconds, "group": group, "claim": claim}
    packing = {"packed": True, "packed_buffer_size_bytes": PACKED_BYTES, "packed_num_buffers": PACKED_BUFFERS}
    return {**place, **packing, "rank_offset": 1}


def _described(backend: str, found: Sequence[TensorEntry], group: str, claim: str) -> Mapping[str, object]:
    """What comes, as all of vLLM's backends for whole weights are told it; ours is told, besides, from whom."""
    fence = {"group": group, "claim": claim} if backend == "gloo" else {}
    return {
        **fence,
        "names": [entry.name for entry in found],
        "dtype_names": [entry.dtype for entry in found],
        "shapes": [list(entry.shape) for entry in found],
    }
