"""The model server of a replay, which answers an agent's calls from the record.

The invariant: the server has no model and calls no other server. Each recorded answer is given once, to the same request; a
request that is not in the record is refused with an error that says where it differs.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import secrets
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Self

from aiohttp import web
from lightning.errors import ConfigError
from lightning.safe_text import counted
from lightning.types import CALLER_HEADER, LLM, ROLLOUT_HEADER, UNNAMED, Caller, CallStatus, Transition
from lightning_record import exchanges

from lightning_branching.divergence import Divergence, diverged
from lightning_branching.recorded import RecordedCall, RecordedCalls, RecordedRollout
from lightning_branching.streams import STREAMS, answer_of

HOST: Final = "127.0.0.1"
MODEL: Final = "policy"
ALIAS: Final = "policy:"
NO_RETRY: Final = {"x-should-retry": "false"}
"""The header of refusals by the replay itself: clients do not send such a request again."""


@dataclass
class ReplayServer:
    """The server. Use it with `async with`; within it, `llm` has the address and key for the agent. At most `until` calls are
    answered; None: all."""

    recorded: RecordedRollout
    until: int | None = None
    port: int = 0
    prompts: Mapping[str, str] = field(default_factory=dict)
    seed: int | None = None
    served: list[RecordedCall] = field(default_factory=list)
    divergences: list[Divergence] = field(default_factory=list)
    diverges: Callable[[Divergence], object] = lambda found: None
    """Called with each divergence when it happens."""
    longer: float = 10.0
    """A call that the agent broke off when it was recorded is held for its recorded time and this many seconds more, so that
    the agent breaks it off again."""
    stopped: bool = False
    """Whether a call came after `until` calls were answered."""

    def __post_init__(self) -> None:
        self._calls = RecordedCalls(self.recorded.calls)
        self._refusals: list[Transition] = list(self.recorded.refusals)
        self._key = f"replay-{secrets.token_urlsafe(16)}"
        self._url = ""
        self.threads = threading.active_count()
        """The number of threads before the agent ran."""
        self._runner: web.AppRunner | None = None
        self._finished = asyncio.Event()

    @property
    def llm(self) -> LLM:
        """The address, key and model for the agent, with the rollout's prompts and seed."""
        return LLM(f"{self._url}/v1", self._key, MODEL, prompts=self.prompts, seed=self.seed)

    @property
    def missing(self) -> tuple[str, ...]:
        """The callers of recorded calls that the agent did not make again: refused calls included, but not calls that broke
        off."""
        left = (call.caller for call in self._calls.left if call.exchange.status)
        return (*left, *(refused.caller.name for refused in self._refusals))

    async def finished(self) -> None:
        """Return when every recorded call has been answered, or `end` was called."""
        await self._finished.wait()

    def end(self) -> None:
        """Let `finished` return."""
        self._finished.set()

    async def __aenter__(self) -> Self:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{path:.*}", self._serve)
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, HOST, self.port)
        try:
            await site.start()
        except OSError as error:
            await self._runner.cleanup()
            raise ConfigError(f"cannot listen on {HOST}:{self.port}: {error}. Give another --port") from error
        self._url = f"http://{HOST}:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        if not self._has_key(request):
            return _refuse(
                "", 401, "invalid_api_key", "This is not the key of the replay: give the client llm.api_key."
            )
        route = request.path.rstrip("/")
        if request.method == "GET" and route.endswith("/models"):
            return web.json_response(
                {"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "replay"}]}
            )
        path = next((known for known in sorted(STREAMS, key=len, reverse=True) if route.endswith(known)), "")
        if request.method != "POST" or not path:
            said = f"{request.method} {request.path} was not recorded: a replay answers {', '.join(STREAMS)}."
            return _refuse(path, 404, "not_recorded", said)
        try:
            body = json.loads(await request.read())
        except ValueError:
            return _refuse(path, 400, "invalid_request", "The body of the request is not JSON.")
        if not isinstance(body, dict):
            return _refuse(path, 400, "invalid_request", "The body of the request is not an object.")
        return await self._answer(request, path, body)

    async def _answer(self, request: web.Request, path: str, body: dict[str, Any]) -> web.StreamResponse:
        caller = _caller(request.headers.get(CALLER_HEADER), body.get("model"))
        if self.until is not None and len(self.served) >= self.until:
            self.stopped = True
            self.end()
            return _refuse(
                path, 409, "replay_ended", (f"The replay ends after {counted(self.until, 'call')}, as it was asked to.")
            )
        call = self._calls.take(caller, path, exchanges.canonical(body))
        if call is None:
            return self._unknown(caller, path, body)
        if not call.exchange.status:
            return await self._broken_off(call, path)
        self.served.append(call)
        try:
            return await _send(request, call, body)
        finally:
            self._end_if_done()

    def _end_if_done(self) -> None:
        if len(self.served) == self.until or not self.missing:
            self.end()

    async def _broken_off(self, call: RecordedCall, path: str) -> web.Response:
        """Refuse a call that had no answer when it was recorded. If the policy server failed, fail at once; if the agent broke
        it off, wait until the agent does so again, and note a divergence if it does not."""
        seen = call.transition
        if seen.status is not CallStatus.ABORTED:
            return _refuse(path, 502, "upstream_failed", "The policy server did not answer this call.", headers={})
        await asyncio.sleep(max(0.0, seen.ended_at - seen.started_at) + self.longer)
        why = f"the agent broke off call {call.number} before its end, and does not now: what it was sent is not kept"
        self._diverge(Divergence(call.caller, path, None, suspect=why))
        return _refuse(path, 504, "not_recorded", why)

    def _unknown(self, caller: str, path: str, body: Mapping[str, Any]) -> web.Response:
        nameless = caller == UNNAMED.name  # the agent has no adapter now, but may have had one when it was recorded
        refused = next((each for each in self._refusals if nameless or each.caller.name == caller), None)
        if refused is not None:
            self._refusals.remove(refused)
            self._end_if_done()
            return _refuse(path, 400, refused.finish_reason, refused.error)
        threads = threading.active_count() > self.threads or self._overlap()
        found = diverged(body, caller, path, self._calls.left, threads=threads)
        self._diverge(found)
        return _refuse(path, 409, "not_recorded", str(found))

    def _diverge(self, found: Divergence) -> None:
        self.divergences.append(found)
        self.diverges(found)

    def _overlap(self) -> bool:
        """Whether some recorded calls ran at the same time."""
        times = sorted((call.transition.started_at, call.transition.ended_at) for call in self.recorded.calls)
        return any(later[0] < before[1] for before, later in itertools.pairwise(times))

    def _has_key(self, request: web.Request) -> bool:
        given = (
            request.headers.get(ROLLOUT_HEADER, ""),
            request.headers.get("authorization", "").removeprefix("Bearer ").strip(),
            request.headers.get("x-api-key", ""),
            request.headers.get("api-key", ""),
            request.path.removeprefix("/r/").partition("/")[0],
        )
        return any(secrets.compare_digest(each.encode(), self._key.encode()) for each in given)


async def _send(request: web.Request, call: RecordedCall, body: Mapping[str, Any]) -> web.StreamResponse:
    """Send a recorded answer, and return when it was written to its end."""
    status, kind, content = answer_of(call, body)
    response = web.Response(body=content, status=status, headers={"content-type": kind})
    await response.prepare(request)
    await response.write_eof()
    return response


def _caller(header: str | None, model: object) -> str:
    """Return the path of the calling agent, from the adapter's header, or else from the model's alias (`policy:NAME`)."""
    try:
        said = json.loads(header or "{}")
        found = Caller(str(said.get("agent") or UNNAMED.agent), tuple(map(str, said.get("path") or ())))
    except (ValueError, AttributeError, TypeError):
        found = UNNAMED
    if found == UNNAMED and isinstance(model, str) and len(model) > len(ALIAS) and model.startswith(ALIAS):
        return model.removeprefix(ALIAS)
    return found.name


def _refuse(path: str, status: int, code: str, message: str, *, headers: Mapping[str, str] = NO_RETRY) -> web.Response:
    """Return an error in the API's shape. By default its headers tell clients not to send the request again."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    error: dict[str, Any] = {"message": message, "type": kind, "code": code, "param": None}
    said = {"type": "error", "error": {"type": kind, "message": message}} if path == "/messages" else {"error": error}
    return web.json_response(said, status=status, headers=headers)
