"""Groups that are sampled as trees: a few rollouts from the task's beginning, and branches of them (`trainer.sampling`).

The invariant: a step samples no more tokens than it would without branches, as far as a branch needs what its trunk did from
there on; and its branches follow from its trunks' records alone, so that a resumed step goes on with those that it had.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Protocol

from lightning.algorithms.protocol import Algorithm
from lightning.batch.branches import is_void
from lightning.batch.trajectory import Group, Trajectory
from lightning.bounded import Once
from lightning.config import Config
from lightning.config.sections import TrainerConfig
from lightning.credit import Branched
from lightning.errors import ConfigError
from lightning.gateway.stages import CONTRACT
from lightning.store.exchanges import why_not_replayable
from lightning.trainer.branch_points import branch_points
from lightning.trainer.plan import branch_rollouts
from lightning.trainer.stack import check_gateway
from lightning.trainer.training_data import of_groups
from lightning.types import Rollout, Transition

logger = logging.getLogger(__name__)


def check_tree(config: Config, group_sizes: Iterable[int], *, recorded: bool, searches: bool) -> None:
    """Refuse settings under which groups of these sizes cannot be trees. Raises `ConfigError`."""
    trainer = config.trainer
    if trainer.sampling != "tree":
        if trainer.trunks is not None or trainer.branch_by != "random":
            raise ConfigError("trainer.trunks and trainer.branch_by are for trainer.sampling = tree: set that, too")
        return
    if recorded or searches:
        raise ConfigError(
            "trainer.sampling = tree samples rollouts for weights to learn from: a record and a search do not"
        )
    if trainer.max_staleness:
        raise ConfigError(
            f"trainer.sampling = tree with trainer.max_staleness = {trainer.max_staleness}: branches are of the policy that "
            "sampled their trunk. Set max_staleness to 0"
        )
    if not config.gateway.record_requests:
        raise ConfigError("trainer.sampling = tree needs gateway.record_requests: branches begin with what is recorded")
    if why := CONTRACT.why_idle(check_gateway(config.gateway).stages, config.gateway, "record_requests"):
        raise ConfigError(f"trainer.sampling = tree: branches begin with what is recorded. {why}")
    for size in group_sizes:
        if (trunks := trunks_of(config.trainer, size)) >= size:
            raise ConfigError(
                f"trainer.sampling = tree with {trunks} trunks in groups of {size} rollouts leaves no tokens for branches: set "
                "a larger group_size of the algorithm, or fewer trainer.trunks"
            )


def trunks_of(config: TrainerConfig, group_size: int) -> int:
    """How many rollouts of a group begin at its task."""
    return config.trunks or max(1, group_size // 2)


def warn_of_credit(algorithms: Iterable[Algorithm]) -> None:
    """Say which algorithms take branches for rollouts of their own, and which bonuses outweigh the credit that does not."""
    for algorithm in algorithms:
        credit = getattr(algorithm, "credit", None)
        if credit is None:  # an algorithm of one's own knows what it does
            continue
        if credit == "branch" or isinstance(credit, Branched):
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


class RunsRollouts(Protocol):
    """The sampler, as trees need it."""

    async def ended(self, planned: list[Rollout], what: str) -> list[Rollout]:
        """Run planned rollouts to their end; returns their groups' rollouts."""

    async def groups_of(self, rollouts: Sequence[Rollout]) -> list[Group]:
        """The groups of ended rollouts."""


class TreeGrower:
    """How a run's groups become trees."""

    def __init__(self, config: TrainerConfig) -> None:
        self._config = config
        self._said = Once()

    def trunks(self, group_size: int) -> int:
        """How many rollouts of a group begin at its task."""
        return trunks_of(self._config, group_size)

    async def grow(self, sampler: RunsRollouts, ended: list[Rollout], group_size: int, what: str) -> list[Rollout]:
        """Add branches to groups of trunks that have ended; returns all of their rollouts. By `variance` half of the tokens go
        first to calls that are spread, and the rest where the returns of these differ."""
        count = self.trunks(group_size)
        shares = [(group_size - count) / count]
        shares = [shares[0] / 2] * 2 if self._config.branch_by == "variance" else shares
        numbered: dict[str, int] = {}
        order = list(dict.fromkeys(rollout.group for rollout in ended))
        for number, share in enumerate(shares):
            planned: list[Rollout] = []
            for group in await sampler.groups_of(ended):
                first = numbered.get(group.id, count)
                made = self._planned(group, first, count, share, number)
                numbered[group.id] = first + len(made)
                planned += made
            if planned:
                groups = {rollout.group for rollout in planned}
                grown = await sampler.ended(planned, f"{what}, {len(planned)} branches")
                of_others = [rollout for rollout in ended if rollout.group not in groups]
                ended = of_groups([*of_others, *grown], order)
        return ended

    def _planned(self, group: Group, first: int, count: int, share: float, number: int) -> list[Rollout]:
        """The branches of a group that are numbered from `first` on. `share` of its trunks' tokens may be sampled for them."""
        known = [member for member in group.trajectories if member.rollout.index < first]
        trunks = [member for member in known if member.rollout.parent is None]
        able = [member for member in trunks if not self._is_lost(member)]
        if not trunks:
            return []
        sampled = sum(len(call.response_ids) for member in trunks for call in member.transitions)
        tokens = share * sampled * count / len(trunks)  # as many as without branches, though a trunk has failed
        points = branch_points(
            able,
            tokens,
            self._config.branch_by,
            f"{self._config.seed}/{group.id.partition('/')[2]}/{number}",
            [member for member in known if member.rollout.parent is not None],
        )
        if not points and number == 0 and able:
            self._tell(
                "no call can be branched: agents make one call each, or all at once, or what is trained makes first calls alone"
            )
        return branch_rollouts(points, first)

    def _is_lost(self, member: Trajectory) -> bool:
        """Whether a trunk cannot be branched at all; each reason is said once."""
        calls: Sequence[Transition] = (*member.transitions, *member.refused, *member.lost)
        why = why_not_replayable(calls, member.tool_events)
        if why:
            self._tell(why)
        return bool(why)

    def _tell(self, why: str) -> None:
        if self._said.first(why):
            logger.warning("a group has no branches, as trainer.sampling = tree asks for: %s (said once)", why)

    def metrics(self, groups: Sequence[Group], rollouts: Sequence[Rollout]) -> dict[str, float]:
        """`branches` that have a reward, how many are `branches_void`, and their share of the sampled tokens."""
        members = [member for group in groups for member in group.trajectories]
        sampled = [sum(len(call.response_ids) for call in member.transitions) for member in members]
        of_branches = sum(
            tokens for tokens, member in zip(sampled, members, strict=True) if member.rollout.parent is not None
        )
        branches = [rollout for rollout in rollouts if rollout.parent is not None]
        void = [rollout for rollout in branches if is_void(rollout)]
        return {
            "branches": float(sum(rollout.reward is not None for rollout in branches)),
            "branches_void": float(len(void)),
            "branch_tokens": of_branches / max(sum(sampled), 1),
        }
