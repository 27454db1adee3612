"""What a campaign proves: the journal of the agents against the store."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lightning.store import Store
from lightning.trainer.training_data import all_rollouts
from lightning.types import Status
from lightning_proof.audit import audit

from tests.chaos.journal import Line


@dataclass(frozen=True, slots=True)
class Verdict:
    """All but the first four must be 0; `findings` are the audit's."""

    replies: int
    rollouts: int
    failed: int
    steps: int
    lost_replies: int
    lost_texts: int
    phantom_rewards: int
    trained_twice: int
    wrong_groups: int
    findings: Sequence[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether nothing was lost, invented or done twice."""
        lost = self.lost_replies or self.lost_texts
        return not (lost or self.phantom_rewards or self.trained_twice or self.wrong_groups or self.findings)


async def judge(store: Store, run: str, lines: Sequence[Line], group_size: int) -> Verdict:
    """Compare everything that agents saw with everything that was kept."""
    rollouts = await all_rollouts(store, run)
    steps = await store.steps(run)
    trained = Counter(name for record in steps for name, _ in record.rollouts)
    groups = Counter(rollout.group for rollout in rollouts if rollout.split == "train")
    returned = {(line.rollout, line.attempt): line.reward for line in lines if line.reward is not None}
    report = await audit(store, run)
    lost_replies, lost_texts = await _lost(store, lines)
    return Verdict(
        replies=sum(bool(line.reply) for line in lines),
        rollouts=len(rollouts),
        failed=sum(rollout.status is Status.FAILED for rollout in rollouts),
        steps=len(steps),
        lost_replies=lost_replies,
        lost_texts=lost_texts,
        phantom_rewards=sum(
            rollout.status is Status.SUCCEEDED and returned.get((rollout.id, rollout.attempt)) != rollout.reward
            for rollout in rollouts
        ),
        trained_twice=sum(count > 1 for count in trained.values()),
        wrong_groups=sum(count != group_size for count in groups.values()),
        findings=[str(finding) for finding in report.findings],
    )


async def _lost(store: Store, lines: Sequence[Line]) -> tuple[int, int]:
    """How many replies have no call in the store, and how many of the calls there have no texts."""
    seen: Mapping[tuple[str, int], set[str]] = defaultdict(set)
    for line in lines:
        if line.reply:
            seen[line.rollout, line.attempt].add(line.reply)
    replies_lost = texts_lost = 0
    for (rollout, attempt), replies in seen.items():
        calls = {call.id: call for call in await store.transitions(rollout, attempt)}
        replies_lost += len(replies - calls.keys())
        texts_lost += sum("texts" not in calls[reply].extras for reply in replies & calls.keys())
    return replies_lost, texts_lost
