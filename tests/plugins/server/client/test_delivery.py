"""Telling an outcome: what may pass is waited for, and less is told only of what stays refused."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any, cast

import pytest
from lightning.errors import DataError, SchemaError, StoreError, UnavailableError
from lightning.types import Fault, Lease, Outcome, Rollout, Status, Task, ToolEvent
from lightning_server.client import client as delivery
from lightning_server.client.client import ServerDelivery
from lightning_server.http_store.transport import PageError, TooLongError

ROLLOUT = Rollout("rollout", "run", Task(1), "group", attempt=1)
LEASE = Lease(ROLLOUT, "worker", 0.0)
EVENT = ToolEvent("search", "ok", arguments={"query": "all"}, output="found")
OUTCOME = Outcome(reward=1.0, tool_events=(EVENT,))
LESS = [OUTCOME, Outcome(reward=1.0, tool_events=(replace(EVENT, arguments=None),)), Outcome(reward=1.0)]
PAGE = PageError("http://proxy answered 404 to POST /complete, and not as a Lightning Server does")
FAULT = StoreError("The server failed at this request, and it is not known why")


class Servers:
    """What the delivery asks of a store: it refuses as it is made to, then takes what comes; `told` has it all, `at` when.

    With `everywhere` a page stands in the place of every other answer too.
    """

    def __init__(self, *refusals: Exception, but_faults: Exception | None = None, everywhere: bool = False) -> None:
        self._refusals, self._but_faults, self._everywhere = list(refusals), but_faults, everywhere
        self.told: list[Outcome] = []
        self.at: list[float] = []

    async def version(self) -> None:
        if self._everywhere:
            raise PAGE

    async def complete(self, rollout: str, attempt: int, outcome: Outcome) -> Rollout:
        self.told.append(outcome)
        self.at.append(time.monotonic())
        if self._refusals:
            raise self._refusals.pop(0)
        if self._but_faults is not None and outcome.fault is None:
            raise self._but_faults
        status = Status.SUCCEEDED if outcome.fault is None else Status.FAILED
        return replace(ROLLOUT, status=status, reward=outcome.reward, fault=outcome.fault, error=outcome.error)


def telling(store: Servers, ttl: float) -> ServerDelivery:
    return ServerDelivery(cast("Any", store), cast("Any", None), cast("Any", None), "worker", ttl)


@pytest.mark.parametrize(
    "refusals",
    [
        [PAGE] * 4,
        [FAULT] * 3,
        [SchemaError("the database is newer than this server")] * 3,
        [PAGE, UnavailableError("no server answered"), PAGE, UnavailableError("no server answered")],
    ],
    ids=lambda refusals: str(refusals[0])[:30] + str(len(refusals)),
)
async def test_a_refusal_that_passes_costs_nothing_of_the_outcome(
    refusals: list[Exception], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(delivery, "FIRST_PAUSE", 0.001)
    servers = Servers(*refusals)
    tells = telling(servers, 60.0)
    rollout = await tells.report(LEASE, OUTCOME)
    assert rollout is not None
    assert servers.told == [OUTCOME] * (len(refusals) + 1)
    assert (tells.tally.succeeded, tells.tally.lost) == (1, 0)
    assert caplog.text.count("its outcome is refused, and told again for 60 s") == 1


async def test_a_page_in_the_place_of_every_answer_is_waited_for_however_long_it_lasts(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("FIRST_PAUSE", "LONGEST_PAUSE"):
        monkeypatch.setattr(delivery, name, 0.001)
    servers = Servers(*[PAGE] * 20, everywhere=True)
    tells = telling(servers, 0.001)
    rollout = await tells.report(LEASE, OUTCOME)
    assert rollout is not None
    assert servers.told == [OUTCOME] * 21
    assert (tells.tally.succeeded, tells.tally.lost) == (1, 0)
    assert "refused" not in caplog.text
    assert caplog.text.count("Agents that run go on") == 1


@pytest.mark.parametrize("refusal", [PAGE, FAULT], ids=["a proxy at the outcome alone", "a server"])
async def test_what_is_refused_for_as_long_as_a_lease_lasts_is_told_with_less_in_it(
    refusal: StoreError, monkeypatch: pytest.MonkeyPatch
) -> None:
    ttl = 0.04
    for name in ("FIRST_PAUSE", "LONGEST_PAUSE"):
        monkeypatch.setattr(delivery, name, 0.01)
    servers = Servers(but_faults=refusal)
    rollout = await telling(servers, ttl).report(LEASE, OUTCOME)
    assert rollout is not None
    assert rollout.fault is Fault.INFRASTRUCTURE
    assert rollout.error == f"servers refused the outcome, also without what its tools did: {refusal}"
    for told in LESS:
        at = [when for one, when in zip(servers.told, servers.at, strict=True) if one == told]
        assert len(at) >= 5
        assert at[-1] - at[0] >= ttl * 0.99
    assert [one for one in servers.told if one.fault is None] == sorted(servers.told[:-1], key=LESS.index)


async def test_what_no_server_takes_for_as_long_is_lost() -> None:
    servers = Servers(*[PAGE] * 8)
    tells = telling(servers, 0.001)
    assert await tells.report(LEASE, OUTCOME) is None
    assert tells.tally.lost == 1
    assert len(servers.told) == 8, "twice each of three outcomes and the fault"


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (TooLongError("raise the proxy's limit"), ["too long, of ", "raise the proxy's limit", "report less"]),
        (DataError("the reward is no number"), ["servers refused the outcome", "the reward is no number"]),
    ],
    ids=["too long", "not to be kept"],
)
async def test_a_refusal_of_the_outcome_itself_is_no_reason_to_wait(error: Exception, words: list[str]) -> None:
    servers = Servers(but_faults=error)
    rollout = await telling(servers, 60.0).report(LEASE, OUTCOME)
    assert rollout is not None
    assert servers.told[:-1] == LESS
    assert all(word in rollout.error for word in words)
    assert isinstance(error, TooLongError) or "bytes" not in rollout.error
