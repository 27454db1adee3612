"""What is taken away, what stays, and that what stays can still be read, replayed and audited."""

from __future__ import annotations

import random
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from lightning.errors import StoreError
from lightning.store.protocol import PRUNED
from lightning.store.sqlite import SqliteStore
from lightning.store.url import sqlite_url
from lightning.types import Outcome, Rollout, Run, StepRecord, StepReward, Task, Transition, logprobs, token_ids
from lightning_db.keeper import Keeper, keeper_of
from lightning_db.prune import PruneRequest, RunPlan, carry_out, plan


class Opened:
    """The store and the keeper of a file."""

    def __init__(self, path: Path) -> None:
        self.store, self.keeper = SqliteStore(path), keeper_of(sqlite_url(path))

    async def __aenter__(self) -> tuple[SqliteStore, Keeper]:
        await self.store.open()
        return self.store, self.keeper

    async def __aexit__(self, *_: object) -> None:
        await self.store.close()


async def groups_of(path: Path, choice: PruneRequest) -> list[str]:
    async with Opened(path) as (store, keeper):
        (item,) = await plan(store, keeper, choice)
        return [group.removeprefix("run/") for group in item.groups]


async def test_only_what_nothing_reads_is_chosen(database: Path) -> None:
    """By default what was trained stays; both steps have a checkpoint, so that nothing before it is replayed."""
    assert await groups_of(database, PruneRequest()) == ["1/1", "2/1", "val/0"]
    assert await groups_of(database, PruneRequest(trained=True)) == ["1/0", "1/1", "2/0", "2/1", "val/0"]


async def test_what_a_resumed_run_replays_stays(database: Path) -> None:
    connection = sqlite3.connect(database)
    connection.execute("UPDATE steps SET checkpoint = '' WHERE step = 2")
    connection.commit()
    assert await groups_of(database, PruneRequest(trained=True)) == ["1/0", "1/1", "val/0"]
    connection.execute("UPDATE steps SET checkpoint = ''")
    connection.commit()
    connection.close()
    assert await groups_of(database, PruneRequest(trained=True)) == []
    assert len(await groups_of(database, PruneRequest(trained=True, unfinished=True))) == 5


@pytest.mark.parametrize(("staleness", "kept_from"), [(0, 3), (1, 2), (5, 1)])
async def test_older_groups_that_a_step_may_take_stay(database: Path, staleness: int, kept_from: int) -> None:
    connection = sqlite3.connect(database)
    text = f'{{"config": {{"trainer": {{"max_staleness": {staleness}}}}}}}'
    connection.execute("UPDATE runs SET config = ?", (text,))
    connection.commit()
    connection.close()
    chosen = await groups_of(database, PruneRequest(trained=True))
    steps = {group.partition("/")[0] for group in chosen} - {"val"}
    assert steps == {str(step) for step in range(1, kept_from)}
    epoch = f'[{{"first": 3, "at": 1.0, "config": {text}}}]'  # as after a resume with that bound
    with closing(sqlite3.connect(database)) as connection:
        connection.execute("UPDATE runs SET config = '{}'")
        connection.execute("UPDATE state SET value = ? WHERE name = 'epochs'", (epoch,))
        connection.commit()
    assert await groups_of(database, PruneRequest(trained=True)) == chosen


async def test_a_group_that_has_not_ended_stays(database: Path) -> None:
    async with Opened(database) as (store, _):
        await store.create_rollouts([Rollout("late", "run", Task("q"), "run/1/1")])
    assert await groups_of(database, PruneRequest(unfinished=True)) == ["2/1", "val/0"]


async def test_pruning_says_so_keeps_rewards_and_is_done_once(database: Path) -> None:
    async with Opened(database) as (store, keeper):
        before = (await store.list_rollouts("run")).items
        kept = {r.id: await store.transitions(r.id) for r in before if r.trained_at_step is not None}
        plans = await plan(store, keeper, PruneRequest())
        assert (plans[0].rollouts, plans[0].trained, plans[0].weight.calls, plans[0].weight.spans) == (6, 0, 12, 6)
        await carry_out(store, keeper, plans)
        assert (await store.list_rollouts("run")).items == before
        assert {name: await store.transitions(name) for name in kept} == kept
        assert await store.transitions("run/val/0/0") == []
        said: Any = await store.get_state("run", PRUNED)
        assert (said["rollouts"], said["trained"]) == (6, False)
        (again,) = await plan(store, keeper, PruneRequest())
        assert again == RunPlan("run", kept="nothing in it can be spared")
        await carry_out(store, keeper, await plan(store, keeper, PruneRequest(trained=True)))
        said = await store.get_state("run", PRUNED)
        assert (said["rollouts"], said["trained"]) == (10, True)


