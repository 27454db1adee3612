"""Weights for a vLLM over the network: vLLM is told over HTTP what comes, while the sender, in the process that has the
weights, sends it.

The invariant: weights are sent only when both sides are in the group that this trainer has formed; otherwise a new group is
formed first. While weights come, and after a transfer that broke off, vLLM's weights have no version. The tensors of the files
are sent in the order of `sending.entries`. After an error the sender has left its group, so that the next transfer forms a new
one.
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
    """Sends weights that this process reads from its disk. Implements `sending.Sender`. `device` is the CUDA device from which
    NCCL sends; no other rank may use it, since NCCL does not let two ranks share one. `auto` is torch's present one."""

    def __init__(self, device: str = "auto") -> None:
        self._device = "cuda" if device == "auto" else device
        self._link: Link | None = None
        self._group = ""

    def check(self, backend: str) -> None:
        """Raise `ConfigError` if this process cannot send weights to vLLM over `backend` ("nccl" or "gloo")."""
        try:
            import torch
        except ImportError as error:
            raise MissingExtraError("torch", "torch") from error
        if backend == "nccl" and not (self._device.startswith("cuda") and torch.cuda.is_available()):
            raise no_cuda("where the trainer's weights are")

    def hold(self) -> bool:
        """Return True: files can be read and sent whatever else this process does."""
        return True

    def release(self) -> None:
        """Do nothing."""

    def listen(self, backend: str, towards: str, world: int, seconds: float) -> Meeting:
        """Leave the present group and listen for a new one."""
        self.leave()
        with self._doing(f"listening for vLLM at the address that {towards} reaches"):
            from lightning_attach.links import GlooLink, NcclLink

            own = partial(NcclLink, self._device) if backend == "nccl" else GlooLink
            self._link = own(towards, world, seconds)
            return self._link.meeting

    def join(self, group: str) -> None:
        """Wait until all receivers have joined; the new group has the name `group`."""
        with self._doing("waiting for vLLM to join"):
            self._linked().join()
        self._group = group

    def group(self) -> str:
        """Return the name of the present group; empty without one."""
        return self._group

    def send(self, files: Sequence[Path]) -> None:
        """Send every tensor of some safetensors files, and return when they have been sent."""
        with self._doing("sending weights"):
            self._linked().send(entries(files))

    def leave(self) -> None:
        """Leave the group, if there is one."""
        link, self._link, self._group = self._link, None, ""
        if link is not None:
            link.leave()

    def _linked(self) -> Link:
        if self._link is None:
            raise PolicyServerError("the process that has the weights was started again, and is in no group")
        return self._link

    @contextmanager
    def _doing(self, what: str) -> Iterator[None]:
        """Do the block; if it fails in any way, leave the group and raise `PolicyServerError` that names `what`."""
        try:
            yield
        except Exception as error:
            self.leave()
            told = str(error) if isinstance(error, LightningError) else f"{type(error).__name__}: {error}"
            raise PolicyServerError(f"{what} failed: {told}") from error


def no_cuda(where: str) -> ConfigError:
    """Return the error for NCCL without a CUDA device; `where` says at which end."""
    return ConfigError(
        f"policy_server.weight_transfer = 'nccl' needs a CUDA device {where}, and there is none: set it to 'gloo', which sends "
        "over TCP from any machine, or to 'file' where vLLM sees the trainer's disk"
    )


logger = logging.getLogger(__name__)

EXTENSION = "lightning_attach.worker.NetworkExtension"
"""The worker extension that vLLM must be started with, instead of the core's."""
GRACE_SECONDS = 60.0
"""Requests to vLLM may take this many seconds longer than a transfer, so that the transfer's own error comes first."""
HOLD_SECONDS = 0.02
"""Seconds between two checks whether a busy sender is free."""


class TransferState(NamedTuple):
    """What one of vLLM's workers says of weights over the network."""

    backend: str
    """vLLM's name of its backend; empty: it takes no weights over the network."""
    group: str
    """The name of the worker's group; empty without one."""
    problem: str
    """The last error there; empty without one, and always empty with vLLM's own backends."""


async def worker_states(control: VLLMControl) -> list[TransferState]:
    """Ask each worker for its state."""
    return [
        TransferState(*(str(control.part_of(answer, name)) for name in TransferState._fields))
        for answer in await control.rpc("lightning_transfer")
    ]


