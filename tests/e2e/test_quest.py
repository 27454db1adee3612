"""The quest's real LLM on a real vLLM: its choices are single tokens, and what is trained is what was sampled."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from lightning.plugins import plugins
from lightning.types import Status, Transition
from lightning_examples.quest_python.agent import MAX_CALLS, MAX_TOKENS
from lightning_examples.quest_python.world import COLOURS, SIDES
from lightning_examples.smollm2 import model_folder
from transformers import AutoTokenizer

pytestmark = pytest.mark.slow


async def calls_of(folder: Path, rollouts: Sequence[str]) -> dict[str, list[Transition]]:
    """The model calls of each rollout."""
    store = plugins().store(f"sqlite:///{folder / 'lightning.db'}")
    await store.open()
    try:
        return {rollout: list(await store.transitions(rollout)) for rollout in rollouts}
    finally:
        await store.close()


def test_its_choices_are_single_tokens() -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_folder())
    assert [word for word in (*COLOURS, *SIDES) if len(tokenizer.encode(word)) != 1] == []


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_step_of_it_trains_choices_of_one_token_which_rollouts_make_in_the_same_states(demo_run: Any) -> None:
    run = demo_run
    run.steps, run.command = 1, ("demo", "quest", "--no-pages", "--held-out", "4")
    run.start("--set", "trainer.tasks_per_step=1")
    assert run.wait() == 0, run.output
    run.assert_whole()
    (record,) = run.committed()
    assert record.metrics["failed"] == 0
    assert record.metrics["mean_logprob_gap"] <= 1e-4
    done = [rollout.id for rollout in run.rollouts() if rollout.status is Status.SUCCEEDED]
    calls = asyncio.run(calls_of(run.folder, done))
    assert len(calls) == 16, "8 trained, 4 held out before and after"
    for made in calls.values():
        assert 8 <= len(made) <= MAX_CALLS
        assert all(1 <= len(call.response_ids) <= MAX_TOKENS for call in made)
    trained = [call for name, _ in record.rollouts for call in calls[name]]
    states = {tuple(call.prompt_ids) for call in trained}
    assert len(states) < len(trained) * 0.9, "rollouts of a quest meet the same states"
