"""A step's page says why its reward differs from that of the step before, and first of all whether chance explains it."""

from __future__ import annotations

import asyncio
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from lightning.store.memory import MemoryStore
from lightning.store.protocol import Store
from lightning.store.url import sqlite_url
from lightning.types import Fault, Outcome, Rollout, Run, StepRecord, Task
from lightning_console.answers import answer
from lightning_console.pages.reward_change import change_blocks
from lightning_console.places import Located, Places
from lightning_console.queries.reward_change import FAILED_TOOL, Beside, GroupReward, RewardChange, Seen, compare_steps
from lightning_db.keeper import keeper_of
from lightning_db.prune import PruneRequest, carry_out, plan

from tests.plugins.console.made_folder import in_store, plot
from tests.plugins.console.made_rollouts import train
from tests.plugins.console.reading import places_of, shown, texts
from tests.plugins.debug.made_runs import Maker


def groups(step: int, *means: float, first: int = 0, rollouts: int = 8) -> list[GroupReward]:
    """Groups of a step with these rewards, each of a task of its own: `t0`, `t1`, ... from `first` on."""
    return [
        GroupReward(f"r/{step}/{place}", Task(f"q{first + place}", id=f"t{first + place}"), mean, rollouts)
        for place, mean in enumerate(means)
    ]


def said(change: RewardChange | str | None) -> str:
    found = Located("r", Run("r", "r"), MemoryStore(), "memory://")
    notices, _ = change_blocks(found, change)
    return "\n".join(f"{each['text']}. {each['detail']}" for each in notices.to_json()["value"]["notices"])


# chance ------------------------------------------------------------------------------------------------------------------
def test_a_difference_that_a_deal_of_the_groups_makes_is_said_to_be_chance_first() -> None:
    before, now = groups(2, 0.1, 0.9, 0.5, 0.5), groups(3, 0.0, 0.8, 0.5, 0.4, first=4)
    text = said(compare_steps(2, before, 3, now))
    assert text.startswith("This may be chance: the reward fell by 0.075 from step 2 (0.500) to step 3 (0.425).")
    assert "these 8 groups were dealt to the two steps at random" in text


def test_a_difference_between_groups_that_agree_is_none_of_chance() -> None:
    change = compare_steps(
        1, groups(1, *[0.5, 0.52, 0.48, 0.5, 0.51]), 2, groups(2, *[0.1, 0.12, 0.08, 0.1, 0.1], first=9)
    )
    assert change.p == pytest.approx(2 / 252), "two of 252 deals part them so"
    assert said(change).startswith(
        "The reward fell by 0.402 from step 1 (0.502) to step 2 (0.100), and chance alone hardly"
    )


def test_many_rollouts_of_few_groups_prove_nothing() -> None:
    change = compare_steps(1, groups(1, 1.0, 1.0, rollouts=512), 2, groups(2, 0.0, 0.0, first=2, rollouts=512))
    assert "With 2 and 2 groups no difference could be told from chance" in said(change)
    alone = said(compare_steps(1, groups(1, 1.0), 2, groups(2, 0.0, first=1)))
    assert "With 1 and 1 groups" in alone
    assert "The step has one group, which makes all of it" in alone


def test_a_reward_that_stayed_is_not_explained() -> None:
    text = said(compare_steps(1, groups(1, 1.0, 1.0, 1.0), 2, groups(2, 1.0, 1.0, 1.0, first=3)))
    assert text.startswith("The reward did not move from step 1 (1.000) to step 2 (1.000)")


# tasks -------------------------------------------------------------------------------------------------------------------
def test_the_same_tasks_are_compared_one_by_one() -> None:
    before = groups(1, 0.1, 0.3, 0.5, 0.7, 0.9, 0.6)
    now = groups(2, 0.2, 0.4, 0.6, 0.8, 1.0, 0.7)
    change = compare_steps(1, before, 2, now)
    assert change.same
    assert change.p == pytest.approx(2 / 64), "all six rose, which two of the 64 ways to flip their signs do"
    assert "both steps had the same ones" in said(change)
    assert all(each.moved == pytest.approx(0.1 / 6) for each in change.groups)


def elsewhere(difficulties: dict[int, float], variance: float = 0.0001) -> dict[str, list[Seen]]:
    return {f"t{number}": [Seen(value, variance)] for number, value in difficulties.items()}


