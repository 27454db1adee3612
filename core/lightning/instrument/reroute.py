"""Calls that an agent sends to a provider by name, brought to the gateway of its rollout.

The invariant: nothing is brought anywhere unless its host was listed (`runner.reroute`), and only in a rollout; a call to a
well-known provider that stays what it is gets a line in the log, because what it says is neither recorded nor trained.
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from typing import Protocol
from urllib.parse import urlsplit

from lightning.instrument.address import Url
from lightning.instrument.context import Session, active, current_session, log_once

PROVIDERS = frozenset({"api.openai.com", "api.anthropic.com"})
"""Hosts of the model APIs that the gateway speaks; other providers' are recognized only when they are listed."""
VERSION = "/v1/"


class HttpxRequest(Protocol):
    """What httpx's and httpx2's requests have in common."""

    url: Url

    @property
    def headers(self) -> MutableMapping[str, str]:
        """Case-insensitive."""


def host_of(name: str) -> str:
    """A host as `runner.reroute` lists it, `api.openai.com`, from that or from a URL of it."""
    return urlsplit(name if "//" in name else f"//{name}").hostname or name


def reroute(request: HttpxRequest, hosts: Sequence[str]) -> bool:
    """Send a request for one of `hosts` to the rollout's gateway, with its key; return whether it was one."""
    url = str(request.url)
    host = urlsplit(url).hostname or ""
    listed = host in hosts
    if not listed and host not in PROVIDERS:
        return False
    session = current_session()
    if session is None:
        if listed and active():
            log_once(
                f"whose {host}",
                "a call to %s is not brought to the policy: it comes from a thread that may belong to any of several rollouts. "
                "Run the thread's work in contextvars.copy_context()",
                host,
            )
        return False
    if not listed:
        log_once(
            f"elsewhere {host}",
            "an agent calls %s itself: what is said there is not recorded, and nothing is learned from it. Give its client "
            "llm.base_url and llm.api_key, or set runner.reroute to ['%s'] to have such calls brought to the policy",
            host,
            host,
        )
        return False
    _, version, rest = url.partition(VERSION)
    if not version:
        log_once(f"no route {host}", "a call to %s is not brought to the policy: its path has no %s", url, VERSION)
        return False
    _redirect(request, session, rest)
    return True


def _redirect(request: HttpxRequest, session: Session, rest: str) -> None:
    target = f"{session.llm.base_url.rstrip('/')}/{rest}"
    request.url = type(request.url)(target)
    request.headers["host"] = request.url.netloc.decode()
    if "x-api-key" in request.headers:
        request.headers["x-api-key"] = session.llm.api_key
    request.headers["authorization"] = f"Bearer {session.llm.api_key}"
