"""A lane: one connection that sends waiting calls together, and sends unanswered calls again.

The invariant: a batch is sent until each of its calls is answered or has waited too long; only then comes the next batch. So
Redis needs to remember the answers of one batch only, and a script that is sent again takes effect once. A dropped connection
may still deliver what was sent: so connections are numbered, and Redis refuses calls over one that was replaced.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from lightning.errors import LightningError, UnavailableError
from lightning.safe_text import counted
from redis.exceptions import NoScriptError, RedisError

from lightning_redis.connection import LEAST_SECONDS, Command, Reply, Wire, away, pause, translate
from lightning_redis.handshake import Ask, asker
from lightning_redis.keys import Keys
from lightning_redis.lua_scripts import Script
from lightning_redis.settings import Settings

MAX_CALLS: Final = 256
MAX_BYTES: Final = 4 << 20
"""The most calls and bytes in one batch: they limit how long its first call waits."""

LOUD_AFTER: Final = 4
"""The log gets a warning after this many failed attempts; a restart of the server takes fewer."""

_log = logging.getLogger(__name__)
Greeting = Callable[[Ask], Awaitable[None]]
"""Checks a new connection before anything else is sent; every waiting call gets the error that it raises."""


class _Call:
    """One script with its arguments, or some reading commands, with the future that waits for the replies."""

    def __init__(self, script: Script | None, commands: list[list[bytes]], deadline: float) -> None:
        self.script = script
        self.commands = commands
        self.deadline = deadline
        self.size = sum(sum(map(len, command)) for command in commands)
        self.waiter: asyncio.Future[list[Reply]] = asyncio.get_running_loop().create_future()

    def answer(self, replies: list[Reply]) -> None:
        if not self.waiter.done():
            self.waiter.set_result(replies)

    def fail(self, error: LightningError) -> None:
        if not self.waiter.done():
            self.waiter.set_exception(error)


class Lane:
    """Sends calls over one connection. It belongs to the event loop that made it; the connection ends with that loop's
    tasks."""

    def __init__(self, settings: Settings, keys: Keys, greeting: Greeting) -> None:
        self._settings, self._keys, self._greeting = settings, keys, greeting
        self._wire = Wire(settings)
        self._waiting: list[_Call] = []
        self._sent: list[_Call] = []
        self._wake = asyncio.Event()
        self._client = uuid.uuid4().hex
        self._batches = self._connections = 0
        self._answers = keys("answers", self._client)
        self._away = False
        self._known: set[bytes] = set()
        self._closing = False
        self._task = asyncio.create_task(self._main(), name="lightning-store-redis")

    async def run(self, script: Script, keys: Sequence[bytes], arguments: Sequence[bytes]) -> list[Reply]:
        """Run a script until it is answered, and return its reply, a list. Raises `StoreError`."""
        # the numbers of the connection, the batch and the call in it are filled in when it is sent
        command = [b"EVALSHA", script.sha, b"%d" % (len(keys) + 1), self._answers, *keys, b"", b"", b"", *arguments]
        (reply,) = await self._send(script, [command])
        found: list[Reply] = reply
        return found

    async def read(self, *commands: Command) -> list[Reply]:
        """Send commands that change nothing, or nothing more when repeated, and return the replies. Raises `StoreError`."""
        return await self._send(None, [list(command) for command in commands])

    def _send(self, script: Script | None, commands: list[list[bytes]]) -> asyncio.Future[list[Reply]]:
        call = _Call(script, commands, asyncio.get_running_loop().time() + self._settings.timeout)
        if self._closing:
            call.fail(UnavailableError(f"store {self._settings.place} was closed meanwhile"))
        else:
            self._waiting.append(call)
            self._wake.set()
        return call.waiter

    @property
    def ended(self) -> bool:
        """Whether the lane was closed, or its task ended with its loop."""
        return self._task.done()

    async def close(self) -> None:
        """Send the waiting calls, then disconnect."""
        self._closing = True
        self._wake.set()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    async def _main(self) -> None:
        try:
            while True:
                await self._wake.wait()
                batch = self._next_batch()
                if batch:
                    await self._deliver(batch)
                elif self._closing:
                    return
                else:
                    self._wake.clear()
        finally:
            self._closing = True
            for call in (*self._sent, *self._waiting):
                call.fail(UnavailableError(f"store {self._settings.place} was closed meanwhile"))
            await self._wire.disconnect()

    def _next_batch(self) -> list[_Call]:
        """Take the next batch of waiting calls, without those whose caller is gone."""
        batch: list[_Call] = []
        size = taken = 0
        for call in self._waiting:
            if batch and (len(batch) == MAX_CALLS or size + call.size > MAX_BYTES):
                break
            taken += 1
            if not call.waiter.done():
                batch.append(call)
                size += call.size
        del self._waiting[:taken]
        return batch

    async def _deliver(self, batch: list[_Call]) -> None:
        """Send a batch until each call has its replies, was refused, or has waited too long."""
        self._sent = batch
        self._number(batch)
        attempt = 0
        while self._sent:
            try:
                error = await self._attempt_in_time()
            except (RedisError, OSError, EOFError, LightningError) as raised:
                error = raised
                await self._wire.disconnect()
            self._away = error is not None
            if error is None:
                continue
            translated = translate(error, self._settings)
            now = asyncio.get_running_loop().time()
            for call in self._sent:
                if not away(error) or call.deadline <= now:
                    call.fail(translated)
            for call in self._waiting:  # these were not sent, because the batch before them was not answered
                if away(error) and call.deadline <= now:
                    call.fail(translated)
            self._sent = [call for call in self._sent if not call.waiter.done()]
            if self._sent:
                if attempt == LOUD_AFTER:
                    _log.warning("%s; %s for it", translated, counted(len(self._sent), "call waits", "calls wait"))
                await asyncio.sleep(pause(attempt))
                attempt += 1

    def _number(self, batch: list[_Call]) -> None:
        """Write the numbers of the batch and of the call into each script's arguments; Redis keeps answers under them."""
        scripts = [call.commands[0] for call in batch if call.script is not None]
        if scripts:
            self._batches += 1
        for number, command in enumerate(scripts):
            at = 3 + int(command[2])
            command[at + 1], command[at + 2] = b"%d" % self._batches, b"%d" % number

    async def _attempt_in_time(self) -> BaseException | None:
        """Do `_attempt`. After a failure wait for it no longer than until the first deadline of a call."""
        if not self._away:
            return await self._attempt()
        soonest = min(call.deadline for call in (*self._sent, *self._waiting))
        async with asyncio.timeout_at(max(soonest, asyncio.get_running_loop().time() + LEAST_SECONDS)):
            return await self._attempt()

    async def _attempt(self) -> BaseException | None:
        """Send the unanswered calls once. Return the error that calls for a pause before the next attempt; None for none."""
        calls = self._sent
        if not self._wire.connected:
            await self._wire.connect()
            self._connections += 1
            self._known.clear()
            await self._greeting(asker(self._wire.exchange))
        scripts = {call.script.sha: call.script for call in calls if call.script is not None}
        loads: list[Command] = [
            (b"SCRIPT", b"LOAD", s.text.encode()) for sha, s in scripts.items() if sha not in self._known
        ]
        for call in calls:
            if call.script is not None:
                (command,) = call.commands
                command[3 + int(command[2])] = b"%d" % self._connections
        replies = await self._wire.exchange([*loads, *(c for call in calls for c in call.commands)])
        for reply in replies[: len(loads)]:
            if isinstance(reply, RedisError):
                raise reply
        self._known |= scripts.keys()
        again: list[_Call] = []
        reason: BaseException | None = None
        at = len(loads)
        for call in calls:
            mine = replies[at : at + len(call.commands)]
            at += len(call.commands)
            error = next((reply for reply in mine if isinstance(reply, RedisError)), None)
            if error is None:
                call.answer(mine)
            elif isinstance(error, NoScriptError):  # Redis has forgotten the script: load it again
                self._known.clear()
                again.append(call)
            elif away(error):
                reason = error
                again.append(call)
            else:
                call.fail(translate(error, self._settings))
        if reason is not None:
            await self._wire.disconnect()
        self._sent = again
        return reason
