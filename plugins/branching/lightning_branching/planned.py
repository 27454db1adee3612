"""Check the settings of runs that sample branches, plan branches, and warn of algorithms that do not credit them as such.

The invariant: the ids of branches follow from their group and their numbers alone, so that planning them twice is harmless.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

from lightning.algorithms.protocol import Algorithm
from lightning.batch import Trajectory
from lightning.errors import ConfigError
from lightning.gateway.stages import CONTRACT
from lightning.plugins import plugins
from lightning.trainer.samplers import Asked
from lightning.trainer.stack import check_gateway
from lightning.types import Rollout, Transition
from lightning_record.config import RecordConfig

logger = logging.getLogger(__name__)


def check_branching(asked: Asked, sampling: str, why_in_turns: str) -> bool:
    """Return whether a run asks for this value of `trainer.sampling`, under which rollouts are branches. `why_in_turns` is why
    no rollout may be sampled while the engine trains. Raises `ConfigError` for settings under which there can be none."""
    config, trainer = asked.config, asked.config.trainer
    if trainer.sampling != sampling:
        return False
    setting = f"trainer.sampling = {sampling}"
    if asked.recorded is not None:
        raise ConfigError(f"{setting} samples rollouts for weights to learn from: a record and a search do not")
    if trainer.max_staleness:
        raise ConfigError(
            f"{setting} with trainer.max_staleness = {trainer.max_staleness}: {why_in_turns}. Set max_staleness to 0"
        )
    if not RecordConfig.of(config).record_requests:
        raise ConfigError(f"{setting} needs gateway.record_requests: branches begin with what is recorded")
    if (line := check_gateway(config.gateway)).named("texts") is None:
        raise ConfigError(
            CONTRACT.not_carried_out(
                f"{setting}: branches begin with what is recorded", "texts", line.versions, "leave trainer.sampling out"
            )
        )
    return True


def branch_rollouts(points: Sequence[tuple[Trajectory, Transition]], first: int) -> list[Rollout]:
    """Return one branch for each of these calls, which are of trajectories of one group. The branches are numbered in the group
    from `first` on."""
    return [
        Rollout(
            id=f"{trunk.rollout.group}/{index}",
            run=trunk.rollout.run,
            task=trunk.rollout.task,
            group=trunk.rollout.group,
            step=trunk.rollout.step,
            split=trunk.rollout.split,
            index=index,
            max_attempts=trunk.rollout.max_attempts,
            resources=trunk.rollout.resources,
            parent=call.key,
        )
        for index, (trunk, call) in enumerate(points, first)
    ]


def warn_of_credit(algorithms: Iterable[Algorithm]) -> None:
    """Say which algorithms take branches for rollouts of their own, and which bonuses outweigh the credit that does not."""
    for algorithm in algorithms:
        credit = getattr(algorithm, "credit", None)
        if credit is None:  # an algorithm of one's own knows what it does
            continue
        if getattr(plugins().credit(credit), "knows_branches", False):
            _warn_of_bonus(algorithm)
            continue
        logger.warning(
            "groups have branches, and the credit is %s: it takes them for rollouts of their own, so that late calls weigh "
            "more. credit=branch compares them where they part",
            credit if isinstance(credit, str) else type(credit).__name__,
        )


def _warn_of_bonus(algorithm: Algorithm) -> None:
    names = ("entropy_coefficient", "kl_coefficient")
    if found := [f"{name} = {value:g}" for name in names if (value := getattr(algorithm, name, 0.0))]:
        logger.warning(
            "the credit branch with %s: its advantages are in units of the reward and divided among continuations, so that a "
            "coefficient which was chosen for GRPO may outweigh them. Begin with 0",
            " and ".join(found),
        )
