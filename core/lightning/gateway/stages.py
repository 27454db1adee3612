"""Where plugins stand in the line of a call: the points, their order, and what happens when a stage fails.

The invariant: stages fail closed. A call on which a stage fails is not answered, its record names the plugin, and its attempt
is made again as after any fault of the infrastructure; so is an attempt on whose outcome a stage fails. No stage is left out
silently. The order of two stages that stand at the same point is said by one of them, or by `gateway.stage_order`; it never
depends on what was installed first.

    admitted   the agent's request, unchanged: answer it, refuse it, say whose it is
    reading    the request is about to be made the policy server's: keep what is needed of it
    sending    the policy server's request: change it
    settled    the answer is read and its tokens' versions are known: refuse it, add extras
    kept       the call is durable: remember it
    ended      an attempt has ended: change its outcome before that is stored, or void it

and before there is an attempt:

    planned    a rollout is about to be made that begins as another one did: refuse what cannot be
"""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Final, TypeAlias

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lightning.config.sections import GatewayConfig
from lightning.errors import DataError, GatewayError, StoreError
from lightning.gateway.call import Answer, Call, Request, refuse_unstored
from lightning.gateway.http import Body, ClientGoneError, RefusalError, UpstreamError
from lightning.gateway.identity import NO_RETRY, Claims
from lightning.plugins import stages as named
from lightning.plugins.stages import StageError
from lightning.store.rollout_state import ending
from lightning.store.rows import check_extra
from lightning.types import Fault, Json, Outcome, Rollout, Transition

if TYPE_CHECKING:
    from lightning.gateway.calls import Parts

log = logging.getLogger(__name__)

API: Final = 1
"""The number of this file's contract. A minor release raises it when a stage that was written for it would not do any more what
it did, and the change log says what to change in a stage."""
FAILED: Final = "stage_failed"
"""The code of the refusal of a call on which a stage failed."""
POINTS: Final = ("admitted", "sending", "settled", "kept")
"""Those that are awaited."""
KEYS: Final = {"branch": "a branch", "session": "many conversations"}
"""What a key may be of besides an attempt, by the field of `Claims` that says so, for people."""
NO_STAGE: Final = "no_stage"
"""The code of the refusal of a key that no stage answers."""
FIXED: Final = ("n", "stream", "logprobs", "top_logprobs", "return_token_ids", "echo")
"""Fields of the policy server's request that the call was numbered and is read by."""

PassOn = Callable[[bytes, Scope, Receive, Send], Awaitable[None]]
"""Answers a request whose body has been read."""


class ChangedFieldError(Exception):
    """A stage changed what the call was numbered by."""


class CallStage(named.Stage):
    """A plugin's place in the line of calls. One is made for each gateway; it overrides the methods of the points where it
    stands.

    `api` is the number of the contract that it was written for (`lightning.gateway.stages.API`). `before` and `after` name the
    stages that it stands before and after, whether or not these are there. What it has to remember of a call it keeps in a
    `weakref.WeakKeyDictionary`; what it opens, it pushes on `Parts.closing`. `answers` says for which keys, besides
    those of an attempt, it knows what their calls are: `branch`, `session`. A gateway without such a stage refuses these keys.
    With `only_for`, some of the same words, it stands in the calls of such keys alone: other calls pass it by.
    `carries_out` names the settings of the gateway that it carries out: a gateway without such a stage says that they do
    nothing.

    Each method may raise `RefusalError`: the agent gets that answer. With a status of 400 to 499 the call is recorded as
    refused, with any other as one that failed by the infrastructure's fault, with all that was sampled. A `StoreError` is
    answered as the store's failure. Anything else that it raises is a failure of the plugin.
    """

    answers: ClassVar[Collection[str]] = ()
    only_for: ClassVar[Collection[str]] = ()

    async def admitted(self, call: Call, request: Request) -> ASGIApp | None:
        """The key is good and the body has been read. The answer, an ASGI application (such as Starlette's `JSONResponse`),
        ends the call; nothing is recorded. None goes on."""

    def reading(self, call: Call, request: Request) -> None:
        """The call will be sent. Read what the agent has sent, and change nothing: of a large request this is done in a thread,
        together with what the gateway itself does with it."""

    async def sending(self, call: Call, body: Body) -> None:
        """The call is about to be sent: change the policy server's `body` in place."""

    async def settled(self, call: Call, answer: Answer) -> None:
        """The call is about to be stored: as it was answered, or, with a `status` of 0, as it broke off; it may break off after
        it was settled as answered. The agent has not got the end of the answer; of a stream that is not withheld it has the
        rest."""

    async def kept(self, call: Call, transitions: Sequence[Transition]) -> None:
        """The store has the call: one transition for each choice. The agent has not got the end of the answer."""

    async def ended(self, rollout: Rollout, outcome: Outcome, calls: Sequence[Transition]) -> Outcome:
        """The attempt `rollout.attempt` has ended: what is stored in place of its outcome, which was judged by its `calls`. A
        void one has no reward and a fault. Asked again when the outcome is told again. It raises `StoreError` for the store's
        failure: the outcome is told again then. For anything else that it raises the attempt failed by the infrastructure's
        fault."""
        return outcome

    async def planned(self, rollout: Rollout) -> None:
        """A trainer's own loop is about to make this rollout and others that begin as its `parent` did. Raises `DataError`
        where they cannot."""

    def told(self, rollout: Rollout) -> Json:
        """What the plugin's stage of the same name around attempts is told of an attempt at this rollout, in `LLM.extras`; None
        for nothing. A runner without such a stage does not make an attempt that it is told of."""

    def elsewhere(self, route: str, model: object) -> PassOn | None:
        """Who answers a route below `/v1` in the policy's place, for this model (None: not known yet); None for nobody."""


