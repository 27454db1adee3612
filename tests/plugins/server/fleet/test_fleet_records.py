"""Many gateways, one policy: whatever dies, stalls or is late, no token is recorded under a version that did not sample it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from lightning.errors import ConflictError
from lightning.gateway.upstream.servers import GRACE, Upstream
from lightning_db.queries import empty_seats
from lightning_server.fleet.records import (
    BEAT,
    GONE,
    LAPSE,
    Notice,
    Seat,
    Stance,
    from_json,
    notice_key,
    seat_key,
    to_json,
)

from tests.plugins.server.fleet.fleet_world import RUN, Call, Gateway, World

HOLD = 12.0
"""Seconds, `gateway.hold_timeout` in this world; a server is waited for no longer."""


def prune(world: World) -> None:
    """As `lightning db prune` does."""
    values = world.state.values
    for name in empty_seats({name: json.dumps(value) for name, value in values.items()}, {RUN}):
        del values[name]


class Fleet(RuleBasedStateMachine):
    """Gateways come and go, calls are made all the time, and a trainer updates, fails, dies and comes back."""

    @initialize(seed=st.integers(0, 2**32), gateways=st.integers(1, 3))
    def begin(self, seed: int, gateways: int) -> None:
        self.world = World(seed)
        self.world.start_trainer()
        for _ in range(gateways):
            self.add_gateway()
        self.world.advance(0.5)

    def teardown(self) -> None:
        if hasattr(self, "world"):
            try:
                self.settle_down()
            finally:
                self.world.close()

    def settle_down(self) -> None:
        """Whatever was broken is mended: every call comes to its end in bounded time."""
        world = self.world
        for gateway in world.gateways:
            gateway.line.broken = False
        if world.owner is None:
            world.start_trainer()
        world.advance(2 * HOLD + 30)
        for call in world.calls:
            assert call.ended is not None
            waited = (call.dispatched if call.dispatched is not None else call.ended) - call.started
            assert waited <= 2 * HOLD + 1, "nobody is held for longer than the bound"

    @invariant()
    def every_clean_token_has_its_version(self) -> None:
        for call in self.world.calls if hasattr(self, "world") else ():
            if call.clean:
                assert call.believed == call.truth

    @rule(seconds=st.floats(0.01, 8.0))
    def time_passes(self, seconds: float) -> None:
        self.world.advance(seconds)

    @precondition(lambda self: len(self.world.gateways) < 5)
    @rule()
    def add_gateway(self) -> None:
        self.world.gateways.append(Gateway(self.world, HOLD))

    @rule(data=st.data(), count=st.integers(1, 4), length=st.integers(1, 25), streamed=st.booleans())
    def ask(self, data: st.DataObject, count: int, length: int, streamed: bool) -> None:
        gateway = data.draw(st.sampled_from(self.world.gateways))
        for _ in range(count):
            self.world.spawn(gateway.call(length, streamed=streamed))

    @rule(data=st.data(), seconds=st.floats(0.5, 9.0))
    def a_gateways_connection_stalls(self, data: st.DataObject, seconds: float) -> None:
        gateway = data.draw(st.sampled_from(self.world.gateways))
        gateway.line.stalled_until = self.world.loop.time() + seconds

    @rule(data=st.data(), broken=st.booleans())
    def a_gateways_connection_breaks_or_is_mended(self, data: st.DataObject, broken: bool) -> None:
        data.draw(st.sampled_from(self.world.gateways)).line.broken = broken

    @rule(fails=st.booleans())
    def update(self, fails: bool) -> None:
        self.world.start_update(fails=fails)

    @precondition(lambda self: self.world.trainer is not None)
    @rule(seconds=st.floats(0.5, 12.0))
    def the_trainer_stalls(self, seconds: float) -> None:
        self.world.trainer.stalled_until = self.world.loop.time() + seconds

    @rule()
    def the_trainer_dies(self) -> None:
        self.world.kill_trainer()

    @rule()
    def somebody_prunes(self) -> None:
        prune(self.world)

    @precondition(lambda self: self.world.owner is None)
    @rule()
    def a_trainer_begins(self) -> None:
        self.world.start_trainer()


Fleet.TestCase.settings = settings(stateful_step_count=25)
TestFleet = pytest.mark.slow(Fleet.TestCase)


# some of its paths, one at a time -----------------------------------------------------------------------------------
@pytest.fixture
def world() -> Iterator[World]:
    made = World(1, slow=0.0)
    made.start_trainer()
    made.gateways.append(Gateway(made, 600.0))
    made.advance(1.0)
    yield made
    made.close()


def ask(world: World, length: int = 40) -> asyncio.Task[Call]:
    """A call in flight."""
    asking = world.spawn(world.gateways[0].call(length, streamed=True))
    world.advance(1.0)
    return asking


def until_ended(world: World, asking: asyncio.Task[Call]) -> Call:
    return world.run(asyncio.wait_for(asking, 1000))


def test_a_call_in_flight_is_split_where_the_servers_stood(world: World) -> None:
    asking = ask(world)
    world.start_update()
    call = until_ended(world, asking)
    assert call.clean
    assert call.believed == call.truth
    assert set(call.truth) == {0, 1}


def test_an_update_that_failed_leaves_the_version_it_was(world: World) -> None:
    asking = ask(world)
    world.start_update(fails=True)
    call = until_ended(world, asking)
    assert call.clean
    assert set(call.believed) == set(call.truth) == {0}


def test_a_gateway_that_stands_still_for_long_is_out_and_its_calls_are_not_trained_on(world: World) -> None:
    asking = ask(world)
    world.gateways[0].line.stalled_until = world.loop.time() + 30
    world.start_update()
    world.advance(10)
    assert world.updating is not None
    assert world.updating.done(), "an update waits for a gateway that is gone no longer than it may be alive"
    assert world.owner is not None
    assert world.owner.others == 0
    assert not until_ended(world, asking).clean
    later = until_ended(world, ask(world, 3))
    assert (later.clean, later.believed) == (True, [1, 1, 1]), "it takes another seat"


def test_a_clock_that_went_on_while_the_process_did_not_is_noticed_before_the_record(world: World) -> None:
    """The machine slept: no timer has fired, and the answer is there at once."""
    gateway = world.gateways[0]
    gateway.member._valid_until = world.loop.time() + 1000
    asking = ask(world, 3)
    gateway.member._valid_until = world.loop.time()
    assert not until_ended(world, asking).clean


def test_calls_are_told_when_the_trainer_dies_in_an_update(world: World) -> None:
    """The hold would last for ten minutes; the trainer is missed after seconds, its server as long as any server is."""
    in_flight = ask(world)
    world.start_update()
    while not world.server.paused:
        world.advance(0.05)
    world.kill_trainer()
    began = world.loop.time()
    waiting = until_ended(world, world.spawn(world.gateways[0].call(3, streamed=False)))
    assert waiting.refused == "no_policy_server"
    assert world.loop.time() - began < GONE + 2 * BEAT + GRACE + 1
    world.start_trainer()
    assert not until_ended(world, in_flight).clean, "what was in flight may have tokens of either version"
    assert until_ended(world, ask(world, 3)).clean


def test_a_gateway_that_has_left_is_not_waited_for(world: World) -> None:
    world.start_update()
    world.advance(4)
    world.run(world.gateways[0].member.leave())
    asked = world.loop.time()
    world.start_update()
    assert world.updating is not None
    world.run(asyncio.wait_for(world.updating, 1000))
    assert world.loop.time() - asked < 4


def test_who_comes_late_for_a_seat_that_was_pruned_takes_another(world: World) -> None:
    """It read the notice before the seat was gone, and takes it when it is not there any more."""
    world.run(world.gateways[0].member.leave())
    world.start_update()
    world.advance(5)
    current = world.state.values[notice_key(RUN)]
    assert isinstance(current, dict)
    assert current["first"] == 1
    prune(world)
    assert seat_key(RUN, 0) not in world.state.values
    world.state.values[notice_key(RUN)] = {**current, "first": 0}
    world.gateways.insert(0, Gateway(world, 600.0))
    while seat_key(RUN, 0) not in world.state.values:
        world.advance(0.001)
    world.state.values[notice_key(RUN)] = current
    assert until_ended(world, ask(world, 3)).clean
    assert seat_key(RUN, 2) in world.state.values
    world.start_update()
    world.advance(5)
    assert world.owner is not None
    assert world.owner.others == 2
    assert until_ended(world, ask(world, 3)).believed == [2, 2, 2]


def test_what_is_written_is_read() -> None:
    notice = Notice("o", 3, Stance.HELD, 7, 2, (Upstream("http://a:1", "m"),), {"x": 4}, (0, 2), 1, 5, (4,))
    assert from_json(Notice, json.loads(json.dumps(to_json(notice)))) == notice
    seat = Seat("g", 9, 3, ("x", "1_y"), True)
    assert from_json(Seat, json.loads(json.dumps(to_json(seat)))) == seat


def test_a_gateway_takes_itself_for_out_before_others_do() -> None:
    assert BEAT < LAPSE < GONE


def test_a_second_trainer_is_told(world: World) -> None:
    first = world.owner
    world.start_trainer()
    world.advance(1.0)
    assert first is not None

    async def hold() -> None:
        async with first.hold():
            raise AssertionError("it must not come to that")

    with pytest.raises(ConflictError, match="another trainer has taken over"):
        world.run(hold())