async def test_whole_runs(database: Path) -> None:
    async with Opened(database) as (store, keeper):
        await store.put_run(Run("idle", "idle", {}, 2000.0))
        await store.put_run(Run("short", "short", {"config": {"trainer": {"steps": 9}}}, 2000.0))
        await store.put_run(Run("open", "open", {}, 2000.0))
        await store.create_rollouts([Rollout("o", "open", Task("q"), "g")])
        plans = {item.run: item for item in await plan(store, keeper, PruneRequest(whole=True))}
        assert {name for name, item in plans.items() if item.whole} == {"run", "idle"}
        assert "0 of 9 steps" in plans["short"].kept
        assert "not ended" in plans["open"].kept
        plans = {item.run: item for item in await plan(store, keeper, PruneRequest(whole=True, unfinished=True))}
        assert all(item.whole for item in plans.values())
        await store.lease("open", "w", ttl=3600)
        (held,) = await plan(store, keeper, PruneRequest(runs=("open",), whole=True, unfinished=True))
        assert (held.whole, held.kept) == (False, "somebody works on it")
        await carry_out(store, keeper, [plans["run"], plans["idle"], held])
    async with Opened(database) as (store, _):
        assert sorted(run.id for run in await store.list_runs()) == ["open", "short"]


async def test_branches_in_other_runs_are_told_that_lose_what_they_said(database: Path) -> None:
    """Not those in their parents' run, nor those that go as well."""
    async with Opened(database) as (store, keeper):
        await store.put_run(Run("branches", "branches", {}, 2000.0))
        await store.put_run(Run("more", "more", {}, 2000.0))
        parents = [("run/val/0/0", 1, 0), ("run/val/0/0", 1, 0), ("run/1/0/0", 1, 0), ("gone", 1, 0)]
        for run, count in (("branches", 4), ("more", 2)):
            await store.create_rollouts(
                [
                    Rollout(f"{run}/{n}", run, Task("q"), f"{run}/g", split="branch", parent=parents[n])
                    for n in range(count)
                ]
            )
        late = Rollout("run/val/0/late", "run", Task("q"), "run/2/9", split="branch", parent=parents[0])
        await store.create_rollouts([late])
        trained = (await store.get_rollout("run/1/0/0")).trained_at_step  # type: ignore[union-attr]
        assert trained is not None
        assert {item.run: item.branches for item in await plan(store, keeper, PruneRequest())} == {
            "run": 4, "branches": 0, "more": 0,
        }  # fmt: skip
        whole = await plan(store, keeper, PruneRequest(runs=("run", "more"), whole=True, unfinished=True))
        assert {item.run: item.branches for item in whole} == {"run": 3, "more": 0}


@pytest.fixture
async def lent(database: Path) -> Path:
    """With groups that begin behind rollouts of the run: one of its step 3, and one of an older run without a checkpoint, as
    after a resume with other settings."""
    behind, borrowed = ("run/1/1/0", 1, 0), ("run/2/1/1", 1, 0)
    async with Opened(database) as (store, _):
        await store.put_run(Run("borrower", "borrower", {}, 500.0))
        later = [Rollout(f"run/3/0/{n}", "run", Task("q"), "run/3/0", 3, index=n, parent=behind) for n in range(2)]
        theirs = [
            Rollout("borrower/1/0/0", "borrower", Task("q"), "borrower/1/0", 1),  # this group begins at its task
            Rollout("borrower/1/1/0", "borrower", Task("q"), "borrower/1/1", 1, parent=borrowed),
        ]
        await store.create_rollouts([*later, *theirs])
    return database


