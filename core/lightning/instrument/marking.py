"""Marking of an agent's requests with the rollout and the agent that they come from; and noting of replies, so that later
reports belong to their call. `clients` calls this for each request that an HTTP client sends.

The invariant: only requests to the gateway of an active rollout are changed, and requests to listed hosts (`runner.reroute`);
nothing here can make a request fail. A call to a well-known provider that is not rerouted is logged, because it is neither
recorded nor trained.

A call by a framework without an adapter is marked with the framework's name. Such calls are named by the user's code around
them, and it would go unnoticed that the framework's agents have no names. Only the stack is read for this, and only if such a
framework is imported.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import replace
from typing import Final, Protocol, TypeAlias
from urllib.parse import urlsplit

from lightning.instrument.components import component_path, current_caller, is_framework, untrained_here
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
from lightning.types import CALLER_HEADER, NO_ADAPTER, ROLLOUT_HEADER, UNNAMED, UNTRAINED_HEADER, Caller, read_reason

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
    """Return the names of the adapters that are attached to their frameworks; each reports its framework's tools itself."""
    from lightning.plugins import plugins

    return plugins().attached()


def without_adapter() -> str:
    """Return the module of a framework without adapter whose code is on the stack of the current call; empty if there is
    none."""
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


TRACE_HEADER = "traceparent"
MARKED = "lightning.marked"
"""The request extension that has the headers which `mark` added."""
ID_HEADER = "x-request-id"
FAILED = 400
"""From this status on a reply is a refusal or a failure, to which no reward can belong."""


class HttpxResponse(Protocol):
    """The attributes of httpx's and httpx2's responses that are used here."""

    status_code: int

    @property
    def headers(self) -> Mapping[str, str]:
        """Case-insensitive."""


def encode_caller(caller: Caller) -> str:
    """Return a caller as compact ASCII JSON, without its empty fields, for the header `x-lightning-caller`."""
    fields: dict[str, str | Sequence[str]] = {"agent": caller.agent}
    if caller.path:
        fields["path"] = caller.path
    for name in ("span_id", "parent_id", "framework"):
        if value := getattr(caller, name):
            fields[name] = value
    return json.dumps(fields, separators=(",", ":"))


def headers_for(url: Url, caller: Caller | None) -> Mapping[str, str]:
    """Return the headers that mark a request of `caller` to a gateway at `url`, sent by the current code."""
    headers = {}
    attempt = certain_attempt()
    if attempt is not None and attempt.serves(url):
        headers[ROLLOUT_HEADER] = attempt.llm.api_key
        if attempt.traceparent:
            headers[TRACE_HEADER] = attempt.traceparent
    if caller is not None:
        headers[CALLER_HEADER] = encode_caller(caller)
    if reason := untrained_here() or _said_by_adapters():
        headers[UNTRAINED_HEADER] = reason
    return headers


def _said_by_adapters() -> str:
    """Return why the request of this code is not trained, as an adapter says; empty if none does."""
    from lightning.plugins import plugins

    try:
        said = plugins().hook.lightning_untrained()
        return "" if said is None else read_reason(said, "what a lightning_untrained hook returned")
    except Exception as error:  # noqa: BLE001 — a stranger's code must not cost the agent its call
        log_once("said untrained", "an adapter failed to say whether a call is trained, so it is: %r", error)
        return ""


Sent: TypeAlias = tuple[ActiveAttempt, str]
"""The rollout in which a call is made, and the name of the agent that makes it."""


_named_by: set[str] = set()
"""The frameworks whose adapters have named a call of this process so far."""


def mark(request: HttpxRequest, hosts: Sequence[str] | None = None) -> Sent | None:
    """Add the headers of its rollout and agent to a request, and return both; None unless it is a call of a known rollout.

    `hosts` are the hosts whose requests are sent to the gateway instead; None for a library whose requests cannot be rerouted.
    """
    try:
        _unmark(request)
        if hosts is not None:
            reroute(request, hosts)
        if not is_gateway(request.url) or (hosts is not None and send_elsewhere(request)):
            return None
        caller = current_caller()
        _say_if_nameless(caller)
        caller = _noted(caller)
        headers = headers_for(request.url, caller)
        # An instrumented client sends the span that it is in, and a client may say itself that a call is not trained.
        said = {name: request.headers[name] for name in (TRACE_HEADER, UNTRAINED_HEADER) if name in request.headers}
        ours = {name: value for name, value in headers.items() if name not in said}
        request.headers.update(ours)
        if (extensions := getattr(request, "extensions", None)) is not None:
            extensions[MARKED] = ours
        attempt = certain_attempt() or attempt_of(_key(request)) or calling_attempt()
        if attempt is None or not attempt.serves(request.url):
            return None
    except Exception as error:  # noqa: BLE001 — a request must go out even if it cannot be marked
        log_once("tap", "a model call goes out without the name of its agent: %r", error)
        return None
    return attempt, caller.name if caller is not None else UNNAMED.name