def test_harder_tasks_explain_their_part_and_the_groups_are_put_right_by_it() -> None:
    before = groups(2, 0.5, 0.5, 0.6, 0.4)
    now = groups(3, 0.3, 0.3, 0.4, 0.2, first=4)
    seen = elsewhere({**dict.fromkeys(range(4), 0.05), **dict.fromkeys(range(4, 8), -0.1)})
    change = compare_steps(2, before, 3, now, seen, "in other steps of this run")
    assert change.difficulty is not None
    assert change.difficulty.explained == pytest.approx(-0.15)
    assert change.rest == pytest.approx(-0.05)
    assert sum(each.moved for each in change.groups) == pytest.approx(change.rest)
    text = said(change)
    assert "Harder tasks explain about 0.150 of it" in text
    assert "the tasks of step 3 earned 0.100 less than the steps around, and those of step 2 0.050 more" in text
    assert "4 of 4 and 4 of 4 tasks were seen there" in text
    assert text.startswith("Harder tasks explain it, and the rest may be chance: the reward fell by 0.200 from step 2")
    assert "Without what the tasks explain, the reward moved by -0.050. " in text


@pytest.mark.parametrize(
    ("difficulty", "variance", "words"),
    [
        (+0.1, 0.0001, "The tasks do not explain it: they were easier, which alone would have moved it by +0.100"),
        (-0.4, 0.0001, "Harder tasks explain all of it"),
        (-0.1, 0.25, "about equally hard, as far as other steps tell"),
    ],
)
def test_difficulty_is_said_as_it_is(difficulty: float, variance: float, words: str) -> None:
    seen = elsewhere({**dict.fromkeys(range(4), 0.0), **dict.fromkeys(range(4, 8), difficulty)}, variance)
    change = compare_steps(2, groups(2, 0.5, 0.5, 0.6, 0.4), 3, groups(3, 0.3, 0.3, 0.4, 0.2, first=4), seen, "in x")
    assert words in said(change)


def test_tasks_that_were_never_seen_elsewhere_have_no_known_difficulty() -> None:
    before, now = groups(2, 0.5, 0.1, 0.6), groups(3, 0.3, 0.3, 0.9, first=3)
    none = compare_steps(2, before, 3, now)
    assert none.difficulty is None
    assert "No task of either step was given in another step or an evaluation" in said(none)
    few = compare_steps(2, before, 3, now, elsewhere({0: 0.1, 1: 0.1, 4: 0.2}), "in x")
    assert few.difficulty is None, "one of the three tasks of step 3 says nothing of the others"
    assert "Only 3 of the tasks" in said(few)


# groups and failures -------------------------------------------------------------------------------------------------------
def test_the_few_groups_that_made_it_are_named_with_what_went_the_other_way() -> None:
    change = compare_steps(1, groups(1, *[0.5] * 5), 2, groups(2, 0.0, 0.0, 0.45, 0.5, 0.7, first=5))
    assert "2 of 5 groups make 95 % of what went down" in said(change)
    assert (
        "They moved the step's mean by 0.200, all groups that went this way by 0.210; the other way went 0.040"
        in said(change)
    )
    even = compare_steps(1, groups(1, *[0.5] * 5), 2, groups(2, *[0.3] * 5, first=5))
    assert "No few groups make the change: 5 of 5 groups went this way" in said(even)


def test_groups_that_lost_rollouts_are_compared_all_the_same() -> None:
    """The same tasks, each better than before: only the mean fell, since the easy task lost its rollouts."""
    easy, hard = groups(1, 0.9, 0.1, rollouts=8)
    change = compare_steps(1, [easy, hard], 2, [replace(easy, mean=0.95, rollouts=1), replace(hard, mean=0.15)])
    assert change.difference < 0 < change.groups[0].moved
    assert "0 of 2 groups went this way" in said(change)


def test_a_share_that_grew_accounts_for_its_part() -> None:
    assert Beside("x", 0.1, 0.3, 0.0, 0.5).accounts == pytest.approx(-0.1)
    assert Beside("x", 0.1, 0.3, None, 0.5).accounts is None


