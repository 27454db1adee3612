"""`lightning runs` reads what is there and says where it is not."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from lightning.cli import output
from lightning.cli.output import with_store
from lightning.plugins import plugins
from lightning.store.protocol import RolloutCount, Store
from lightning.store.url import sqlite_url
from lightning.trainer.context import Epoch, keep_epochs, read_epochs
from lightning.trainer.summary import evaluate_rollouts
from lightning.types import Fault, Json, Outcome, Rollout, Run, Status, StepRecord, StepReward, Task


def test_list(lightning, runs: Path) -> None:
    (row,) = json.loads(lightning("runs", "--runs", str(runs), "--json").out)
    counted = {key: row[f"{key}_rollouts"] for key in ("training", "held_out", "other")}
    assert (row["id"], row["steps"], counted) == ("small", 1, {"training": 4, "held_out": 0, "other": 0})
    assert row["rollouts_failed"] == 1
    assert row["rewards"] == [0.5, 0.5]
    table = lightning("runs", "--runs", str(runs)).out
    assert "small" in table
    assert "0.500 → 0.500" in table


def test_a_place_can_be_a_folder_of_runs_a_run_a_file_or_a_url(lightning, runs: Path) -> None:
    file = runs / "small" / "lightning.db"
    for place in (runs, runs / "small", file, f"sqlite:///{file}"):
        rows = json.loads(lightning("runs", "--runs", str(place), "--json").out)
        assert [row["id"] for row in rows] == ["small"], place


def test_the_default_place_is_runs_and_may_be_missing(lightning, runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(runs)
    ran = lightning("runs")
    assert ("no runs in runs yet" in ran.out, ran.err) == (
        True,
        "Next: make one with a demonstration: lightning demo\n",
    )
    assert lightning("runs", "--json").out == "[]\n"
    monkeypatch.chdir(runs.parent)
    assert [row["id"] for row in json.loads(lightning("runs", "--json").out)] == ["small"]


def test_show(lightning, runs: Path) -> None:
    shown = json.loads(lightning("runs", "show", "small", "--runs", str(runs), "--json").out)
    assert shown["run"]["config"]["model"] == "models/tiny"
    assert [step["digest"] for step in shown["steps"]] == ["c"]
    assert [(item["status"], item["reward"]) for item in shown["rollouts"]] == [
        ("succeeded", 0.0),
        ("succeeded", 1.0),
        ("failed", None),
        ("pending", None),
    ]
    table = lightning("runs", "--runs", str(runs), "show", "small").out
    assert "models/tiny" in table
    assert "ValueError: [no] number" in table
    assert "line 2" not in table


def test_a_step_that_measured_nothing_shows_no_number(lightning, runs: Path) -> None:
    """It trained older rollouts, of which every call was constrained: neither a reward nor a gap is known."""
    url = sqlite_url(runs / "small" / "lightning.db")
    metrics = {"rollouts": 12.0, "failed": 0.0, "tokens": 40.0, "tokens_compared": 0.0, "staleness_max": 1.0}
    record = StepRecord("small", 2, 2, (), (), "d", metrics=metrics)
    asyncio.run(with_store(url, lambda store: store.commit_step(record)))
    table = lightning("runs", "show", "small", "--runs", str(runs)).out
    (row,) = [line.split() for line in table.splitlines() if line.startswith("2 ") and " v2 " in line]
    assert row == ["2", "-", "-", "0", "40", "-", "-", "v2", "-/1", "-"]
    shown = json.loads(lightning("runs", "show", "small", "--runs", str(runs), "--json").out)
    assert shown["summary"]["rewards"] == [0.5, None]
    assert json.loads(lightning("runs", "--runs", str(runs), "--json").out)[0]["rewards"] == [0.5, None]
    assert "0.500 → -" in lightning("runs", "--runs", str(runs)).out


def test_show_can_be_narrowed(lightning, runs: Path) -> None:
    place = ("--runs", str(runs), "--json")
    assert len(json.loads(lightning("runs", "show", "small", "--failed", *place).out)["rollouts"]) == 1
    assert len(json.loads(lightning("runs", "show", "small", "--limit", "2", *place).out)["rollouts"]) == 2
    assert json.loads(lightning("runs", "show", "small", "--step", "9", *place).out)["rollouts"] == []


def test_what_is_not_there_is_said(lightning, runs: Path) -> None:
    ran = lightning("runs", "show", "smal", "--runs", str(runs))
    assert ran.code == 2
    assert ran.err.startswith("error: there is no run 'smal'")
    ran = lightning("runs", "--runs", str(runs / "nowhere"))
    assert ran.code == 2
    assert "is neither a folder nor a database" in ran.err


def test_a_corrupt_database_does_not_hide_the_others(lightning, runs: Path) -> None:
    (runs / "bad").mkdir()
    (runs / "bad" / "lightning.db").write_bytes(b"not a database" * 100)
    ran = lightning("runs", "--runs", str(runs), "--json")
    assert [row["id"] for row in json.loads(ran.out)] == ["small"]
    assert "bad/lightning.db" in ran.err
    ran = lightning("runs", "show", "small", "--runs", str(runs), "--json")
    assert (ran.code, json.loads(ran.out)["run"]["id"]) == (0, "small")
    assert "bad/lightning.db" in ran.err
    ran = lightning("runs", "show", "smal", "--runs", str(runs))
    assert (ran.code, "bad/lightning.db" in ran.err, "there is no run 'smal'" in ran.err) == (2, True, True)


def test_a_run_whose_store_no_plugin_knows_does_not_hide_the_others(lightning, runs: Path) -> None:
    (runs / "bad").mkdir()
    (runs / "bad" / "run.json").write_text('{"id": "bad", "store": "gone://host/db"}')
    ran = lightning("runs", "--runs", str(runs), "--json")
    assert [row["id"] for row in json.loads(ran.out)] == ["small"]
    assert "there is no store 'gone'" in ran.err


def test_where_no_database_can_be_read_that_is_the_error(lightning, runs: Path) -> None:
    (runs / "small" / "lightning.db").write_bytes(b"not a database" * 100)
    ran = lightning("runs", "--runs", str(runs))
    assert (ran.code, ran.out) == (2, "")
    assert "small/lightning.db" in ran.err


def test_looking_makes_no_database(lightning, runs: Path, tmp_path: Path) -> None:
    missing = sqlite_url(tmp_path / "typo.db")
    ran = lightning("runs", "--runs", missing)
    assert (ran.code, "there is no database at" in ran.err) == (2, True)
    (runs / "moved").mkdir()
    (runs / "moved" / "run.json").write_text(json.dumps({"id": "moved", "store": missing}))
    ran = lightning("runs", "--runs", str(runs), "--json")
    assert [row["id"] for row in json.loads(ran.out)] == ["small"]
    for command in (("runs", "show"), ("audit",), ("plan",)):
        ran = lightning(*command, str(runs / "moved"))
        assert (ran.code, "there is no database at" in ran.err) == (2, True), command
    assert not (tmp_path / "typo.db").exists()


def test_what_a_task_may_hold_is_printed_as_json(lightning, runs: Path) -> None:
    url = sqlite_url(runs / "small" / "lightning.db")
    odd = Task("lone \ud800", expected=2**70)

    async def add(store: Store) -> None:
        await store.create_rollouts([Rollout("odd", "small", odd, "g")])

    asyncio.run(with_store(url, add))
    ran = lightning("runs", "show", "small", "--runs", str(runs), "--json")
    assert ran.code == 0
    shown = json.loads(ran.out)
    (found,) = [item for item in shown["rollouts"] if item["id"] == "odd"]
    assert found["task"] == {"input": "lone \ud800", "expected": 2**70, "metadata": {}, "id": odd.id}


def test_no_command_shows_the_password_of_a_store(lightning, runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Known:
        def opened_store(self, url: str, *, make: bool) -> Any:
            return plugins().opened_store(sqlite_url(runs / "small" / "lightning.db"), make=make)

        def names(self, kind: str) -> Iterable[str]:
            return plugins().names(kind)

    monkeypatch.setattr(output, "plugins", Known)
    url, shown = "postgresql://me:hunter2@db/l", "postgresql://***@db/l"
    typo = "postgresql:/me:hunter2@db/l"
    for command, named in (
        (("runs", "--runs", url, "--json"), True),
        (("runs", "--runs", url), False),
        (("runs", "show", "nobody", "--runs", url), True),
        # With one slash too few it is the name of a file, which is not there.
        (("runs", "--runs", typo), False),
        (("db", "status", typo), False),
    ):
        ran = lightning(*command)
        assert "hunter2" not in ran.out + ran.err, command
        assert (shown in ran.out + ran.err) is named, (command, ran)


def test_show_has_the_named_rewards_of_evaluations_and_those_in_which_all_failed(lightning, tmp_path: Path) -> None:
    async def fill() -> None:
        store = plugins().store(sqlite_url(tmp_path / "lightning.db"))
        await store.open()
        await store.put_run(Run("run", "run"))
        given = (StepReward(0.5, "polite"), StepReward(0.25, "polite"))
        ends = (
            Outcome(reward=0.5, rewards={"correct": 0.25}, step_rewards=given),
            Outcome(fault=Fault.AGENT, error="broken"),
        )
        for step, outcome in enumerate(ends):
            await store.create_rollouts([Rollout(f"v{step}", "run", Task(1), "g", split="val", step=step)])
            (lease,) = await store.lease("run", "worker", limit=1)
            await store.complete(lease.rollout.id, lease.attempt, outcome)
        await store.close()

    asyncio.run(fill())
    shown = lightning("runs", "show", "run", "--runs", str(tmp_path)).out
    assert "held-out after 0 steps: 0.500, correct 0.250 over 1 task" in shown
    assert "held-out after 1 step: - (0.000 if failures count as 0) over 1 task" in shown
    assert "1 tasks" not in shown
    assert "correct 0.25, polite 0.75 of 2 calls" in shown
    assert "rollouts: 2 of 2 (2 held-out)" in shown
    assert "more with a larger" not in shown
    limited = lightning("runs", "show", "run", "--runs", str(tmp_path), "--limit", "1").out
    assert "rollouts: 1 of 2 (2 held-out); 1 more with a larger --limit" in limited
    assert "1 of 2 rollouts failed: broken" in shown
    told = json.loads(lightning("runs", "show", "run", "--runs", str(tmp_path), "--json").out)
    assert [reward["value"] for reward in told["step_rewards"]["v0"]] == [0.5, 0.25]
    assert [(one["count"], one["reason"]["message"]) for one in told["failures"]] == [(1, "broken")]
    listed = lightning("runs", "--runs", str(tmp_path)).out
    assert "0.500 → - (0.500 → 0.000 if failures count as 0)" in listed
    (row,) = json.loads(lightning("runs", "--runs", str(tmp_path), "--json").out)
    assert (row["before_with_failures"], row["after_with_failures"]) == (0.5, 0.0)


def test_what_changed_while_a_run_lived_is_listed(lightning, tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "second"
    folder.mkdir(parents=True)

    async def fill() -> None:
        store = plugins().store(sqlite_url(folder / "lightning.db"))
        await store.open()
        run = await store.put_run(Run("second", "second", {"seed": 1, "forked_from": "first@20"}))
        epochs = [*await read_epochs(store, run), Epoch(1, 2, {**run.config, "seed": 2}, 5.0)]
        await keep_epochs(store, run, epochs)
        for step, threads in ((1, 1), (2, 1), (3, 4)):
            context: dict[str, Json] = {"epoch": int(step > 1), "threads": threads}
            await store.commit_step(StepRecord("second", step, step, (), (), f"{step}", context=context))
        await store.close()

    asyncio.run(fill())
    place = ("--runs", str(folder.parent))
    shown = lightning("runs", "show", "second", *place).out
    assert "forked from first@20" in shown
    assert "config epoch 1, from step 2 on:\n  seed 1 → 2" in shown
    found = json.loads(lightning("runs", "show", "second", "--json", *place).out)
    assert [epoch["first"] for epoch in found["epochs"]] == [1, 2]
    assert found["steps"][2]["context"] == {"epoch": 1, "threads": 4}
    audited = lightning("audit", "second", *place).out
    assert "warning from step 3 on sums are rounded otherwise than before: threads 1 → 4" in audited
    assert "3 steps in 2 config epochs" in audited


def test_train_forks_what_it_is_told_to(lightning, tmp_path: Path) -> None:
    """As far as the message that there is no such run, which comes before anything is started."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "tasks.jsonl").write_text('{"input": 1}\n')
    ran = lightning(
        "train", "--model", str(tmp_path / "model"), "--tasks", str(tmp_path / "tasks.jsonl"), "--runner", "remote",
        "--from", "nobody@3", "--out", str(tmp_path / "runs" / "fork"), "--set", "server.port=1",
    )  # fmt: skip
    assert ran.code == 2
    assert "no run 'nobody'" in ran.err


