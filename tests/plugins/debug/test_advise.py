"""A recorded run is asked by the rules again, and compared with past runs of its tasks."""

from __future__ import annotations

import json
import math
import shlex
from pathlib import Path
from typing import Any

import pytest
from lightning.cli.app import main
from lightning.config import Config, load_config, with_settings
from lightning.engines.logprob_gap import BFLOAT16, FLOAT32
from lightning.plugins import plugins
from lightning.store.protocol import Store
from lightning.trainer.context import Epoch, keep_epochs
from lightning.trainer.plan import VAL
from lightning.types import Fault, Json, Rollout, Run, StepRecord, Task
from lightning.types import Outcome as Ended
from lightning_debug.advise import (
    Advice,
    Alarm,
    Outcome,
    Past,
    Tuning,
    advise,
    compare,
    config_of,
    past_of,
    read_course,
    settings_of,
)
from lightning_debug.diagnosis import Diagnosis
from lightning_debug.run_commands import show_advice

from tests.core.trainer.test_tiny_run import train as train


def past(reward: float, rollouts: int = 200, **settings: Json) -> Past:
    plain: dict[str, Json] = {"engine.lr": 1e-3, "trainer.order": "shuffled"}
    changed = {key.replace("__", "."): value for key, value in settings.items()}
    return Past(plain | changed, Outcome(reward, 0.5 / math.sqrt(rollouts)))


def test_a_setting_is_named_by_the_runs_that_differ_in_it_alone() -> None:
    others = [
        past(0.8, engine__lr=2e-3),
        past(0.82, engine__lr=2e-3),
        past(0.99, engine__lr=5e-3, trainer__order="given"),
    ]
    first, *_ = compare(past(0.5), others)
    assert (first.setting, first.mine, first.better, first.my_runs, first.better_runs, first.alone) == (
        "engine.lr", 1e-3, 2e-3, 1, 2, True,
    )  # fmt: skip
    assert first.better_reward == pytest.approx(0.81)
    named = {each.setting: each for each in compare(past(0.5), others[2:])}
    assert {name: each.alone for name, each in named.items()} == {"engine.lr": False, "trainer.order": False}


def test_differences_within_the_error_and_worse_runs_are_not_named() -> None:
    assert list(compare(past(0.5), [past(0.55, engine__lr=2e-3)])) == []
    assert list(compare(past(0.5), [past(0.2, engine__lr=2e-3)])) == []
    assert list(compare(past(0.5), [past(0.9)])) == [], "the same settings, a luckier seed"
    assert list(compare(past(0.5, 4), [past(0.9, 4, engine__lr=2e-3)])) == [], "of four rollouts nothing is known"


def test_runs_that_were_measured_otherwise_are_not_compared() -> None:
    better = past(0.9, engine__lr=2e-3)
    assert len(list(compare(past(0.5), [better]))) == 1
    trained = Past(better.settings, Outcome(0.9, 0.01, "training"))
    cooler = Past(better.settings, better.outcome, {"trainer.eval_temperature": 0.0})
    assert list(compare(past(0.5), [trained, cooler])) == []


def described(algorithm: Any = None, **settings: Any) -> dict[str, Json]:
    """A run's configuration."""
    config = with_settings(Config(), {key.replace("__", "."): value for key, value in settings.items()})
    return {"model": "m", "tasks": None, "algorithm": algorithm, "config": config.model_dump(mode="json")}


def test_settings_that_change_nothing_that_is_learned_are_no_settings() -> None:
    plain = settings_of(described())
    assert settings_of(described(trainer__seed=3, server__port=1, engine__threads=2, policy_server__port=7)) == plain
    kept = {"policy_server.max_model_len": 64, "policy_server.dtype": "float32", "policy_server.args": ["-x"]}
    found = settings_of(described(**{name.replace(".", "__"): value for name, value in kept.items()}))
    assert {name: value for name, value in found.items() if value != plain[name]} == kept


