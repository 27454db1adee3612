"""`lightning serve`: a model behind the gateway, for agents that run anywhere; or a server over a shared database."""

from __future__ import annotations

import asyncio
import shlex
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from lightning.asyncio_utils import run_to_end
from lightning.cli.output import Overrides, SettingsFile, next_steps, say, timestamp
from lightning.config import Config, load_config, with_settings
from lightning.errors import ConfigError
from lightning.plugins import plugins
from lightning.store.places import existing_store
from lightning.store.url import parse, redacted
from lightning.trainer.model import models_in, resolve_model
from lightning.trainer.run_stages import PREFIX
from lightning_resources.command import locate
from lightning_resources.reference import find
from lightning_resources.weights import checked_weights

from lightning_server.policies import has_policies, policies_in

if TYPE_CHECKING:
    from lightning_server.serving import Followed


def serve(
    model: Annotated[
        str | None,
        typer.Argument(
            help="A model folder, a name on a model hub, the folder of a finished run (RUN/model/NAME for one of its "
            "policies), or weights as resource:[PLACE#]policy/weights@ALIAS: the server follows the alias."
        ),
    ] = None,
    store: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Serve a shared database instead of a model: postgresql://, redis://, sqlite:/// or a run's folder. "
            "Its trainers register the model's address.",
        ),
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address to bind (server.host), with --store.")] = None,
    port: Annotated[int, typer.Option(help="The port; 0 takes a free one.")] = 0,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for the database and logs; with --store, for the first tokens and for the weights that the "
            "server sends."
        ),
    ] = None,
    ttl: Annotated[float, typer.Option(help="Seconds for which the printed key is valid.")] = 86_400.0,
    seconds: Annotated[float | None, typer.Option(help="Stop after this many seconds; default: at Ctrl-C.")] = None,
    config: SettingsFile = None,
    set_: Overrides = None,
) -> None:
    """Serve a model through the gateway, or a shared database for trainers and clients. Every call is recorded."""
    settings = load_config(config, set_ or [])
    if (model is None) == (store is None):
        raise ConfigError("give a model to serve, or --store URL to serve a database: one of the two")
    try:
        if store is not None:
            given = {"server.host": host, "server.port": port or None}
            settings = with_settings(settings, {key: value for key, value in given.items() if value is not None})
            run_to_end(_serve_store(store, settings, out, seconds))
        elif model is not None:
            if host is not None:
                raise ConfigError("--host goes with --store: a server with a model of its own binds gateway.host")
            settings = with_settings(settings, {"gateway.port": port} if port else {})
            run_to_end(_serve_model(model, settings, out, ttl, seconds))
    except KeyboardInterrupt:
        say("stopped")


async def _serve_model(model: str, settings: Config, out: Path | None, ttl: float, seconds: float | None) -> None:
    from lightning_server.serving import serve as serving_model

    place = out or Path("runs") / f"serve-{timestamp()}"
    async with AsyncExitStack() as resources:
        follows, policies = None, None
        if model.startswith(PREFIX):
            follows = await _followed(resources, model)
            folder = await asyncio.to_thread(checked_weights, follows.resource)
            named = f"{follows.resource.name}@{follows.resource.version}"
            say(f"starting vLLM on {named} in {folder} (log: {place / 'vllm.log'})")
            if isinstance(follows.reference.which, str):
                say(f"the alias {follows.reference.which!r} is followed: lightning resources promote|rollback")
        elif has_policies(Path(model)):
            policies = await policies_in(Path(model))
            folder = policies.base
            say(f"starting vLLM on {folder} with the policies of {model} (log: {place / 'vllm.log'})")
        else:
            trained = Path(model) / "model"
            folder = resolve_model(trained if models_in(trained) else model)
            say(f"starting vLLM on {folder} (log: {place / 'vllm.log'})")
        serving = await resources.enter_async_context(serving_model(folder, settings, place, follows, policies))
        llm = await serving.open_session("shell", ttl)
        say("ready; give these to any OpenAI-compatible client (Ctrl-C ends it):")
        for name, value in (("OPENAI_BASE_URL", llm.base_url), ("OPENAI_API_KEY", llm.api_key)):
            say(f"export {name}={value}")
        say(f"model: {llm.model if policies is None else ' or '.join(policies.names)}")
        for path in serving.web_apps:
            made = shlex.join(["lightning", "token", "create", "viewer", "--store", str(place)])
            say(f"{serving.gateway.url}{path} is a page for people; it asks for a token: {made}")
        next_steps(("see each call, in a browser", ["console", place]))
        await serving.wait(seconds)


async def _followed(resources: AsyncExitStack, model: str) -> Followed:
    """Find the version of weights that `model` names, with its store open; `resources` closes the store."""
    from lightning_server.serving import Followed

    # `locate` runs an event loop of its own, so it needs a thread.
    url, reference = await asyncio.to_thread(locate, model.removeprefix(PREFIX), "runs")
    store = await resources.enter_async_context(plugins().opened_store(url))
    return Followed(store, reference, await find(store, reference), _folder(url))


async def _serve_store(place: str, settings: Config, out: Path | None, seconds: float | None) -> None:
    from lightning_server.serving import serve_store

    url = place if "://" in place else existing_store(place)
    async with serve_store(url, settings, out or _folder(url)) as server:
        say(f"ready at {server.url} (Ctrl-C ends it)")
        if server.admin_file is not None:
            say(f"the first admin token is in {server.admin_file}: keep it; `lightning token` makes others")
        for path in server.web_apps:
            made = shlex.join(["lightning", "token", "create", "viewer", "--store", redacted(place)])
            say(f"{server.url}{path} is a page for people; it asks for a token: {made}")
        token = f"$(cat {shlex.quote(str(server.runner_file))})" if server.runner_file else "TOKEN"
        if server.runner_file is None:
            made = shlex.join(["lightning", "token", "create", "runner", "--store", redacted(place)])
            say(f"a token for agents: {made}")
        say(f"run agents with: LIGHTNING_TOKEN={token} lightning runner --server {server.url} MODULE:AGENT")
        await server.wait(seconds)


def _folder(url: str) -> Path:
    """The folder for first tokens, and of the weights that the server sends: beside an SQLite file, else `runs`."""
    where = parse(url)
    return Path(where.path).parent if where.scheme == "sqlite" else Path("runs")