def two_runs(folder: Path) -> Path:
    """Two runs with other seeds and rates, evaluated before and after a step."""

    async def fill(store: Store) -> None:
        for name, lr, after in (("one", 1e-3, (1.0, 0.0)), ("two", 2e-3, (1.0, 1.0))):
            seed = 0 if name == "one" else 1
            config: Json = {"model": "m", "seed": seed, "config": {"trainer": {"seed": seed}, "engine": {"lr": lr}}}
            assert isinstance(config, dict)
            await store.put_run(Run(name, name, config))
            for step, rewards in ((0, (0.0, 0.0)), (1, after)):
                made = [
                    Rollout(
                        id=f"{name}/{step}/{n}",
                        run=name,
                        task=Task(n),
                        group=f"{name}/{step}/{n}",
                        step=step,
                        split="val",
                    )
                    for n in range(2)
                ]
                await store.create_rollouts(made)
                for lease in await store.lease(name, "w", limit=2):
                    index = int(lease.rollout.id.rpartition("/")[2])
                    await store.complete(lease.rollout.id, lease.rollout.attempt, Outcome(reward=rewards[index]))
                await store.log_metrics(name, step, {"eval/reward": sum(rewards) / 2})

    folder.mkdir()
    asyncio.run(with_store(sqlite_url(folder / "lightning.db"), fill, make=True))
    return folder


