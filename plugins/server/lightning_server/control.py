"""The control API on a gateway's port, beside a trainer or without one; and the first tokens of a store.

The invariant: the API is mounted before the port opens, so that it answers every client from the first. A token's plain text is
written once, into a file that only its owner can read; a file with a token of another database is never overwritten. Every
server over a store gives the same access for a lease: the trainer keeps with its run how agents call the model (`HowToCall`),
and the rest is in the rollout. Prompts are those of the run's project.
"""

from __future__ import annotations

import logging
import os
import re
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

from lightning.addresses import is_loopback
from lightning.bounded import Aging, Bounded
from lightning.config import Config, with_settings
from lightning.errors import ConfigError, StoreError
from lightning.gateway.gateway import Gateway
from lightning.runner.attempt_completion import report
from lightning.runner.protocol import Runner
from lightning.store.memory import MemoryStore
from lightning.store.protocol import Store
from lightning.trainer.agents import Agents, HowToCall, of_project
from lightning.trainer.stack import Stack
from lightning.types import DEFAULT_PROJECT, LLM, Lease, Scope
from lightning_resources.nouns import ResourceKind
from lightning_resources.operations import get_resource

from lightning_server.api.app import Api, Limits
from lightning_server.auth import (
    ALL_PROJECTS,
    AUTOMATIC,
    PLAIN,
    Authenticator,
    check_exposure,
    digest_of,
    is_alive,
    issue_token,
    project_of,
)
from lightning_server.client_agents import ClientAgents
from lightning_server.config import ServerConfig
from lightning_server.gateway_processes import Processes, processes_for
from lightning_server.projects import Names, ProjectStore
from lightning_server.protocol import ClientRunner, Site
from lightning_server.tokens import Token, get_token, list_tokens, put_token

log = logging.getLogger(__name__)

ADMIN_FILE = "admin-token"
RUNNER_FILE = "runner-token"


class Control:
    """The control API on a gateway that has not started yet. Close it before the gateway.

    Clients reach the port at `server.public_url`; where that is empty, at the address where the gateway listens.
    """

    def __init__(self, store: Store, gateway: Gateway, config: Config | None = None) -> None:
        config = config or Config()
        self._store = store
        self._gateway, self._public_url = gateway, ServerConfig.of(config).public_url.rstrip("/")
        self._api = Api(
            store,
            Authenticator(store),
            finish=partial(report, line=gateway.parts.line),
            llm_for=AgentAccess(gateway, self._public_url).llm_for,
            served=gateway.served,
            limits=Limits(body_bytes=config.gateway.max_body_bytes),
        )
        gateway.mount(self._api)

    @property
    def url(self) -> str:
        """The URL that clients are given as `--server`."""
        return self._public_url or self._gateway.url

    async def close(self) -> None:
        """Answer all clients that wait for changes."""
        await self._api.close()


def on_server_port(config: Config) -> Config:
    """Return the settings with the gateway on the host and port of the section `server`. Behind a proxy on this machine the
    name of `server.public_url` is added to the allowed hosts."""
    server = ServerConfig.of(config)
    settings: dict[str, object] = {"gateway.host": server.host, "gateway.port": server.port}
    name = urlsplit(server.public_url).hostname
    if name and is_loopback(server.host):  # a proxy in front passes the public name on
        settings["gateway.limits.hosts"] = [*config.gateway.limits.hosts, name]
    return with_settings(config, settings)


def token_file(store: Store, folder: Path, name: str) -> Path:
    """Return the file for a first token of the store. A store in memory has a file of its own, whose token the next such store
    may replace: it is invalid once the store is gone."""
    return folder / (f"{name}.memory" if isinstance(store, MemoryStore) else name)


async def first_admin_token(store: Store, folder: Path) -> Path | None:
    """Make an admin token and return its file, unless the store has a valid admin token: then return None.

    Raises `ConfigError` when the file cannot be written.
    """
    if any(token.scope is Scope.ADMIN and is_alive(token) for token in await list_tokens(store)):
        return None
    return await _write_token(store, token_file(store, folder, ADMIN_FILE), Scope.ADMIN, ALL_PROJECTS)


async def runner_token(
    store: Store, folder: Path, project: str = DEFAULT_PROJECT, *, only: bool = False
) -> tuple[Path, str]:
    """Return the file of a token for runners, and its plain text. A valid one in the folder is used, of any project; with
    `only`, of `project`. That includes files that were renamed for another database's token. Without one, a token for `project`
    is made.

    Raises `ConfigError` when the file cannot be read or written.
    """
    file = token_file(store, folder, RUNNER_FILE)
    for there in (file, *_set_aside_of(folder, RUNNER_FILE)):
        found = _token_in(there)
        token = await get_token(store, found[1]) if found else None
        if found is None or token is None or (only and token.project != project):
            continue
        if is_alive(token) and token.digest == digest_of(found[2]):
            return there, found[0]
    await _write_token(store, file, Scope.RUNNER, project)
    return file, file.read_text().strip()


async def _write_token(store: Store, file: Path, scope: Scope, project: str) -> Path:
    token, plain = issue_token(scope, project, name=AUTOMATIC)
    try:
        # Before anything is awaited: another server may be writing its own here.
        older = None if isinstance(store, MemoryStore) else _set_aside(file)
        _write_private(file, f"{plain}\n")
    except OSError as error:
        raise ConfigError(f"the first {scope.value} token cannot be written to {file}: {error}") from error
    try:
        await put_token(store, token)
    except Exception:
        _take_back(file, token, older)
        raise
    if older is not None and await get_token(store, older.suffix[1:]) is not None:
        older.unlink(missing_ok=True)  # a token of this database, now replaced
    elif older is not None:
        log.warning(
            "%s had a token of another database, which is in %s now: give each database a folder of its own with --out, or "
            "remove that file if its database is gone",
            file,
            older,
        )
    return file


