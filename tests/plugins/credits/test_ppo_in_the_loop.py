"""A critic in the loop: its values are asked once, kept, and read again by a resume and by an audit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from lightning.algorithms.lightning_rl import LightningRL
from lightning.algorithms.protocol import head_of
from lightning.errors import StoreError
from lightning.store.memory import MemoryStore
from lightning.testing.trajectories import make_group
from lightning.trainer.training_data import fresh_values
from lightning_proof.recorded_step import recorded_values

PPO = LightningRL("ppo", group_size=2)


def test_ppo_wants_a_critic() -> None:
    assert head_of(PPO)
    assert not head_of(LightningRL("grpo"))


async def test_values_of_a_step_that_was_not_valued_are_an_error(store: MemoryStore) -> None:
    with pytest.raises(StoreError, match=r"the head's values of step 4 are not in the store \(rollout group-0/0"):
        await recorded_values(store, "run", 4, [make_group([0.0, 1.0])])


async def test_a_step_without_anything_to_value_asks_nothing(store: MemoryStore) -> None:
    def refuse(rows: Sequence[Any]) -> Any:
        raise AssertionError("nothing can be trained")

    (group,) = await fresh_values(store, "run", 0, [make_group([])], refuse)
    assert group == make_group([])
    assert await recorded_values(store, "run", 0, [make_group([])]) == [group]
