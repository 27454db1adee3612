"""Pass calls for other models than the policy on to a provider from the settings, with the provider's key.

The invariant: only addresses in the settings are called, and no redirect is followed. The agent never sees the provider's key,
and the provider never the rollout's. Such calls are not recorded, because the policy sampled nothing of them.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from typing import TYPE_CHECKING
from urllib.request import getproxies, proxy_bypass

import aiohttp
from lightning.asyncio_utils import end
from lightning.bounded import Once
from lightning.config import check_endpoint
from lightning.errors import ConfigError
from lightning.gateway.http import JSON_TYPE, Header, RefusalError, send_bytes
from lightning.gateway.identity import ALIAS, MODEL
from lightning.gateway.stages import CallStage, PassOn
from lightning.instrument.providers import is_policys
from lightning.memory_budget import bounded
from lightning.outside_requests import OUTSIDE
from starlette.types import ASGIApp, Receive, Scope, Send
from yarl import URL

from lightning_record.config import ProviderConfig, RecordConfig

if TYPE_CHECKING:
    from lightning.gateway.call import Call, Request
    from lightning.gateway.calls import Parts

log = logging.getLogger(__name__)

SETTING = "gateway.providers"
ROUTE = re.compile(r"(?:(?!\.{1,2}(?:/|$))[\w.~:@-]+)(?:/(?!\.{1,2}(?:/|$))[\w.~:@-]+)*", re.ASCII)
"""A path of plain names, without `.` or `..` as a part."""
ASKED = (b"content-type", b"accept", b"anthropic-version", b"anthropic-beta", b"openai-beta")
"""Headers of the agent's request that are sent to the provider."""
ANSWERED = ("Content-Type", "Content-Disposition", "Retry-After")
"""Headers of the provider's answer that are sent to the agent. The id of the call is not among them, because rewards find the
policy's calls by such an id."""
KEY_HEADERS = {b"x-api-key": "x-api-key", b"api-key": "api-key"}
"""Headers in which clients of some providers send their key instead of `authorization`; the provider gets its key in the same
header."""
REFUSED_KEY = (401, 403)
CONNECT_SECONDS = 10.0
LONGEST_ERROR = 1 << 20
"""Most bytes of a provider's error that is passed on; of a longer one only the status is passed on."""


@dataclass(frozen=True, slots=True)
class Provider:
    """One provider from the settings, with its key (empty for none)."""

    name: str
    base_url: str
    models: Sequence[str]
    routes: Sequence[str]
    api_key_env: str
    key: str = field(repr=False)

    def answers(self, model: object) -> bool:
        """Return whether the provider's `models` match this model name."""
        return isinstance(model, str) and any(fnmatchcase(model, glob) for glob in self.models)

    def takes(self, route: str) -> bool:
        """Return whether a route below `/v1/`, other than the policy's, is passed on to this provider."""
        return any(route == known or route.startswith(f"{known}/") for known in self.routes)


def read_providers(
    configs: Mapping[str, ProviderConfig], environment: Mapping[str, str] = os.environ
) -> list[Provider]:
    """Make the providers of the settings, with their keys from the environment. Raises `ConfigError` for a provider that is not
    valid and for a missing key."""
    found = []
    for name, config in configs.items():
        whose = f"{SETTING}.{name}"
        check_endpoint(config.base_url, config.api_key_env, whose)
        for route in config.routes:
            if not ROUTE.fullmatch(route) or is_policys(route):
                raise ConfigError(
                    f"{whose}.routes has {route!r}: write what stands behind /v1/, as 'embeddings'. Chat completions, "
                    f"completions, responses and messages go to a provider by the model's name ({whose}.models)"
                )
        key = environment.get(config.api_key_env, "").strip() if config.api_key_env else ""
        if config.api_key_env and not key:
            raise ConfigError(
                f"{whose}.api_key_env names {config.api_key_env}, which is not set in the environment of this process"
            )
        base = config.base_url.rstrip("/")
        found.append(Provider(name, base, config.models, config.routes, config.api_key_env, key))
    return found