def test_runs_are_compared_by_what_they_differ_in(lightning, tmp_path: Path) -> None:
    place = str(two_runs(tmp_path / "both"))
    rows = json.loads(lightning("runs", "compare", "--runs", place, "--json").out)
    assert [(row["id"], row["before"], row["after"]) for row in rows] == [("one", 0.0, 0.5), ("two", 0.0, 1.0)]
    assert [row["settings"] for row in rows] == [
        {"engine.lr": 1e-3, "trainer.seed": 0},
        {"engine.lr": 2e-3, "trainer.seed": 1},
    ]
    assert rows[0]["error"] > rows[1]["error"] > 0
    ran = lightning("runs", "compare", "one", "two", "--runs", place)
    lines = [line.split() for line in ran.out.splitlines()]
    first, second = (lines[row][:2] for row in (1, 2))
    assert (first, second) == (["1", "two"], ["2", "one"]), "the best first"
    assert ["engine.lr", "0.002", "0.001"] in lines
    assert ["trainer.seed", "1", "0"] in lines
    assert [row["gain"]["tasks"] for row in rows] == [2, 2]
    intervals = [row["gain"]["interval"] for row in rows]
    assert all(low < 0 < high for low, high in intervals), "two tasks do not tell a gain from chance"
    assert f"lightning runs --runs {place} two" in ran.err


