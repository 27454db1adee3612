"""What a run says of steps that teach nothing, or less than they look."""

from __future__ import annotations

import logging
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from lightning.algorithms.intake import Intake
from lightning.algorithms.lightning_rl import LightningRL
from lightning.batch.trajectory import Group
from lightning.engines.protocol import StepResult
from lightning.gateway.http import CURE_OF_LENGTH
from lightning.store.memory import MemoryStore
from lightning.testing.trajectories import make_call, make_group
from lightning.trainer.metrics import (
    Remarks,
    UntrainedCalls,
    most_reasons,
    nothing_trained,
    staleness,
    step_metrics,
    unmatched,
    untrained_reasons,
    wholly_untrained,
)
from lightning.types import TOO_LONG, Caller, CallStatus, Rollout, Run, Status, StepRecord, Task

PLANNER = Caller("ask", ("agent", "planner", "ask"))
CHECKER = Caller("checker", ("agent", "checker"))


def group(*rewards: float, trained: bool = True, caller: Caller = PLANNER, **call: Any) -> Group:
    """One call of `caller` for each reward."""
    made = make_group(rewards)
    members = tuple(
        replace(
            member,
            transitions=tuple(replace(one, caller=caller, **call) for one in member.transitions),
            trainable=(trained,),
        )
        for member in made.trajectories
    )
    return Group(made.id, members)


def tell(remarks: Remarks, step: int, groups: list[Group], agents: tuple[str, ...] = (), stepped: float = 1.0) -> None:
    batch = LightningRL("grpo", group_size=2).batch(groups)
    result = StepResult({"stepped": stepped if batch.samples else 0.0}, {})
    remarks.step(step, groups, batch, step_metrics([], groups, batch, result), agents)


@pytest.fixture(autouse=True)
def all_levels(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "lightning.trainer.metrics")


