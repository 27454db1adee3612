"""The best model is kept, and a run that gets no better ends, also over restarts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lightning.config import Config, with_settings
from lightning.errors import ConfigError
from lightning.trainer.summary import Evaluation, HeldOut, check_held_out
from lightning.types import Task


def evaluation(step: int, reward: float) -> Evaluation:
    return Evaluation(step, reward, 4, 0)


def graded(rewards: Sequence[float], answering: Any) -> Any:
    """An agent that earns `rewards[i]` on every task of the i-th evaluation."""
    seen: list[Task] = []

    async def agent(task: Task, llm: Any) -> float:
        reward = await answering(task, llm)
        if not str(task.input).startswith("held out"):
            return float(reward)
        seen.append(task)
        return rewards[(len(seen) - 1) // 3]

    return agent


def ledger(engine: Any) -> Any:
    """An export that says of what it is."""

    def export(folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "ledger.json").write_text(json.dumps(engine.ledger))
        return folder

    return export


async def test_the_run_leaves_the_model_of_its_best_evaluation(bench: Any, tmp_path: Path, answering: Any) -> None:
    agent = graded([0.2, 0.5, 0.9, 0.4, 0.9], answering)
    async with bench(tmp_path / "r", agent, trainer__steps=4, trainer__keep="best") as made:
        made.engine.export = ledger(made.engine)
        kept = await made.loop.run({})
        assert (kept.step, kept.reward, made.loop.done) == (2, pytest.approx(0.9), 4)
        assert json.loads((tmp_path / "r/model/ledger.json").read_text()) == made.engine.ledger[:2]
        assert [folder.name for folder in (tmp_path / "r/best").iterdir()] == ["step-00000002"]


async def test_the_last_model_is_kept_where_nothing_else_is_asked_for(
    bench: Any, tmp_path: Path, answering: Any
) -> None:
    async with bench(tmp_path / "r", graded([0.9, 0.1, 0.1], answering), trainer__steps=2) as made:
        made.engine.export = ledger(made.engine)
        assert await made.loop.run({}) is None
        assert json.loads((tmp_path / "r/model/ledger.json").read_text()) == made.engine.ledger
        assert not (tmp_path / "r/best").exists()


async def test_a_crash_before_the_best_model_is_written_costs_nothing(
    bench: Any, tmp_path: Path, answering: Any
) -> None:
    settings = {"trainer__steps": 2, "trainer__keep": "best"}

    def fails(folder: Path) -> Path:
        raise made.Crash(folder.name)

    async with bench(tmp_path / "r", graded([0.9], answering), **settings) as made:
        made.engine.export = fails
        with pytest.raises(made.Crash, match="step-00000000"):
            await made.loop.run({})
    async with bench(tmp_path / "r", graded([0.5, 0.5], answering), **settings) as again:
        again.engine.export = ledger(again.engine)
        assert (await again.loop.run({})).step == 0


async def test_what_was_better_before_it_was_asked_for_is_said(
    bench: Any, tmp_path: Path, answering: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async with bench(tmp_path / "r", graded([0.1, 0.9, 0.2], answering), trainer__steps=2) as made:
        await made.loop.run({})
    settings = {"trainer__steps": 3, "trainer__keep": "best"}
    async with bench(tmp_path / "r", graded([0.3], answering), **settings) as again:
        again.engine.export = ledger(again.engine)
        assert (await again.loop.run({})).step == 3
    assert "solved better after 1 step (0.900) than now" in caplog.text
    assert "--from" in caplog.text


@pytest.mark.parametrize(
    ("settings", "val", "said"),
    [
        ({"trainer.keep": "best"}, (), "keep = 'best' looks at held-out rewards: give held-out tasks"),
        ({"trainer.patience": 2}, (), "patience looks at held-out rewards"),
        ({"trainer.patience": 2, "trainer.eval_every": 0}, ("a",), "set trainer.eval_every"),
    ],
)
def test_settings_that_need_evaluations_are_refused_without(
    settings: dict[str, Any], val: Sequence[str], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        check_held_out(with_settings(Config(), settings), val)


@given(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=1), st.integers(1, 4))
def test_a_run_ends_exactly_when_the_best_is_old_enough(rewards: list[float], patience: int) -> None:
    held_out = HeldOut(Path("nowhere"))
    for step, reward in enumerate(rewards):
        held_out.add([evaluation(step, reward)])
        first = rewards.index(max(rewards[: step + 1]))
        assert held_out.best == evaluation(first, rewards[first])
        assert held_out.is_over(patience) == (step - first >= patience)
        assert not held_out.is_over(0)


async def test_evaluations_of_other_tasks_are_not_compared(bench: Any, tmp_path: Path, answering: Any) -> None:
    async with bench(tmp_path / "r", graded([0.8, 0.9, 0.9], answering), trainer__steps=2) as made:
        await made.loop.run({})
    settings = {"trainer__steps": 4, "trainer__keep": "best", "trainer__eval_temperature": 0.5, "trainer__patience": 2}
    async with bench(tmp_path / "r", graded([0.2, 0.3], answering), **settings) as again:
        again.engine.export = ledger(again.engine)
        kept = await again.loop.run({})
        assert [result.step for result in again.loop.held_out.results] == [3, 4]
        assert (kept.step, again.loop.done) == (4, 4)
