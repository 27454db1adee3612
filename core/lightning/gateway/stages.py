"""The points of a call where stages of plugins are asked, the order of stages, and what happens when a stage fails.

The invariant: stages fail closed. If a stage fails on a call, the call is not answered, its record names the plugin, and its
attempt is made again, as after any fault of the infrastructure. The same holds if a stage fails on an attempt's outcome. No
stage is left out silently. The order of two stages at the same point is given by one of them, or by `gateway.stage_order`; it
never depends on what was installed first.

    admitted   the agent's request has come, unchanged: answer it, refuse it, say to which attempt it belongs
    reading    the request is about to be translated for the policy server: keep parts of it
    sending    the policy server's request is made: change it
    settled    the answer is read and the versions of its tokens are known: refuse it, add extras
    kept       the call is stored: remember it
    ended      an attempt has ended: change its outcome before it is stored, or void it

and before there is an attempt, or at its beginning:

    planned    a rollout that branches another one is about to be made: refuse it
    placed     the key of an attempt is about to be issued: choose which of several policy servers gets its calls

and after it, before `ended`:

    over       an attempt has ended, with whatever outcome: let go of it

and for the list of models:

    models     somebody asks which models there are: say the names that a call may ask for
"""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Final, TypeAlias

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lightning.errors import DataError, GatewayError, StoreError
from lightning.gateway.call import Answer, Call, Request, refuse_unstored
from lightning.gateway.http import Body, ClientGoneError, RefusalError, UpstreamError
from lightning.gateway.identity import MODEL, NO_RETRY, Claims
from lightning.plugins import stages as named
from lightning.plugins.stages import StageError
from lightning.store.rollout_state import ending
from lightning.store.rows import check_extra
from lightning.types import Fault, Json, Outcome, Rollout, Transition

if TYPE_CHECKING:
    from lightning.gateway.calls import Parts
    from lightning.gateway.upstream import Slot

log = logging.getLogger(__name__)

API: Final = 1
"""The version of the contract between a gateway and its stages. A minor release raises it when a stage written for the old
version would behave differently, and the change log says what to change in a stage."""
FAILED: Final = "stage_failed"
"""The error code of a call on which a stage failed."""
POINTS: Final = ("admitted", "sending", "settled", "kept")
"""The points whose methods are awaited during a call."""
KEYS: Final = {"branch": "a branch", "session": "many conversations"}
"""The kinds of keys besides those of a plain attempt: the name for people by the field of `Claims`."""
NO_STAGE: Final = "no_stage"
"""The error code of a key whose calls no stage answers."""
FIXED: Final = ("n", "stream", "logprobs", "top_logprobs", "return_token_ids", "echo")
"""The fields of the policy server's request that a stage must not change: the call's numbers and the reading of its answer
depend on them."""

PassOn = Callable[[bytes, Scope, Receive, Send], Awaitable[None]]
"""Answers a request whose body has been read."""


class ChangedFieldError(Exception):
    """A stage changed one of the `FIXED` fields."""


