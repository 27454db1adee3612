"""Sample groups as trees: a few rollouts from the task's beginning (trunks), and branches of them (`trainer.sampling`).

The invariant: if a branch takes as many tokens as its trunk did from the branching call on, a step samples no more tokens than
without branches. The branches depend only on the trunks' records, so that a resumed step continues with the same branches.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from lightning.batch import Group, Trajectory
from lightning.bounded import Once
from lightning.config import TrainerConfig
from lightning.errors import ConfigError
from lightning.safe_text import counted
from lightning.trainer.samplers import Asked, Sampled, TurnSampler
from lightning.trainer.training_data import of_groups
from lightning.types import Rollout, Transition
from lightning_record.exchanges import why_not_replayable

from lightning_branching.branch_points import branch_points
from lightning_branching.config import TREE, BranchingConfig
from lightning_branching.planned import branch_rollouts, check_branching, warn_of_credit
from lightning_branching.recorded import is_void

logger = logging.getLogger(__name__)


def check_tree(asked: Asked) -> bool:
    """Return whether a run asks for trees. Raises `ConfigError` for settings under which groups cannot be sampled as trees, and
    for settings of trees without trees."""
    if not check_branching(asked, TREE, "branches are of the policy that sampled their trunk"):
        return False
    trainer = asked.config.trainer
    for size in (algorithm.group_size for _, algorithm in asked.schedule.phases):
        if (trunks := trunks_of(trainer, size)) >= size:
            raise ConfigError(
                f"trainer.sampling = tree with {counted(trunks, 'trunk')} in groups of {counted(size, 'rollout')} "
                "leaves no tokens for branches: set "
                "a larger group_size of the algorithm, or fewer trainer.trunks"
            )
    return True


def trunks_of(config: TrainerConfig, group_size: int) -> int:
    """Return the number of trunks in a group: rollouts that begin at its task."""
    return BranchingConfig.of(config).trunks or max(1, group_size // 2)


def tree_sampler(asked: Asked) -> TreeSampler | None:
    """Return the sampler for a run that asks for trees; None for other runs. Raises `ConfigError` as `check_tree` does."""
    if not check_tree(asked):
        return None
    warn_of_credit(algorithm for _, algorithm in asked.schedule.phases)
    return TreeSampler()


class TreeSampler(TurnSampler):
    """Samples the groups of a step as trees."""

    api, carries_out = 1, ("sampling", "order")

    def __init__(self) -> None:
        self._said = Once()

    def begun(self, group_size: int) -> int:
        """Return the number of rollouts of a group that begin at the task: its trunks."""
        return trunks_of(self.config, group_size)

    async def step(self, step: int) -> Sampled:
        """Sample the groups of a step, and add the metrics of `tree_metrics`."""
        sampled = await super().step(step)
        return replace(sampled, metrics=sampled.metrics | tree_metrics(sampled.groups, sampled.rollouts))

    async def grow(self, ended: list[Rollout], group_size: int, what: str) -> list[Rollout]:
        """Run branches for groups whose trunks have ended; return all rollouts of the groups. With `branch_by = "variance"`,
        half of the tokens first go to calls that are spread over the trunks, then the rest to calls whose branches' returns
        differ."""
        count = self.begun(group_size)
        shares = [(group_size - count) / count]
        shares = [shares[0] / 2] * 2 if BranchingConfig.of(self.config).branch_by == "variance" else shares
        numbered: dict[str, int] = {}
        order = list(dict.fromkeys(rollout.group for rollout in ended))
        for number, share in enumerate(shares):
            planned: list[Rollout] = []
            for group in await self.groups_of(ended):
                first = numbered.get(group.id, count)
                made = self._branches_of(group, first, count, share, number)
                numbered[group.id] = first + len(made)
                planned += made
            if planned:
                groups = {rollout.group for rollout in planned}
                grown = await self.ended(planned, f"{what}, {counted(len(planned), 'branch', 'branches')}")
                of_others = [rollout for rollout in ended if rollout.group not in groups]
                ended = of_groups([*of_others, *grown], order)
        return ended

    def _branches_of(self, group: Group, first: int, count: int, share: float, number: int) -> list[Rollout]:
        """Plan branches of a group, with indices from `first` on, in round `number`. They may sample `share` times the tokens
        that its `count` trunks sampled."""
        known = [member for member in group.trajectories if member.rollout.index < first]
        trunks = [member for member in known if member.rollout.parent is None]
        able = [member for member in trunks if not self._is_lost(member)]
        if not trunks:
            return []
        sampled = sum(len(call.response_ids) for member in trunks for call in member.transitions)
        tokens = share * sampled * count / len(trunks)  # as many as without branches, even if a trunk has failed
        points = branch_points(
            able,
            tokens,
            BranchingConfig.of(self.config).branch_by,
            f"{self.config.seed}/{group.id.partition('/')[2]}/{number}",
            [member for member in known if member.rollout.parent is not None],
        )
        if not points and number == 0 and able:
            self._tell(
                "no call can be branched: agents make one call each, or all at once, or what is trained makes first calls alone"
            )
        return branch_rollouts(points, first)

    def _is_lost(self, member: Trajectory) -> bool:
        """Return whether no call of a trunk can be branched at; each reason is logged once."""
        calls: Sequence[Transition] = (*member.transitions, *member.refused, *member.lost)
        why = why_not_replayable(calls, member.tool_events)
        if why:
            self._tell(why)
        return bool(why)

    def _tell(self, why: str) -> None:
        if self._said.first(why):
            logger.warning("a group has no branches, as trainer.sampling = tree asks for: %s (said once)", why)


def tree_metrics(groups: Sequence[Group], rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Return the metrics of a step's trees: the number of `branches` with a reward, the number of void ones (`branches_void`),
    and the share of the sampled tokens that branches sampled (`branch_tokens`)."""
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