def lines_of(tuning: Tuning, capsys: pytest.CaptureFixture[str]) -> list[str]:
    capsys.readouterr()
    show_advice(Advice("r", 3, (), (), (tuning,), 2, ""))
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize(
    ("setting", "better"),
    [
        ("engine.lora", {"rank": 4, "alpha": 8.0, "target_modules": ["q_proj", "v_proj"]}),
        ("engine.lora", None),
        ("engine.lr", 1e-06),
        ("gateway.seed_calls", True),
        ("policy_server.args", ["--served-name", 'a "b" \\ é']),
        ("runner.prompts", {"solver.main": "Think.\nIt's 5 o'clock"}),
        ("trainer.policy_fault", "mask"),
    ],
)
def test_what_is_printed_for_set_is_what_set_takes(
    setting: str, better: Json, capsys: pytest.CaptureFixture[str]
) -> None:
    tuning = Tuning(setting, None, better, 0.1, 0.9, 1, 1, alone=True)
    *_, line = lines_of(tuning, capsys)
    word, value = shlex.split(line)
    assert word == "--set"
    loaded = load_config(overrides=[value], env={}).model_dump(mode="json")
    section, name = setting.split(".")
    assert loaded[section][name] == better


def test_what_set_does_not_take_is_not_printed_for_it(capsys: pytest.CaptureFixture[str]) -> None:
    for setting in ("algorithm.arguments.group_size", "trainer.of_another_release"):
        assert not any("--set" in line for line in lines_of(Tuning(setting, 1, 2, 0.1, 0.9, 1, 1, True), capsys))


def test_of_rollouts_no_onset_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    alarms = tuple(Alarm(Diagnosis("x", "it is", serious=True), None, still) for still in (True, False))
    show_advice(Advice("r", 3, alarms, (), (), 1, ""))
    said = capsys.readouterr().out
    assert "it is (in the last steps)" in said
    assert "it is (in the last steps, and not in the very last)" in said


def test_a_short_run_that_trained_nothing_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    show_advice(Advice("r", 2, (), (), (), 1, "", idle=2))
    said = capsys.readouterr().out
    assert "2 of 2 steps trained nothing" in said
    assert "most rules were not applied: they compare 5 steps" in said
    assert "no alarm" not in said


@pytest.fixture
async def store() -> Any:
    """An open store."""
    made = plugins().store("memory://")
    await made.open()
    yield made
    await made.close()


async def commit(store: Store, run: str, step: int, reward: float = 0.5, **context: Json) -> None:
    """A step of ten rollouts whose rewards are 2 apart from their mean."""
    metrics = {"reward": reward, "reward_with_failures": reward, "reward_std": 2.0, "rollouts": 10.0, "failed": 0.0}
    await store.commit_step(StepRecord(run, step, step, (), (), "d", metrics=metrics, context=context))


async def evaluated(store: Store, run: str, step: int, rewards: list[float]) -> None:
    """An evaluation with these rewards."""
    names = [f"{run}/{VAL}/{step}/{place}" for place in range(len(rewards))]
    await store.create_rollouts([Rollout(name, run, Task(name), name, split=VAL, step=step) for name in names])
    await store.lease(run, "worker", limit=len(names))
    for name, reward in zip(names, rewards, strict=True):
        await store.complete(name, 1, Ended(reward=reward))


async def test_a_run_is_compared_by_what_was_measured_under_its_last_settings(store: Store) -> None:
    run = Run("r", "r", described(engine__lr=1e-3), 1.0)
    await store.put_run(run)
    await evaluated(store, "r", 0, [0.0, 2.0])
    await commit(store, "r", 1)
    await commit(store, "r", 2)
    one = await past_of(store, run)
    assert one is not None, "the evaluation before the first step is of no setting"
    assert one.outcome.measure == "training"
    assert one.outcome.error == pytest.approx(2 / math.sqrt(18))
    await evaluated(store, "r", 2, [10.0, 14.0])
    one = await past_of(store, run)
    assert one is not None
    assert (one.outcome.measure, one.outcome.reward) == ("held-out", 12.0)
    assert one.outcome.error == pytest.approx(2.0)
    later = Epoch(1, 3, described(engine__lr=5e-3, trainer__eval_temperature=0.0), 2.0)
    await keep_epochs(store, run, [Epoch(0, 1, run.config, 1.0), later])
    await commit(store, "r", 3, reward=7.0)
    assert await past_of(store, run) is None, "what did it may have been either learning rate"
    one = await past_of(store, run, changed=True)
    assert one is not None
    assert (one.settings["engine.lr"], one.outcome.reward, one.outcome.measure) == (5e-3, 7.0, "training")
    assert one.measured["trainer.eval_temperature"] == 0.0
    assert (await config_of(store, run))["config"] == later.config["config"]


