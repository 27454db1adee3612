"""The web applications that plugins bring, on a gateway's port.

The invariant: one that cannot be made is named in the log and left out, and the server serves without it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import cast

from lightning.errors import LightningError
from lightning.gateway.gateway import Gateway
from lightning.plugins import plugins

from lightning_server.protocol import Host, WebApp

logger = logging.getLogger(__name__)


def mount_web_apps(resources: AsyncExitStack, gateway: Gateway, host: Host) -> list[str]:
    """Mount each of them before the gateway starts; `resources` closes them. Returns their paths."""
    mounted = []
    for name in plugins().names("web_apps"):
        path = f"/{name}"
        try:
            make = cast("Callable[[Host], WebApp]", plugins().get("web_apps", name))
            app = make(replace(host, path=path))
            resources.push_async_callback(app.close)
            gateway.mount(app, name)
        except LightningError as error:
            logger.warning("nothing answers at %s: %s", path, error)
            continue
        except Exception:  # a plugin's fault
            logger.exception("nothing answers at %s", path)
            continue
        mounted.append(path)
    return mounted
