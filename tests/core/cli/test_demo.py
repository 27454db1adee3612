"""`lightning demo`: which demonstration runs, and what its report shows."""

from __future__ import annotations

import io
import json
import sys
from array import array
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.cli import demo as command
from lightning.cli.report import Story, draw_rewards, show_story, show_summary, tell_story
from lightning.errors import DataError
from lightning.plugins import plugins
from lightning.store.memory import MemoryStore
from lightning.trainer.summary import Summary, summarize
from lightning.types import Outcome, Rollout, Run, StepRecord, Task, Transition
from lightning_examples import smollm2
from rich.console import Console


class Chosen(Exception):  # noqa: N818 — no error: it ends the command once it has chosen
    """The demonstration that was about to run."""


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, Path]]:
    """What the trainer was made for: the model and the folder."""
    made: list[tuple[Any, Path]] = []

    def trainer(model: Any, algorithm: Any, **options: Any) -> None:
        made.append((model, options["out"]))
        raise DataError("that is enough")

    monkeypatch.setattr(command, "Trainer", trainer)
    return made


def test_without_the_real_model_the_tiny_one_is_trained_and_it_is_said(
    lightning, chosen: list[tuple[Any, Path]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(smollm2, "PACKAGE", "no_such_package")
    lightning("demo")
    ((model, folder),) = chosen
    assert (model.parent.name, folder.name.startswith("demo-tiny-")) == ("raw_python", True)
    (warning,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert smollm2.INSTALL in warning.getMessage()
    assert "The demonstration 'tiny' runs instead" in warning.getMessage()


def test_a_framework_that_is_missing_is_told_with_the_line_that_installs_it(
    lightning, chosen: list[tuple[Any, Path]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for module in [name for name in sys.modules if name.startswith("lightning_examples.calculator_autogen")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "autogen_agentchat.agents", None)
    lightning("demo")
    ((model, _),) = chosen
    assert model.parent.name == "raw_python"
    assert "pip install 'lightning[examples]<1'" in caplog.text


def test_a_demonstration_that_was_named_is_never_replaced(
    lightning, chosen: list[tuple[Any, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(smollm2, "PACKAGE", "no_such_package")
    ran = lightning("demo", "calculator")
    assert (ran.code, chosen) == (2, [])
    assert smollm2.INSTALL in ran.err


def test_a_damaged_model_file_is_an_error_and_no_reason_for_another_demonstration(
    lightning, chosen: list[tuple[Any, Path]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "damaged_package").mkdir()
    (tmp_path / "damaged_package" / smollm2.GGUF).write_bytes(b"half of it")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(smollm2, "PACKAGE", "damaged_package")
    ran = lightning("demo")
    assert (ran.code, chosen) == (2, [])
    assert "is not the published file" in ran.err


def test_with_the_real_model_it_is_the_default(
    lightning, chosen: list[tuple[Any, Path]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    real = SimpleNamespace(
        name="calculator", title="", settings={}, model=tmp_path, algorithm=lambda: None, train_agents=()
    )
    monkeypatch.setattr(type(plugins()), "demo", lambda self, name: {"calculator": lambda: real}[name])
    lightning("demo")
    assert [(model, folder.name.startswith("demo-calculator-")) for model, folder in chosen] == [(tmp_path, True)]


# --- the report ---------------------------------------------------------------------------------------------------------


@pytest.fixture
async def store() -> AsyncIterator[MemoryStore]:
    """Two held-out tasks before and after one step. The reward of the first rises most, `correct` of the second alone."""
    store = MemoryStore()
    await store.open()
    await store.put_run(Run("run", "run"))
    outcomes = {
        ("val", 0, "a"): {"reward": 0.0, "correct": 0.0},
        ("val", 0, "b"): {"reward": 0.2, "correct": 0.0},
        ("train", 0, "c"): {"reward": 0.5, "correct": 0.25},
        ("val", 1, "a"): {"reward": 0.9, "correct": 0.0},
        ("val", 1, "b"): {"reward": 1.0, "correct": 1.0},
    }
    for (split, step, name), parts in outcomes.items():
        rollout = Rollout(f"{split}/{step}/{name}", "run", Task(name, id=name), name, split=split, step=step)
        await store.create_rollouts([rollout])
        (lease,) = await store.lease("run", "w", limit=1)
        call = Transition(
            rollout.id, lease.attempt, 0, name, array("i", [1, 2]), array("i", [step + 3]), array("f", [0.0])
        )
        await store.append([call])
        await store.complete(rollout.id, lease.attempt, Outcome(reward=parts["reward"], rewards=parts))
    metrics = {"reward": 0.5, "reward/correct": 0.25, "tokens": 1.0}
    record = StepRecord("run", 0, 1, (("train/0/c", 1),), ("e",), "d", metrics=metrics)
    await store.commit_step(record)
    yield store
    await store.close()


def printed(show: Callable[[Console], None]) -> str:
    out = io.StringIO()
    show(Console(file=out, width=120))
    return out.getvalue()


async def test_a_named_part_of_the_reward_is_what_the_table_shows(store: MemoryStore) -> None:
    summary = await summarize(store, "run")
    assert [one.rewards for one in summary.evaluations] == [{"correct": 0.0}, {"correct": 0.5}]
    assert summary.named_rewards == {"correct": (0.25,)}
    assert json.loads(json.dumps(summary.to_json()))["evaluations"][1]["rewards"] == {"correct": 0.5}
    table = printed(lambda console: show_summary(summary, "title", console, "correct"))
    assert "correct before" in table
    assert "+0.500" in table
    assert "+0.850" in printed(lambda console: show_summary(summary, "title", console))


async def test_the_story_is_of_the_task_whose_measure_rose(store: MemoryStore) -> None:
    words = {1: "system: sums", 2: "user: 2 + 2", 3: "assistant: five", 4: "assistant: four"}

    def decode(ids: list[int]) -> str:
        return "\n".join(words[token] for token in ids)

    by_reward = await tell_story(store, "run", 1, lambda task: task.id, decode)
    story = await tell_story(store, "run", 1, lambda task: task.id, decode, "correct")
    assert by_reward is not None
    assert story is not None
    assert (by_reward.task, by_reward.before_value, by_reward.after_value) == ("a", 0.0, 0.9)
    assert (story.task, story.before_value, story.after_value) == ("b", 0.0, 1.0)
    shown = printed(lambda console: show_story(story, console))
    assert "before training (correct 0; after the same 2 turns)\nassistant: five\n" in shown
    assert "after training (correct 1; after the same 2 turns)\nassistant: four\n" in shown
    assert "system" not in shown


def test_a_story_whose_turns_are_all_alike_still_shows() -> None:
    shown = printed(lambda console: show_story(Story("t", "one\ntwo", 0.0, "one", 1.0), console))
    assert "after the same 1 turns" in shown


async def test_the_picture_has_the_measure_s_curves(store: MemoryStore, tmp_path: Path) -> None:
    summary: Summary = await summarize(store, "run")
    draw_rewards(summary, "title", tmp_path / "reward.png", "correct")
    assert (tmp_path / "reward.png").stat().st_size > 1000