class Providers:
    """Chooses the provider of a call, and passes the call on. `timeout` bounds the seconds without a byte of the answer."""

    def __init__(self, known: Sequence[Provider], timeout: float) -> None:
        self._known, self._timeout = known, timeout
        self._session: aiohttp.ClientSession | None = None
        self._said = Once()

    def of_model(self, model: object) -> Provider | None:
        """Return the provider that answers calls for a model; None if the policy does, as it does under its own names."""
        if not self._known or model == MODEL or (isinstance(model, str) and model.startswith(ALIAS)):
            return None
        return next((provider for provider in self._known if provider.answers(model)), None)

    def of_route(self, route: str, model: object) -> Provider | None:
        """Return the provider for a route that is not the policy's: of those that list it, the one with this model, else the
        first; None if none lists it."""
        if is_policys(route) or not ROUTE.fullmatch(route):
            return None
        able = [provider for provider in self._known if provider.takes(route)]
        return next((provider for provider in able if provider.answers(model)), able[0] if able else None)

    async def pass_on(
        self, provider: Provider, route: str, payload: bytes, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Send a request to the provider and its answer to the agent; a stream is passed on as it comes. `payload` is the body.

        Raises `RefusalError`: 403 if the provider refuses the key, 502 if it does not answer or redirects.
        """
        if self._said.first(provider.name):
            log.info("a call of %s goes to the provider %s.%s (said once for each)", route, SETTING, provider.name)
        exchange = asyncio.ensure_future(self._exchange(provider, route, payload, scope, send))
        gone = asyncio.ensure_future(receive())  # the body was read: the next message says that the client is gone
        try:
            await asyncio.wait({exchange, gone}, return_when=asyncio.FIRST_COMPLETED)
            if exchange.done():
                exchange.result()
        finally:
            await end(exchange, gone)

    async def _exchange(self, provider: Provider, route: str, payload: bytes, scope: Scope, send: Send) -> None:
        query = scope.get("query_string", b"").decode("latin-1")
        url = URL(f"{provider.base_url}/{route}{'?' + query if query else ''}", encoded=True)
        started = False
        try:
            async with self._client().request(
                scope["method"],
                url,
                data=payload or None,
                headers=_headers(provider, scope),
                allow_redirects=False,
                proxy=_proxy_for(url),
            ) as answer:
                if answer.status in REFUSED_KEY or 300 <= answer.status < 400:
                    raise _refused(provider, answer.status)
                headers = [
                    (name.lower().encode(), answer.headers[name].encode("latin-1", "replace"))
                    for name in ANSWERED
                    if name in answer.headers
                ]
                if answer.status >= 400:
                    said = await bounded(answer.content.iter_any(), LONGEST_ERROR)
                    if said is None:
                        said = _too_long(provider, answer.status)
                        headers = [JSON_TYPE, *(header for header in headers if header[0] == b"retry-after")]
                    await send_bytes(send, answer.status, _without(provider.key, said), headers)
                    return
                started = True
                await send({"type": "http.response.start", "status": answer.status, "headers": headers})
                async for data in answer.content.iter_any():
                    await send({"type": "http.response.body", "body": data, "more_body": True})
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            log.warning("%s.%s did not answer %s: %r", SETTING, provider.name, route, error)
            if not started:  # else the agent's connection breaks off, too
                message = f"The provider {provider.name!r} ({SETTING}) did not answer ({type(error).__name__}). Send it again."
                raise RefusalError(502, "provider_failed", message) from error

    def _client(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0),
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS, sock_read=self._timeout),
                skip_auto_headers=("Content-Type",),
            )
        return self._session

    async def close(self) -> None:
        """Close all connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None


class ProvidersStage(CallStage):
    """The call stage that sends calls for a provider's model, and calls of a provider's routes, to that provider."""

    api, before = 1, ("branches",)

    def __init__(self, providers: Providers) -> None:
        self._providers = providers

    async def admitted(self, call: Call, request: Request) -> ASGIApp | None:
        """Return an ASGI app with the provider's answer if the model is a provider's; None for the policy."""
        provider = self._providers.of_model(request.model)
        if provider is None:
            return None
        count(provider)
        return partial(self._providers.pass_on, provider, call.dialect.path[1:], request.payload)

    def elsewhere(self, route: str, model: object) -> PassOn | None:
        """Return the function that passes a call of a route other than the stage's own on to its provider; None if there is no
        provider for it."""
        found = self._providers
        provider = found.of_model(model) if is_policys(route) else found.of_route(route, model)
        return None if provider is None else partial(self._pass_elsewhere, provider, route)

    async def _pass_elsewhere(
        self, provider: Provider, route: str, payload: bytes, scope: Scope, receive: Receive, send: Send
    ) -> None:
        count(provider)
        await self._providers.pass_on(provider, route, payload, scope, receive, send)


def count(provider: Provider) -> None:
    """Count a request that goes to a provider. Raises `RefusalError` (503) beyond the run's budget of requests: an attempt that
    meets it fails by the infrastructure's fault."""
    if refused := OUTSIDE.refused(f"the provider {provider.name!r} ({SETTING})"):
        raise RefusalError(503, "budget_spent", f"{refused}.")


def stage(parts: Parts) -> ProvidersStage | None:
    """Make the stage; None if the settings have no provider."""
    configs = RecordConfig.of(parts.config).providers
    if not configs:
        return None
    providers = Providers(read_providers(configs), parts.config.upstream_timeout)
    parts.closing.push_async_callback(providers.close)
    return ProvidersStage(providers)


def _proxy_for(url: URL) -> str | None:
    """Return the machine's proxy for a URL; None for none. aiohttp's `trust_env` would also add logins from ~/.netrc."""
    return None if proxy_bypass(url.host or "") else getproxies().get(url.scheme)


def _headers(provider: Provider, scope: Scope) -> dict[str, str]:
    """Return the headers for a provider: those in `ASKED`, and the provider's key in the header in which the agent's client
    sent the gateway's."""
    pairs: Sequence[Header] = scope["headers"]
    sent = dict(pairs)
    headers = {name.decode(): sent[name].decode("latin-1") for name in ASKED if name in sent}
    if provider.key:
        other = next((header for name, header in KEY_HEADERS.items() if name in sent), "")
        headers |= {other: provider.key} if other else {"authorization": f"Bearer {provider.key}"}
    return headers


def _refused(provider: Provider, status: int) -> RefusalError:
    where = f"{SETTING}.{provider.name}"
    if status in REFUSED_KEY:
        key = (
            f"the key in {provider.api_key_env}"
            if provider.api_key_env
            else f"calls without a key ({where}.api_key_env)"
        )
        return RefusalError(403, "provider_refused_key", f"The provider of {where} refuses {key} (status {status}).")
    message = f"The provider of {where} answered with a redirect ({status}), which is not followed: mend its base_url."
    return RefusalError(502, "provider_failed", message)


def _too_long(provider: Provider, status: int) -> bytes:
    """Return the body for an error of a provider whose own body is too long."""
    where = f"{SETTING}.{provider.name}"
    message = (
        f"The provider of {where} answered with status {status} and with more than {LONGEST_ERROR} bytes of text, or more JSON "
        "values than fit in memory, which are not passed on."
    )
    return RefusalError(status, "provider_failed", message).body


def _without(key: str, payload: bytes) -> bytes:
    """Remove the key from an error's text, since some servers quote it."""
    return payload.replace(key.encode(), b"[redacted]") if key else payload
