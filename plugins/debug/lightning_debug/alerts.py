"""Tells others what rules find serious in a running training: a webhook, or a program (`trainer.alerts`).

The invariant: training neither waits for them nor fails with them. What could not be told is logged, without the address, which
may be a secret.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shlex
import shutil
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final

import aiohttp
from lightning.asyncio_utils import end_process
from lightning.errors import ConfigError
from lightning.types import Json

logger = logging.getLogger(__name__)

Send = Callable[[bytes], Awaitable[None]]
SECONDS: Final = 30.0
"""How long telling may take, and how long the end of a run waits for what is being told."""
WEBHOOK, COMMAND = "webhook:", "command:"


def read_alerts(targets: Sequence[str]) -> list[tuple[str, Send]]:
    """What to call with an alert, by the name of each target. Raises `ConfigError` for what is neither, is not there, or is a
    secret where its name belongs."""
    found: list[tuple[str, Send]] = []
    for target in targets:
        if target.startswith(WEBHOOK):
            found.append((target, _webhook(target.removeprefix(WEBHOOK))))
        elif target.startswith(COMMAND):
            command = target.removeprefix(COMMAND)
            found.append((f"{COMMAND}{command.split(maxsplit=1)[0] if command.strip() else ''}", _command(command)))
        else:
            raise ConfigError(
                "trainer.alerts has something that is neither webhook:NAME (the environment variable with the URL) nor "
                "command:PROGRAM ARGUMENTS"
            )
    return found


def _webhook(variable: str) -> Send:
    if not variable.isidentifier():
        raise ConfigError(
            "webhook: of trainer.alerts does not name an environment variable: give the name of the variable that holds the "
            "URL, not the URL, which may be a secret, and settings are kept with the run"
        )
    url = os.environ.get(variable, "")
    if not url.startswith(("http://", "https://")):
        raise ConfigError(
            f"the environment variable {variable}, of trainer.alerts, holds no URL: set it to https://..."
        )

    async def send(body: bytes) -> None:
        headers = {"content-type": "application/json"}
        async with (
            aiohttp.ClientSession(trust_env=True) as session,
            session.post(url, data=body, headers=headers) as answer,
        ):
            if not answer.ok:
                raise RuntimeError(f"it answered {answer.status}")

    return send


def _command(text: str) -> Send:
    if "://" in text:
        raise ConfigError(
            "command: of trainer.alerts has an address in it, which may be a secret, and settings are kept with the run: use "
            "webhook:NAME, or read the address inside of a script"
        )
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"command:{text} of trainer.alerts cannot be read as a command: {error}") from error
    if not words or shutil.which(words[0]) is None:
        raise ConfigError(f"command:{text} of trainer.alerts: there is no program {(words or [''])[0]!r}")

    async def send(body: bytes) -> None:
        process = await asyncio.create_subprocess_exec(
            *words, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL
        )
        try:
            await process.communicate(body)
        finally:
            await end_process(process)
        if process.returncode:
            raise RuntimeError(f"it ended with {process.returncode}")

    return send


class Alerts:
    """The targets of one run."""

    def __init__(self, targets: Sequence[str]) -> None:
        self._targets = read_alerts(targets)
        self._telling: set[asyncio.Task[None]] = set()
        self._failed: set[str] = set()

    async def close(self) -> None:
        """Wait for what is being told."""
        if self._telling:
            await asyncio.wait(self._telling, timeout=SECONDS)

    def send(self, alert: Mapping[str, Json]) -> None:
        """Tell all targets; returns at once."""
        body = json.dumps({**alert}).encode()
        for name, send in self._targets:
            task = asyncio.create_task(self._tell(name, send, body))
            self._telling.add(task)
            task.add_done_callback(self._telling.discard)

    async def _tell(self, name: str, send: Send, body: bytes) -> None:
        try:
            async with asyncio.timeout(SECONDS):
                await send(body)
        except (OSError, RuntimeError, TimeoutError, aiohttp.ClientError) as error:
            level = logging.INFO if name in self._failed else logging.WARNING
            self._failed.add(name)
            reason = str(error) if isinstance(error, RuntimeError) else type(error).__name__
            logger.log(level, "an alarm could not be told to %s: %s. Training goes on; it is in the log", name, reason)