class OverNetwork:
    """Brings weights to vLLM through a sender, which reads and sends the files. A transfer may take `seconds`. Implements
    `WeightTransfer`."""

    extension = EXTENSION
    cures: Sequence[tuple[str, str]] = ()

    def __init__(self, backend: str, sender: Sender, seconds: float) -> None:
        self._backend, self._sender, self._seconds = backend, sender, seconds
        self._used = False
        """Whether weights were sent in the present group. If a group that was used breaks, one new group is tried before the
        transfer fails."""

    def args(self, alias: str = "") -> Sequence[str]:
        """Return the argument with which vLLM takes weights over this backend."""
        return ("--weight-transfer-config", json.dumps({"backend": BACKENDS[self._backend]}))

    def models(self, alias: str) -> Sequence[tuple[str, str]]:
        """Return no names: the server has one policy."""
        return ()

    def part(self, weights: Path) -> Path | None:
        """Return all of the weights."""
        return weights

    def check(self, device: Device | None) -> None:
        """Raise `ConfigError` when weights cannot be sent over this backend, here or to a vLLM on `device` (None: somebody else
        runs it)."""
        self._sender.check(self._backend)
        if device == "cpu" and self._backend == "nccl":
            raise no_cuda("for vLLM")

    async def ready(self, control: VLLMControl) -> None:
        """Bring both sides into one group: the last one, unless one of them was started again or a transfer broke off."""
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
        """Send the files' weights to vLLM, which must be paused. Raises `PolicyServerError`."""
        async with self._held():
            await self._ready(control)
            try:
                await self._send(control, files)
            except PolicyServerError as error:
                if not self._used or isinstance(error, NotOursError):
                    raise
                await control.check_ours()  # raises when vLLM is not ours: it would leave the sender waiting
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
        """Raise `PolicyServerError` for an error on a worker or one outside the group; our receivers do not raise
        themselves."""
        states = await worker_states(control)
        if problems := _problems(states):
            raise PolicyServerError("; ".join(problems))
        if any(state.group != group for state in states):
            raise PolicyServerError(f"the workers of the vLLM at {control.url} are not in this trainer's group")

    @asynccontextmanager
    async def _held(self) -> AsyncIterator[None]:
        """Reserve the sender for the block, once it is free. It is asked repeatedly, since a waiting thread could not be
        cancelled."""
        while not self._sender.hold():  # noqa: ASYNC110 — it is a lock of threads
            await asyncio.sleep(HOLD_SECONDS)
        try:
            yield
        finally:
            self._sender.release()

    async def _states(self, control: VLLMControl) -> list[TransferState]:
        """Return the states of vLLM's workers. Raises `PolicyServerError` with the cure where vLLM was not started for this
        backend."""
        wanted = BACKENDS[self._backend]
        cure = (
            f"start it with {shlex.join(self.args())} --worker-extension-cls {EXTENSION}, or set "
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
        """Run vLLM's part (`asked`) and the sender's (`done`) at the same time. When one fails, the other is made to end before
        the error is raised."""
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
    """Return the distinct errors of the workers in the last transfer."""
    return list(dict.fromkeys(state.problem for state in states if state.problem))


async def _leave(control: VLLMControl) -> None:
    """Make all living workers leave the group, so that a sender that waits for them gets an error."""
    try:
        await control.rpc("lightning_leave")
    except PolicyServerError as error:
        logger.debug("%s did not leave: its connections have broken with it, or will: %s", control.url, error)


def _told(backend: str, meeting: Meeting, group: str, claim: str) -> Mapping[str, object]:
    """Return what vLLM's workers must know to join the group."""
    place = {"master_address": meeting.address, "master_port": meeting.port, "world_size": meeting.world}
    if backend == "gloo":
        return {**place, "seconds": meeting.seconds, "group": group, "claim": claim}
    packing = {"packed": True, "packed_buffer_size_bytes": PACKED_BYTES, "packed_num_buffers": PACKED_BUFFERS}
    return {**place, **packing, "rank_offset": 1}


def _described(backend: str, found: Sequence[TensorEntry], group: str, claim: str) -> Mapping[str, object]:
    """Return the description of the tensors that come, as vLLM's backends for whole weights expect it; for our gloo receiver
    also the group and the claim."""
    fence = {"group": group, "claim": claim} if backend == "gloo" else {}
    return {
        **fence,
        "names": [entry.name for entry in found],
        "dtype_names": [entry.dtype for entry in found],
        "shapes": [list(entry.shape) for entry in found],
    }