NamedStage: TypeAlias = named.NamedStage[CallStage]
CONTRACT: Final = named.Contract(
    kind=CallStage,
    asked="call_stages",
    api=API,
    points=(*POINTS, "reading", "ended", "elsewhere", "planned", "told"),
    ordered=(*POINTS, "reading", "ended", "elsewhere"),
    setting="gateway.stage_order",
    settings=GatewayConfig.model_fields,
    error=GatewayError,
    of="calls",
    where="gateway",
)


class Line(named.StageLine[CallStage]):
    """The stages of a gateway in their order. `order` is `gateway.stage_order`. Raises `GatewayError` where that order is not
    said, and for a stage that was written for another contract."""

    contract = CONTRACT

    def __init__(self, stages: Sequence[NamedStage], order: Sequence[str] = ()) -> None:
        super().__init__(stages, order)
        for each in self.stages:
            _check_keys(each)
        self._standing = {
            point: [(each, getattr(each.stage, point)) for each in self.at(point)] for point in (*POINTS, "reading")
        }
        self._ended, self._elsewhere = self.at("ended"), self.at("elsewhere")

    def why_not(self, kind: str) -> str:
        """Why keys of a kind (`CallStage.answers`) are not answered here; empty where a stage is there for them."""
        if any(kind in each.stage.answers for each in self.stages):
            return ""
        return (
            f"no stage of this gateway answers the calls of {KEYS[kind]}: its stages are {', '.join(self.versions) or 'none'}. "
            "Start it with the plugin that brings such a stage: install the plugin, or take it out of LIGHTNING_DISABLE_PLUGINS"
        )

    async def planned(self, rollout: Rollout) -> None:
        """See `CallStage.planned`. Raises `DataError` also where no stage answers branches, `StageError` for one that fails."""
        if rollout.parent is not None and (why := self.why_not("branch")):
            raise DataError(f"the rollout {rollout.parent[0]} cannot be branched: {why}")
        for each in self.at("planned"):
            with CONTRACT.blaming(each, "planned", f"the rollout {rollout.id}"):
                await each.stage.planned(rollout)

    def told(self, rollout: Rollout) -> dict[str, Json]:
        """See `CallStage.told`: by the names of the stages that say something. Raises `StageError`."""
        said: dict[str, Json] = {}
        for each in self.stages:
            try:
                word = each.stage.told(rollout)
                json.dumps(word, allow_nan=False)
            except Exception as error:
                raise StageError(each.failure("told", error, f"the rollout {rollout.id}")) from error
            if word is not None:
                said[each.name] = word
        return said

    def named(self, name: str) -> CallStage | None:
        """The stage of this name, if it stands in the line."""
        return next((each.stage for each in self.stages if each.name == name), None)

    async def admitted(self, call: Call, request: Request) -> ASGIApp | None:
        """The answer of the first stage that has one; None for a call that is sent. Raises `RefusalError`, also for a key that
        no stage answers."""
        for kind in KEYS:
            if getattr(call.claims, kind) and (why := self.why_not(kind)):
                raise RefusalError(501, NO_STAGE, f"This key is of {KEYS[kind]}, and {why}.", [NO_RETRY])
        return await self._ask("admitted", call, request)

    def reading(self, call: Call, request: Request) -> None:
        """See `CallStage.reading`."""
        for each, read in self._of(call, "reading"):
            _StageReader(each, call, partial(read, call), "reading")(request)

    async def sending(self, call: Call, body: Body) -> None:
        """See `CallStage.sending`."""
        fixed = [body.get(name) for name in FIXED]

        def check() -> None:
            if [body.get(name) for name in FIXED] != fixed:
                changed = ", ".join(name for name, was in zip(FIXED, fixed, strict=True) if body.get(name) != was)
                raise ChangedFieldError(f"it changed {changed}, by which the answer is read")

        await self._ask("sending", call, body, check)

    async def settled(self, call: Call, answer: Answer) -> None:
        """See `CallStage.settled`."""
        await self._ask("settled", call, answer)
        for name, why in _not_storable(call):
            call.stopped_by = name
            log.error("a call of %s is not answered: %s", call.claims.rollout, why)
            raise RefusalError(500, FAILED, f"The call is not answered: {why}.") from why

    async def kept(self, call: Call, transitions: Sequence[Transition]) -> None:
        """See `CallStage.kept`."""
        await self._ask("kept", call, transitions)

    async def _ask(
        self, point: str, call: Call, given: object, check: Callable[[], None] | None = None
    ) -> ASGIApp | None:
        """Ask the stages that stand at a point, one after the other, at `admitted` until one has an answer of its own. `check`
        raises what a stage has done wrong."""
        for each, method in self._of(call, point):
            try:
                answer = await method(call, given)
                if check:
                    check()
            except RefusalError:
                call.stopped_by = each.name
                raise
            except Exception as error:
                if point == "settled" and isinstance(error, UpstreamError):
                    raise  # what was read is not shaped like an answer
                raise _failed(each, point, call, error) from error
            if answer is not None and point == "admitted":
                return partial(_answer, each, answer, call)
            if call.readers:
                call.readers[:] = [
                    reader if isinstance(reader, _StageReader) else _StageReader(each, call, reader)
                    for reader in call.readers
                ]
        return None

    def _of(self, call: Call, point: str) -> Iterator[tuple[NamedStage, Callable[..., Awaitable[ASGIApp | None]]]]:
        """The stages that stand at a point of this call, in their order, with their methods."""
        for each, method in self._standing[point]:
            kinds = each.stage.only_for
            if not kinds or any(getattr(call.claims, kind) for kind in kinds):
                yield each, method

    async def ended(self, rollout: Rollout, outcome: Outcome, calls: Sequence[Transition]) -> Outcome:
        """See `CallStage.ended`. Raises `StoreError`."""
        for each in self._ended:
            try:
                said = await each.stage.ended(rollout, outcome, calls)
                if not isinstance(said, Outcome):
                    raise TypeError(f"it returned {said!r}, which is no Outcome")
                if said is not outcome:
                    ending(rollout.id, said)  # as the store will take it
            except StoreError:
                raise
            except Exception as error:
                log.exception("the stage %s failed on the outcome of %s (ended)", each.said, rollout.id)
                return replace(
                    outcome,
                    reward=None,
                    rewards={},
                    fault=Fault.INFRASTRUCTURE,
                    error=each.failure("ended", error, "this outcome"),
                )
            outcome = said
        return outcome

    async def broken_off(self, call: Call, answer: Answer) -> None:
        """Ask all stages but the one that stopped the call to settle it. It gets no answer, and is stored whatever they say."""
        call.extras.clear()  # those of an answer that nobody gets
        for each, method in self._of(call, "settled"):
            if each.name != call.stopped_by:
                try:
                    await method(call, answer)
                except Exception:
                    log.exception("call %s broke off and is stored without the stage %s", call.capture.id, each.said)
        for _, error in _not_storable(call):
            log.warning("call %s broke off and is stored without some extras: %s", call.capture.id, error)

    def elsewhere(self, route: str, model: object = None, *, rollout: str = "") -> PassOn | None:
        """The first that answers a route in the policy's place, for an agent of this rollout. It raises `RefusalError`, and so
        does what it returns, for a stage that fails."""
        for each in self._elsewhere:
            with _failing_closed(each, "elsewhere", rollout):
                found = each.stage.elsewhere(route, model)
            if found is not None:
                return partial(_pass_on, each, found, rollout)
        return None


