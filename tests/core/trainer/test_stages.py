"""Plugins at a step: what a stage may add, who hears of its alarms, the order of stages, and what becomes of one that fails."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from lightning.config import Config
from lightning.errors import ConfigError, PluginError, StoreError
from lightning.plugins.stages import NamedStage, StageError
from lightning.trainer.context import ADDED, STAGES
from lightning.trainer.stages import Added, Alarm, StepLine, StepStage, StepTaken
from lightning.trainer.summary import Evaluation
from lightning.types import Json


class Watch(StepStage):
    """Adds a number and says something of it; remembers what it was asked."""

    api = 1

    def __init__(self) -> None:
        self.asked: list[Any] = []

    async def begun(self, steps: Sequence[Mapping[str, float]], evaluations: Sequence[Evaluation]) -> Iterable[Alarm]:
        self.asked.append(("begun", len(steps), len(evaluations)))
        return [Alarm("early", "it is early")] if steps else []

    async def taken(self, step: StepTaken) -> Added:
        self.asked.append(("taken", step.step, len(step.rollouts), "rollouts" in step.metrics))
        alarms = [Alarm("early", "it is early"), Alarm(f"step {step.step}", "look", serious=True, steps=(step.step,))]
        return Added({"groups": len(step.groups)}, {"looked": [step.step]}, alarms)

    async def evaluated(self, evaluations: Sequence[Evaluation]) -> Iterable[Alarm]:
        self.asked.append(("evaluated", evaluations[-1].step))
        return [Alarm("evaluated", "an evaluation is there")]

    def alarmed(self, alarm: Mapping[str, Json]) -> None:
        self.asked.append(alarm)
        raise KeyError("nobody listens")

    async def ended(self) -> None:
        self.asked.append("ended")
        raise KeyError("not the end")


def standing(*stages: StepStage) -> Callable[[Config], StepLine]:
    named = [NamedStage(type(stage).__name__.lower(), stage, "1.0", "theirs") for stage in stages]
    return lambda config: StepLine(named, [each.name for each in named])


async def test_a_stage_adds_to_each_step_and_its_alarms_are_said_once(
    bench: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch, heard = Watch(), list[Any]()
    async with bench(tmp_path, stages=standing(watch), trainer__steps=2) as made:
        monkeypatch.setattr(made.loop.trackers, "alert", heard.append)
        await made.loop.run({})
        records = await made.store.steps("run")
    assert [record.metrics["watch/groups"] for record in records] == [2.0, 2.0]
    assert [record.context[ADDED] for record in records] == [{"watch": {"looked": [step]}} for step in (1, 2)]
    assert [record.context[STAGES]["steps"] for record in records] == [[["watch", "1.0"]]] * 2
    alarms = [{"run": "run", "step": step, **Alarm(f"step {step}", "look", True, (step,)).to_json()} for step in (1, 2)]
    assert heard == alarms, "what is serious, trackers hear too"
    taken = [("taken", step, 8, True) for step in (1, 2)]
    looked = [("evaluated", 0), taken[0], alarms[0], ("evaluated", 1), taken[1], alarms[1], ("evaluated", 2)]
    assert watch.asked == [("begun", 0, 0), *looked, "ended"]
    said = [record.getMessage() for record in caplog.records if record.name == "lightning.trainer.loop"]
    assert [line for line in said if "early" in line or "look" in line or "evaluation is" in line] == [
        "after 0 steps: an evaluation is there",
        "step 1: it is early",
        "step 1: look",
        "step 2: look",
    ]
    passed = [record.getMessage() for record in caplog.records if "training goes on" in record.getMessage()]
    assert passed[0].startswith("the stage 'watch' of the plugin 'theirs' failed (alarmed)")
    assert [line.partition("(")[2][:5] for line in passed] == ["alarm", "alarm", "ended"]


class Fails(StepStage):
    api, after = 1, ("watch",)
    raised: Exception | None = None
    added = Added()

    async def taken(self, step: StepTaken) -> Added:
        assert step.metrics["watch/groups"] == 2.0, "the one before has added it"
        if self.raised is not None and step.step == 2:
            raise self.raised
        return self.added


async def test_a_step_on_which_a_stage_fails_is_not_committed_and_a_resume_takes_it_again(
    bench: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fails = Fails()
    fails.raised = KeyError("a bug")
    why = (
        r"'fails' of the plugin 'theirs' failed on step 2, which is not committed \(taken: KeyError: 'a bug'\).*resume"
    )
    async with bench(tmp_path, stages=standing(Watch(), fails)) as made:
        with pytest.raises(StageError, match=why):
            await made.loop.run({})
        assert [record.step for record in await made.store.steps("run")] == [1]
    watch = Watch()
    caplog.clear()
    async with bench(tmp_path, stages=standing(watch)) as made:
        await made.loop.run({})
        assert [record.step for record in await made.store.steps("run")] == [1, 2, 3]
        assert len(made.engine.ledger) == 3
    assert watch.asked[:2] == [("begun", 1, 2), ("evaluated", 1)]
    said = [record.getMessage() for record in caplog.records]
    assert not any("early" in line for line in said), "it was said before"
    assert any("steps are made with other stages than in step 1: 'fails' (1.0) is missing" in line for line in said)


@pytest.mark.parametrize(
    ("added", "why"),
    [
        (Added({"share": float("nan")}), "the metric 'share' is nan and no number"),
        (Added({"share": float("inf")}), "the metric 'share' is inf and no number"),
        (Added({"share": "much"}), "the metric 'share' is 'much' and no number"),  # type: ignore[dict-item]
        (Added(context={"at": {1, 2}}), "Object of type set is not JSON serializable"),  # type: ignore[dict-item]
        ({"share": 1.0}, "has no attribute 'metrics'"),
    ],
)
async def test_what_no_record_takes_is_the_stages_failure(added: Any, why: str) -> None:
    fails = Fails()
    fails.added = added
    line = standing(Watch(), fails)(Config())
    with pytest.raises(StageError, match=rf"^the stage 'fails' of the plugin 'theirs' failed on step 1, .*{why}"):
        await line.taken(StepTaken(1, [], [1, 2], None, {"rollouts": 0.0}))  # type: ignore[arg-type, list-item]


async def test_an_alarm_of_a_step_that_is_taken_again_is_said_again() -> None:
    fails, steps = Fails(), [StepTaken(step, [], [1, 2], None, {"rollouts": 0.0}) for step in (2, 3)]  # type: ignore[arg-type, list-item]
    fails.raised = StoreError("the store is away")
    line = standing(Watch(), fails)(Config())
    with pytest.raises(StoreError):
        await line.taken(steps[0])
    fails.raised = None
    for step, causes in ((steps[0], ["early", "step 2"]), (steps[1], ["step 3"])):
        assert [alarm.cause for alarm in (await line.taken(step)).alarms] == causes


async def test_a_store_that_fails_a_stage_is_not_the_stages_failure() -> None:
    fails = Fails()
    fails.raised = StoreError("the store is away")
    with pytest.raises(StoreError, match=r"^the store is away$"):
        await standing(Watch(), fails)(Config()).taken(StepTaken(2, [], [1, 2], None, {}))  # type: ignore[arg-type, list-item]


def test_each_stage_hears_an_alarm_of_its_own() -> None:
    class Forgets(Watch):
        def alarmed(self, alarm: Mapping[str, Json]) -> None:
            alarm.clear()  # type: ignore[attr-defined]

    watch = Watch()
    standing(Forgets(), watch)(Config()).alarmed({"cause": "slow"})
    assert watch.asked == [{"cause": "slow"}]


class Rehearses(StepStage):
    api = 1

    async def rehearsed(self, *given: Any) -> Any:
        raise NotImplementedError


def test_stages_that_cannot_stand_there_are_refused() -> None:
    class Old(StepStage):
        api = 7

    class Plain(StepStage):
        api = 1

        def taken(self, step: StepTaken) -> Added:  # type: ignore[override]
            return Added()

    for stage, why in (
        (Old(), r"written for API 7; this trainer has API 1 \(`lightning.trainer.stages.API`\)"),
        (Plain(), "'taken' of the stage 'mine' of the plugin 'mine' is awaited: begin it with `async def`"),
        (object(), "derive it from `lightning.trainer.stages.StepStage`"),
    ):
        with pytest.raises(PluginError, match=why):
            StepLine([NamedStage("mine", stage)])  # type: ignore[type-var]
    both = [NamedStage("one", Watch()), NamedStage("two", Watch())]
    with pytest.raises(PluginError, match=r'both stand at \'taken\'.*set trainer.stage_order = \["one", "two"\]'):
        StepLine(both)
    assert list(StepLine(both, ["two", "one"]).versions) == ["two", "one"]
    with pytest.raises(PluginError, match=r"has the name with which the trainer's own metrics begin \(reward/...\)"):
        StepLine([NamedStage("reward", Watch())])
    with pytest.raises(PluginError, match="'one' of the plugin 'one' and 'two' of the plugin 'two' both make dry runs"):
        StepLine([NamedStage("one", Rehearses()), NamedStage("two", Rehearses())])
    with pytest.raises(ConfigError, match="a dry run needs a plugin that makes it, and there is none"):
        StepLine([NamedStage("one", Watch())]).rehearsal()


def test_a_name_in_the_order_that_nobody_has_is_told(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    StepLine([], ["gone"])
    assert "trainer.stage_order names stages that no plugin has here: gone" in caplog.text