class CallStage(named.Stage):
    """A plugin's stage in the calls of a gateway. Each gateway makes its own. A subclass overrides the methods of the points
    where it is to be asked.

    `api` is the version of the contract for which it was written (`lightning.gateway.stages.API`). `before` and `after` name
    the stages that it stands before and after, installed or not. Keep data of a call in a `weakref.WeakKeyDictionary`, and push
    whatever you open on `Parts.closing`. `answers` names the kinds of keys, `branch` or `session`, whose calls the stage
    answers; a gateway without such a stage refuses these keys. With `only_for`, the stage is asked only in calls of these kinds
    of keys.

    Each method may raise `RefusalError`, which the agent gets as the answer. With a status of 400 to 499 the call is stored as
    refused; with any other status as failed by the infrastructure, with its sampled tokens. A `StoreError` is answered as a
    failure of the store. Any other exception is a failure of the plugin.
    """

    answers: ClassVar[Collection[str]] = ()
    only_for: ClassVar[Collection[str]] = ()

    async def models(self, claims: Claims) -> Mapping[str, str] | None:
        """Return the model names that a request with this key may ask for, each with the name of the policy that answers; None
        if the stage chooses no policies for it. The gateway's list of models has these names."""

    async def admitted(self, call: Call, request: Request) -> ASGIApp | None:
        """Look at a call whose key is valid and whose body was read. Return None to go on. An ASGI application (such as
        Starlette's `JSONResponse`) answers the call, and nothing is stored."""

    def reading(self, call: Call, request: Request) -> None:
        """Read the request of a call that will be sent, and change nothing. For a large request this runs in a thread, together
        with the gateway's own translation."""

    async def sending(self, call: Call, body: Body) -> None:
        """Change the policy server's `body` in place, before the call is sent."""

    async def settled(self, call: Call, answer: Answer) -> None:
        """Look at a call before it is stored: as answered, or as broken off, with `answer.status` 0. A call may break off after
        it was settled as answered. The agent has not got the end of the answer; it has the rest of a stream that is not
        withheld."""

    async def kept(self, call: Call, transitions: Sequence[Transition]) -> None:
        """Look at a call after it was stored, with one transition for each choice. The agent has not got the end of the
        answer."""

    async def ended(self, rollout: Rollout, outcome: Outcome, calls: Sequence[Transition]) -> Outcome:
        """Return the outcome to store for the attempt `rollout.attempt`, which has ended with `outcome` and these `calls`. An
        outcome without a reward and with a fault voids the attempt. It is asked again if the outcome is reported again, which
        happens after a `StoreError`. After any other exception the attempt has failed by the infrastructure's fault."""
        return outcome

    async def planned(self, rollout: Rollout) -> None:
        """Check a rollout that a trainer's own loop is about to make, with others of the same `parent`. Raises `DataError` if
        they cannot begin as the parent did."""

    def told(self, rollout: Rollout) -> Json:
        """Return data for the plugin's stage of the same name around attempts, which gets it in `LLM.extras` for attempts at
        this rollout; None for no data. A runner without that stage does not make an attempt for which there is data."""

    def placed(self, rollout: Rollout, servers: Sequence[Slot]) -> int | None:
        """Choose the policy server for the calls of the attempt `rollout.attempt`, which is about to begin: return the `number`
        of one of these `servers`; None leaves the choice to others. While the chosen server is not healthy, the calls go to
        another."""

    def over(self, rollout: Rollout) -> None:
        """Let go of the attempt `rollout.attempt`, which has ended. An error is logged and changes nothing. Of an attempt whose
        outcome is reported elsewhere, or never, the stage is not told."""

    def elsewhere(self, route: str, model: object) -> PassOn | None:
        """Return a function that answers a route below `/v1` in place of the policy; None if the stage does not answer it.
        `model` is the model of the request, None if it is not known yet."""


NamedStage: TypeAlias = named.NamedStage[CallStage]
CONTRACT: Final = named.Contract(
    kind=CallStage,
    asked="call_stages",
    api=API,
    points=(*POINTS, "reading", "ended", "elsewhere", "models", "planned", "placed", "over", "told"),
    ordered=(*POINTS, "reading", "ended", "elsewhere", "models", "placed"),
    setting="gateway.stage_order",
    error=GatewayError,
    of="calls",
    where="gateway",
    names=dict.fromkeys(("answers", "only_for"), ("keys", KEYS)),
)


