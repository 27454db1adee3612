"""The game of two players: what each of them earns, and that nothing in their prompts tells them apart."""

from __future__ import annotations

import asyncio

import pytest
from lightning.testing.fake_vllm import FakeVLLM, Reply
from lightning.types import LLM
from lightning_examples.opposites.agent import agent, number_in, tasks, val_tasks


@pytest.mark.parametrize(
    ("first", "second", "low", "high"),
    [(3, 77, 1.0, 1.0), (77, 3, 0.0, 0.0), (49, 49, 1.0, 0.0), (50, 50, 0.0, 1.0), (3, 100, 1.0, 0.0)],
)
async def test_a_number_that_helps_one_player_hurts_the_other(first: int, second: int, low: float, high: float) -> None:
    async with FakeVLLM() as fake:
        fake.queue(Reply(f"The answer is {first}."), Reply(f"The answer is {second}."))
        (task,) = tasks(1, 0)
        reward = await asyncio.to_thread(agent, task, LLM(f"{fake.url}/v1", "the-key", fake.model))
        assert reward == {"reward": (low + high) / 2, "low": low, "high": high}
        one, other = (request.body for request in fake.requests)
        assert one == other


def test_other_replies_name_no_number() -> None:
    assert [number_in(reply) for reply in ("The answer is 7.", "7", "answer is 1234", "The answer is 7 pens")] == [
        7,
        -1,
        -1,
        -1,
    ]


def test_held_out_rounds_are_never_trained_on() -> None:
    train, held_out = ({str(task.input) for task in found} for found in (tasks(500, 3), val_tasks(200)))
    assert (len(train), len(held_out), train & held_out) == (500, 200, set())
