"""Whether a server may listen beyond this machine.

The invariant: nothing listens beyond loopback before a person has decided who gets in: a token that somebody made must be
there. A token that a server made by itself at its first start is nobody's decision.
"""

from __future__ import annotations

import time

from lightning.addresses import is_loopback
from lightning.errors import ConfigError
from lightning.store.protocol import Store
from lightning.store.url import redacted

AUTOMATIC = "made by the server at its first start"
"""The name of the token that a server makes when there is none."""


async def check_exposure(store: Store, host: str, *, place: str = "") -> None:
    """Return when a server of this store may bind `host`. Raises `ConfigError` unless that is loopback, or there is a token
    that a person made and that still opens something. `place` is the store's URL, for the message."""
    if is_loopback(host):
        return
    now = time.time()
    for token in await store.list_tokens():
        alive = token.revoked_at is None and (token.expires_at is None or token.expires_at > now)
        if alive and token.name != AUTOMATIC:
            return
    where = f" --store {redacted(place)}" if place else ""
    raise ConfigError(
        f"this server will not listen on {host}, beyond this machine: nobody has made a token for it yet. Make one with "
        f"`lightning token create admin{where}`, and put a proxy with TLS before the server, since it speaks plain HTTP and "
        "tokens travel with each request. For this machine alone leave the host at 127.0.0.1"
    )