class Line(named.StageLine[CallStage]):
    """The stages of a gateway in their order. `order` is `gateway.stage_order`. Raises `GatewayError` for two stages without an
    order, and for a stage that was written for another contract."""

    contract = CONTRACT

    def __init__(self, stages: Sequence[NamedStage], order: Sequence[str] = ()) -> None:
        super().__init__(stages, order)
        for each in self.stages:
            _check_keys(each)
        self._standing = {
            point: [(each, getattr(each.stage, point)) for each in self.at(point)] for point in (*POINTS, "reading")
        }
        self._ended, self._elsewhere, self.places = self.at("ended"), self.at("elsewhere"), self.at("placed")

    def why_not(self, kind: str) -> str:
        """Return why no stage answers the calls of a kind of keys (`CallStage.answers`); empty if a stage does."""
        if any(kind in each.stage.answers for each in self.stages):
            return ""
        return (
            f"no stage of this gateway answers the calls of {KEYS[kind]}: its stages are {', '.join(self.versions) or 'none'}. "
            "Start it with the plugin that brings such a stage: install the plugin, or take it out of LIGHTNING_DISABLE_PLUGINS"
        )

    async def planned(self, rollout: Rollout) -> None:
        """Let the stages check a rollout before it is made (`CallStage.planned`). Raises `DataError` for a rollout that cannot
        be made, also if no stage answers branches, and `StageError` for a stage that fails."""
        if rollout.parent is not None and (why := self.why_not("branch")):
            raise DataError(f"the rollout {rollout.parent[0]} cannot be branched: {why}")
        for each in self.at("planned"):
            with CONTRACT.blaming(each, "planned", f"the rollout {rollout.id}"):
                await each.stage.planned(rollout)

    def told(self, rollout: Rollout) -> dict[str, Json]:
        """Return the data of the stages for attempts at a rollout (`CallStage.told`), by the stages' names. Raises `StageError`
        for a stage that fails."""
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

    def placed(self, rollout: Rollout, servers: Sequence[Slot]) -> int | None:
        """Return the number of the server that the first of the stages with a choice has chosen (`CallStage.placed`); None if
        none has. Raises `StageError` for a stage that fails."""
        for each in self.places:
            with CONTRACT.blaming(each, "placed", f"the rollout {rollout.id}"):
                number = each.stage.placed(rollout, servers)
            if number is not None:
                return number
        return None

    def named(self, name: str) -> CallStage | None:
        """Return the stage with this name; None if there is none."""
        return next((each.stage for each in self.stages if each.name == name), None)

    async def models(self, claims: Claims) -> Mapping[str, str]:
        """Return the model names of the first stage that has some for a key, with their policies (`CallStage.models`); else the
        name that agents use, with no policy. Raises `RefusalError` for a stage that fails."""
        for each in self.at("models"):
            with _failing_closed(each, "models", claims.rollout):
                found = await each.stage.models(claims)
            if found is not None:
                return found
        return {MODEL: ""}

    async def admitted(self, call: Call, request: Request) -> ASGIApp | None:
        """Return the answer of the first stage that has one (`CallStage.admitted`); None for a call to send. Raises
        `RefusalError`, also for a key whose calls no stage answers."""
        for kind in KEYS:
            if getattr(call.claims, kind) and (why := self.why_not(kind)):
                raise RefusalError(501, NO_STAGE, f"This key is of {KEYS[kind]}, and {why}.", [NO_RETRY])
        return await self._ask("admitted", call, request)

    def reading(self, call: Call, request: Request) -> None:
        """Let the stages read the request of a call (`CallStage.reading`). Raises `RefusalError`."""
        for each, read in self._of(call, "reading"):
            _StageReader(each, call, partial(read, call), "reading")(request)

    async def sending(self, call: Call, body: Body) -> None:
        """Let the stages change the policy server's request (`CallStage.sending`). Raises `RefusalError`, also for a stage that
        changes one of the `FIXED` fields."""
        fixed = [body.get(name) for name in FIXED]

        def check() -> None:
            if [body.get(name) for name in FIXED] != fixed:
                changed = ", ".join(name for name, was in zip(FIXED, fixed, strict=True) if body.get(name) != was)
                raise ChangedFieldError(f"it changed {changed}, by which the answer is read")

        await self._ask("sending", call, body, check)

    async def settled(self, call: Call, answer: Answer) -> None:
        """Let the stages settle a call (`CallStage.settled`). Raises `RefusalError`, also for extras that no store takes."""
        await self._ask("settled", call, answer)
        for name, why in _not_storable(call):
            call.stopped_by = name
            log.error("a call of %s is not answered: %s", call.claims.rollout, why)
            raise RefusalError(500, FAILED, f"The call is not answered: {why}.") from why

    async def kept(self, call: Call, transitions: Sequence[Transition]) -> None:
        """Tell the stages of a stored call (`CallStage.kept`). Raises `RefusalError`."""
        await self._ask("kept", call, transitions)

    async def _ask(
        self, point: str, call: Call, given: object, check: Callable[[], None] | None = None
    ) -> ASGIApp | None:
        """Ask the stages at a point, one after the other; at `admitted` until one has an answer, which is returned. `check` is
        called after each stage and raises an error for a forbidden change. Raises `RefusalError`."""
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
                    raise  # the answer does not have the shape of vLLM's
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
        """Yield the stages that are asked at a point of this call, in their order, with their methods."""
        for each, method in self._standing[point]:
            kinds = each.stage.only_for
            if not kinds or any(getattr(call.claims, kind) for kind in kinds):
                yield each, method

    async def ended(self, rollout: Rollout, outcome: Outcome, calls: Sequence[Transition]) -> Outcome:
        """Return the outcome of an attempt as the stages change it (`CallStage.ended`). If a stage fails, the attempt has
        failed by the infrastructure's fault. Raises `StoreError`."""
        for each in self.at("over"):
            try:
                each.stage.over(rollout)
            except Exception:
                log.exception("the stage %s failed on the end of %s (over)", each.said, rollout.id)
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
        """Let all stages but the one that stopped the call settle a call that broke off. It is stored even if a stage fails."""
        call.extras.clear()  # they belong to an answer that the agent does not get
        for each, method in self._of(call, "settled"):
            if each.name != call.stopped_by:
                try:
                    await method(call, answer)
                except Exception:
                    log.exception("call %s broke off and is stored without the stage %s", call.capture.id, each.said)
        for _, error in _not_storable(call):
            log.warning("call %s broke off and is stored without some extras: %s", call.capture.id, error)

    def elsewhere(self, route: str, model: object = None, *, rollout: str = "") -> PassOn | None:
        """Return the function of the first stage that answers a route in place of the policy (`CallStage.elsewhere`); None if
        no stage does. `rollout` is the agent's, for the log. Both this method and the function raise `RefusalError` for a stage
        that fails."""
        for each in self._elsewhere:
            with _failing_closed(each, "elsewhere", rollout):
                found = each.stage.elsewhere(route, model)
            if found is not None:
                return partial(_pass_on, each, found, rollout)
        return None


