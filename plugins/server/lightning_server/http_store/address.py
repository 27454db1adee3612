"""Where the servers are and what opens them: `http://a:8000`, `https://a,b/prefix?patience=600`, and `LIGHTNING_TOKEN`.

The invariant: a token is never part of a URL, so that nothing that shows a URL shows a token.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from lightning.errors import ConfigError
from lightning.store.url import parse

TOKEN_VARIABLE: Final = "LIGHTNING_TOKEN"  # noqa: S105 — the name of a variable
SCHEMES: Final = ("http", "https")
EXAMPLE: Final = "write http://host:port, several as http://host-a:port,host-b:port"


def split_urls(given: str | Sequence[str]) -> tuple[tuple[str, ...], dict[str, str]]:
    """The URLs of the servers, without a slash at the end, and the options behind `?`. Raises `ConfigError`."""
    texts = [given] if isinstance(given, str) else list(given)
    found: list[str] = []
    options: dict[str, str] = {}
    for text in texts:
        if "@" in text.partition("?")[0]:
            raise ConfigError(
                f"a server's URL takes no user and no token: set the variable {TOKEN_VARIABLE}, and {EXAMPLE}"
            )
        where = parse(text)
        options |= where.options
        where.check_options(("patience",))
        bare = text.partition("?")[0]
        parts = [part.strip() for part in bare.split(",")]
        found += [_checked(part if "://" in part else f"{where.scheme}://{part}") for part in parts]
    if not found:
        raise ConfigError(f"there is no URL of a server: {EXAMPLE}")
    return tuple(dict.fromkeys(found)), options


def _checked(url: str) -> str:
    try:
        parts = urlsplit(url)
        port_is_possible = parts.port is None or parts.port > 0
    except ValueError:
        port_is_possible = False
    if not port_is_possible or parts.scheme not in SCHEMES or not parts.hostname or parts.fragment:
        raise ConfigError(f"{url!r} is not the URL of a server: {EXAMPLE}")
    return url.rstrip("/")


def token_or_complain(given: str | Path | None) -> str:
    """The token that was given, that of a file, or the environment's. Raises `ConfigError`, which shows no part of it."""
    where = str(given) if isinstance(given, Path) else TOKEN_VARIABLE
    try:
        text = given.read_text(encoding="utf-8") if isinstance(given, Path) else given
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the token in {where} cannot be read: {error}") from error
    token = (os.environ.get(TOKEN_VARIABLE, "") if text is None else text).strip()
    if not token and isinstance(given, Path):
        raise ConfigError(f"there is no token in {where}: write one there that `lightning token create` made")
    if not token:
        raise ConfigError(
            f"a server asks for a token: set the variable {TOKEN_VARIABLE} to one that `lightning token create` made"
        )
    if not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigError(
            f"the token (in {where}) is none: it is one word, lt_..., as `lightning token create` printed it"
        )
    return token