NO_LINE: Final = Line(())


@dataclass(frozen=True, slots=True)
class _StageReader:
    """Reads a request or a stream for a stage."""

    stage: NamedStage
    call: Call
    read: Callable[[Any], object]
    point: str = "a reader"

    def __call__(self, said: object) -> None:
        try:
            self.read(said)
        except UpstreamError:  # the chunk is not shaped like one
            raise
        except RefusalError:
            self.call.stopped_by = self.stage.name
            raise
        except Exception as error:
            raise _failed(self.stage, self.point, self.call, error) from error


def _not_storable(call: Call) -> Iterator[tuple[str, DataError]]:
    """Take out the extras that no store takes, each with the reason."""
    for name, kept in [*call.extras.items()]:
        try:
            check_extra(name, kept, f"the extras of call {call.capture.id}")
        except DataError as error:
            del call.extras[name]
            yield name, error


async def _answer(stage: NamedStage, app: ASGIApp, call: Call, scope: Scope, receive: Receive, send: Send) -> None:
    """Have a stage's own answer sent. Raises `RefusalError` where that fails."""

    async def passed(message: Message) -> None:
        call.started = call.started or message["type"] == "http.response.start"
        await send(message)

    with _failing_closed(stage, "admitted", call):
        await app(scope, receive, passed)


