"""A gateway's port opened to clients: the control API on it, and the first tokens.

The invariant: the API is on the port before the port is open, so that no client is ever told that there is none; a token's
plain text is written once, into a file that only its owner can read.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from urllib.parse import urlsplit

from lightning.config import Config, with_settings
from lightning.errors import ConfigError, DataError
from lightning.gateway import Gateway
from lightning.gateway.guard import is_loopback
from lightning.runner.report import report
from lightning.server.agents import Agents
from lightning.server.api import Api, Limits
from lightning.server.auth import ALL_PROJECTS, PLAIN, Authenticator, check_project, digest_of, issue_token
from lightning.server.exposure import AUTOMATIC
from lightning.store.protocol import Store
from lightning.types import DEFAULT_PROJECT, Scope, Token

ADMIN_FILE = "admin-token"
RUNNER_FILE = "runner-token"


class Control:
    """The control API on a gateway that has not started yet. Close it before the gateway.

    Clients reach the port at `server.public_url`; where that is empty, at the address where the gateway listens.
    """

    def __init__(self, store: Store, gateway: Gateway, config: Config | None = None) -> None:
        config = config or Config()
        self._gateway, self._public_url = gateway, config.server.public_url.rstrip("/")
        agents = Agents(gateway, self._public_url)
        limits = Limits(body_bytes=config.gateway.max_body_bytes)
        self._api = Api(
            store, Authenticator(store), finish=report, llm_for=agents.llm_for, served=gateway.served, limits=limits
        )
        gateway.mount(self._api)

    @property
    def url(self) -> str:
        """What clients are given as `--server`."""
        return self._public_url or self._gateway.url

    async def close(self) -> None:
        """Let everybody go who waits for changes."""
        await self._api.close()


def on_server_port(config: Config) -> Config:
    """The configuration with the gateway on the port of the section `server`, under the name that clients know it by."""
    settings: dict[str, object] = {"gateway.host": config.server.host, "gateway.port": config.server.port}
    name = urlsplit(config.server.public_url).hostname
    if name and is_loopback(config.server.host):  # a proxy is before it, and passes the name on
        settings["gateway.limits.hosts"] = [*config.gateway.limits.hosts, name]
    return with_settings(config, settings)


def project_of(config: Config) -> str:
    """The setting `trainer.project`. Raises `ConfigError` for what no token could be bound to."""
    try:
        check_project(config.trainer.project, Scope.RUNNER)
    except DataError as error:
        raise ConfigError(f"trainer.project: {error}") from error
    return config.trainer.project


async def first_admin_token(store: Store, folder: Path) -> Path | None:
    """The file of a new admin token when the store has none that still opens anything, else None.

    Raises `ConfigError` when the file cannot be written.
    """
    if any(token.scope is Scope.ADMIN and _alive(token) for token in await store.list_tokens()):
        return None
    return await _write_token(store, folder / ADMIN_FILE, Scope.ADMIN, ALL_PROJECTS)


async def runner_token(
    store: Store, folder: Path, project: str = DEFAULT_PROJECT, *, only: bool = False
) -> tuple[Path, str]:
    """The file of a token for runners, and its plain text. It is made for `project` unless a good one is there: of any project,
    with `only` of that one.

    Raises `ConfigError` when the file cannot be written.
    """
    file = folder / RUNNER_FILE
    kept = file.read_text().strip() if file.is_file() else ""
    found = PLAIN.fullmatch(kept)
    token = await store.get_token(found[1]) if found else None
    good = found is not None and token is not None and _alive(token) and token.digest == digest_of(found[2])
    if not good or (only and token is not None and token.project != project):
        await _write_token(store, file, Scope.RUNNER, project)
    return file, file.read_text().strip()


async def _write_token(store: Store, file: Path, scope: Scope, project: str) -> Path:
    token, plain = issue_token(scope, project, name=AUTOMATIC)
    try:
        _write_private(file, f"{plain}\n")
    except OSError as error:
        raise ConfigError(f"the first {scope.value} token cannot be written to {file}: {error}") from error
    await store.put_token(token)
    return file


def _write_private(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.unlink(missing_ok=True)  # its rights may be too wide
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as writing:
        writing.write(text)


def _alive(token: Token) -> bool:
    return token.revoked_at is None and (token.expires_at is None or token.expires_at > time.time())
