"""The tests of the loop again, each with an audit at its end: wherever a run is cut, what it was trained on is proved."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from lightning.errors import AuditError
from lightning.types import Transition, token_ids
from lightning_proof.audit import audit

from tests.core.trainer import test_loop
from tests.core.trainer.test_loop import (  # noqa: F401 — they run here again, those with pytest.mark.slow, too
    cut_and_resumed,
    each_place,
    test_a_finished_run_is_not_trained_again,
    test_a_restart_that_fails_during_an_update_ends_the_run_with_its_own_error,
    test_a_run_from_start_to_end,
    test_a_server_that_dies_during_an_update_is_restarted_and_updated,
    test_a_server_that_does_not_serve_the_trained_weights_is_an_error,
    test_a_step_that_failed_as_a_whole_is_tried_again_on_resume,
    test_an_evaluation_lost_to_the_infrastructure_is_an_error_and_is_tried_again,
    test_an_evaluation_that_the_agent_failed_is_a_result_without_a_reward,
)


@pytest.fixture(autouse=True)
def audited(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = test_loop.assert_finished

    async def assert_finished(made: Any) -> None:
        await plain(made)
        report = await audit(made.store, "run")
        assert report.ok, report.findings
        assert report.rederived

    monkeypatch.setattr(test_loop, "assert_finished", assert_finished)


@pytest.mark.slow
@pytest.mark.parametrize("checkpoint_every", [1, 2, None])
@each_place
async def test_wherever_it_is_cut_a_resume_finishes_exactly_once(
    bench: Any, tmp_path: Path, where: str, checkpoint_every: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    await cut_and_resumed(bench, tmp_path, where, checkpoint_every, monkeypatch)


async def test_a_changed_store_cannot_be_replayed(bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with bench(tmp_path, trainer__checkpoint_every=3) as made:
        made.policy.crash_at = 2
        with pytest.raises(made.Crash):
            await made.loop.run({})
    async with bench(tmp_path, trainer__checkpoint_every=3) as made:
        honest = made.store.transitions_of

        async def tampered(attempts: Sequence[tuple[str, int]]) -> Any:
            return [[changed(call) for call in calls] for calls in await honest(attempts)]

        def changed(call: Transition) -> Transition:
            first, *rest = call.response_ids
            return replace(call, response_ids=token_ids([first + 1, *rest]))

        monkeypatch.setattr(made.store, "transitions_of", tampered)
        with pytest.raises(AuditError, match="cannot be replayed"):
            await made.loop.run({})


async def test_a_crash_between_a_commit_and_its_checkpoint_is_replayed(bench: Any, tmp_path: Path) -> None:
    """Checkpoints are written beside the sampling of the next step: the store has a step before its checkpoint is on disk."""
    async with bench(tmp_path, trainer__checkpoint_every=1) as made:
        made.engine.crash_at = "save:2"
        with pytest.raises(made.Crash):
            await made.loop.run({})
        assert len(await made.store.steps("run")) == 2
        assert made.loop.checkpoints.steps() == [1]
    async with bench(tmp_path, trainer__checkpoint_every=1) as made:
        await made.loop.restore()
        assert len(made.engine.ledger) == 2
        assert made.loop.writer.unsaved
        await made.loop.run({})
        await test_loop.assert_finished(made)


async def test_a_run_that_is_told_to_stop_saves_what_it_has_learned(bench: Any, tmp_path: Path) -> None:
    async with bench(tmp_path, trainer__checkpoint_every=100) as made:
        sample = made.loop.evaluate

        async def stopped() -> None:
            if made.loop.done == 2:
                raise asyncio.CancelledError
            await sample()

        made.loop.evaluate = stopped
        with pytest.raises(asyncio.CancelledError):
            await made.loop.run({})
        assert made.loop.checkpoints.steps() == [2]
        assert made.policy.ledger == made.engine.ledger
    async with bench(tmp_path, trainer__checkpoint_every=100) as made:
        await made.loop.run({})
        await test_loop.assert_finished(made)


async def test_what_stops_in_the_middle_of_training_is_not_saved(bench: Any, tmp_path: Path) -> None:
    """The engine's thread goes on: nobody knows what it has."""
    async with bench(tmp_path, trainer__checkpoint_every=100) as made:
        step = made.engine.step

        def interrupted(*args: Any) -> Any:
            if len(made.engine.ledger) == 1:
                raise asyncio.CancelledError
            return step(*args)

        made.engine.step = interrupted
        with pytest.raises(asyncio.CancelledError):
            await made.loop.run({})
        assert made.loop.checkpoints.steps() == []