async def _pass_on(
    stage: NamedStage, pass_on: PassOn, rollout: str, payload: bytes, scope: Scope, receive: Receive, send: Send
) -> None:
    """Have a stage answer a route in the policy's place. Raises `RefusalError` where that fails."""
    with _failing_closed(stage, "elsewhere", rollout):
        await pass_on(payload, scope, receive, send)


@asynccontextmanager
async def recording_refusals(parts: Parts, claims: Claims, scope: Scope, send: Send) -> AsyncIterator[Send]:
    """Around the answer to what is no call, which `Line.elsewhere` may give: the `send` that the answer is sent by.

    What an agent asks for in the block and does not get is recorded as a refused call, a stage's failure as the
    infrastructure's, so that the attempt is made again. Raises the `RefusalError`, or, where the answer has begun,
    `ClientGoneError`: then the connection ends without the answer's end.
    """
    started = False

    async def passed(message: Message) -> None:
        nonlocal started
        started = True
        await send(message)

    try:
        yield passed
    except RefusalError as refusal:
        if refusal.code == FAILED or (scope["method"] == "POST" and refusal.status < 500):
            caller, name = parts.identity.caller(scope, None), f"route-{secrets.token_hex(12)}"
            await parts.recorder.record_refused(claims, caller, name, refusal)
        if started:
            raise ClientGoneError from refusal
        raise


@contextmanager
def _failing_closed(stage: NamedStage, point: str, asked: Call | str) -> Iterator[None]:
    """What a stage raises in the block is its failure, but for a refusal of its own and an agent that has hung up."""
    try:
        yield
    except (RefusalError, ClientGoneError):
        raise
    except ClientDisconnect as error:  # Starlette's word for it
        raise ClientGoneError from error
    except Exception as error:
        raise _failed(stage, point, asked, error) from error


def _failed(stage: NamedStage, point: str, asked: Call | str, error: Exception) -> RefusalError:
    """The refusal of a call on which a stage failed (500), which names the stage; of one that the store failed (503). `asked`:
    the call, or the rollout of a request that is no call."""
    rollout = asked if isinstance(asked, str) else asked.claims.rollout
    if not isinstance(asked, str):
        asked.stopped_by = stage.name
    if isinstance(error, StoreError):
        return refuse_unstored(error)
    log.error("the stage %s failed on a call of %s (%s)", stage.said, rollout, point, exc_info=error)
    told = str(error) if isinstance(error, ChangedFieldError) else type(error).__name__  # others may quote credentials
    message = (
        f"The stage {stage.said} failed on this call ({point}: {told}), so that it is not answered. The gateway's log has the "
        f"reason. Mend the plugin, or start without it: {stage.off}"
    )
    return RefusalError(500, FAILED, message)


def _check_keys(each: NamedStage) -> None:
    """Raise `GatewayError` for a stage that names keys which there are none of, and for one that would not be asked in the
    calls of keys that it answers."""
    for field in ("answers", "only_for"):
        if isinstance(kinds := getattr(each.stage, field), str):
            raise GatewayError(
                f"`{field}` of the stage {each.said} is a text: make it a tuple of names, as in ('texts',)"
            )
        if unknown := ", ".join(kind for kind in kinds if kind not in KEYS):
            raise GatewayError(
                f"`{field}` of the stage {each.said} names keys that there are none of: {unknown}. There are {', '.join(KEYS)}"
            )
    if each.stage.only_for and (never := ", ".join(set(each.stage.answers) - set(each.stage.only_for))):
        raise GatewayError(
            f"the stage {each.said} answers the keys of {never}, and its `only_for` keeps it out of their calls"
        )
