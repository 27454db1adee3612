"""The one connection to a Ray cluster that a process has. The Ray runner and the verl engine may both need it, at the same
time.

The invariant: only one of them connects at a time, and each ends only a connection that it made itself.
"""

from __future__ import annotations

import logging
import socket
import threading
from typing import Any

logger = logging.getLogger(__name__)

CONNECT_SECONDS = 3
"""Time limit in seconds for a connection to a cluster's port."""
_BEGINS = threading.Lock()


def check_listening(address: str) -> None:
    """Raise `OSError` at once where nothing listens at the address of a cluster; Ray itself would try for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdecimal():  # else `auto` or `local`
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()


def begin(ray: Any, **arguments: Any) -> bool:
    """Connect as `ray.init` does, unless this process is connected. Return True if this call connected, so that the caller ends
    the connection with `ray.shutdown`.

    Raises the errors of `ray.init`, after ending what it had started.
    """
    with _BEGINS:
        if ray.is_initialized():
            return False
        try:
            ray.init(**arguments)
        except BaseException:
            if not ray.is_initialized():  # else the program itself has connected meanwhile
                ray.shutdown()
            raise
        return True


def say_which(ray: Any, setting: str, address: str) -> None:
    """Warn when the address of a setting was not used because this process is connected to another cluster."""
    present = getattr(ray.get_runtime_context(), "gcs_address", "") if address not in ("", "auto") else ""
    if present and present != address:
        logger.warning(
            "%s = %s was not used: this process is connected to the Ray cluster at %s", setting, address, present
        )