def test_a_step_that_earned_nothing_names_the_kind_of_rollouts_that_came_with_it() -> None:
    change = compare_steps(1, groups(1, 0.5, 0.7, 0.6), 2, groups(2, 0.0, 0.0, 0.0, first=3))
    failed = Beside(FAILED_TOOL, 0.08, 0.86, 0.0, 0.2)
    alike = replace(change, equal=0.0, beside=(failed,), tool_error=("calculate: ValueError: display overflow", 65))
    assert (
        "All rollouts of step 2 earned 0.000. The most probable cause: rollouts with a failed tool run, 86 % of all (8.0 %"
        in said(alike)
    )
    assert "most often calculate: ValueError: display overflow (65 times). The tool may not be able" in said(alike)
    assert "failed', if" not in said(alike)
    known = said(replace(alike, tool_arguments="expression has a number above 120"))
    assert (
        "(65 times), if expression has a number above 120. The tool may not be able to do these tasks; whether" in known
    )
    assert "Whether the tasks were harder or easier is not known" not in known, "one statement on hard tasks is enough"
    assert "No few groups" not in said(alike)
    assert "No kind of failure explains it" in said(replace(change, equal=0.0))
    solved = compare_steps(1, groups(1, 0.5, 0.7), 2, groups(2, 1.0, 1.0, first=3))
    assert "All rollouts of step 2 earned 1.000. " in said(replace(solved, equal=1.0))
    assert "failure" not in said(replace(solved, equal=1.0)), "a step that earned everything has none to explain"
    assert "probable cause" not in said(replace(change, beside=(replace(failed, now=0.2),))), (
        "a small share explains little"
    )


async def step(
    store: MemoryStore,
    number: int,
    rewards: list[list[float | None]],
    *,
    ended: bool = True,
    fault: Fault = Fault.TIMEOUT,
    metrics: dict[str, float] | None = None,
) -> None:
    """A step whose groups earned these rewards; None for a rollout that failed by this `fault`. One that has not `ended` lacks
    its record, and its last rollout."""
    names = []
    for place, own in enumerate(rewards):
        group = f"run/{number}/{place}"
        names.append(group)
        await store.create_rollouts(
            [
                Rollout(f"{group}/{n}", "run", Task(f"task {place}"), group, number, index=n, max_attempts=1)
                for n in range(len(own))
            ]
        )
    leases = await store.lease("run", "w", limit=100)
    by_id = {lease.rollout.id: lease for lease in leases}
    wanted = [(f"{name}/{n}", reward) for name, own in zip(names, rewards, strict=True) for n, reward in enumerate(own)]
    for rollout, reward in wanted if ended else wanted[:-1]:
        outcome = Outcome(fault=fault, error="slow") if reward is None else Outcome(reward=reward)
        await store.complete(rollout, by_id[rollout].attempt, outcome)
    if ended:
        record = StepRecord("run", number, number, (), (), f"d{number}", groups=tuple(names), metrics=metrics or {})
        await store.commit_step(record)


async def test_failed_rollouts_count_as_0_and_are_said_beside_the_reward(store: MemoryStore) -> None:
    await store.put_run(Run("run", "run", {}))
    await step(store, 1, [[1.0, 1.0], [1.0, 0.0]])
    await step(store, 2, [[1.0, None], [None, 0.0]])
    found = await shown(places_of(store), "step/run/2")
    (failed,) = texts(found["What else changed"])
    assert failed["the others earned in steps 1 and 2"] == "0.625"
    assert (
        found["Why the reward moved"]["notices"][0]["links"][-1]["text"] == "calls and tokens that step 2 pushed most"
    )
    assert (failed["share in step 1"], failed["share in step 2"]) == ("0.0 %", "50 %")
    assert failed["moved the reward by"] == "-0.312", "half of them earn 0 where the others earned 0.625"
    (lead, *_) = found["Why the reward moved"]["notices"]
    assert "fell by 0.500 from step 1 (0.750) to step 2 (0.250)" in lead["text"]
    await step(store, 3, [[None, None]])
    only_failed = await shown(places_of(store), "step/run/3")
    assert "All rollouts of step 3 earned 0.000" in only_failed["Why the reward moved"]["notices"][1]["text"]
    assert "to step 3 (0.000)" in only_failed["Why the reward moved"]["notices"][0]["text"]


def test_a_rise_from_a_step_that_earned_nothing_is_no_gain_of_the_same_weights() -> None:
    change = compare_steps(4, groups(4, *[0.0] * 8), 5, groups(5, *[0.5] * 8, first=8))
    failed = Beside(FAILED_TOOL, 0.86, 0.0, 0.0, 0.25)
    located = Located("r", Run("r", "r"), MemoryStore(), "memory://")
    made, behind = change_blocks(located, replace(change, equal_before=0.0, beside=(failed,)), same_since=3)
    lead, cause, *_ = made.notices
    assert (lead.tone, lead.text.partition(":")[0]) == ("", "The model did not change since step 3")
    assert cause.text == (
        "All rollouts of step 4 earned 0.000. The most probable cause: rollouts with a failed tool run, 86 % of all (0.0 % "
        "in step 5)"
    )
    assert [block.title for block in behind] == ["Groups that moved the reward"], (
        "the mean of the two steps says nothing"
    )