def test_a_comparison_of_long_settings_fits_on_a_screen(lightning, tmp_path: Path) -> None:
    async def fill(store: Store) -> None:
        for number in range(6):
            tasks: list[Json] = [f"{number}/{task}" for task in range(500)]
            many: dict[str, Json] = {f"setting{place}": number for place in range(40)}
            await store.put_run(Run(f"run-{number}", f"run-{number}", {"tasks": {"train": tasks}, "many": many}))

    asyncio.run(with_store(sqlite_url(tmp_path / "lightning.db"), fill, make=True))
    place = ("--runs", str(tmp_path))
    shown = lightning("runs", "compare", *place).out
    assert len(shown.splitlines()) < 40
    assert "21 more settings differ: --all-settings shows them" in shown
    whole = lightning("runs", "compare", "--all-settings", *place).out
    assert "more settings" not in whole
    assert "5/499" in whole


def test_a_run_s_name_alone_shows_it(lightning, runs: Path) -> None:
    shown = lightning("runs", "show", "small", "--runs", str(runs)).out
    assert lightning("runs", "--runs", str(runs), "small").out == shown
    assert lightning("runs", str(runs / "small")).out == shown
    assert json.loads(lightning("runs", str(runs / "small"), "--json", "--limit", "1").out)["run"]["id"] == "small"


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["one", "three"], "there is no run 'three' in"),
        (
            ["one"],
            "a comparison needs two or more runs, and only one was named: name another run, or no run to compare all",
        ),
        ([], ""),
    ],
)
def test_what_cannot_be_compared_is_named(lightning, tmp_path: Path, names: list[str], said: str) -> None:
    ran = lightning("runs", "compare", *names, "--runs", str(two_runs(tmp_path / "both")))
    assert (ran.code, said in ran.err) == ((2, True) if said else (0, True))


