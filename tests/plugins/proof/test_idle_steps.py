"""Steps that teach nothing are audited."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from lightning.engines.rows import Tally
from lightning.engines.step import NonFiniteError, StepDriver
from lightning_proof.audit import audit


async def test_what_taught_nothing_is_committed_but_neither_saved_nor_sent(bench: Any, tmp_path: Path) -> None:
    async with bench(tmp_path, trainer__steps=4, trainer__checkpoint_every=1) as made:
        step = made.loop.step

        async def second_and_last_idle(number: int) -> Any:
            made.engine.idle = number in (2, 4)
            return await step(number)

        made.loop.step = second_and_last_idle
        await made.loop.run({})
        assert made.engine.did == [
            "weights:version-00000001", "save:step-00000001", "weights:version-00000003", "save:step-00000003",
        ]  # fmt: skip
        assert (made.policy.version, made.policy.ledger) == (4, made.engine.ledger)
        records = await made.store.steps("run")
        assert [record.policy_version for record in records] == [1, 2, 3, 4]
        assert [record.checkpoint for record in records] == ["", "step-00000001", "step-00000001", "step-00000003"]
        report = await audit(made.store, "run")
        assert report.ok, report.findings
    async with bench(tmp_path, trainer__steps=5) as made:
        made.engine.idle = True
        await made.loop.run({})
        assert made.policy.version == 5
        assert (len(made.engine.ledger), made.policy.ledger) == (2, made.engine.ledger)


async def test_a_step_that_is_not_finite_is_committed_and_neither_drifts_nor_blames_the_rewards(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with bench(tmp_path) as made:
        take, driver = made.engine.step, StepDriver(1)

        class Computes:
            """One whose gradient is not finite."""

            def prepare(self, samples: Any, loss: Any) -> Any:
                return samples

            def accumulate(self, samples: Any, loss: Any, step: int) -> Tally:
                raise NonFiniteError("the loss is nan")

            def update(self, lr: float, step: int) -> dict[str, float]:
                raise AssertionError("there is no gradient")

        def second_fails(samples: Any, loss: Any, lr: float) -> Any:
            if made.loop.done == 1:
                return driver.step(Computes(), samples, loss)
            taken = take(samples, loss, lr)
            return replace(taken, metrics={**taken.metrics, "skipped_nonfinite": 0.0})

        monkeypatch.setattr(made.engine, "step", second_fails)
        await made.loop.run({})
        records = await made.store.steps("run")
        assert [record.metrics["skipped_nonfinite"] for record in records] == [0.0, 1.0, 0.0]
        assert [record.metrics["drift_tokens"] for record in records] == [0.0, 0.0, 0.0]
        assert (len(made.engine.ledger), made.policy.version) == (2, 3)
        assert (await audit(made.store, "run")).ok
    assert "the loss is nan: the step is skipped" in caplog.text
    assert "trained nothing" not in caplog.text


async def test_idle_steps_do_not_use_up_the_interval_of_checkpoints(bench: Any, tmp_path: Path) -> None:
    async with bench(tmp_path, trainer__steps=3, trainer__checkpoint_every=2) as made:
        step = made.loop.step

        async def second_idle(number: int) -> Any:
            made.engine.idle = number == 2
            return await step(number)

        made.loop.step = second_idle
        await made.loop.run({})
        assert [one for one in made.engine.did if one.startswith("save")] == ["save:step-00000003"]
