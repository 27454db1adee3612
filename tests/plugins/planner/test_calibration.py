"""Costs that are put into a recording are found in it again."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from lightning.errors import DataError
from lightning_planner.calibration import calibrate
from lightning_planner.costs import Schedule
from lightning_planner.recorded import Recorded, RecordedCall, RecordedGroup, RecordedRollout, RecordedStep


def recording(groups: list[list[RecordedRollout]], rows: list[int], schedule: Schedule | None = None) -> Recorded:
    steps = tuple(
        RecordedStep(step, {"train": 1.5 + 0.01 * count, "update": 0.25, "checkpoint": 0.125}, count, (0.0, 0.0))
        for step, count in enumerate(rows, 1)
    )
    made = tuple(RecordedGroup(step, tuple(rollouts), True) for step, rollouts in enumerate(groups, 1))
    return Recorded("run", "model", schedule or Schedule(1, len(groups[0]), 64), made, steps, {})


def one(ready: float, started: float, ended: float, prompt: int, response: int, tools: int = 0) -> RecordedRollout:
    call = RecordedCall(-1, ready, started, ended, prompt, prompt, response, tools)
    return RecordedRollout((call,), ready, ended, 10)


def test_a_server_that_is_asked_one_thing_at_a_time() -> None:
    rng, at, groups = random.Random(0), 0.0, []
    for _ in range(40):
        prompt, response = rng.randrange(10, 900), rng.randrange(5, 200)
        seconds = 0.3 + 0.002 * prompt + 0.05 * response
        groups.append([one(at, at + 1.0, at + 1.0 + seconds, prompt, response)])
        at += 1.0 + seconds
    calibration = calibrate(recording(groups, [100, 300, 200]))
    server = calibration.costs.server
    assert server.request + server.latency == pytest.approx(0.3)
    assert server.prompt_token == pytest.approx(0.002)
    assert server.token + server.token_per_call == pytest.approx(0.05)
    assert calibration.fit == pytest.approx(1.0)


def test_training_and_what_follows_it() -> None:
    groups = [[one(at, at + 1.0, at + 2.0, 10, 10)] for at in (0.0, 10.0, 20.0)]
    trainer = calibrate(recording(groups, [100, 300, 200])).costs.trainer
    assert (trainer.step, trainer.row_token) == (pytest.approx(1.5), pytest.approx(0.01))
    assert (trainer.update, trainer.checkpoint) == (0.25, 0.125)
    assert trainer.first == 0.0
    alike = calibrate(recording(groups, [100, 101, 102])).costs.trainer
    assert alike.step == 0.0, "nothing tells what comes with a step from what comes with its tokens"
    assert alike.row_token == pytest.approx((1.5 + 1.01) / 101, rel=0.01)


def test_the_first_step_trains_while_things_start() -> None:
    groups = [[one(at, at + 1.0, at + 2.0, 10, 10)] for at in (0.0, 10.0, 20.0, 30.0)]
    recorded = recording(groups, [200, 100, 300, 200])
    slow = replace(recorded.steps[0], seconds={**recorded.steps[0].seconds, "train": 9.5})
    trainer = calibrate(replace(recorded, steps=(slow, *recorded.steps[1:]))).costs.trainer
    assert (trainer.step, trainer.row_token) == (pytest.approx(1.5), pytest.approx(0.01))
    assert trainer.first == pytest.approx(9.5 - 1.5 - 200 * 0.01)


def test_what_a_step_takes_beside_its_rollouts() -> None:
    groups = [[one(at, at + 1.0, at + 2.0, 10, 10)] for at in (0.0, 10.0, 20.0)]
    recorded = recording(groups, [100, 100, 100])
    steps = tuple(
        replace(step, seconds={**step.seconds, "rollout": 2.0 + beside})
        for step, beside in zip(recorded.steps, (7.0, 0.25, 0.25), strict=True)
    )
    assert calibrate(replace(recorded, steps=steps)).costs.turn == pytest.approx(0.25)
    always = replace(recorded, steps=steps, schedule=replace(recorded.schedule, max_staleness=1))
    assert calibrate(always).costs.turn == 0.0


def crowd(limited: bool, tool: float, seed: int = 0) -> Recorded:
    """Agents in crowds of 2 to 40, each between two calls. If they are `limited`, 0.1 s of work each is done one after the
    other, else each takes a random time of 0.1 s on the average. Every other one waits for a tool then, for `tool` seconds."""
    rng, at, groups = random.Random(seed), 0.0, []
    for _ in range(60):
        rollouts, count = [], rng.randrange(2, 40)
        for place in range(count):
            work = 0.1 * (place + 1) if limited else rng.expovariate(10.0)
            started = at + work + place % 2 * tool
            rollouts.append(one(at, started, started + 1e-3, 10, 1, place % 2))
        groups.append(rollouts)
        at += 200.0
    return recording(groups, [10] * 60)


def test_agents_that_are_not_in_each_others_way_only_wait() -> None:
    recorded = crowd(limited=False, tool=5.0)
    calibration = calibrate(recorded)
    assert math.isinf(calibration.costs.sharing.agents)
    calls = [call for team in calibration.teams for agent in team.agents for call in agent.calls]
    gaps = [call.started - call.ready for rollout in recorded.rollouts for call in rollout.calls]
    assert [call.wait for call in calls] == pytest.approx(gaps)
    assert all(call.work == 0.0 for call in calls)


def test_agents_in_each_others_way_share_a_machine_and_tools_do_not() -> None:
    calibration = calibrate(crowd(limited=True, tool=0.0))
    assert calibration.costs.sharing.agents == 1.0
    calls = [call for team in calibration.teams for agent in team.agents for call in agent.calls]
    assert sum(call.work for call in calls) / len(calls) == pytest.approx(0.1, rel=0.05)
    assert sum(call.wait for call in calls) / len(calls) < 0.02

    slower = calibrate(crowd(limited=True, tool=0.5))
    after_tools = [call for team in slower.teams for agent in team.agents for call in agent.calls if call.tools]
    assert 0.4 < sum(call.wait for call in after_tools) / len(after_tools) < 0.7, "an estimate, from what took longer"


def test_the_first_step_is_left_out_of_what_is_drawn() -> None:
    calibration = calibrate(crowd(limited=False, tool=0.0))
    assert len(calibration.teams) == len(calibration.steady) + 1 == 60


def test_a_run_without_tokens_is_refused() -> None:
    with pytest.raises(DataError, match="no call with response tokens"):
        calibrate(recording([[one(0.0, 1.0, 2.0, 10, 0)]], [10]))
