"""What a request of an agent's says: which rollout and which agent it comes from; and which call a reply belongs to, so that
what is reported after it follows that call. `clients` asks here for each request that an HTTP client sends.

The invariant: only requests to the gateway of an active rollout are touched, and those whose host was listed
(`runner.reroute`); nothing here can make a request fail. A call to a well-known provider that stays what it is gets a line in
the log, because what it says is neither recorded nor trained.

A framework that has no adapter here is noted with the calls that it makes: they belong to whatever code of the user's is around
them, and nobody would notice that its agents have no names. Only the stack is looked at, and only where such a framework is
imported.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import replace
from typing import Final, Protocol, TypeAlias
from urllib.parse import urlsplit

from lightning.instrument.components import component_path, current_caller, is_framework
from lightning.instrument.context import (
    ActiveAttempt,
    active,
    attempt_of,
    calling_attempt,
    certain_attempt,
    current_attempt,
    is_gateway,
    log_once,
)
from lightning.instrument.providers import Url, elsewhere, is_policys
from lightning.types import CALLER_HEADER, ROLLOUT_HEADER, UNNAMED, Caller

NO_ADAPTER: Final = "no-adapter:"
"""What `Caller.framework` begins with, before the framework's module, in a call that a framework without adapter makes."""
FRAMEWORKS: Final = (
    "agent_framework",
    "agno",
    "camel",
    "crewai",
    "dspy",
    "google.adk",
    "haystack",
    "llama_index",
    "pydantic_ai",
    "semantic_kernel",
    "smolagents",
    "strands",
)
"""Modules of frameworks with agents or tools of their own, for which an adapter may be missing or not attached."""


def attached_adapters() -> set[str]:
    """The adapters that are attached to their frameworks: each reports the tools of its framework itself."""
    from lightning.plugins import plugins

    return plugins().attached()


def without_adapter() -> str:
    """The framework without adapter whose code makes the running call; empty where there is none."""
    imported = tuple(name for name in FRAMEWORKS if name in sys.modules)
    if not imported:
        return ""
    from lightning.plugins import plugins

    attached = attached_adapters()
    adapted = {info.waits_for.partition(".")[0] for info in plugins().adapters() if info.name in attached}
    missing = [name for name in imported if name.partition(".")[0] not in adapted]
    frame = sys._getframe(1) if missing else None  # noqa: SLF001 — the one way to the stack that builds no list of all frames
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        for name in missing:
            if module == name or module.startswith(f"{name}."):
                return name
        frame = frame.f_back
    return ""


def framework_without_adapter(framework: str) -> str:
    """What `Caller.framework` says of it; empty for any other caller."""
    return framework.removeprefix(NO_ADAPTER) if framework.startswith(NO_ADAPTER) else ""


TRACE_HEADER = "traceparent"
ID_HEADER = "x-request-id"
FAILED = 400
"""From this status on a reply is a refusal or a failure, and no call that a reward could belong to."""


class HttpxResponse(Protocol):
    """What httpx's and httpx2's responses have in common."""

    status_code: int

    @property
    def headers(self) -> Mapping[str, str]:
        """Case-insensitive."""


def encode_caller(caller: Caller) -> str:
    """A caller as compact ASCII JSON, without its empty fields, as it stands in `x-lightning-caller`."""
    fields: dict[str, str | Sequence[str]] = {"agent": caller.agent}
    if caller.path:
        fields["path"] = caller.path
    for name in ("span_id", "parent_id", "framework"):
        if value := getattr(caller, name):
            fields[name] = value
    return json.dumps(fields, separators=(",", ":"))


def headers_for(url: Url, caller: Caller | None) -> Mapping[str, str]:
    """What a request of `caller` to a gateway at `url`, sent from here and now, has to carry."""
    headers = {}
    attempt = certain_attempt()
    if attempt is not None and attempt.serves(url):
        headers[ROLLOUT_HEADER] = attempt.llm.api_key
        if attempt.traceparent:
            headers[TRACE_HEADER] = attempt.traceparent
    if caller is not None:
        headers[CALLER_HEADER] = encode_caller(caller)
    return headers


Sent: TypeAlias = tuple[ActiveAttempt, str]
"""The rollout that a call is made in, and the agent that makes it."""


_named_by: set[str] = set()
"""The frameworks whose adapters have named a call of this process."""


def mark(request: HttpxRequest, hosts: Sequence[str] | None = None) -> Sent | None:
    """Write on a request whose it is; None unless it is a call of a rollout's that is known here.

    Requests to `hosts` are brought to the gateway, where a library's requests can be.
    """
    try:
        if hosts is not None:
            reroute(request, hosts)
        if not is_gateway(request.url) or (hosts is not None and send_elsewhere(request)):
            return None
        caller = current_caller()
        _say_if_nameless(caller)
        caller = _noted(caller)
        headers = headers_for(request.url, caller)
        said = request.headers.get(TRACE_HEADER)  # a client that is instrumented knows the span it is in
        request.headers.update({**headers, TRACE_HEADER: said} if said else headers)
        attempt = certain_attempt() or attempt_of(_key(request)) or calling_attempt()
        if attempt is None or not attempt.serves(request.url):
            return None
    except Exception as error:  # noqa: BLE001 — a request must go out even if nobody can say whose it is
        log_once("tap", "a model call goes out without the name of its agent: %r", error)
        return None
    return attempt, caller.name if caller is not None else UNNAMED.name