NO_LINE: Final = Line(())


@dataclass(frozen=True, slots=True)
class _StageReader:
    """Lets a stage read a request or a chunk of a stream. Raises `RefusalError` for a stage that fails."""

    stage: NamedStage
    call: Call
    read: Callable[[Any], object]
    point: str = "a reader"

    def __call__(self, said: object) -> None:
        try:
            self.read(said)
        except UpstreamError:  # the chunk does not have the shape of vLLM's
            raise
        except RefusalError:
            self.call.stopped_by = self.stage.name
            raise
        except Exception as error:
            raise _failed(self.stage, self.point, self.call, error) from error


def _not_storable(call: Call) -> Iterator[tuple[str, DataError]]:
    """Remove the extras of a call that no store takes; yield the plugin's name and the reason of each."""
    choices = call.capture.choices.values() if call.is_planned else ()
    for extras in (call.extras, *(choice.extras for choice in choices)):
        for name, kept in [*extras.items()]:
            try:
                check_extra(name, kept, f"the extras of call {call.capture.id}")
            except DataError as error:
                del extras[name]
                yield name, error


async def _answer(stage: NamedStage, app: ASGIApp, call: Call, scope: Scope, receive: Receive, send: Send) -> None:
    """Send a stage's own answer to a call. Raises `RefusalError` if the stage fails."""

    async def passed(message: Message) -> None:
        call.started = call.started or message["type"] == "http.response.start"
        await send(message)

    with _failing_closed(stage, "admitted", call):
        await app(scope, receive, passed)


async def _pass_on(
    stage: NamedStage, pass_on: PassOn, rollout: str, payload: bytes, scope: Scope, receive: Receive, send: Send
) -> None:
    """Let a stage answer a route in place of the policy. Raises `RefusalError` if the stage fails."""
    with _failing_closed(stage, "elsewhere", rollout):
        await pass_on(payload, scope, receive, send)


@asynccontextmanager
async def recording_refusals(parts: Parts, claims: Claims, scope: Scope, send: Send) -> AsyncIterator[Send]:
    """A context for answering a request that is no call of the policy. It gives the `send` for the answer.

    A `RefusalError` in the block is stored as a refused call, or, for a stage that failed, as a failure of the infrastructure,
    after which the attempt is made again. Raises the `RefusalError`; if the answer has begun, raises `ClientGoneError`, so that
    the connection closes before the end of the answer.
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
    """Turn an exception of the block into the stage's failure, a `RefusalError`. A `RefusalError` is raised as it is; an agent
    that has hung up raises `ClientGoneError`."""
    try:
        yield
    except (RefusalError, ClientGoneError):
        raise
    except ClientDisconnect as error:  # Starlette's word for it
        raise ClientGoneError from error
    except Exception as error:
        raise _failed(stage, point, asked, error) from error


def _failed(stage: NamedStage, point: str, asked: Call | str, error: Exception) -> RefusalError:
    """Return the refusal of a call on which a stage failed: 500 with the stage's name, or 503 for a `StoreError`. `asked` is
    the call, or the rollout's id for a request that is no call."""
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
    """Raise `GatewayError` for a stage whose `only_for` leaves out keys that it answers."""
    if each.stage.only_for and (never := ", ".join(set(each.stage.answers) - set(each.stage.only_for))):
        raise GatewayError(
            f"the stage {each.said} answers the keys of {never}, and its `only_for` keeps it out of their calls"
        )