def test_a_place_with_too_few_runs_is_named(lightning, runs: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for place, count in ((runs, "only 1"), (tmp_path / "empty", "none")):
        ran = lightning("runs", "compare", "--runs", str(place))
        assert ran.code == 2
        said = f"a comparison needs two or more runs, and there is {count} in {place}: give another place with --runs"
        assert said in ran.err


def test_a_cancelled_rollout_has_neither_failed_nor_succeeded(lightning, runs: Path) -> None:
    async def cancel(store: Store) -> list[RolloutCount]:
        (lease,) = await store.lease("small", "worker")
        await store.complete(lease.rollout.id, lease.attempt, Outcome(fault=Fault.CANCELLED, error="enough"))
        return await store.count_rollouts("small")

    counts = asyncio.run(with_store(sqlite_url(runs / "small" / "lightning.db"), cancel))
    assert {each.status: each.rollouts for each in counts} == {"cancelled": 1, "failed": 1, "succeeded": 2}
    (row,) = json.loads(lightning("runs", "--runs", str(runs), "--json").out)
    assert (row["training_rollouts"], row["rollouts_failed"]) == (4, 1)
    shown = json.loads(lightning("runs", "show", "small", "--runs", str(runs), "--json").out)
    assert (shown["summary"]["failed"], len(shown["failures"]), shown["cancelled"]) == (1, 1, 1)
    table = lightning("runs", "show", "small", "--runs", str(runs)).out
    assert "1 of 4 rollouts were cancelled" in table
    assert "1 of 4 rollouts failed: ValueError" in table


def test_a_cancelled_rollout_is_no_part_of_an_evaluation() -> None:
    done = Rollout("a", "r", Task(1), "g", split="val", status=Status.SUCCEEDED, reward=1.0)
    unwanted = replace(done, id="b", status=Status.CANCELLED, fault=Fault.CANCELLED, reward=None)
    assert evaluate_rollouts(3, [done, unwanted]) == evaluate_rollouts(3, [done])
