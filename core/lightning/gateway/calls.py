"""The steps of a model call, from the agent's request to the durable transition, in order from top to bottom.

The invariant (law 4): the last byte of an answer is sent only after `Store.append` has returned. A call that reached vLLM and
ended in another way (the client hung up, vLLM died) is stored with the status that says so.
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
from lightning.gateway.identity import Claims, ExpiredTokenError, Identity, forwarded_headers, read_marks
from lightning.gateway.policy import LiveCall, Policies
from lightning.gateway.stages import FAILED, NO_STAGE, Line
from lightning.gateway.upstream import Forwarder, Watch, read_answer
from lightning.store.protocol import Store
from lightning.types import CallStatus

log = logging.getLogger(__name__)

PROCESS, NUMBERS = secrets.token_hex(8), itertools.count(1)
"""The parts of a request id: the process's random text and a number. So ids are unique, and have no dashes, with which vLLM
adds its own parts."""
REQUEST_ERRORS = range(400, 500)
"""The HTTP statuses of errors that are the request's own fault."""
CHAT = "/chat/completions"
LONGEST_NAME = 200
"""The most characters that are stored of a model's name."""
NO_SERVER = frozenset({"no_policy_server", "upstream_unreachable", "held_too_long"})
"""The codes of refusals of calls that no policy server got."""
LOGPROBS_ARE_JSON = (
    "the policy server sends logprobs as JSON, which costs its API process about 17 microseconds a token: start it with "
    "`--middleware lightning.policy_server.packed_logprobs.PackedLogprobs`, where lightning is installed (said once "
    "for each API)"
)

AdminOf = Callable[[str], Awaitable[str]]
"""Returns, for an `Authorization` header, the project that its holder administers; `*` for all. Raises `RefusalError`."""


