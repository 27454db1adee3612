"""What the rules say of the steps of a run, each thing once, and who hears of it."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from lightning.algorithms.lightning_rl import LightningRL
from lightning.batch.trajectory import Group
from lightning.config.plugin_settings import Config
from lightning.engines.protocol import StepResult
from lightning.testing.fake_vllm import Reply
from lightning.trainer.metrics import step_metrics
from lightning.trainer.stages import StepLine, StepTaken, step_line
from lightning.types import CallStatus

from tests.core.trainer.test_step_warnings import CHECKER, group


async def tell(
    line: StepLine, step: int, groups: list[Group], agents: tuple[str, ...] = (), **said: float
) -> list[str]:
    """What is said of a step that was taken."""
    batch = LightningRL("grpo", group_size=2).batch(groups)
    result = StepResult({"stepped": 1.0 if batch.samples else 0.0, **said}, {})
    taken = StepTaken(step, [], groups, batch, step_metrics([], groups, batch, result), agents)
    return [alarm.text for alarm in (await line.taken(taken)).alarms]


async def test_groups_that_teach_nothing_are_told_once() -> None:
    line = step_line(Config())
    found = {step: said for step in range(1, 21) if (said := await tell(line, step, [group(1.0, 1.0)]))}
    ((step, (text,)),) = found.items()
    assert (step, text[:22]) == (5, "100% of the groups tea")


async def test_calls_that_were_refused_are_said_once_for_each_cause() -> None:
    """The agent went on without an answer, so that its reward says nothing of that."""
    line, made = step_line(Config()), group(0.0, 1.0)
    one = made.trajectories[0].transitions[0]
    no = replace(one, status=CallStatus.REFUSED, finish_reason="invalid_parameter", error="'n' is 3")
    member = replace(made.trajectories[0], refused=(no,))
    found = [await tell(line, step, [Group(made.id, (member, made.trajectories[1]))]) for step in range(1, 4)]
    assert found[1:] == [[], []]
    ((text,), *_) = found
    assert text == "agent/planner/ask: 1 refused call (invalid_parameter): 'n' is 3"


async def test_a_misspelt_agent_beside_a_right_one_is_told_once() -> None:
    line, groups = step_line(Config()), [group(0.0, 1.0), group(0.0, 1.0, trained=False, caller=CHECKER)]
    (first,) = await tell(line, 1, groups, ("ask", "chekcer"))
    assert "no call matched 'chekcer' of train_agents; did you mean 'checker'?" in first
    assert await tell(line, 2, groups, ("ask", "chekcer")) == []


async def test_much_that_is_masked_is_told_once_with_its_cure() -> None:
    line, groups = step_line(Config()), [group(0.0, 1.0)]
    found: list[str] = []
    for step, share in enumerate((0.04, 0.125, 0.5), 1):
        found += [f"step {step}: {text}" for text in await tell(line, step, groups, masked_share=share)]
    (text,) = found
    assert text.startswith("step 2: 12 % of what was to be trained is masked: ")
    for cure in ("trainer.max_staleness", "engine.dtype", "correction.high=10"):
        assert cure in text


async def test_answers_that_were_cut_off_are_counted_and_told_once(
    bench: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sizes = iter(range(1_000_000))

    def script(body: Any) -> Reply:
        number = next(sizes)
        return Reply("x" * (number % 7 + 1), finish_reason="length" if number % 3 == 0 else "stop")

    async with bench(tmp_path, script=script) as made:
        await made.loop.run({})
        shares = [record.metrics["truncated"] for record in await made.store.steps("run")]
    assert all(0.2 < share < 0.5 for share in shares), shares
    told = [record.getMessage() for record in caplog.records if "cut off" in record.getMessage()]
    assert len(told) == 1
    assert "policy_server.max_model_len" in told[0]
    assert "max_tokens" in told[0]


async def test_a_serious_finding_is_told_to_who_wants_to_know(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = tmp_path / "told"
    heard: list[Any] = []
    program = f"command:{sys.executable} -c \"import sys; open('{told}', 'a').write(sys.stdin.read() + chr(10))\""
    script = {"script": lambda body: Reply("xxx")}
    async with bench(
        tmp_path / "r", trainer__steps=6, trainer__eval_every=0, trainer__alerts=(program,), **script
    ) as made:
        monkeypatch.setattr(made.loop.trackers, "alert", heard.append)
        await made.loop.run({})
    (alert,) = [json.loads(line) for line in told.read_text().splitlines()]
    assert heard == [alert], "trackers hear of it as well"
    assert (alert["run"], alert["cause"], alert["step"], alert["steps"]) == ("run", "equal groups", 5, [1, 2, 3, 4, 5])
    assert "learnable" in alert["text"]
