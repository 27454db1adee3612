"""The simulated loop, where the answer is known: by hand, and by what has to hold whatever happens."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning_planner.costs import Agent, Call, Costs, GatewayCosts, Schedule, ServerCosts, Sharing, Team, TrainerCosts
from lightning_planner.simulation import Kernel, Server, Simulated, simulate

ONE = Schedule(tasks_per_step=1, group_size=1, concurrency=1, steps=3)
SERVER = ServerCosts(token=0.1)
TRAINER = TrainerCosts(step=2.0, row_token=0.01, checkpoint=0.5, update=0.25)


def agent(*calls: tuple[float, float, int], rows: int = 100) -> Agent:
    """A rollout of calls one after the other: (wait, work, response tokens)."""
    made = (Call(place - 1, wait, work, 10, 10, tokens) for place, (wait, work, tokens) in enumerate(calls))
    return Agent(tuple(made), rows)


def forever(*agents: Agent, teaches: bool = True) -> Iterator[Team]:
    return itertools.repeat(Team(agents, teaches))


def only_step(simulated: Simulated) -> float:
    """The seconds that every step took alike."""
    assert all(step.total == pytest.approx(simulated.steps[0].total) for step in simulated.steps)
    return simulated.steps[0].total


def test_one_rollout_at_a_time_is_a_sum() -> None:
    server = replace(SERVER, token_per_call=0.02, request=0.3, prompt_token=0.05, latency=0.7)
    simulated = simulate(ONE, Costs(server, TRAINER), forever(agent((1.0, 2.0, 5), (3.0, 0.0, 10))))
    rollout = (1.0 + 2.0) + (3.0) + 2 * (0.3 + 10 * 0.05 + 0.7) + 15 * (0.1 + 0.02)
    train = 2.0 + 100 * 0.01
    assert simulated.steps[0].rollout == pytest.approx(rollout)
    assert only_step(simulated) == pytest.approx(rollout + train + 0.5 + 0.25)
    assert simulated.steps[0].staleness_max == 0
    assert simulated.trainer_busy == pytest.approx((train + 0.75) / (rollout + train + 0.75))
    assert simulated.server_busy == pytest.approx((15 * 0.12 + 2 * 0.8) / (rollout + train + 0.75))


def test_with_places_for_all_a_step_waits_for_the_slowest() -> None:
    slow, fast = agent((9.0, 0.0, 10)), agent((1.0, 0.0, 10))
    schedule = replace(ONE, tasks_per_step=5, group_size=2, concurrency=64)
    simulated = simulate(schedule, Costs(SERVER, TRAINER), forever(fast, slow))
    assert simulated.steps[1].rollout == pytest.approx(9.0 + 1.0)
    few = simulate(replace(schedule, concurrency=1), Costs(SERVER, TRAINER), forever(fast, slow))
    assert few.steps[1].rollout == pytest.approx(5 * (9.0 + 1.0 + 1.0 + 1.0))


def test_what_is_shared_takes_its_time_from_all() -> None:
    schedule = replace(ONE, group_size=8, concurrency=8)
    costs = Costs(ServerCosts(token=0.0, token_per_call=0.01), TRAINER, Sharing(agents=2.0))
    simulated = simulate(schedule, costs, forever(*[agent((0.0, 1.0, 10))] * 8))
    assert simulated.steps[0].rollout == pytest.approx(8 * 1.0 / 2.0 + 10 * 0.01 * 8)
    assert simulated.batch == pytest.approx(8.0)


def test_prompts_hold_up_what_is_being_decoded() -> None:
    first, later = agent((0.0, 0.0, 10)), agent((0.5, 0.0, 10))
    costs = Costs(replace(SERVER, prompt_token=0.1), TRAINER)
    simulated = simulate(replace(ONE, group_size=2, concurrency=2), costs, forever(first, later))
    # The first prompt takes 1 s; the second comes meanwhile and takes another. Then both decode together.
    assert simulated.steps[0].rollout == pytest.approx(1.0 + 1.0 + 1.0)


@pytest.mark.parametrize("limit", [{"kv_tokens": 39}, {"max_calls": 1}])
def test_calls_that_the_server_has_no_room_for_wait_in_line(limit: dict[str, float]) -> None:
    costs = Costs(replace(SERVER, **limit), TRAINER)
    simulated = simulate(replace(ONE, group_size=4, concurrency=4), costs, forever(*[agent((0.0, 0.0, 10))] * 4))
    assert simulated.steps[0].rollout == pytest.approx(4.0)


def test_a_call_larger_than_the_cache_goes_alone() -> None:
    costs = Costs(replace(SERVER, kv_tokens=5), TRAINER)
    assert simulate(ONE, costs, forever(agent((0.0, 0.0, 10)))).steps[0].rollout == pytest.approx(1.0)


def test_several_servers_share_the_rollouts() -> None:
    costs = Costs(replace(SERVER, token=0.0, token_per_call=0.01), TRAINER)
    schedule = replace(ONE, group_size=8, concurrency=8)
    one, four = (
        simulate(schedule, replace(costs, servers=servers), forever(*[agent((0.0, 0.0, 10))] * 8)) for servers in (1, 4)
    )
    assert (one.steps[1].rollout, four.steps[1].rollout) == (pytest.approx(0.8), pytest.approx(0.2))
    assert (one.batch, four.batch) == (pytest.approx(8.0), pytest.approx(2.0))
    assert four.server_busy == pytest.approx(0.2 / only_step(four))


@pytest.mark.parametrize(("bound", "held"), [(0, 2.0), (2, 6.0)])
def test_servers_are_loaded_at_once_or_one_after_another(bound: int, held: float) -> None:
    trainer = TrainerCosts(step=1.0, row_token=0.0, update=3.0, export=1.0)
    costs = Costs(SERVER, trainer, servers=3)
    simulated = simulate(replace(ONE, max_staleness=bound, steps=2), costs, forever(agent((0.0, 0.0, 10))))
    assert simulated.steps[1].update == pytest.approx(1.0 + held)


def test_a_conversation_that_the_cache_has_displaced_is_computed_again() -> None:
    """Each rollout calls twice, with 10 tokens of context and 10 new ones, and 50 s in between."""
    calls = (Call(-1, 0.0, 0.0, 10, 10, 10), Call(0, 50.0, 0.0, 20, 1, 10))
    costs, schedule = Costs(replace(SERVER, prompt_token=1.0), TRAINER), replace(ONE, group_size=2, concurrency=2)
    found = {
        room: simulate(
            schedule, replace(costs, server=replace(costs.server, kv_tokens=room)), forever(*[Agent(calls, 1)] * 2)
        )
        for room in (30.0, 100.0, math.inf)
    }
    assert (found[math.inf].again, found[100.0].again) == (0.0, 0.0)
    assert found[30.0].again == pytest.approx(2 * 19 / (2 * 30)), "all of both second prompts but the new token"
    assert found[30.0].steps[1].rollout > found[100.0].steps[1].rollout + 19


def test_an_update_drops_the_conversations_that_are_under_way() -> None:
    calls = tuple(Call(place - 1, 5.0 * (place > 0), 0.0, 1000 + place, 1, 10) for place in range(20))
    trainer = TrainerCosts(step=1.0, row_token=0.0, update=1.0)
    schedule = replace(ONE, max_staleness=1, concurrency=4, steps=8)
    for room, dropped in ((math.inf, False), (1e9, True)):
        costs = Costs(replace(SERVER, kv_tokens=room), trainer)
        assert (simulate(schedule, costs, forever(Agent(calls, 1))).again > 0.0) is dropped


@pytest.mark.parametrize(("dropped", "again"), [(False, 0), (True, 29)])
def test_what_an_update_dropped_between_two_calls_is_computed_again(dropped: bool, again: int) -> None:
    kernel = Kernel()
    server = Server(kernel, replace(SERVER, kv_tokens=1e9))
    for call in (Call(-1, 0.0, 0.0, 10, 10, 10), Call(0, 0.0, 0.0, 30, 1, 10)):
        ended: list[bool] = []
        server.submit(call, 7, lambda: None, lambda ended=ended: ended.append(True))  # type: ignore[misc]
        while not ended:
            server.retune()
            assert kernel.step()
        if dropped and call.after < 0:
            server.drop()
    assert (server.prompts, server.again) == (40, again)


def test_the_gateway_takes_as_many_calls_as_its_processes_have_cores() -> None:
    schedule = replace(ONE, group_size=8, concurrency=8)
    for processes, seconds in ((1, 8 * 0.5), (2, 4 * 0.5), (16, 0.5)):
        costs = Costs(SERVER, TRAINER, gateway=GatewayCosts(0.5, processes))
        simulated = simulate(schedule, costs, forever(*[agent((0.0, 0.0, 10))] * 8))
        assert simulated.steps[1].rollout == pytest.approx(seconds + 1.0)
        assert simulated.calls == pytest.approx(8 / only_step(simulated))


def test_an_update_lets_calls_stand_still() -> None:
    schedule = replace(ONE, max_staleness=1, concurrency=2, steps=6)
    costs = Costs(ServerCosts(token=1.0), TrainerCosts(step=1.0, row_token=0.0, update=2.0))
    simulated = simulate(schedule, costs, forever(agent((0.0, 0.0, 10))))
    # Two rollouts are under way at any time; of 10 s of decoding each sees every update meanwhile.
    pair = simulated.steps[2].total + simulated.steps[3].total
    assert pair == pytest.approx(10.0 + 2 * 2.0, abs=1.0)


@pytest.mark.parametrize(("export", "waited"), [(0.0, 10.0), (3.0, 7.0), (4.0, 6.0)])
def test_while_the_weights_are_written_calls_go_on(export: float, waited: float) -> None:
    trainer = TrainerCosts(step=0.0, row_token=0.0, update=4.0, export=export)
    schedule = replace(ONE, max_staleness=1)
    simulated = simulate(schedule, Costs(ServerCosts(token=1.0), trainer), forever(agent((0.0, 0.0, 10))))
    assert simulated.steps[0].update == pytest.approx(4.0)
    # The second rollout begins when the first update does, and decodes for 10 s besides the time in which it may not.
    assert simulated.steps[1].rollout == pytest.approx(waited)


def test_what_the_first_step_trains_longer_the_next_one_need_not_wait() -> None:
    trainer = TrainerCosts(step=1.0, row_token=0.0)
    slow = replace(trainer, first=6.0)
    team = forever(agent((0.0, 0.0, 100)))
    for bound, saved in ((0, 0.0), (1, 6.0)):
        schedule = replace(ONE, max_staleness=bound)
        usual, late = (simulate(schedule, Costs(SERVER, costs), team) for costs in (trainer, slow))
        assert (usual.steps[0].train, late.steps[0].train) == (pytest.approx(1.0), pytest.approx(7.0))
        assert usual.steps[1].rollout - late.steps[1].rollout == pytest.approx(saved)


def test_what_agents_do_after_their_last_call_belongs_to_the_rollout() -> None:
    busy = replace(agent((0.0, 0.0, 10)), wait=3.0, work=1.0)
    schedule = replace(ONE, group_size=2, concurrency=2)
    simulated = simulate(schedule, Costs(SERVER, TRAINER, Sharing(agents=1.0)), forever(busy, busy))
    assert simulated.steps[1].rollout == pytest.approx(1.0 + 3.0 + 2 * 1.0)


def test_a_step_in_turns_takes_something_beside_its_rollouts() -> None:
    costs = Costs(SERVER, TRAINER, turn=0.75)
    assert simulate(ONE, costs, forever(agent((0.0, 0.0, 10)))).steps[1].rollout == pytest.approx(1.75)


def test_in_parallel_calls_of_one_rollout_depend_on_the_call_before() -> None:
    calls = (Call(-1, 0, 0, 1, 1, 10), Call(0, 0, 0, 1, 1, 10), Call(0, 2.0, 0, 1, 1, 10), Call(1, 0, 0, 1, 1, 10))
    simulated = simulate(ONE, Costs(SERVER, TRAINER), forever(Agent(calls, 1)))
    assert simulated.steps[0].rollout == pytest.approx(1.0 + max(2.0 + 1.0, 1.0 + 1.0))


def test_the_places_machine_works_between_rollouts() -> None:
    schedule = replace(ONE, group_size=3)
    costs = Costs(SERVER, TRAINER, Sharing(agents=1.0), dispatch=0.5)
    simulated = simulate(schedule, costs, forever(*[agent((0.0, 0.0, 10))] * 3))
    assert simulated.steps[0].rollout == pytest.approx(3 * 1.0 + 2 * 0.5)


def test_a_checkpoint_is_written_when_it_is_due_and_at_the_end() -> None:
    simulated = simulate(replace(ONE, steps=5, checkpoint_every=2), Costs(SERVER, TRAINER), forever(agent((0, 0, 1))))
    assert [step.checkpoint for step in simulated.steps] == pytest.approx([0.0, 0.5, 0.0, 0.5, 0.5])


def test_groups_that_teach_nothing_are_not_trained_on() -> None:
    simulated = simulate(ONE, Costs(SERVER, TRAINER), forever(agent((0, 0, 10)), teaches=False))
    assert [(step.train, step.rows, step.tokens) for step in simulated.steps] == [(0.0, 0, 0)] * 3


@pytest.mark.parametrize("bound", [0, 2])
def test_dynamic_sampling_replaces_groups_that_teach_nothing(bound: int) -> None:
    one = agent((0.0, 0.0, 10))
    teams = itertools.cycle([Team((one,), teaches=False), Team((one,), teaches=True)])
    schedule = replace(ONE, tasks_per_step=2, dynamic_sampling=True, max_staleness=bound, steps=4, max_waves=4)
    simulated = simulate(schedule, Costs(SERVER, TRAINER), teams)
    assert all(step.rows >= 2 * 100 for step in simulated.steps)


def test_nothing_to_simulate_is_an_error() -> None:
    with pytest.raises(ValueError, match="0 steps"):
        simulate(replace(ONE, steps=0), Costs(SERVER, TRAINER), forever(agent((0, 0, 1))))


agents = st.lists(st.tuples(st.floats(0.0, 30.0), st.floats(0.0, 2.0), st.integers(1, 50)), min_size=1, max_size=3).map(
    lambda calls: agent(*calls)
)


@settings(max_examples=10, deadline=None)
@given(
    bound=st.integers(0, 3),
    tasks=st.integers(1, 3),
    size=st.integers(1, 3),
    places=st.integers(1, 12),
    pool=st.lists(agents, min_size=3, max_size=6),
    shared=st.sampled_from([math.inf, 1.0]),
    one_device=st.booleans(),
    servers=st.integers(1, 3),
    room=st.sampled_from([math.inf, 60.0]),
)
def test_whatever_is_drawn(
    bound: int, tasks: int, size: int, places: int, pool: list[Agent], shared: float, one_device: bool,
    servers: int, room: float,
) -> None:  # fmt: skip
    schedule = Schedule(tasks, size, places, bound, steps=5)
    turning = itertools.cycle(pool)
    teams = (Team(tuple(next(turning) for _ in range(size))) for _ in itertools.count())
    sharing = Sharing(shared, trainer_with_agents=math.isfinite(shared), one_device=one_device)
    costs = Costs(
        replace(SERVER, kv_tokens=room), TRAINER, sharing, servers=servers, gateway=GatewayCosts(0.1, servers)
    )
    simulated = simulate(schedule, costs, teams)
    for number, step in enumerate(simulated.steps):
        assert 0 <= step.staleness_mean <= step.staleness_max <= min(bound, number)
        assert step.rows == tasks * size * 100, "every group is whole and taken once"
        assert step.train >= TRAINER.step + TRAINER.row_token * step.rows - 1e-9
        assert (step.checkpoint, step.update) >= (TRAINER.checkpoint - 1e-9, TRAINER.update)
        assert step.rollout >= 0.0
    for share in (simulated.server_busy, simulated.places_busy, simulated.trainer_busy, simulated.agents_busy):
        assert -1e-9 <= share <= 1.0 + 1e-9
    assert simulated.batch <= places + 1e-9