def _unmark(request: HttpxRequest) -> None:
    """Take out the headers that `mark` added when the same request object was sent before, maybe by another agent."""
    for name, value in getattr(request, "extensions", {}).pop(MARKED, {}).items():
        if request.headers.get(name) == value:
            del request.headers[name]


def _noted(caller: Caller | None) -> Caller | None:
    """Return the caller, with the framework's name if a framework without an adapter makes the call."""
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
            "a model call has no agent's name, although %s names other calls of this process. It counts as a call of the agent "
            "'agent', because the framework did not make it: put `with lightning.component(\"NAME\")` around that call",
            " and ".join(sorted(_named_by)),
        )


def _key(request: HttpxRequest) -> str:
    """Return the API key of a request, by which the gateway finds the rollout if the context does not tell it."""
    return request.headers.get("authorization", "").partition(" ")[2].strip() or request.headers.get("x-api-key", "")


def answered(sent: Sent, reply: HttpxResponse) -> None:
    """Note a reply as the last call of its rollout and agent, unless it is a failure. A stream counts from its beginning."""
    try:
        response_id = reply.headers.get(ID_HEADER)
        if response_id and reply.status_code < FAILED:
            attempt, agent = sent
            attempt.calls.add(response_id, agent)
    except Exception as error:  # noqa: BLE001 — a reply must come in even if it cannot be noted
        log_once(
            "reply", "the id of a model's reply is unknown, so rewards and tool runs go to calls by time: %r", error
        )


PROVIDERS = frozenset({"api.openai.com", "api.anthropic.com"})
"""Hosts of the model APIs that the gateway speaks; calls to other providers are noticed only if their host is listed."""
VERSION = "/v1/"
AZURE = re.compile(r"/openai/(?:deployments/[^/]+/|v1/)?(.*)")
"""The path of Azure's clients, which may have the deployment's name in the place of the version."""


AZURE_ORIGIN = "openai.azure_auth_origin"
"""A request extension by which Azure's client notices that a request goes to another host than its own, and removes the key."""


class HttpxRequest(Protocol):
    """The attributes of httpx's and httpx2's requests that are used here."""

    url: Url

    @property
    def headers(self) -> MutableMapping[str, str]:
        """Case-insensitive."""


def host_of(name: str) -> str:
    """Return the host, such as `api.openai.com`, of a name or URL in `runner.reroute`."""
    return urlsplit(name if "//" in name else f"//{name}").hostname or name


def reroute(request: HttpxRequest, hosts: Sequence[str]) -> bool:
    """Change a request to one of `hosts` so that it goes to the rollout's gateway with the rollout's key, or if it is no call
    of the policy to its provider. Return whether it was changed. Log calls to well-known providers that are not."""
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
            "an agent calls %s itself: such calls are neither recorded nor trained on. Give its client llm.base_url and "
            "llm.api_key, or set runner.reroute to ['%s'] to send such calls to the policy",
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
    """Return the part of a URL's path below `/v1/`, with its query; for Azure's URLs, the part after the deployment. Empty if
    there is none."""
    path = _path(url)
    azure = AZURE.search(path)
    return path.partition(VERSION)[2] if azure is None else azure[1]


def _path(url: str) -> str:
    return "/" + url.partition("//")[2].partition("/")[2]


def send_elsewhere(request: HttpxRequest) -> bool:
    """Change a request that is no call of the policy so that it goes where it would have gone without lightning, with the
    process's own key. Return whether it was changed.

    Without such a key the request stays as it is: the gateway may know a provider for it, or answers what is missing.
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
        "%s is not a call to the policy: it is sent to %s with the process's own key",
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
