"""`HttpStore`: the `Store` protocol over the control API of Lightning Servers.

The invariant: it promises what the store behind the servers promises, through whichever of them answers; errors are the same
classes with the same words. A request is sent until it is answered, and what must not be done twice is sent under an id.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Any, Final, TypeVar, cast

from lightning.errors import DataError, StoreError, UnavailableError
from lightning.store import json_codec, json_text, messages, rollout_state, rows
from lightning.store.http.long_poll import HttpWatch
from lightning.store.http.requests import PAGE, Asking, written
from lightning.store.http.transport import LEASE_ANSWER, OUTCOME_ANSWER, NotFoundError
from lightning.store.protocol import (
    LATEST,
    Alias,
    Attempt,
    MetricPoint,
    Page,
    ResourceUse,
    RolloutCount,
    RunWatch,
)
from lightning.types import (
    LLM,
    Json,
    Lease,
    Outcome,
    Resource,
    Rollout,
    Run,
    Span,
    Status,
    StepRecord,
    Token,
    Transition,
)

T = TypeVar("T")
BODY_BYTES: Final = 8 * 1024 * 1024
"""Longer lists are sent in several requests; what is one unit is sent in one."""

SHORTEST_ANSWER: Final = 3.0
"""Seconds a server is given at least: what it has leased after that waits until the lease expires."""


class HttpStore(Asking):
    """The store behind the servers at `urls` (any of them answers any request), opened with a scoped `token`.

    A path names a file with the token, which is read again when servers refuse what it had: tokens may expire and be renewed
    there. Without `token` it is the environment's `LIGHTNING_TOKEN`. When no server answers, requests are repeated with growing
    pauses for `patience` seconds, then raise `UnavailableError`. Raises `ConfigError` for settings that cannot be meant.
    """

    # runs -------------------------------------------------------------------------------------------------------
    async def put_run(self, run: Run) -> Run:
        """See `Store.put_run`."""
        return cast("Run", await self._ask("POST", ("runs",), Run, run))

    async def get_run(self, run: str) -> Run | None:
        """See `Store.get_run`."""
        return cast("Run | None", await self._find(("runs", run), Run))

    async def list_runs(
        self, project: str | None = None, *, after: str = "", limit: int | None = None, brief: bool = False
    ) -> list[Run]:
        """See `Store.list_runs`."""
        rollout_state.check_page(limit)
        return await self._all(("runs",), Run, after, limit, project=project, brief="true" if brief else None)

    def watch(self, run: str) -> AbstractAsyncContextManager[RunWatch]:
        """See `Store.watch`."""
        return HttpWatch(lambda since, timeout: self._changed(run, since, timeout))

    async def _changed(self, run: str, since: str, timeout: float) -> messages.Changed | None:
        """What a server says after `timeout` seconds at most; None when none could say it in that time."""
        query = {"run": run, "since": since, "timeout": timeout}
        try:
            changed = await self._ask(
                "GET", ("watch",), messages.Changed, query=query, waits=timeout, patience=timeout if since else None
            )
        except UnavailableError:
            if not since:
                raise
            return None
        return cast("messages.Changed", changed)

    # rollouts ---------------------------------------------------------------------------------------------------
    async def create_rollouts(self, rollouts: Sequence[Rollout]) -> int:
        """See `Store.create_rollouts`. More than `BODY_BYTES` of them are created in several requests: all or none of each."""
        total = 0
        for body in _bodies("rollouts", [_item(Rollout, one, rows.rollout_values) for one in rollouts]):
            total += (await self._send("POST", ("rollouts",), messages.Created, body)).created
        return total

    async def get_rollout(self, rollout: str) -> Rollout | None:
        """See `Store.get_rollout`."""
        return cast("Rollout | None", await self._find(("rollouts", rollout), Rollout))

    async def list_rollouts(
        self,
        run: str,
        *,
        split: str | None = None,
        step: int | None = None,
        status: Status | None = None,
        cursor: str = "",
        limit: int = 1000,
    ) -> Page:
        """See `Store.list_rollouts`."""
        found: list[Rollout] = []
        while True:
            query = {"split": split, "step": step, "status": status, "cursor": cursor}
            path = ("runs", run, "rollouts")
            page = await self._ask(
                "GET", path, json_codec.Slice[Rollout], query={**query, "limit": min(limit - len(found), PAGE)}
            )
            found += page.items
            cursor = page.cursor
            if not cursor or len(found) >= limit:
                return Page(tuple(found), cursor)

    async def count_rollouts(self, run: str) -> list[RolloutCount]:
        """See `Store.count_rollouts`."""
        found = await self._ask("GET", ("runs", run, "rollout_counts"), messages.RolloutCounts)
        return list(cast("messages.RolloutCounts", found).counts)

    async def lease(self, run: str, worker: str, *, limit: int = 1, ttl: float = 60.0, once: str = "") -> list[Lease]:
        """See `Store.lease`. What was not answered in time is asked for first when the worker leases again."""
        return [held.lease for held in (await self._lease(run, worker, limit, ttl, once)).leases]

    async def lease_for_agents(
        self, run: str, worker: str, *, limit: int = 1, ttl: float = 60.0
    ) -> tuple[list[tuple[Lease, LLM]], bool]:
        """`lease`, with what the agent of each lease needs to call the model, and whether the run is over. Raises `StoreError`
        when the server has no model for agents to call."""
        found = await self._lease(run, worker, limit, ttl, "")
        if any(one.llm is None for one in found.leases):
            raise StoreError(
                f"the server at {self._urls[0]} has no gateway: lease from one that `lightning serve` started"
            )
        return [(one.lease, cast("LLM", one.llm)) for one in found.leases], found.over

    async def _lease(self, run: str, worker: str, limit: int, ttl: float, once: str) -> messages.Leases:
        asked, name = messages.LeaseRequest(run, worker, limit, ttl), once or (_id() if limit else "")
        if not once and (earlier := self._unanswered.take(run, worker, limit)) is not None:
            asked, name = earlier
        how: dict[str, Any] = {"answer_seconds": _within(ttl), "once": name}
        try:
            return cast(
                "messages.Leases", await self._send("POST", ("leases",), messages.Leases, written(asked), **how)
            )
        except NotFoundError:  # a run that is not there yet has nothing to lease, as in every other store
            return messages.Leases(())
        except (UnavailableError, asyncio.CancelledError):
            self._unanswered.keep(asked, name)
            raise

    async def renew(self, lease: Lease, *, ttl: float = 60.0) -> Lease:
        """See `Store.renew`."""
        path = ("rollouts", lease.rollout.id, "attempts", str(lease.attempt), "renew")
        found = await self._ask(
            "POST", path, messages.Expiry, messages.Renewal(lease.worker, ttl), answer_seconds=_within(ttl)
        )
        return replace(lease, expires_at=found.expires_at)

    async def complete(self, rollout: str, attempt: int, outcome: Outcome, *, spend: bool = True) -> Rollout:
        """See `Store.complete`. The server judges the outcome by the calls that were recorded before it keeps it, and decides
        by them whether the attempt is spent, whatever `spend` says."""
        path = ("rollouts", rollout, "attempts", str(attempt), "complete")
        body = messages.Completion(outcome)
        return cast("Rollout", await self._ask("POST", path, Rollout, body, answer_seconds=OUTCOME_ANSWER))

    async def release(self, worker: str, *, once: str = "") -> int:
        """See `Store.release`."""
        path, body = ("leases", "release"), messages.Release(worker)
        how = {"answer_seconds": LEASE_ANSWER, "once": once or _id()}
        found = await self._ask("POST", path, messages.Released, body, **how)
        self._unanswered.forget(worker)
        return cast("int", found.released)

    # transitions ------------------------------------------------------------------------------------------------
    async def append(self, transitions: Sequence[Transition]) -> int:
        """See `Store.append`. More than `BODY_BYTES` of them are stored in several requests."""
        codec, total = json_codec.codec_of(Transition, sparse=True), 0
        for body in _bodies("transitions", [json_codec.write(codec.encode(item)) for item in transitions]):
            total += (await self._send("POST", ("transitions",), messages.Appended, body)).appended
        return total

    async def next_seq(self, rollout: str, attempt: int) -> int:
        """See `Store.next_seq`."""
        path = ("rollouts", rollout, "attempts", str(attempt), "next_seq")
        return cast("int", (await self._ask("GET", path, messages.NextSeq)).seq)

    async def transitions(self, rollout: str, attempt: int | None = None) -> list[Transition]:
        """See `Store.transitions`."""
        return await self._all(("rollouts", rollout, "transitions"), Transition, attempt=attempt)

    async def transitions_of(self, attempts: Sequence[tuple[str, int]]) -> list[list[Transition]]:
        """See `Store.transitions_of`."""
        found: list[list[Transition]] = []
        while len(found) < len(attempts):
            asked = messages.Attempts(tuple(attempts[len(found) : len(found) + PAGE]))
            some = await self._ask("POST", ("transitions", "read"), messages.TransitionsOf, asked)
            if not some.transitions:
                raise StoreError(f"the server at {self._urls[0]} gave no calls of {attempts[len(found)]}: update it")
            found += [list(calls) for calls in some.transitions]
        return found

    async def attempts_of(self, attempts: Sequence[tuple[str, int | None]]) -> list[Attempt]:
        """See `Store.attempts_of`."""
        found: list[Attempt] = []
        while len(found) < len(attempts):
            asked = messages.AnyAttempts(tuple(attempts[len(found) : len(found) + PAGE]))
            some = await self._ask("POST", ("attempts", "read"), messages.AttemptsOf, asked)
            if not some.attempts:
                raise StoreError(f"the server at {self._urls[0]} gave nothing of {attempts[len(found)]}: update it")
            found += some.attempts
        return found

    # spans ------------------------------------------------------------------------------------------------------
    async def append_spans(self, spans: Sequence[Span]) -> int:
        """See `Store.append_spans`."""
        total = 0
        for body in _bodies("spans", [_item(Span, span, rows.SPANS.values) for span in spans]):
            total += (await self._send("POST", ("spans",), messages.Stored, body)).stored
        return total

    async def spans(self, rollout: str, attempt: int | None = None) -> list[Span]:
        """See `Store.spans`."""
        return await self._all(("rollouts", rollout, "spans"), Span, attempt=attempt)

    # steps, metrics, small state --------------------------------------------------------------------------------
    async def commit_step(self, record: StepRecord) -> None:
        """See `Store.commit_step`."""
        await self._ask("POST", ("steps",), StepRecord, record)

    async def steps(
        self, run: str, *, after: int = -1, limit: int | None = None, brief: bool = False
    ) -> list[StepRecord]:
        """See `Store.steps`."""
        rollout_state.check_page(limit)
        cursor = str(after) if after >= 0 else ""
        return await self._all(("runs", run, "steps"), StepRecord, cursor, limit, brief="true" if brief else None)

    async def last_step(self, run: str) -> StepRecord | None:
        """See `Store.last_step`."""
        found = await self._ask("GET", ("runs", run, "steps"), json_codec.Slice[StepRecord], query={"last": "true"})
        return cast("StepRecord", found.items[0]) if found.items else None

    async def log_metrics(self, run: str, step: int, values: Mapping[str, float], *, once: str = "") -> None:
        """See `Store.log_metrics`."""
        body = messages.Metrics(step, values)
        await self._ask("POST", ("runs", run, "metrics"), messages.Metrics, body, once=once or _id())

    async def metrics(self, run: str) -> list[MetricPoint]:
        """See `Store.metrics`."""
        return await self._all(("runs", run, "metrics"), MetricPoint)

    async def put_state(self, run: str, key: str, value: Json, *, once: str | None = "") -> None:
        """See `Store.put_state`. Raises `StoreError` for a secret of the servers."""
        body, name = _state(key, value), _id() if once == "" else once or ""
        await self._ask("PUT", ("state", key), messages.StateValue, body, query={"run": run}, once=name)

    async def keep_state(self, run: str, key: str, value: Json) -> Json:
        """See `Store.keep_state`. Raises `StoreError` for a secret of the servers."""
        path = ("state", key, "keep")
        found = await self._ask("POST", path, messages.StateValue, _state(key, value), query={"run": run})
        return cast("messages.StateValue", found).value

    async def get_state(self, run: str, key: str) -> Json:
        """See `Store.get_state`. A secret of the servers is not there."""
        found = await self._ask("GET", ("state", key), messages.StateValue, query={"run": run})
        return cast("messages.StateValue", found).value

    # tokens -----------------------------------------------------------------------------------------------------
    async def put_token(self, token: Token, *, once: str = "") -> Token:
        """See `Store.put_token`."""
        return cast("Token", await self._ask("POST", ("tokens",), Token, token, once=once or _id()))

    async def get_token(self, token: str) -> Token | None:
        """See `Store.get_token`."""
        return cast("Token | None", await self._find(("tokens", token), Token))

    async def list_tokens(self) -> list[Token]:
        """See `Store.list_tokens`."""
        return await self._all(("tokens",), Token)

    async def revoke_token(self, token: str) -> Token:
        """See `Store.revoke_token`."""
        return cast("Token", await self._ask("DELETE", ("tokens", token), Token))

    # resources --------------------------------------------------------------------------------------------------
    async def put_resource(self, resource: Resource) -> Resource:
        """See `Store.put_resource`."""
        return cast("Resource", await self._ask("POST", ("resources",), Resource, resource))

    async def get_resource(self, name: str, which: int | str = LATEST) -> Resource | None:
        """See `Store.get_resource`."""
        return cast("Resource | None", await self._find(("resources", name, "versions", str(which)), Resource))

    async def list_resources(self, name: str | None = None) -> list[Resource]:
        """See `Store.list_resources`."""
        return await self._all(("resources",), Resource, name=name)

    async def set_alias(self, name: str, alias: str, version: int, *, once: str = "") -> Alias:
        """See `Store.set_alias`."""
        path = ("resources", name, "aliases", alias)
        return cast("Alias", await self._ask("PUT", path, Alias, messages.Target(version), once=once or _id()))

    async def roll_back_alias(self, name: str, alias: str, *, once: str = "") -> Alias:
        """See `Store.roll_back_alias`."""
        path = ("resources", name, "aliases", alias, "rollback")
        return cast("Alias", await self._ask("POST", path, Alias, once=once or _id()))

    async def list_aliases(self, name: str | None = None) -> list[Alias]:
        """See `Store.list_aliases`."""
        return await self._all(("aliases",), Alias, name=name)

    async def alias_history(self, name: str, alias: str) -> list[Alias]:
        """See `Store.alias_history`."""
        return await self._all(("resources", name, "aliases", alias, "history"), Alias)

    async def resource_uses(self, name: str) -> list[ResourceUse]:
        """See `Store.resource_uses`."""
        return await self._all(("resources", name, "uses"), ResourceUse)


def _id() -> str:
    """For a call that its caller has not named: its answer may get lost on the way all the same."""
    return uuid.uuid4().hex


def _within(ttl: float) -> float:
    """Seconds a server has to answer about a lease of `ttl` seconds: a few servers may be asked before it is over."""
    return min(max(ttl / 6, SHORTEST_ANSWER), LEASE_ANSWER)


def _state(key: str, value: Json) -> messages.StateValue:
    json_text.dump(value, f"the state {key!r}")
    return messages.StateValue(value)


def _item(cls: type[T], value: T, check: Callable[[T], object]) -> bytes:
    """A noun as JSON. Where it has none, `check` says what is wrong with it better than JSON can."""
    try:
        return json_codec.write(json_codec.codec_of(cls, sparse=True).encode(value))
    except DataError:
        check(value)
        raise


def _bodies(field: str, items: Sequence[bytes]) -> Iterator[bytes]:
    """`{field: [items]}`, in bodies of `BODY_BYTES` at most; an item that is longer comes alone."""
    start = size = 0
    for end, item in enumerate(items):
        if end > start and size + len(item) > BODY_BYTES:
            yield _body(field, items[start:end])
            start, size = end, 0
        size += len(item) + 1
    yield _body(field, items[start:])


def _body(field: str, items: Sequence[bytes]) -> bytes:
    return b'{"' + field.encode() + b'":[' + b",".join(items) + b"]}"