def test_a_step_that_trained_nothing_says_who_was_seen_and_which_glob_was_meant(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tell(Remarks(), 1, [group(0.0, 1.0, trained=False)], ("planner",))
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.getMessage() == (
        "step 1 trained nothing and left the weights as they were (1 of 1 steps so far): 1 of 1 groups are left out as "
        "nothing_to_train (no call belongs to an agent that is trained): train_agents ['planner'] matches none of the agents "
        "seen: agent/planner/ask. did you mean '*/planner/*' for 'planner'?"
    )


def test_steps_that_train_nothing_are_told_at_growing_distances(caplog: pytest.LogCaptureFixture) -> None:
    remarks = Remarks()
    for step in range(1, 21):
        tell(remarks, step, [group(1.0, 1.0)])
    idle = [record for record in caplog.records if "trained nothing" in record.getMessage()]
    assert [record.args[0] for record in idle if isinstance(record.args, tuple)] == [1, 2, 4, 8, 16]
    assert "16 of 16 steps so far" in idle[-1].getMessage()
    assert "all_rewards_equal (all rollouts that were compared earned the same)" in caplog.text
    assert caplog.records == idle
    assert "temperature" not in caplog.text


def test_equal_rewards_without_any_trained_call_name_the_agents_too(caplog: pytest.LogCaptureFixture) -> None:
    tell(Remarks(), 1, [group(1.0, 1.0, trained=False)], ("planner",))
    assert "all_rewards_equal" in caplog.text
    assert "matches none of the agents seen: agent/planner/ask" in caplog.text


def test_calls_with_media_are_counted_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    remarks, seen = Remarks(), group(0.0, 1.0, status=CallStatus.MEDIA)
    groups = [group(0.0, 1.0), seen]
    for step in range(1, 4):
        tell(remarks, step, groups)
    metrics = step_metrics([], groups, LightningRL("grpo", group_size=2).batch(groups), StepResult({}, {}))
    assert (metrics["dropped/media"], metrics["rows"]) == (2.0, 2.0)
    said = [record.getMessage() for record in caplog.records if "2 of 4 calls of trained agents" in record.getMessage()]
    assert len(said) == 1
    assert said[0].startswith("step 1: 2 of 4 calls of trained agents are not trained: their prompts have an image")


async def test_a_step_whose_calls_are_all_marked_says_why_and_one_without_marks_has_no_metric(
    caplog: pytest.LogCaptureFixture, store: MemoryStore
) -> None:
    groups = [group(0.0, 1.0, untrained="title")]
    tell(Remarks(), 1, groups)
    assert "the calls that could be trained are marked as untrained (2 title)" in caplog.text
    for seen, counted in ((groups, {"calls_untrained/title": 2.0}), ([group(0.0, 1.0)], {})):
        assert await UntrainedCalls(store, "run").step(seen) == counted


def test_many_reasons_are_few_metrics() -> None:
    """Reasons are free text. The most frequent have a metric each, the rest one together."""
    calls = [replace(make_call((1,), (2,), seq=seq), untrained=f"bad answer {seq}") for seq in range(1000)]
    title = [replace(make_call((1,), (2,), seq=seq), untrained="title") for seq in range(1000, 1003)]
    other = replace(title[0], untrained="other")
    found = most_reasons(untrained_reasons([*calls, *title, other]))
    assert len(found) == 21
    assert (found["title"], found["other"], sum(found.values())) == (3, 982, 1004)
    assert next(iter(found)) == "title"


async def test_new_reasons_in_every_step_are_few_metrics_of_the_run_also_after_a_resume(
    store: MemoryStore,
) -> None:
    await store.put_run(Run("run", "run"))
    rng, before, names = random.Random(0), UntrainedCalls(store, "run"), set[str]()
    for step in range(1, 6):
        reasons = [f"try {rng.randrange(30 * step)}" for _ in range(40)] + ["title"] * 3
        calls = tuple(replace(make_call((1,), (2,), seq=seq), untrained=why) for seq, why in enumerate(reasons))
        member = replace(group(0.0).trajectories[0], transitions=calls)
        resumed = await UntrainedCalls(store, "run").step([Group("g", (member,))])
        metrics = await before.step([Group("g", (member,))])
        assert resumed == metrics
        assert (sum(metrics.values()), metrics["calls_untrained/title"]) == (43, 3)
        names |= metrics.keys()
        await store.commit_step(StepRecord("run", step, step, (), (), "d", metrics=metrics))
    assert len(names) == 21


def test_rollouts_all_of_whose_calls_are_marked_are_counted_beside_the_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    marked, other = group(0.0, 0.5, untrained="title", trained=False), group(0.5, 1.0)
    remarks = Remarks()
    for step in range(1, 3):
        tell(remarks, step, [marked, other])
    assert caplog.text.count("the mean reward of 2 rollouts is 0.25, and 0.75 of the others") == 1
    assert wholly_untrained([marked, other]) == {
        "wholly_untrained/rollouts": 2.0,
        "wholly_untrained/reward": 0.25,
        "wholly_untrained/reward_of_others": 0.75,
    }
    assert wholly_untrained([other]) == wholly_untrained([group(1.0, trained=False)]) == {}


def test_calls_that_did_not_fit_are_counted_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """Those of rollouts that went on, and rollouts that failed by one."""
    remarks, made = Remarks(), group(0.0, 1.0)
    one = made.trajectories[0].transitions[0]
    long = replace(one, status=CallStatus.REFUSED, finish_reason=TOO_LONG, error=CURE_OF_LENGTH)
    member = replace(made.trajectories[0], refused=(long, replace(long, seq=9)))
    groups = [Group(made.id, (member, made.trajectories[1]))]
    failed = replace(member.rollout, status=Status.FAILED, error=f"BadRequestError: Error code: 400 - {CURE_OF_LENGTH}")
    batch = LightningRL("grpo", group_size=2).batch(groups)
    metrics = step_metrics([failed, replace(failed, error="another")], groups, batch, StepResult({"stepped": 1.0}, {}))
    assert metrics["too_long"] == 3.0
    for step in range(1, 3):
        remarks.step(step, groups, batch, metrics, ())
    (record,) = caplog.records
    assert record.getMessage().startswith("step 1: 3 calls were refused, since prompt and answer together are longer")
    assert "policy_server.max_model_len" in record.getMessage()


def test_a_step_of_media_alone_says_why_it_trained_nothing(caplog: pytest.LogCaptureFixture) -> None:
    tell(Remarks(), 1, [group(0.0, 1.0, status=CallStatus.MEDIA)], ("ask",))
    (record,) = caplog.records
    assert "2 of 2 calls of trained agents are not trained: their prompts have an image" in record.getMessage()
    assert "matches none" not in record.getMessage()


def test_an_engine_that_did_not_step_is_believed(caplog: pytest.LogCaptureFixture) -> None:
    tell(Remarks(), 1, [group(0.0, 1.0)], stepped=0.0)
    assert "step 1 trained nothing" in caplog.text
    assert "no trained call got an advantage" in caplog.text


def test_the_first_of_each_kind_that_is_left_out_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    remarks, good = Remarks(), group(0.0, 1.0)
    for step in range(1, 4):
        tell(remarks, step, [good, group(1.0, 1.0), group(0.0, 1.0, trained=False, caller=CHECKER)], ("*/ask",))
    told = [record for record in caplog.records if "left out" in record.getMessage()]
    assert [(record.levelname, record.getMessage().partition(" (")[0]) for record in told] == [
        ("INFO", "step 1: 1 of 3 groups are left out as all_rewards_equal"),
        ("WARNING", "step 1: 1 of 3 groups are left out as nothing_to_train"),
    ]
    assert told[1].getMessage().count("agent/checker") == 1, "only those of the group itself"


def test_a_reason_of_ones_own_is_told_by_its_name(caplog: pytest.LogCaptureFixture) -> None:
    intake = Intake()
    intake.skip("below_bar")
    Remarks().step(1, [], intake.batch([], []), {"truncated": 0.0}, ())
    assert "left out as below_bar; no model call was recorded" in caplog.text


def test_greedy_calls_are_named_where_rewards_are_equal(caplog: pytest.LogCaptureFixture) -> None:
    tell(Remarks(), 1, [group(1.0, 1.0, temperature=0.0)])
    assert "temperature 0: the rollouts of a task are then alike" in caplog.text
    assert "gateway.override_sampling.temperature=1" in caplog.text


def test_an_agent_that_is_called_now_and_then_is_no_misspelling() -> None:
    write = Caller("write", ("LangGraph", "write"))
    assert unmatched(["write", "rewrite"], [write]) == {"rewrite": ""}, "`write` is trained"
    assert unmatched(["rewrite"], [write]) == {"rewrite": "write"}
    assert unmatched(["planner", "*/checker"], [Caller("ask", ("planner", "ask")), CHECKER]) == {"planner": "planner/*"}


def test_why_nothing_is_trained() -> None:
    assert nothing_trained([], ["x"]).startswith("no model call was recorded")
    assert nothing_trained([CHECKER], []) == "no call of agent/checker has tokens to train on"
    assert "'*/planner/*' is all inside planner" in nothing_trained([CHECKER], ["zzz"])


async def test_a_run_that_learns_nothing_says_so(bench: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with bench(tmp_path) as made:
        made.loop.train_agents = ("somebody else",)
        await made.loop.run({})
    told = [record.getMessage() for record in caplog.records if "trained nothing" in record.getMessage()]
    assert [line.partition(" (")[2][:6] for line in told] == ["1 of 1", "2 of 2"]
    assert "train_agents ['somebody else'] matches none of the agents seen: agent" in told[0]


def test_a_step_without_new_rollouts_has_no_reward_and_no_age() -> None:
    """Its rollouts are older ones, or none has a reward: a mean of nothing is not known."""
    algorithm = LightningRL("grpo", group_size=2)
    metrics = step_metrics([], [], algorithm.batch([]), StepResult({}, {})) | staleness(3, algorithm.batch([]))
    unknown = {"reward", "reward_std", "reward_with_failures", "calls_per_rollout", "truncated"}
    assert not (unknown | {"staleness_mean", "staleness_max"}) & metrics.keys()
    assert metrics["rollouts"] == 0.0
    failed = Rollout("r/9", "run", Task("t"), "r/0", status=Status.FAILED)
    metrics = step_metrics([failed], [], algorithm.batch([]), StepResult({}, {}))
    assert "reward" not in metrics
    assert metrics["reward_with_failures"] == 0.0, "that is known, by what it counts failures as"