def _take_back(file: Path, token: Token, older: Path | None) -> None:
    """Undo the writing of a token that the store refused, unless another server has written its own there meanwhile."""
    found = _token_in(file)
    if found is not None and found[1] == token.id:
        file.unlink()
        if older is not None:
            older.rename(file)


def _token_in(file: Path) -> re.Match[str] | None:
    try:
        return PLAIN.fullmatch(file.read_text(errors="replace").strip()) if file.is_file() else None
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error


def _set_aside(file: Path) -> Path | None:
    """Rename a file that has a token, with the token's id at the end, and return the new path. None where there is none."""
    found = _token_in(file)
    if found is None:
        return None
    file.chmod(0o600)  # its rights may be too wide
    return file.rename(file.with_name(f"{file.name}.{found[1]}"))


def _set_aside_of(folder: Path, name: str) -> list[Path]:
    return sorted(folder.glob(f"{name}.*"))


def _write_private(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.unlink(missing_ok=True)  # its rights may be too wide
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as writing:
        writing.write(text)


class LightningServer:
    """Lets clients run the agents of trainers where `server.port` is set, or the runner runs none in its process."""

    check_exposure = staticmethod(check_exposure)
    project = staticmethod(project_of)
    of_project = staticmethod(ProjectStore)

    def gateways(self, config: Config, store_url: str) -> Processes | None:
        """The gateways in processes of their own for a training; None where its own process answers all calls."""
        count = processes_for(config, store_url)
        return Processes(config, store_url, count) if count else None

    def door(self, runner: Runner, config: Config) -> Door | None:
        """What lets clients in; None where none are meant to come."""
        return None if runner.concurrency and not ServerConfig.of(config).port else Door(config)


class Door:
    """The control API on the port of one run's gateway, for the clients of the run."""

    def __init__(self, config: Config) -> None:
        self.config = on_server_port(config)

    def open(self, store: Store, gateway: Gateway) -> None:
        """Answer clients on a gateway that has not started."""
        self._store, self._control = store, Control(store, gateway, self.config)

    async def agents(self, stack: Stack) -> Agents:
        """Return the agents of a run that clients may run; the run's folder gets a token for runners of its project."""
        file, token = await runner_token(self._store, stack.folder, stack.run.project, only=True)
        parts, url = stack.gateway.parts, self._control.url
        agents = ClientAgents(stack.store, stack.run.id, stack.runner, stack.config.runner, stack.llm, parts.line)
        agents.site = Site(url, token, stack.run.id, self._store)
        if not stack.runner.concurrency and not isinstance(stack.runner, ClientRunner):
            agents.how_to_join = f"LIGHTNING_TOKEN=$(cat {file}) lightning runner --server {url} MODULE:AGENT"
        return agents

    async def close(self) -> None:
        """Answer all clients that wait for changes."""
        await self._control.close()


REMEMBERED = 1024
"""At most this many runs, and as many texts of prompts, are cached."""
FRESH_SECONDS = 2.0
"""Seconds for which the settings that a run's trainer keeps are cached."""


class AgentAccess:
    """Gives agents access to the model behind a gateway. `url` is the gateway's URL for agents; empty: where it listens."""

    def __init__(self, gateway: Gateway, url: str) -> None:
        self._gateway, self._url = gateway, url.rstrip("/")
        self._runs = Aging[str, tuple[HowToCall, str]](REMEMBERED)
        self._texts = Bounded[tuple[str, str, int], str](REMEMBERED)

    async def llm_for(self, lease: Lease, store: Store) -> LLM:
        """Return the access to the model for the agent of a lease; `store` is the view of the lease's holder. Raises
        `StoreError` for a prompt that does not exist."""
        how, project = await self._how(lease.rollout.run, store)
        seen = of_project(store, project)
        rollout = Names(project).rollout_out(lease.rollout)
        prompts = await how.prompts(rollout, partial(self._text, seen, lease.rollout.run))
        llm = how.llm(self._gateway, lease, prompts)
        return replace(llm, base_url=f"{self._url}/v1") if self._url else llm

    async def _how(self, run: str, store: Store) -> tuple[HowToCall, str]:
        """Return how the agents of a run call the model, as its trainer keeps it, and the run's project."""
        now = time.monotonic()
        if (known := self._runs.fresh(run, now, FRESH_SECONDS)) is not None:
            return known
        how, found = await HowToCall.of_run(store, run), await store.get_run(run)
        project = DEFAULT_PROJECT if found is None else found.project
        self._runs.keep(run, ((how, project), now))
        return how, project

    async def _text(self, store: Store, run: str, name: str, version: int) -> str:
        key = (run, name, version)  # the same name is another resource in another project, and a run is in one
        text = self._texts.get(key)
        if text is None:
            found = await get_resource(store, name, version)
            if found is None or found.kind is not ResourceKind.PROMPT:
                raise StoreError(f"a rollout runs with version {version} of the prompt {name!r}, and there is none")
            text = self._texts.keep(key, str(found.content))
        return text
