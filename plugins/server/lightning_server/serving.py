"""The two Lightning Servers that run without a trainer. `serve`: one machine's policy server and gateway, for agents that run
elsewhere. `serve_store`: control API, gateway and span ingest over a shared database, on one port.

The invariant: a session's key gives access to the model and to nothing else, and every call is recorded under that session. A
server over a shared database has no state of its own: any number of such servers answer any request of any client, and killing
one costs only the calls that go through it. A plugin's web application that cannot be made is named in the log, and the server
runs without it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from lightning.asyncio_utils import end
from lightning.config import Config
from lightning.errors import ConfigError, LightningError, PluginError, PolicyServerError
from lightning.gateway.calls import AdminOf
from lightning.gateway.gateway import Gateway
from lightning.gateway.http import RefusalError
from lightning.gateway.identity import gateway_secret
from lightning.plugins import plugins
from lightning.policy_server.auto_settings import Demand
from lightning.policy_server.protocol import PolicyServer
from lightning.policy_server.servers import served_models, settings_of_servers
from lightning.policy_server.vllm_server import check_policy_server, make_policy_server
from lightning.store.protocol import Store
from lightning.store.url import redacted, sqlite_url
from lightning.trainer.model import with_dtypes, with_one_policy
from lightning.trainer.runs import claim_folder
from lightning.trainer.stack import check_gateway, check_ports, make_gateway
from lightning.types import DEFAULT_PROJECT, LLM, SERVED, Json, Rollout, Run, Task, new_id
from lightning_resources.nouns import Resource
from lightning_resources.reference import ResourceReference

from lightning_server.auth import ALL_PROJECTS, Authenticator, check_exposure, project_of
from lightning_server.config import ServerConfig
from lightning_server.control import (
    RUNNER_FILE,
    Control,
    first_admin_token,
    on_server_port,
    runner_token,
    token_file,
)
from lightning_server.errors import ApiError
from lightning_server.following import Follower
from lightning_server.policies import ServedPolicies
from lightning_server.protocol import SESSION_OF, Host, WebApp
from lightning_server.weight_files import MOUNT, WeightFiles


@dataclass(frozen=True, slots=True)
class RunningServer:
    """A running server of one model. `open_session` gives keys; everything stops when the `serve` context ends."""

    run: Run
    store: Store
    policy: PolicyServer
    gateway: Gateway
    log: Path
    web_apps: tuple[str, ...] = ()
    """The paths below which plugins answer, such as `/console`."""
    following: asyncio.Task[None] | None = None
    """The task that follows the alias of the weights; None where they were not named by an alias."""

    async def open_session(self, name: str, ttl: float) -> LLM:
        """Return access to the model with a key for `ttl` seconds. Each conversation with the key is recorded as a rollout of a
        run called `name`."""
        return await Sessions(self.store, self.gateway, self.run.config)(name, ttl, many=True)

    async def wait(self, seconds: float | None = None) -> None:
        """Return after `seconds`; without them, never. Raises `PolicyServerError` when the policy server dies before, or when
        it is not certain which version it serves."""
        died = asyncio.create_task(self.policy.wait_died())
        try:
            ends = {died} if self.following is None else {died, self.following}
            done, _ = await asyncio.wait(ends, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await end(died)
        if not done:
            return
        if self.following in done:
            self.following.result()
        raise PolicyServerError(f"the policy server died; its log is {self.log}")


@dataclass(frozen=True, slots=True)
class Sessions:
    """Opens sessions on a gateway; each is a run of its own with one rollout. `config` becomes part of each session's run."""

    store: Store
    gateway: Gateway
    config: Mapping[str, Json]

    async def __call__(
        self, name: str, ttl: float, *, project: str = DEFAULT_PROJECT, run: str = "", many: bool = False
    ) -> LLM:
        """Open a session: see `OpenSession`. With `many` the key is for many conversations, each of which is a rollout of the
        session's run that feedback completes."""
        about = {**self.config, SESSION_OF: run}
        session = await self.store.put_run(Run(new_id("session"), name, about, time.time(), project))
        rollout = Rollout(f"{session.id}/0", session.id, Task(input=name), session.id, split=SERVED, max_attempts=1)
        await self.store.create_rollouts([rollout])
        # The run has one rollout only, so this leases the rollout of this session.
        (lease,) = await self.store.lease(session.id, f"{session.id}/server", limit=1, ttl=ttl)
        key = self.gateway.issue(rollout.id, lease.attempt, ttl=ttl, run=run, session=session.id if many else "")
        return LLM(f"{self.gateway.url}/v1", key, "policy")