@dataclass(slots=True)
class Parts:
    """The parts of a gateway that its calls go through; stages and routes get them, too.

    With `shared` other servers over its `store` also answer calls with its keys. `agents` will run at once (0: unknown). Stages
    and routes push on `closing` whatever must be closed with the gateway. `line` has the stages once all are made. The server
    that starts the gateway sets `admin_of`, which checks people's tokens, and `resource`, the name of the weights whose
    versions are the policy's, so that rewards can be compared by version.
    """

    config: GatewayConfig
    identity: Identity
    policies: Policies
    forwarder: Forwarder
    recorder: Recorder
    store: Store
    shared: bool
    closing: AsyncExitStack
    agents: int = 0
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
        """Serve one request. Faults of the agent, vLLM, the store or a plugin are answered and never raised."""
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
            del request  # a large request would hold megabytes while the policy server works
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
        untrained, rejects = read_marks(request.scope)
        headers = forwarded_headers(request.scope)
        return Call(self._dialect, caller, claims, find, headers, untrained=untrained, rejects=rejects)

    # sent ----------------------------------------------------------------------------------------------------------
    async def _plan(self, call: Call, request: Request) -> None:
        """Number the call and translate the agent's request into the policy server's. Raises `RefusalError`."""
        request_id = f"{call.id_mark}{PROCESS}{next(NUMBERS):x}"
        capture = Capture(self._dialect.id_prefix + request_id)
        plan, translator = await beside(request.scope, partial(self._translate, call, request, capture.id))
        plan.requested_model = request.model[:LONGEST_NAME] if isinstance(request.model, str) else ""
        live = LiveCall(
            request_id,
            plan.choices,
            plan.n,
            call.policy.version,
            capture,
            call.claims.server,
            policy=call.policy_name,
            frozen=call.frozen,
        )
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
                name = call.policy_name
                tokenize = partial(self._forwarder.tokenize, call.policy, call.sent.ticket.rollout, name)
                await call.dialect.fit(call.sent.plan.body, call.policy, tokenize, name)
                answer = await self._ask(call, send)
                refuse_unsound(call)
                await self._forwarder.settle(call.policy, call.sent.live)
            call.policy.calls.discard(call.sent.live)  # no later update can split it
            # A server that answers 500 is still there, but its engine may have died.
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
        """Send the call to vLLM and read its answer to the end; a stream is passed on to the agent at the same time."""
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
            response.close()  # so that vLLM ends a call whose answer was not read to the end
            call.readers.clear()  # readers may hold the call, which would keep it in memory

    async def _send(self, call: Call) -> aiohttp.ClientResponse:
        return await self._forwarder.send(
            call.policy,
            call.sent.ticket.rollout,
            call.dialect.upstream,
            call.sent.plan.body,
            [*call.headers, *call.packing],
            call.sent.live,
            partial(_draw_seed, call),
        )

    async def _send_for_less(
        self, call: Call, response: aiohttp.ClientResponse, refusal: bytes
    ) -> aiohttp.ClientResponse | None:
        """If vLLM refused a call because its token limit exceeds the room, send it again without the limit and return the
        answer: clients have default limits for models with more context. Return None for another refusal and for a call without
        a limit."""
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
        """Let the stages settle the answered call, then store it durably."""
        if call.sent.live.unsure:
            log.warning("call %s is not trained on: its tokens' policy version is not known", call.capture.id)
        status = CallStatus.ERROR if call.sent.live.unsure else answer.outcome
        if status is CallStatus.OK and call.sent.plan.media:
            status = CallStatus.MEDIA
        await self._line.settled(call, answer)
        await self._record(call, status)
        await self._line.kept(call, call.sent.ticket.appended)

    async def _deliver(self, call: Call, answer: Answer, watch: Watch, send: Send) -> None:
        """Send the last bytes of the answer. If the agent has hung up by then, it will ask again; so the stored call becomes
        aborted, or one answer would be trained twice."""
        if not call.started:
            length = (b"content-length", str(len(answer.body)).encode())
            head = [*answer.headers, length]
            await send({"type": "http.response.start", "status": answer.status, "headers": head})
        await send({"type": "http.response.body", "body": answer.body, "more_body": True})
        if watch.agent_is_gone:  # before the end is sent, since the end of an answer is noticed as a hang-up, too
            await self._take_back(call)
            return
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _take_back(self, call: Call) -> None:
        """Store as aborted a call that the store has, or may have, because its answer did not arrive. Raises nothing."""
        try:
            await self._recorder.take_back(call.sent.ticket)
        except StaleAttemptError as error:
            log.info("the answer to call %s did not arrive, and its attempt is over: %s", call.capture.id, error)
        except StoreError as error:
            log.warning(
                "the answer to call %s did not arrive, and the store could not record that: %s", call.capture.id, error
            )
        except Exception:
            log.exception("the gateway failed to record that the answer to call %s did not arrive", call.capture.id)

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
        """Store a refused call, as refused or as failed, and send the refusal to the agent."""
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
            await self._take_back(planned)  # the store has the call, or may have it

    async def _abandoned(self, call: Call | None) -> None:
        """Store a call whose agent has hung up: as aborted, or as unserved if no server was there to take it."""
        if call is None or not call.is_planned:
            return
        policy = call.policy
        if not call.sent.live.sent and (policy.gate.held or not policy.pool.healthy):
            await self._record_failure(call, CallStatus.ERROR, unserved=True)  # the agent gave up before the gateway
        else:
            await self._record_failure(call, CallStatus.ABORTED)

    async def _record_failure(
        self, call: Call | None, status: CallStatus, *, unserved: bool = False, why: RefusalError | None = None
    ) -> None:
        """Store a call that was sent but not answered; a failure to store it is only logged.

        With `unserved` the infrastructure is at fault, and the attempt is made again: no policy server got the call, or a stage
        failed on it. `why` is the failure or the refusal of a stage, which may come after the call was sampled.
        """
        if call is None or not call.is_planned or not (call.sent.live.sent or unserved or why is not None):
            return
        call.sent.live.unserved |= unserved
        if call.sent.ticket.appended:  # the call may be stored already: another row would be another call
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
            # The end of an attempt aborts its agent's calls: an interrupt, one for each agent.
            expected = status is CallStatus.ABORTED and isinstance(refusal.__cause__, StaleAttemptError)
            level = logging.INFO if expected else logging.WARNING
            log.log(level, "call %s (%s) was not recorded: %s", call.capture.id, status, refusal)
            return
        except Exception:
            log.exception("the gateway failed to record call %s", call.capture.id)
            return
        with contextlib.suppress(RefusalError):  # of a stage that failed, which is logged
            await self._line.kept(call, call.sent.ticket.appended)

    async def _record_refused(self, scope: Scope, claims: Claims, refusal: RefusalError) -> None:
        """Store a request that was refused before it was planned."""
        name = f"{self._dialect.id_prefix}{PROCESS}{next(NUMBERS):x}"
        await self._recorder.record_refused(claims, self._identity.caller(scope, None), name, refusal)

    async def _refuse(self, call: Call | None, send: Send, refusal: RefusalError) -> None:
        if call is not None and call.started and not call.is_planned:
            return  # a stage's own answer broke off: the connection closes before the end of the answer
        if call is not None and call.started:
            event = refusal.event if call.sent.translator is None else call.sent.translator.broken(refusal)
            await send({"type": "http.response.body", "body": event, "more_body": False})
        else:
            body, headers = self._dialect.refusal(refusal), (JSON_TYPE, *refusal.headers)
            await send_bytes(send, refusal.status, body, headers)


def _note_sampling(plan: Plan, capture: Capture) -> None:
    """Note the temperature, constraints, media and tools of a call, from the request that the policy server gets."""
    body = plan.body
    capture.offered = offered_tools(body)
    plan.temperature, plan.constrained, plan.media = temperature_of(body), is_constrained(body), has_media(body)


async def _draw_seed(call: Call, seed: int) -> int:
    """Return the seed of a call, derived from its run's `seed`. Raises `RefusalError` (503) if the store cannot number the
    call."""
    try:
        return call_seed(seed, call.claims, await call.sent.ticket.counter.first() + call.sent.ticket.offset)
    except StoreError as error:
        raise refuse_unstored(error) from error
