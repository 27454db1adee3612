"""`POST /v1/feedback`: rate an answer of a served model, which completes the rollout of its conversation with a reward.

The invariant: a conversation is rated once, by the holder of the session's key or by an admin of its project. Anybody else gets
the same error as for an unknown answer. An agent in training cannot rate itself, because its key belongs to an attempt.
"""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING

import orjson
from lightning.errors import StaleAttemptError, StoreError
from lightning.gateway.http import (
    JSON_TYPE,
    Body,
    ClientGoneError,
    RefusalError,
    beside,
    read_body,
    read_object,
    send_bytes,
)
from lightning.gateway.identity import bearer
from lightning.redaction import redacted
from lightning.runner.attempt_completion import check_labels, with_rejections
from lightning.types import Json, Outcome, Rollout
from starlette.types import Receive, Scope, Send

from lightning_record.conversations import rollout_of_answer

if TYPE_CHECKING:
    from lightning.gateway.calls import Parts

FIELDS = frozenset({"response_id", "reward", "note"})
LONGEST_NOTE = 4096
"""Most characters of a note."""
OF_CONVERSATION = (
    "a call can be rejected by a later call of its conversation only, and a call that names no conversation is one of its own: "
    "send the header X-Lightning-Conversation with each call"
)
"""The cure for a rejection of a call that is not in the rated conversation."""
ADMIN_TOKEN = "lt_"  # noqa: S105 — how the tokens of people begin, none itself


def feedback_key(rollout: str) -> str:
    """Return the key in the run's state under which the feedback about a conversation is kept."""
    return f"feedback/{rollout}"


class FeedbackEndpoint:
    """The ASGI app of the route. Admins' tokens are accepted only if a server can check them (`Parts.admin_of`)."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._config, self._identity, self._store = parts.config, parts.identity, parts.store

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        try:
            may_rate = await self._holder(scope)
            payload = await read_body(scope, receive, self._config.max_body_bytes)
            response, said = _read(await beside(scope, partial(read_object, payload)))
            rollout = await self._rate(response, said, may_rate)
            answer = {"response_id": response, "rollout": rollout.id, "reward": rollout.reward}
            await send_bytes(send, 200, orjson.dumps(answer))
        except RefusalError as refusal:
            await send_bytes(send, refusal.status, refusal.body, (JSON_TYPE, *refusal.headers))
        except StoreError as error:
            message = f"The store did not take the feedback: {error}. Send it again."
            await send_bytes(send, 503, RefusalError(503, "store_failed", message).body)
        except ClientGoneError:
            return

    async def _holder(self, scope: Scope) -> Callable[[Rollout], Awaitable[bool]]:
        """Return a function that says whether the sender may rate a rollout. Raises `RefusalError` (401, 403)."""
        authorization = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        admin_of = self._parts.admin_of
        if admin_of is not None and bearer(authorization).startswith(ADMIN_TOKEN):
            project = await admin_of(authorization.decode("latin-1"))

            async def of_project(rollout: Rollout) -> bool:
                run = await self._store.get_run(rollout.run)
                return run is not None and project in ("*", run.project)

            return of_project
        session = self._identity.claims(scope).session
        if not session:
            message = (
                "This key is of an attempt of a rollout, whose reward its agent returns. Feedback takes the key that "
                "`lightning serve` gave, or an admin's token."
            )
            raise RefusalError(403, "feedback_not_allowed", message)

        async def of_session(rollout: Rollout) -> bool:
            return rollout.run == session

        return of_session

    async def _rate(
        self, response: str, said: dict[str, Json], may_rate: Callable[[Rollout], Awaitable[bool]]
    ) -> Rollout:
        """Complete the conversation of a response with its reward. The first feedback stays; the same feedback again gets the
        same answer. Raises `RefusalError` (404 for an unknown response, 409 for other feedback or an ended conversation)."""
        name = rollout_of_answer(response)
        rollout = None if name is None else await self._store.get_rollout(name)
        if rollout is None or not await may_rate(rollout) or not await self._has(rollout, response):
            message = (
                "There is no such response of yours. `response_id` is the `id` of an answer (its `x-request-id` header, too) "
                "that was made with this key; feedback for another key's answers takes an admin's token of their project."
            )
            raise RefusalError(404, "response_not_found", message, param="response_id")
        kept = await self._store.keep_state(rollout.run, feedback_key(rollout.id), {**said, "at": time.time()})
        first = dict(kept) if isinstance(kept, dict) else {}
        if any(first.get(key) != value for key, value in said.items()):
            message = (
                f"The conversation of this response has its feedback already (reward {first.get('reward')}, for response "
                f"{first.get('response_id')}), and the first one stays. Send the same again for the same answer."
            )
            raise RefusalError(409, "already_rated", message)
        try:
            calls = await self._store.transitions(rollout.id, rollout.attempt)
            outcome = with_rejections(Outcome(reward=float(str(said["reward"]))), calls)
            check_labels(rollout, outcome, calls, OF_CONVERSATION)
            outcome = await self._parts.line.ended(rollout, outcome, calls)
            return await self._store.complete(rollout.id, rollout.attempt, outcome)
        except StaleAttemptError as error:
            message = f"The conversation of this response is over without feedback: {error}."
            raise RefusalError(409, "conversation_over", message) from error

    async def _has(self, rollout: Rollout, response: str) -> bool:
        return any(call.id == response for call in await self._store.transitions(rollout.id))


def _read(body: Body) -> tuple[str, dict[str, Json]]:
    """Read the response's id and the feedback about it. Raises `RefusalError` (400) that names the wrong field."""
    if unknown := sorted(body.keys() - FIELDS):
        raise _bad(unknown[0], f"Feedback has no field {unknown[0]!r}: it has response_id, reward and note.")
    response, reward, note = body.get("response_id"), body.get("reward"), body.get("note") or ""
    if not isinstance(response, str) or not response:
        raise _bad("response_id", "Give the `id` of the answer as response_id.")
    if isinstance(reward, bool) or not isinstance(reward, (int, float)) or not _is_finite(reward):
        raise _bad("reward", f"The reward is a finite number, such as 1 or 0.5, not {reward!r:.100}.")
    if not isinstance(note, str) or len(note) > LONGEST_NOTE:
        raise _bad("note", f"A note is a text of at most {LONGEST_NOTE} characters.")
    return response, {"response_id": response, "reward": float(reward), "note": redacted(note, "feedback.note")}


def _is_finite(number: float) -> bool:
    try:
        return math.isfinite(number)
    except OverflowError:  # an integer beyond floats
        return False


def _bad(field: str, message: str) -> RefusalError:
    return RefusalError(400, "invalid_feedback", message, param=field)
