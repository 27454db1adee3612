"""The tests of the loop again, each with an audit at its end: wherever a run is cut, what it was trained on is proved."""

from __future__ import annotations

from typing import Any

import pytest
from lightning_proof.audit import audit

from tests.core.trainer import test_loop
from tests.core.trainer.test_loop import (  # noqa: F401 — they run here again, those with pytest.mark.slow, too
    test_a_crash_between_a_commit_and_its_checkpoint_is_replayed,
    test_a_finished_run_is_not_trained_again,
    test_a_restart_that_fails_during_an_update_ends_the_run_with_its_own_error,
    test_a_run_from_start_to_end,
    test_a_run_that_is_told_to_stop_saves_what_it_has_learned,
    test_a_server_that_dies_during_an_update_is_restarted_and_updated,
    test_a_server_that_does_not_serve_the_trained_weights_is_an_error,
    test_a_step_that_failed_as_a_whole_is_tried_again_on_resume,
    test_an_evaluation_lost_to_the_infrastructure_is_an_error_and_is_tried_again,
    test_an_evaluation_that_the_agent_failed_is_a_result_without_a_reward,
    test_wherever_it_is_cut_a_resume_finishes_exactly_once,
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
