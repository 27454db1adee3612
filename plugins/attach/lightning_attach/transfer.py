"""A vLLM gets weights over the network: it is told over HTTP what comes, and the sender, in the process that has the weights,
sends it meanwhile.

The invariant: both sides are in the very group that this trainer has made, or a new one is made before anything is sent;
while weights come, and after a transfer that broke off, vLLM says of none of its versions that it has it. What is sent are the
tensors of the files, in the order of `sending.entries`; after an error the sender is in no group any more, so that the
next transfer begins with a new one.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import shlex
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import urlsplit

from lightning.errors import ConfigError, LightningError, MissingExtraError, PolicyServerError
from lightning.policy_server.control import NoRoutesError, NotOursError

from lightning_attach.sending import (
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
    from lightning.policy_server.auto_settings import Device
    from lightning.policy_server.control import VLLMControl


class LocalSender:
    """Implements `sending.Sender` for weights that this process reads from its disk. `device` is where NCCL sends
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
            from lightning_attach.links import GlooLink, NcclLink

            own = partial(NcclLink, self._device) if backend == "nccl" else GlooLink
            self._link = own(towards, world, seconds)
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

EXTENSION = "lightning_attach.worker.NetworkExtension"
"""What has to stand in vLLM's workers, in the place of the core's extension."""
GRACE_SECONDS = 60.0
"""vLLM is asked for longer than a transfer may take, so that its own error comes first."""
HOLD_SECONDS = 0.02
"""How often a sender that is busy is asked whether it is free."""


class TransferState(NamedTuple):
    """What one of vLLM's workers says of weights over the network."""

    backend: str
    """vLLM's name; empty: it takes none."""
    group: str
    """The word of the group that it is in; empty: none."""
    problem: str
    """What went wrong there the last time; empty where nothing did, or where it cannot say: vLLM's own backends."""


async def worker_states(control: VLLMControl) -> list[TransferState]:
    """What each worker says."""
    return [
        TransferState(*(str(control.part_of(answer, name)) for name in TransferState._fields))
        for answer in await control.rpc("lightning_transfer")
    ]


class OverNetwork:
    """Implements `WeightTransfer`: the sender reads the files and sends them; `seconds` is how long that may take."""

    extension = EXTENSION

    def __init__(self, backend: str, sender: Sender, seconds: float) -> None:
        self._backend, self._sender, self._seconds = backend, sender, seconds
        self.args: Sequence[str] = ("--weight-transfer-config", json.dumps({"backend": BACKENDS[backend]}))
        self._used = False
        """Whether weights have come in the group of now: one that broke since is made anew before anything is given up."""

    def check(self, device: Device | None) -> None:
        """See `WeightTransfer.check`."""
        self._sender.check(self._backend)
        if device == "cpu" and self._backend == "nccl":
            raise no_cuda("for vLLM")

    async def ready(self, control: VLLMControl) -> None:
        """Have both sides in one group: the last one, unless one of them was started again or a transfer broke off."""
        async with self._held():
            await self._ready(control)

    async def _ready(self, control: VLLMControl) -> None:
        states = await self._states(control)
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
        """See `WeightTransfer.load`."""
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
        seconds = self._seconds + GRACE_SECONDS
        await control.call("POST", "/init_weight_transfer_engine", json={"init_info": told}, seconds=seconds)
        if self._backend != "gloo":  # ours keeps the word of its group by itself
            await control.rpc("lightning_group", group)
        await self._confirm(control, group)

    async def _send(self, control: VLLMControl, files: Sequence[Path]) -> None:
        found = await asyncio.to_thread(entries, files)
        group = await asyncio.to_thread(self._sender.group)
        await control.rpc("lightning_expect", control.claimed_as)  # they are of no version until one is set
        await control.call("POST", "/start_weight_update")
        await self._both(
            control,
            self._receive(control, found, group),
            asyncio.to_thread(self._sender.send, files),
            f"the weights did not come over {self._backend}",
        )
        await control.call("POST", "/finish_weight_update")

    async def _receive(self, control: VLLMControl, found: Sequence[TensorEntry], group: str) -> None:
        told = _described(self._backend, found, group, control.claimed_as)
        await control.call("POST", "/update_weights", json={"update_info": told}, seconds=self._seconds + GRACE_SECONDS)
        await self._confirm(control, group)

    async def _confirm(self, control: VLLMControl, group: str) -> None:
        """Our receivers do not raise: they are asked."""
        states = await worker_states(control)
        if problems := _problems(states):
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

    async def _states(self, control: VLLMControl) -> list[TransferState]:
        """What its workers say. Raises with the cure where it was not started for this."""
        wanted = BACKENDS[self._backend]
        cure = (
            f"start it with {shlex.join(self.args)} --worker-extension-cls {EXTENSION}, or set "
            "policy_server.weight_transfer = 'file'"
        )
        try:
            states = await worker_states(control)
        except (NoRoutesError, NotOursError):
            raise
        except PolicyServerError as error:
            raise PolicyServerError(
                f"{error}. If that vLLM was not started for weights over the network: {cure}"
            ) from error
        found = {state.backend for state in states}
        if found != {wanted}:
            has = f"takes weights over {', '.join(sorted(found))}" if found != {""} else "was not started for that"
            raise PolicyServerError(
                f"policy_server.weight_transfer is {self._backend!r}, but the vLLM at {control.url} {has}: {cure}"
            )
        return states

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
            await _leave(control)
            await asyncio.to_thread(self._sender.leave)
        await asyncio.wait([theirs, ours])
        failed = [error for task in (theirs, ours) if (error := task.exception())]
        if failed:
            await asyncio.to_thread(self._sender.leave)
            problems: list[str] = []
            with suppress(PolicyServerError):  # they cannot say
                problems = _problems(await worker_states(control))
            reasons = "; ".join(dict.fromkeys([*map(str, failed), *problems]))
            raise PolicyServerError(f"{what}: {reasons}") from failed[0]


def _problems(states: Sequence[TransferState]) -> list[str]:
    """What went wrong on the workers in the last transfer."""
    return list(dict.fromkeys(state.problem for state in states if state.problem))


async def _leave(control: VLLMControl) -> None:
    """Have all workers that still live leave the group, so that a sender that waits for them hears of it."""
    try:
        await control.rpc("lightning_leave")
    except PolicyServerError as error:
        logger.debug("%s did not leave: its connections have broken with it, or will: %s", control.url, error)


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