async def end_all(path: Path) -> None:
    ids = token_ids([1, 2])
    async with Opened(path) as (store, _):
        for run in ("run", "borrower"):
            for lease in await store.lease(run, "w", limit=9):
                name = lease.rollout.id
                await store.append([Transition(name, lease.attempt, 0, name, ids, ids, logprobs([-1.0, -1.0]))])
                await store.complete(name, lease.attempt, Outcome(reward=0.0))


async def test_a_group_behind_which_a_training_goes_on_stays(lent: Path) -> None:
    """It goes with the groups that begin behind it, if the user names their run as well, or if these have no calls."""

    async def going(*runs: str, **how: bool) -> list[str]:
        async with Opened(lent) as (store, keeper):
            items = {item.run: item for item in await plan(store, keeper, PruneRequest(runs=runs, **how))}
            assert not any(item.branches for item in items.values())
            return sorted(group.removeprefix("run/") for group in items["run"].groups)

    assert await going("run", unfinished=True) == ["val/0"], "none of these groups has ended"
    await end_all(lent)
    assert await going("run") == ["val/0"]
    assert await going("run", unfinished=True) == ["1/1", "3/0", "val/0"], "the borrower is to be resumed"
    assert await going("run", unfinished=True, trained=True) == ["1/0", "1/1", "2/0", "3/0", "val/0"]
    assert await going(unfinished=True) == ["1/1", "2/1", "3/0", "val/0"]
    assert await going("run", trained=True) == ["1/0", "2/0", "val/0"]
    with closing(sqlite3.connect(lent)) as connection:
        connection.execute("UPDATE rollouts SET trained_at_step = step WHERE id IN ('run/3/0/0', 'borrower/1/1/0')")
        connection.commit()
    assert await going(unfinished=True) == ["val/0"], "an audit of these steps reads where the groups begin"
    assert await going("run", unfinished=True, trained=True) == ["1/0", "1/1", "2/0", "3/0", "val/0"]
    assert await going(unfinished=True, trained=True) == ["1/0", "1/1", "2/0", "2/1", "3/0", "val/0"]
    async with Opened(lent) as (_, keeper):
        await keeper.forget_calls("borrower", ["borrower/1/1"])
    assert await going("run", unfinished=True) == ["2/1", "val/0"], "nothing of the borrower's group can be proved"


async def test_a_run_behind_which_another_training_begins_is_not_removed_as_a_whole(lent: Path) -> None:
    await end_all(lent)

    async def going(*runs: str) -> dict[str, str]:
        async with Opened(lent) as (store, keeper):
            plans = await plan(store, keeper, PruneRequest(runs=runs, whole=True, unfinished=True))
            assert all(item.whole != bool(item.kept) for item in plans)
            return {item.run: item.kept for item in plans}

    assert await going("run", "borrower") == {"run": "", "borrower": ""}
    assert await going("run") == {
        "run": "groups of borrower begin behind its rollouts: remove that run together with it, when nobody works on it "
        "(--whole --run run --run borrower), or first the calls of that run (without --whole: --run borrower --trained "
        "--unfinished --apply)"
    }
    async with Opened(lent) as (store, keeper):
        await store.create_rollouts([Rollout("late", "borrower", Task("q"), "late")])
        await store.lease("borrower", "w", ttl=3600)
        kept = await going("run", "borrower")
        assert kept["borrower"] == "somebody works on it"
        assert "groups of borrower begin behind" in kept["run"], "it stays, whatever the user asked for"
        (cure,) = await plan(store, keeper, PruneRequest(("borrower",), trained=True, unfinished=True))
        assert cure.groups == (), "not while somebody works on it"
        await store.release("w")
        await carry_out(store, keeper, await plan(store, keeper, PruneRequest(("borrower",), None, False, True, True)))
    assert await going("run") == {"run": ""}


async def test_age_is_that_of_the_last_attempt(database: Path) -> None:
    async with Opened(database) as (store, keeper):
        await store.put_run(Run("old", "old", {}, 1000.0))
        assert [item.run for item in await plan(store, keeper, PruneRequest(older_than=3600.0))] == ["old"]
        assert [item.run for item in await plan(store, keeper, PruneRequest(older_than=0.0))] == ["old", "run"]
        with pytest.raises(StoreError, match="no run 'x' in this store; it has"):
            await plan(store, keeper, PruneRequest(runs=("x",)))