@pytest.mark.parametrize("bad", [1, 2, 3])
async def test_what_is_in_rollouts_lasts_only_if_the_last_step_has_it(
    store: Store, bad: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def found(attempts: object = (), agents: object = (), errors: Any = (), course: object = None) -> list[Diagnosis]:
        return [Diagnosis("odd", "odd", serious=True)] if "odd" in errors else []

    monkeypatch.setattr("lightning_debug.advise.diagnose", found)
    await store.put_run(Run("r", "r", described(), 1.0))
    await store.create_rollouts([Rollout("r/1", "r", Task("t"), "r/1", step=bad)])
    await store.lease("r", "worker", limit=1)
    await store.complete("r/1", 1, Ended(error="odd", fault=Fault.AGENT))
    for step in range(1, 4):
        await commit(store, "r", step)
    alarms = (await advise(store, "r")).alarms
    assert [(alarm.since, alarm.still) for alarm in alarms] == {1: [], 2: [(None, False)], 3: [(None, True)]}[bad]


async def test_a_tool_that_failed_in_earlier_steps_without_training_has_the_first_of_these_as_its_onset(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def found(attempts: object = (), agents: object = (), errors: Any = (), course: object = None) -> list[Diagnosis]:
        return [Diagnosis(cause, cause, serious=True) for cause in ("unable tools", "odd") if errors]

    monkeypatch.setattr("lightning_debug.advise.diagnose", found)
    await store.put_run(Run("r", "r", described(), 1.0))
    for step in (2, 3):
        await store.create_rollouts([Rollout(f"r/{step}", "r", Task("t"), f"r/{step}", step=step)])
        await store.lease("r", "worker", limit=1)
        await store.complete(f"r/{step}", 1, Ended(error="odd", fault=Fault.AGENT))
    for step in range(1, 7):
        metrics = {"reward": 0.0, "groups_used": float(step not in (2, 3))}
        await store.commit_step(StepRecord("r", step, step, (), (), "d", metrics=metrics))
    alarms = (await advise(store, "r")).alarms
    assert [(alarm.found.cause, alarm.since, alarm.still) for alarm in alarms] == [("unable tools", 2, False)]


async def test_training_rewards_of_chosen_tasks_say_nothing(store: Store) -> None:
    run = Run("r", "r", described(trainer__order="learnable"), 1.0)
    await store.put_run(run)
    await commit(store, "r", 1)
    assert await past_of(store, run) is None


@pytest.mark.parametrize(("dtype", "bound"), [("float32", FLOAT32), ("bfloat16", BFLOAT16)])
async def test_a_run_with_odd_settings_is_read_with_the_dtype_it_was_computed_in(
    store: Store, dtype: str, bound: object
) -> None:
    config: Json = {"trainer": {"gone": 1, "order": 7, "eval_every": 2}, "engine": {"dtype": "auto"}}
    run = Run("r", "r", {"model": "m", "config": config}, 1.0)
    await store.put_run(run)
    await commit(store, "r", 1, dtype=dtype)
    course = (await read_course(store, run)).after(1)
    assert (course.gap, course.order) == (bound, "shuffled")
    assert (await advise(store, "r")).steps == 1


def advised(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, what was printed, and what was said on standard error."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        main(["advise", *arguments])
    said = capsys.readouterr()
    return int(ended.value.code or 0), said.out, said.err


def test_the_command_compares_with_the_other_runs_of_the_folder(
    train: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = train("mine", 2)
    train("other", 1, engine__lr=3e-3)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "lightning.db").write_bytes(b"nothing")
    code, said, beside = advised(capsys, str(folder), "--runs", str(tmp_path), "--json")
    found = json.loads(said)
    assert (code, found["run"], found["steps"], found["compared_runs"]) == (0, "mine", 2, 2)
    assert (found["alarms"], found["tuning"], found["unread"]) == ([], [], "")
    assert "broken" in beside
    _, said, _ = advised(capsys, str(folder), "--runs", str(tmp_path))
    few = "most rules were not applied: they compare 5 steps, and the run has fewer"
    assert f"mine: 2 steps\nno alarm\n{few}\nnone of 1 other runs" in said


def test_what_cannot_be_advised_on_is_said(train: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, said = advised(capsys, str(train("empty", 0)), "--runs", str(tmp_path))
    assert (code, "the run empty has no committed step" in said) == (2, True)
