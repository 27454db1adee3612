"""One gateway in a process of its own, over the store of a training: `python -m lightning_server.gateway_process`.

The invariant: the process ends with its parent, which holds its standard input open. It has the listening socket and its
settings from the parent, and no state that the store does not have. What it logs goes to the parent, a line of JSON for each
message.
"""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import socket
import sys
from typing import Any

from lightning.asyncio_utils import run
from lightning.config import config_model
from lightning.errors import LightningError
from lightning.gateway.gateway import Gateway
from lightning.gateway.identity import gateway_secret
from lightning.plugins import plugins

LONGEST_TEXT = 1 << 16
"""The most characters of one message to the parent."""


def what_stands(gateway: Gateway) -> list[str]:
    """Return what plugins have added to a gateway, so that two processes can be compared: stages, APIs, routes, redactors."""
    known = plugins()
    redactors = [each.plugin_name for each in known.hook.lightning_redact.get_hookimpls()]
    return [
        *(f"the stage {name} {version}" for name, version in gateway.stages.items()),
        *(f"the API {name}" for name in known.names("dialects")),
        *(f"the route {name}" for name in known.names("routes")),
        *(f"the redactor {name}" for name in redactors),
    ]


class ToParent(logging.Handler):
    """Writes each message as a line of JSON to standard output."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write one message, with the text of its exception."""
        tell(level=record.levelno, logger=record.name, text=self.format(record)[:LONGEST_TEXT])


def tell(**said: Any) -> None:
    """Send one line to the parent."""
    sys.stdout.write(json.dumps(said) + "\n")
    sys.stdout.flush()


async def serve(said: dict[str, Any]) -> None:
    """Answer calls on the parent's socket until SIGTERM, or until the parent has closed standard input."""
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, ended.set)

    def orphaned() -> None:
        loop.remove_reader(sys.stdin.fileno())  # which can be read for ever now
        ended.set()

    loop.add_reader(sys.stdin.fileno(), orphaned)
    config = config_model().model_validate(said["config"]).gateway
    async with plugins().opened_store(said["store"], make=False) as store:
        gateway = Gateway(store, [], config, secret=await gateway_secret(store), shared=True)
        try:
            await gateway.start(socket.socket(fileno=said["listener"]))
            tell(stands=what_stands(gateway))
            await ended.wait()
        finally:
            await gateway.close()


def main() -> int:
    """Read the settings, a line of JSON, from standard input, and serve. Return the exit code."""
    said = json.loads(sys.stdin.readline())
    logging.basicConfig(level=said["level"], handlers=[ToParent()])
    try:
        run(serve(said))
    except LightningError as error:
        tell(failed=str(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