async def test_whatever_is_pruned_the_rest_is_read_as_it_was(tmp_path: Path) -> None:
    """Groups whose calls share prefixes in all the ways the store makes use of, some of them removed in random order."""
    rng = random.Random(5)
    path = tmp_path / "store.db"
    async with Opened(path) as (store, keeper):
        await store.put_run(Run("run", "run"))
        made = [Rollout(f"r{n}", "run", Task(n), f"g{n % 6}", max_attempts=3) for n in range(24)]
        await store.create_rollouts(made)
        shared = [rng.randrange(1000) for _ in range(40)]
        while leases := await store.lease("run", "w", limit=5, ttl=3600):
            for lease in leases:
                own = [*shared, lease.rollout.group[1], *range(int(lease.rollout.group[1]) * 50)]
                prompt = [int(value) for value in own]
                for seq in range(rng.randrange(1, 4)):
                    response = [rng.randrange(1000) for _ in range(rng.randrange(1, 30))]
                    call = Transition(
                        lease.rollout.id,
                        lease.attempt,
                        seq,
                        f"c{seq}",
                        token_ids(prompt),
                        token_ids(response),
                        logprobs([-1.0] * len(response)),
                    )
                    await store.append([call])
                    prompt = prompt if rng.random() < 0.3 else [*prompt, *response]
                if rng.random() < 0.2:
                    await store.release("w")
                    break
                await store.complete(lease.rollout.id, lease.attempt, Outcome(reward=1.0))
        attempts = [(r.id, a) for r in (await store.list_rollouts("run")).items for a in range(1, r.attempt + 1)]
        before = dict(zip(attempts, await store.transitions_of(attempts), strict=True))
        gone: set[str] = set()
        for group in rng.sample([f"g{n}" for n in range(6)], 4):
            await keeper.forget_calls("run", [group])
            gone |= {r.id for r in made if r.group == group}
            kept = {key: calls for key, calls in before.items() if key[0] not in gone}
            assert dict(zip(kept, await store.transitions_of(list(kept)), strict=True)) == kept
        assert all(not calls for calls in await store.transitions_of([key for key in attempts if key[0] in gone]))


async def test_a_repeated_outcome_is_still_the_same_after_pruning(database: Path) -> None:
    """Also the rewards of its steps are, which are a part of what the rollout has earned."""
    async with Opened(database) as (store, keeper):
        await store.create_rollouts([Rollout("new", "run", Task("q"), "n")])
        (lease,) = await store.lease("run", "w")
        outcome = Outcome(reward=1.0, seconds=2.0, step_rewards=(StepReward(0.5, "solved"),))
        ended = await store.complete("new", lease.attempt, outcome)
        await keeper.forget_calls("run", ["n"])
        assert await store.complete("new", lease.attempt, outcome) == ended
        assert (await store.attempts_of([("new", None)]))[0].step_rewards == outcome.step_rewards
        with pytest.raises(StoreError):
            await store.complete("new", lease.attempt, replace(outcome, reward=0.0))


async def test_a_pruned_run_without_a_step_record_is_left_alone(tmp_path: Path) -> None:
    """A prompt search has no steps, and reads what its rollouts said when it goes on."""
    async with Opened(tmp_path / "s.db") as (store, keeper):
        await store.put_run(Run("run", "run"))
        await store.create_rollouts([Rollout("a", "run", Task("q"), "g", 1)])
        await store.lease("run", "w")
        ids = token_ids([1, 2])
        await store.append([Transition("a", 1, 0, "c", ids, ids, logprobs([-1.0, -1.0]))])
        await store.complete("a", 1, Outcome(reward=1.0))
        assert (await plan(store, keeper, PruneRequest(trained=True)))[0].groups == ()
        record = StepRecord("run", 1, 1, (("a", 1),), ("d",), "x", "step-00000001")
        await store.commit_step(record)
        assert (await plan(store, keeper, PruneRequest(trained=True)))[0].groups == ("g",)
