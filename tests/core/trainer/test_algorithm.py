"""What is no algorithm is refused before anything is started."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.algorithms import Intake, from_batch, from_loss
from lightning.algorithms.lightning_rl import LightningRL
from lightning.algorithms.protocol import Batch
from lightning.batch.trajectory import Group
from lightning.credit import Decayed
from lightning.errors import ConfigError, PluginError
from lightning.losses.protocol import TokenBatch
from lightning.trainer import Trainer
from lightning.trainer.algorithm import resolve_algorithm


@from_loss
def plain(tokens: TokenBatch) -> torch.Tensor:
    return -tokens.advantages * tokens.logprobs


@from_batch
def eager(groups: Sequence[Group], *, group_size: int = 4, dynamic_sampling: bool = False) -> Batch:
    return Intake().batch([], [])


def broken(group: Group, advantage: Any) -> Any:
    """Needs two rollouts to find out that it is wrong."""
    return np.zeros(9)[len(group.trajectories) * 5]


class Nothing:
    """No algorithm; its loss is not looked at, which would import torch."""

    name, group_size = "nothing", 2

    @property
    def loss(self) -> Any:
        raise AssertionError


@pytest.mark.parametrize(
    ("algorithm", "says"),
    [
        (plain, r"the algorithm is the class plain, not an object of it: give plain\(\.\.\.\)"),
        (LightningRL, r"is the class LightningRL, .* give LightningRL\(\.\.\.\)"),
        (Nothing(), r"is no algorithm: it has no batch; give a registered name"),
        (object(), r"it has no name, no group_size, no batch, no loss"),
        (broken, r"is no algorithm: it has no name.*from_batch and from_loss make an algorithm of a function"),
        (eager(group_size=0), r"eager has group_size=0: rollouts per task, 1 or more"),
        (eager(group_size=4.0), r"eager has group_size=4\.0: rollouts per task, 1 or more"),
        (eager(dynamic_sampling=True), r"dynamic_sampling=True, .* no method teaches\(group\)"),
    ],
)
def test_what_is_no_algorithm_is_refused_with_the_cure(algorithm: Any, says: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=says):
        Trainer(tmp_path, algorithm)


def test_the_name_of_a_credit_function_is_looked_up_at_once(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(PluginError, match=r"no credit 'gigp'; did you mean 'gigpo'\?"):
        Trainer(tmp_path, LightningRL(credit="gigp"))


def test_an_algorithm_is_taken_as_it_is_and_made_of_its_name() -> None:
    for made in (
        plain("rloo"),
        eager(),
        eager(group_size=np.int64(4)),
        LightningRL("ppo"),
        LightningRL(credit=Decayed()),
    ):
        assert resolve_algorithm(made) is made
    assert isinstance(resolve_algorithm("gspo"), LightningRL)