async def test_what_the_infrastructure_lost_is_left_out_and_said(store: MemoryStore) -> None:
    await store.put_run(Run("run", "run", {}))
    await step(store, 1, [[1.0, 1.0], [1.0, 0.0]])
    await step(store, 2, [[1.0, None], [0.5, 0.5]], fault=Fault.INFRASTRUCTURE, metrics={"stepped": 0.0})
    found = (await shown(places_of(store), "step/run/2"))["Why the reward moved"]["notices"]
    assert "to step 2 (0.667)" in found[0]["text"]
    assert any(each["text"] == "1 rollout was lost to the infrastructure and is left out" for each in found)
    assert any("it trained nothing, so v2 has the weights of v1" in each["text"] for each in found)
    await step(store, 3, [[1.0, 0.0]], metrics={"stepped": 0.0, "skipped_nonfinite": 1.0})
    skipped = (await shown(places_of(store), "step/run/3"))["Why the reward moved"]["notices"]
    assert not any("trained nothing" in each["text"] for each in skipped), (
        "its loss was not finite: that is said elsewhere"
    )


async def test_a_step_that_is_sampled_is_compared_by_what_ended(store: MemoryStore) -> None:
    await store.put_run(Run("run", "run", {}))
    await step(store, 1, [[1.0, 1.0], [1.0, 0.0]])
    first = await shown(places_of(store), "step/run/1")
    assert "no step of this run came before it" in first["Why the reward moved"]["notices"][0]["detail"]
    await step(store, 2, [[0.5, 0.5], [0.0, 1.0]], ended=False)
    found = await shown(places_of(store), "step/run/2")
    (going, lead, *_) = found["Why the reward moved"]["notices"]
    assert going["text"].startswith("1 rollout of step 2 has not ended")
    assert "to step 2 (0.333)" in lead["text"]
    await step(store, 3, [[0.5]], ended=False)
    empty = await shown(places_of(store), "step/run/3")
    assert "no rollout of step 3 has a reward" in empty["Why the reward moved"]["notices"][0]["detail"]


# whole runs --------------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def passes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of several passes over its tasks."""
    folder = tmp_path_factory.mktemp("passes")
    made = replace(plot("run", 3), tasks=6, steps=6, tasks_per_step=3)
    asyncio.run(in_store(folder, lambda store: Maker(store, made).write()))
    return folder


async def test_tasks_of_a_run_of_several_passes_have_a_known_difficulty(passes: Path) -> None:
    places = Places(str(passes))
    found = await shown(places, "step/run/4")
    text = " ".join(each["text"] + each["detail"] for each in found["Why the reward moved"]["notices"])
    assert "3 of 3 and 3 of 3 tasks were seen there" in text
    assert texts(found["Groups that moved the reward"])[0]["group"].startswith(("4/", "3/", "2/"))
    told = await answer(places, "step/run/4", "Why the reward moved")
    assert told["blocks"][0]["notices"], "programs are told the same"
    await places.close()


async def test_own_code_is_compared_and_pruned_calls_are_said_to_be_missing(
    store: MemoryStore, passes: Path, tmp_path: Path
) -> None:
    await train(store, own_code=True)
    await step(store, 2, [[1.0, 0.0]])
    own = await shown(places_of(store), "step/run/2")
    assert "to step 2 (0.500)" in own["Why the reward moved"]["notices"][0]["text"]

    async def prune(database: Store) -> None:
        keeper = keeper_of(sqlite_url(tmp_path / "passes" / "lightning.db"))
        request = PruneRequest(trained=True, unfinished=True)
        await carry_out(database, keeper, await plan(database, keeper, request))

    shutil.copytree(passes, tmp_path / "passes")
    await in_store(tmp_path / "passes", prune)
    places = Places(str(tmp_path / "passes"))
    pruned = await shown(places, "step/run/4")
    await places.close()
    last = pruned["Why the reward moved"]["notices"][-1]
    assert last["text"] == "Whether cut off answers or failed tools explain it is not known"
    assert "removed" in last["detail"]
