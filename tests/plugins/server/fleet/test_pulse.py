"""A gateway whose event loop is busy keeps its seat, and one that hangs loses it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest
from lightning.asyncio_utils import end
from lightning.gateway import Upstream
from lightning.plugins import plugins
from lightning.store.protocol import Store
from lightning_server.fleet import member as members
from lightning_server.fleet import owner as owners
from lightning_server.fleet import pulse
from lightning_server.fleet.member import Member
from lightning_server.fleet.owner import Owner
from lightning_server.fleet.pulse import Pulse
from lightning_server.fleet.records import Seat, from_json, seat_key

BEAT = 0.04


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second of the protocol takes `BEAT`."""
    for module in (members, owners, pulse):
        monkeypatch.setattr(module, "BEAT", BEAT)
    monkeypatch.setattr(members, "LAPSE", 4 * BEAT)
    monkeypatch.setattr(owners, "GONE", 5 * BEAT)


@pytest.fixture
async def store() -> AsyncIterator[Store]:
    async with plugins().opened_store("memory://") as made:
        await Owner(made, "run").open([Upstream("http://127.0.0.1:1", "tiny")], 0)
        yield made


@pytest.mark.parametrize(("still", "kept"), [(30.0, True), (6 * BEAT, False)])
async def test_a_busy_loop_keeps_its_seat_unless_it_hangs(
    store: Store, monkeypatch: pytest.MonkeyPatch, still: float, kept: bool
) -> None:
    monkeypatch.setattr(pulse, "STILL", still)
    member = Member(store, "run", 60.0)
    following = asyncio.create_task(member.follow())
    while not member.policy.told:
        await asyncio.sleep(0.001)
    with Pulse(member):
        await asyncio.sleep(3 * BEAT)
        seat = member._seat.id
        time.sleep(14 * BEAT)  # thousands of calls came at once
        member.check()
        assert member.seated is kept
        beside = from_json(Seat, await store.get_state("", seat_key("run", 0)))
        assert beside is not None
        assert beside.id == seat
        assert beside.beat < 0
        assert not member._seat.beat < 0, "the thread changes nothing of the member's own"
    await end(following)
    await member.leave()


async def test_a_loop_in_time_beats_by_itself(store: Store) -> None:
    member = Member(store, "run", 60.0)
    following = asyncio.create_task(member.follow())
    with Pulse(member):
        await asyncio.sleep(8 * BEAT)
    seat = from_json(Seat, await store.get_state("", seat_key("run", 0)))
    assert seat is not None
    assert seat.beat >= 3
    await end(following)
    await member.leave()
