"""The line of a model call, from the agent's request to the durable transition; it reads top to bottom.

The invariant (law 4): the last byte of an answer leaves only after `Store.append` has returned; and whatever else happens
to a call that reached vLLM (the client hangs up, vLLM dies) is recorded as what it was.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import secrets
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial

import aiohttp
from starlette.types import Receive, Scope, Send

from lightning.bounded import Once
from lightning.config.sections import GatewayConfig
from lightning.errors import StaleAttemptError, StoreError
from lightning.gateway.call import (
    STORE_FAILED,
    Answer,
    Call,
    Recorder,
    Request,
    Sent,
    described,
    forget_unsound,
    pass_on,
    read_whole,
    refuse_unsound,
    refuse_unstored,
)
from lightning.gateway.dialects import (
    Capture,
    Dialect,
    Plan,
    Translator,
    apply_sampling,
    call_seed,
    has_media,
    is_constrained,
    offered_tools,
    temperature_of,
    without_limit,
)
from lightning.gateway.http import (
    JSON_TYPE,
    SHORTER,
    ClientGoneError,
    RefusalError,
    UpstreamError,
    UpstreamGoneError,
    beside,
    read_body,
    read_object,
    send_bytes,
    told_of_length,
)
from lightning.gateway.identity import Claims, ExpiredTokenError, Identity, forwarded_headers
from lightning.gateway.policy import LiveCall, Policies
from lightning.gateway.stages import FAILED, NO_STAGE, Line
from lightning.gateway.upstream import Forwarder, Watch, read_answer
from lightning.policy_server.packed_logprobs import HEADER, WANTED
from lightning.store.protocol import Store
from lightning.types import CallStatus

log = logging.getLogger(__name__)

PROCESS, NUMBERS = secrets.token_hex(8), itertools.count(1)
"""Request ids are the process's random part and a number: unique, and without the dashes that vLLM adds its own parts with."""
REQUEST_ERRORS = range(400, 500)
"""Statuses of what is the request's own fault."""
CHAT = "/chat/completions"
LONGEST_NAME = 200
"""Characters that are kept of a model's name."""
NO_SERVER = frozenset({"no_policy_server", "upstream_unreachable", "held_too_long"})
"""Refusals of calls that no policy server has seen."""
LOGPROBS_ARE_JSON = (
    "the policy server sends logprobs as JSON, which costs its API process about 17 microseconds a token: start it with "
    "`--middleware lightning.policy_server.packed_logprobs.PackedLogprobs`, where lightning is installed (said once "
    "for each API)"
)

AdminOf = Callable[[str], Awaitable[str]]
"""From an `Authorization` header to the project that its holder administers, `*` for all. Raises `RefusalError`."""


@dataclass(slots=True)
class Parts:
    """The parts of a gateway that every call goes through, for stages and routes, too.

    `shared`: other servers over its `store` answer for its keys, too. A stage or a route pushes what is to be closed with the
    gateway on `closing`. `line` are the stages, once all are made. Whoever starts the server says `admin_of` (whose tokens of
    people are taken) and `resource` (the name of the weights of which the policy's version is a version, so that rewards can be
    compared by version).
    """

    config: GatewayConfig
    identity: Identity
    policies: Policies
    forwarder: Forwarder
    recorder: Recorder
    store: Store
    shared: bool
    closing: AsyncExitStack
    line: Line = field(default_factory=lambda: Line(()))
    admin_of: AdminOf | None = None
    resource: str = ""