def _noted(caller: Caller | None) -> Caller | None:
    """The caller with a note of the framework that makes the call, where that has no adapter to name its agents."""
    if is_framework(caller) or component_path() or (caller is not None and caller.framework not in ("", "raw")):
        return caller
    if not (framework := without_adapter()):
        return caller
    return replace(caller or UNNAMED, framework=f"{NO_ADAPTER}{framework}")


def _say_if_nameless(caller: Caller | None) -> None:
    if caller is not None and is_framework(caller):
        _named_by.add(caller.framework)
    elif caller is None and _named_by:
        log_once(
            "nameless",
            "a model call comes without an agent's name, although this process has calls that %s names. It belongs to the "
            "agent 'agent'. The framework does not know the code that made it: put `with lightning.component(\"NAME\")` there",
            " and ".join(sorted(_named_by)),
        )


def _key(request: HttpxRequest) -> str:
    """By which the gateway tells whose call it is, when the context does not say so."""
    return request.headers.get("authorization", "").partition(" ")[2].strip() or request.headers.get("x-api-key", "")


def answered(sent: Sent, reply: HttpxResponse) -> None:
    """Keep which call was answered, or has begun to be, if it is a stream."""
    try:
        response_id = reply.headers.get(ID_HEADER)
        if response_id and reply.status_code < FAILED:
            attempt, agent = sent
            attempt.calls.add(response_id, agent)
    except Exception as error:  # noqa: BLE001 — an answer must come in even if nobody can say which it is
        log_once("reply", "rewards and tool runs after a model call are matched to it by time: %r", error)


PROVIDERS = frozenset({"api.openai.com", "api.anthropic.com"})
"""Hosts of the model APIs that the gateway speaks; other providers' are recognized only when they are listed."""
VERSION = "/v1/"
AZURE = re.compile(r"/openai/(?:deployments/[^/]+/|v1/)?(.*)")
"""The path of Azure's clients, which may name the deployment where others have a version."""


AZURE_ORIGIN = "openai.azure_auth_origin"
"""By which Azure's client notices that a request goes to another host than it meant, and takes the key off."""


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
    attempt = current_attempt()
    if attempt is None:
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
    rest = _below_version(url)
    if not rest:
        log_once(f"no route {host}", "a call to %s is not brought to the policy: its path has no %s", url, VERSION)
        return False
    if not send_elsewhere(request):
        _redirect(request, attempt, rest)
    return True


def _below_version(url: str) -> str:
    """The path below `/v1/`, with its query; of Azure's URLs what follows the deployment. Empty where there is neither."""
    path = _path(url)
    azure = AZURE.search(path)
    return path.partition(VERSION)[2] if azure is None else azure[1]


def _path(url: str) -> str:
    return "/" + url.partition("//")[2].partition("/")[2]


def send_elsewhere(request: HttpxRequest) -> bool:
    """Send a request that is not the policy's to where it would have gone without us; return whether it was one that can.

    The gateway answers the others: it knows more providers, or says what is missing.
    """
    url = str(request.url)
    route = _below_version(url)
    if not route or is_policys(route):
        return False
    azure = AZURE.search(_path(url)) if "api-key" in request.headers else None
    tail = "" if azure is None else azure[0].lstrip("/")
    found = elsewhere(route, anthropic="anthropic-version" in request.headers, azure=tail)
    if found is None:
        return False
    url, key = found
    for name in ("authorization", "x-api-key", "api-key"):
        if name in request.headers:
            del request.headers[name]
    request.url = type(request.url)(url)
    request.headers.update({**key, "host": request.url.netloc.decode()})
    getattr(request, "extensions", {}).pop(AZURE_ORIGIN, None)
    log_once(
        f"route {route.partition('/')[0]}",
        "%s is no call of the policy's: it goes to %s with the process's own key",
        route.partition("?")[0],
        url.partition("?")[0],
    )
    return True


def _redirect(request: HttpxRequest, attempt: ActiveAttempt, rest: str) -> None:
    target = f"{attempt.llm.base_url.rstrip('/')}/{rest}"
    request.url = type(request.url)(target)
    request.headers["host"] = request.url.netloc.decode()
    if "x-api-key" in request.headers:
        request.headers["x-api-key"] = attempt.llm.api_key
    if "api-key" in request.headers:  # Azure's
        del request.headers["api-key"]
    request.headers["authorization"] = f"Bearer {attempt.llm.api_key}"