def admins(authenticator: Authenticator) -> AdminOf:
    """Return the function that tells, from an `Authorization` header, of which project a request may rate conversations. An
    admin's token may, `*` meaning all projects; any other raises `RefusalError`."""

    async def admin_of(authorization: str) -> str:
        try:
            principal = await authenticator.principal(authorization)
            principal.require()
        except ApiError as error:
            raise RefusalError(error.status, error.type, str(error)) from error
        return ALL_PROJECTS if principal.project is None else principal.project

    return admin_of


@dataclass(frozen=True, slots=True)
class Followed:
    """A version of weights that is served. `reference` named it: an alias, which is followed, or a number. `store` has the
    version, and is open; files of the version below `folder` may be downloaded."""

    store: Store
    reference: ResourceReference
    resource: Resource
    folder: Path


@asynccontextmanager
async def serve(
    model: Path,
    config: Config,
    folder: Path,
    follows: Followed | None = None,
    policies: ServedPolicies | None = None,
) -> AsyncIterator[RunningServer]:
    """Serve a model folder through a gateway that records into `folder`. `follows` says which version of weights the model is;
    if an alias named it, the server follows the alias. `policies` are several that began as the model, and all are served.

    Raises `ConfigError` for settings that change the agents, which run elsewhere, and for an address beyond loopback before
    anybody has made a token; `PluginError` where no plugin tells conversations apart; and the errors of policy server, gateway
    and store.
    """
    config = _checked(config)
    database = Path(os.path.abspath(folder / "lightning.db"))  # noqa: ASYNC240, PTH100 — says where, does not look
    async with AsyncExitStack() as resources:
        resources.enter_context(claim_folder(folder))
        store = await resources.enter_async_context(plugins().opened_store(sqlite_url(database)))
        await check_exposure(store, config.gateway.host, place=sqlite_url(database))
        said = {} if policies is None else {"config": policies.said}
        run = Run(database.parent.name, "serve", {"model": str(model), **said}, time.time())
        check_ports(config.gateway, config.policy_server)
        demand = Demand(config.runner.concurrency)
        if follows is not None:
            config = with_dtypes(config, model, "torch")
        version, log = follows.resource.version if follows else 0, folder / "vllm.log"
        config, claims = policies.within(config) if policies else config, bool(follows or policies)
        way = served_models(model, config)[0].transfer if policies else None
        policy = make_policy_server(model, config, log=log, version=version, claims=claims, demand=demand, transfer=way)
        resources.push_async_callback(policy.close)
        await policy.start()
        if follows is not None and policy.version != version:  # an attached vLLM still has its last weights
            await policy.update(model, version)
        if policies is not None:
            await policy.update(policies.adapters, version + 1)
        gateway = await make_gateway(store, [policy], config, run.id)
        resources.push_async_callback(gateway.close)
        sessions, authenticator = Sessions(store, gateway, run.config), Authenticator(store)
        gateway.parts.admin_of = admins(authenticator)
        if follows is not None:
            gateway.parts.resource = follows.resource.name
            gateway.mount(WeightFiles(follows.store, authenticator, follows.folder, follows.resource.name), MOUNT)
        web_apps = mount_web_apps(
            resources, gateway, Host("", "", store, authenticator, sessions, gateway.served, own_model=True)
        )
        await gateway.start()
        following = None
        if follows is not None and isinstance(follows.reference.which, str):
            follower = Follower(
                follows.store, follows.reference, policy, gateway, store, config, follows.resource, model
            )
            following = asyncio.create_task(follower.follow(), name="lightning-follow")
            resources.push_async_callback(end, following)
        yield RunningServer(run, store, policy, gateway, log, tuple(web_apps), following)