class CallEndpoint:
    """The ASGI application behind one dialect's route."""

    def __init__(self, dialect: Dialect, parts: Parts) -> None:
        self._dialect, self._line = dialect, parts.line
        self._config, self._identity, self._policies = parts.config, parts.identity, parts.policies
        self._forwarder, self._recorder = parts.forwarder, parts.recorder
        self._said = Once()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request. Never raises for what is the agent's, vLLM's, the store's or a plugin's fault."""
        call: Call | None = None
        claims: Claims | None = None
        try:
            claims = self._identity.claims(scope)
            self._identity.check_over(claims)
            request = await self._read(scope, receive)
            call = self._admit(claims, request)
            answer = await self._line.admitted(call, request)
            if answer is None:
                await self._plan(call, request)
            del request  # of a large one that is megabytes for as long as the policy server takes
            await (self._serve(call, receive, send) if answer is None else answer(scope, receive, send))
        except ExpiredTokenError as refusal:
            await self._record_refused(scope, refusal.claims, refusal)
            await self._refuse(None, send, refusal)
        except RefusalError as refusal:
            await self._refused(call, claims, refusal, scope, send)
        except ClientGoneError:
            await self._abandoned(call)
        except asyncio.CancelledError:
            await asyncio.shield(self._record_failure(call, CallStatus.ABORTED))
            raise
        except Exception:
            api = f"{self._dialect.path}, which {type(self._dialect).__module__} brings"
            log.exception("the gateway failed on a call of %s", api)
            await self._record_failure(call, CallStatus.ERROR)
            message = f"The gateway failed on a call of {api}: see its log."
            await self._refuse(call, send, RefusalError(500, "gateway_fault", message))

    # asked ---------------------------------------------------------------------------------------------------------
    async def _read(self, scope: Scope, receive: Receive) -> Request:
        payload = await read_body(scope, receive, self._config.max_body_bytes)
        body = await beside(scope, partial(read_object, payload))
        model = body.get("model") or scope.get("path_params", {}).get("deployment")  # Azure's URLs name it
        return Request(scope, payload, body, model)

    def _admit(self, claims: Claims, request: Request) -> Call:
        caller = self._identity.caller(request.scope, request.model)
        find = partial(self._policies.of, claims.run)
        return Call(self._dialect, caller, claims, find, forwarded_headers(request.scope))

    # sent ----------------------------------------------------------------------------------------------------------
    async def _plan(self, call: Call, request: Request) -> None:
        """Number the call and make the policy server's request of the agent's. Raises `RefusalError`."""
        request_id = f"{call.id_mark}{PROCESS}{next(NUMBERS):x}"
        capture = Capture(self._dialect.id_prefix + request_id)
        plan, translator = await beside(request.scope, partial(self._translate, call, request, capture.id))
        plan.requested_model = request.model[:LONGEST_NAME] if isinstance(request.model, str) else ""
        live = LiveCall(request_id, plan.choices, plan.n, call.policy.version, capture)
        call.sent = Sent(plan, translator, self._recorder.begin(*call.attempt, plan.choices, call.caller), live)
        await self._line.sending(call, plan.body)
        await beside(request.scope, partial(_note_sampling, plan, capture), reads_texts=False)

    def _translate(self, call: Call, request: Request, answer_id: str) -> tuple[Plan, Translator | None]:
        self._line.reading(call, request)
        body, translator = self._dialect.translate(request.body, call.before, answer_id)
        apply_sampling(body, self._config.override_sampling, call.claims.sampling)
        return self._dialect.plan(body), translator

    async def _serve(self, call: Call, receive: Receive, send: Send) -> None:
        call.policy.calls.add(call.sent.live)
        watch = Watch(
            receive,
            call.sent.live,
            self._config.upstream_timeout,
            partial(self._forwarder.works, call.policy, call.sent.live),
        )
        try:
            with watch:
                tokenize = partial(self._forwarder.tokenize, call.policy, call.sent.ticket.rollout)
                await call.dialect.fit(call.sent.plan.body, call.policy, tokenize)
                answer = await self._ask(call, send)
                refuse_unsound(call)
                await self._forwarder.settle(call.policy, call.sent.live)
            call.policy.calls.discard(call.sent.live)  # no update concerns it any more
            # A server that answers 500 is there still, but its engine may have died.
            if answer.outcome is CallStatus.ERROR:
                call.sent.live.unserved = await self._forwarder.is_gone(call.policy, call.sent.live)
            await self._keep(call, answer)
            await self._deliver(call, answer, watch, send)
        except UpstreamError as error:
            log.warning("call %s failed: %s", call.capture.id, error)
            call.sent.live.unserved = isinstance(error, UpstreamGoneError) or await self._forwarder.is_gone(
                call.policy, call.sent.live
            )
            await self._record_failure(call, CallStatus.ERROR)
            message = f"The policy server broke off: {error}. The call was not trained on; send it again."
            raise RefusalError(502, "upstream_failed", message) from error
        finally:
            call.policy.calls.discard(call.sent.live)
            watch.close()

    # answered ------------------------------------------------------------------------------------------------------
    async def _ask(self, call: Call, send: Send) -> Answer:
        """Send the call to vLLM and read its answer to the end, passing a stream on meanwhile."""
        response = await self._send(call)
        try:
            refusal = await read_answer(response) if response.status == 400 else None
            if refusal is not None and (roomier := await self._send_for_less(call, response, refusal)) is not None:
                response, refusal = roomier, None
            if response.status == 200 and call.sent.plan.stream:
                tail = await pass_on(call, response, send)
                return Answer(200, tail, outcome=CallStatus.ERROR if call.capture.failed else CallStatus.OK)
            return read_whole(call, response, await read_answer(response, SHORTER) if refusal is None else refusal)
        except (aiohttp.ClientError, OSError) as error:
            raise UpstreamGoneError(f"its connection was lost in the middle of the answer ({error!r})") from error
        finally:
            response.close()  # if not read to the end: vLLM must see at once that nobody listens any more
            call.readers.clear()  # they may hold the call, which is to be gone with its answer

    async def _send(self, call: Call) -> aiohttp.ClientResponse:
        headers = [*call.headers, (HEADER, WANTED)] if call.wants_packed else call.headers
        return await self._forwarder.send(
            call.policy,
            call.sent.ticket.rollout,
            call.dialect.upstream,
            call.sent.plan.body,
            headers,
            call.sent.live,
            partial(_draw_seed, call),
        )

    async def _send_for_less(
        self, call: Call, response: aiohttp.ClientResponse, refusal: bytes
    ) -> aiohttp.ClientResponse | None:
        """The answer to the same call without its limit of tokens, where that limit was more than there is room for: clients
        have defaults for models with more context. None for another refusal, and where vLLM has a small limit of its own."""
        if call.dialect.upstream != CHAT or told_of_length(refusal) is None:
            return None
        if not (asked := without_limit(call.sent.plan.body)):
            return None
        response.close()
        call.sent.live.retract()
        call.sent.plan.max_tokens_asked = asked
        return await self._send(call)

    # kept ----------------------------------------------------------------------------------------------------------
    async def _keep(self, call: Call, answer: Answer) -> None:
        """Make the call durable, as its stages leave it."""
        if call.sent.live.unsure:
            log.warning("call %s is not trained on: its tokens' policy version is not known", call.capture.id)
        status = CallStatus.ERROR if call.sent.live.unsure else answer.outcome
        if status is CallStatus.OK and call.sent.plan.media:
            status = CallStatus.MEDIA
        await self._line.settled(call, answer)
        await self._record(call, status)
        await self._line.kept(call, call.sent.ticket.appended)

    async def _deliver(self, call: Call, answer: Answer, watch: Watch, send: Send) -> None:
        """Let go of the answer's last bytes. An agent that has hung up by then does not get them, and asks again: one answer
        would be trained as two."""
        if not call.started:
            length = (b"content-length", str(len(answer.body)).encode())
            head = [*answer.headers, length]
            await send({"type": "http.response.start", "status": answer.status, "headers": head})
        await send({"type": "http.response.body", "body": answer.body, "more_body": True})
        if watch.agent_is_gone:  # before the answer is complete, as which this is told, too
            await self._take_back(call)
            return
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _take_back(self, call: Call) -> None:
        """The answer to a call that the store has, or may have, did not arrive. Never raises, whatever the store does."""
        try:
            await self._recorder.take_back(call.sent.ticket)
        except StaleAttemptError as error:
            log.info("the answer to call %s did not arrive, and its attempt is over: %s", call.capture.id, error)
        except StoreError as error:
            log.warning(
                "the answer to call %s did not arrive, and the store was not told so: %s", call.capture.id, error
            )
        except Exception:
            log.exception("the gateway failed to say that the answer to call %s did not arrive", call.capture.id)

    async def _record(self, call: Call, status: CallStatus) -> None:
        try:
            await self._recorder.append(call, status)
        except StaleAttemptError as error:
            raise self._identity.over(call.claims, error) from error
        except StoreError as error:
            raise refuse_unstored(error) from error
        why = self._dialect.why_no_ids(call.sent.plan, call.capture) if status is CallStatus.OK else ""
        if why and self._said.first(why):
            log.warning("call %s is not trained on: %s (said once for each API)", call.capture.id, why)
        as_text = any(choice.logprobs and not choice.packed for choice in call.capture.choices.values())
        if as_text and call.wants_packed and self._said.first(LOGPROBS_ARE_JSON):
            log.info(LOGPROBS_ARE_JSON)

    # not answered --------------------------------------------------------------------------------------------------
    async def _refused(
        self, call: Call | None, claims: Claims | None, refusal: RefusalError, scope: Scope, send: Send
    ) -> None:
        """Record a call that gets no answer, as what it was, and tell the agent."""
        planned = call if call is not None and call.is_planned else None
        is_kept = planned is not None and bool(planned.sent.ticket.appended)
        of_stage = call is not None and bool(call.stopped_by)
        failed = refusal.code in (FAILED, NO_STAGE)
        if planned is not None and not is_kept and (of_stage or refusal.code in NO_SERVER):
            refused = of_stage and refusal.status in REQUEST_ERRORS
            status, why = CallStatus.REFUSED if refused else CallStatus.ERROR, refusal if of_stage else None
            await self._record_failure(planned, status, unserved=not refused, why=why)
        elif claims is not None and (failed or (planned is None and (of_stage or refusal.status in REQUEST_ERRORS))):
            await self._record_refused(scope, claims if call is None else call.claims, refusal)
        await self._refuse(call, send, refusal)
        if planned is not None and is_kept and (planned.stopped_by or refusal.code == STORE_FAILED):
            await self._take_back(planned)  # the store has taken it, or may have, though it did not say so

    async def _abandoned(self, call: Call | None) -> None:
        """The agent has hung up."""
        if call is None or not call.is_planned:
            return
        policy = call.policy
        if not call.sent.live.sent and (policy.gate.closed or not policy.pool.healthy):
            await self._record_failure(call, CallStatus.ERROR, unserved=True)  # its agent's patience ended first
        else:
            await self._record_failure(call, CallStatus.ABORTED)

    async def _record_failure(
        self, call: Call | None, status: CallStatus, *, unserved: bool = False, why: RefusalError | None = None
    ) -> None:
        """Record a call that was sent but not answered; a store that refuses this too is only logged.

        `unserved` says that its agent's failure is not its own, and the attempt is made again: no policy server has seen the
        call, or a stage failed on it. `why` is how a stage failed, or refused it, which may be after it was sampled.
        """
        if call is None or not call.is_planned or not (call.sent.live.sent or unserved or why is not None):
            return
        call.sent.live.unserved |= unserved
        if call.sent.ticket.appended:  # it may be durable already: another row would be another call
            await self._take_back(call)
            return
        forget_unsound(call)
        if why is not None:
            call.capture.refused = described(why.error)
        if why is not None and status is CallStatus.REFUSED:
            for choice in call.capture.choices.values() or [call.capture.choice(0)]:
                choice.finish_reason = why.code
        try:
            await self._line.broken_off(call, Answer(0, outcome=status))
            await self._record(call, status)
        except RefusalError as refusal:
            # Whoever ends an attempt ends its agent's calls: on an interrupt, one for each agent.
            expected = status is CallStatus.ABORTED and isinstance(refusal.__cause__, StaleAttemptError)
            level = logging.INFO if expected else logging.WARNING
            log.log(level, "call %s (%s) was not recorded: %s", call.capture.id, status, refusal)
            return
        except Exception:
            log.exception("the gateway failed to record call %s", call.capture.id)
            return
        with contextlib.suppress(RefusalError):  # a stage that failed, which is logged; the call is recorded
            await self._line.kept(call, call.sent.ticket.appended)

    async def _record_refused(self, scope: Scope, claims: Claims, refusal: RefusalError) -> None:
        """Record a request that no policy server is asked."""
        name = f"{self._dialect.id_prefix}{PROCESS}{next(NUMBERS):x}"
        await self._recorder.record_refused(claims, self._identity.caller(scope, None), name, refusal)

    async def _refuse(self, call: Call | None, send: Send, refusal: RefusalError) -> None:
        if call is not None and call.started and not call.is_planned:
            return  # a stage's own answer broke off: its connection ends without the answer's end
        if call is not None and call.started:
            event = refusal.event if call.sent.translator is None else call.sent.translator.broken(refusal)
            await send({"type": "http.response.body", "body": event, "more_body": False})
        else:
            body, headers = self._dialect.refusal(refusal), (JSON_TYPE, *refusal.headers)
            await send_bytes(send, refusal.status, body, headers)


def _note_sampling(plan: Plan, capture: Capture) -> None:
    """Note how a call is sampled, by the very request that the policy server gets."""
    body = plan.body
    capture.offered = offered_tools(body)
    plan.temperature, plan.constrained, plan.media = temperature_of(body), is_constrained(body), has_media(body)


async def _draw_seed(call: Call, seed: int) -> int:
    """The seed of a call in a run with this one. Raises `RefusalError` (503) when the store cannot number the call."""
    try:
        return call_seed(seed, call.claims, await call.sent.ticket.counter.first() + call.sent.ticket.offset)
    except StoreError as error:
        raise refuse_unstored(error) from error