def _checked(config: Config) -> Config:
    """Return the settings of the one vLLM that serves a model. Raises `ConfigError` for settings that cannot be carried out,
    and `PluginError` without a plugin that tells conversations apart."""
    if config.runner.prompts:
        raise ConfigError(
            f"runner.prompts gives prompts to {', '.join(sorted(config.runner.prompts))}, but a served model's agents run "
            "elsewhere and send their own: put the text into component(..., prompt=...) there (`lightning resources show "
            "NAME@ALIAS --content` prints it), and serve with --set 'runner.prompts={}'"
        )
    check_policy_server(config.policy_server)
    config, *more = settings_of_servers(config, models=1)
    if more:
        raise ConfigError(
            f"lightning serve serves a model by one vLLM, and the settings name {1 + len(more)} (policy_server.replicas, "
            "policy_server.attach): leave out all but one, or give vLLM --data-parallel-size in policy_server.args"
        )
    if why := check_gateway(config.gateway).why_not("session"):
        raise PluginError(
            "each conversation with a served model is a rollout, and no plugin is there that tells them apart: "
            f"{why}.{plugins().left_out()}"
        )
    return with_one_policy(config)


@dataclass(frozen=True, slots=True)
class Server:
    """A running server over a shared database. `admin_file` has the first admin token if this server made it, `runner_file` a
    token for runners; each is None where there is none in the folder."""

    url: str
    store: Store
    admin_file: Path | None
    runner_file: Path | None
    web_apps: tuple[str, ...] = ()
    """The paths below which plugins answer, such as `/console`."""

    async def wait(self, seconds: float | None = None) -> None:
        """Return after `seconds`; without them, never."""
        await (asyncio.Event().wait() if seconds is None else asyncio.sleep(seconds))


@asynccontextmanager
async def serve_store(url: str, config: Config, folder: Path) -> AsyncIterator[Server]:
    """Serve the database at a store's URL on the port of the section `server`. First tokens are written into `folder`. The one
    for runners is for the project `trainer.project`, unless the folder has a valid one of any project, such as a trainer's.

    Calls go to the policy servers that trainers name in the store. Raises `ConfigError` for the URL of a server, and for an
    address beyond loopback before anybody has made a token; and the errors of store and gateway.
    """
    if url.partition("://")[0] in ("http", "https"):
        raise ConfigError(
            f"{redacted(url)} is a server: a server needs the database itself, as postgresql://, redis:// or sqlite:///"
        )
    project = project_of(config)
    async with AsyncExitStack() as resources:
        store = await resources.enter_async_context(plugins().opened_store(url))
        settings = on_server_port(config).gateway
        await check_exposure(store, settings.host, place=url)
        gateway = Gateway(store, [], settings, secret=await gateway_secret(store), shared=True)
        resources.push_async_callback(gateway.close)
        control = Control(store, gateway, config)
        resources.push_async_callback(control.close)
        sessions, authenticator = Sessions(store, gateway, {}), Authenticator(store)
        gateway.parts.admin_of = admins(authenticator)
        gateway.mount(WeightFiles(store, authenticator, folder), MOUNT)
        web_apps = mount_web_apps(
            resources,
            gateway,
            Host(
                "",
                ServerConfig.of(config).public_url.rstrip("/"),
                store,
                authenticator,
                sessions,
                gateway.served,
            ),
        )
        await gateway.start()
        admin = await first_admin_token(store, folder)
        file = token_file(store, folder, RUNNER_FILE)
        if admin is not None or file.is_file():
            file, _ = await runner_token(store, folder, project)
        yield Server(control.url, store, admin, file if file.is_file() else None, tuple(web_apps))


logger = logging.getLogger(__name__)


def mount_web_apps(resources: AsyncExitStack, gateway: Gateway, host: Host) -> list[str]:
    """Mount the web applications of plugins on a gateway that has not started, and return their paths; `resources` closes them.
    One that cannot be made is logged and left out."""
    mounted = []
    for name in plugins().names("web_apps"):
        path = f"/{name}"
        try:
            make = cast("Callable[[Host], WebApp]", plugins().get("web_apps", name))
            app = make(replace(host, path=path))
            resources.push_async_callback(app.close)
            gateway.mount(app, name)
            mounted.append(path)
        except LightningError as error:
            logger.warning("nothing answers at %s: %s", path, error)
        except Exception:  # a plugin's fault
            logger.exception("nothing answers at %s", path)
    return mounted
