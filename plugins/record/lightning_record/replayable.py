"""The step stage that counts the rollouts of a step that cannot be replayed from their record."""

from __future__ import annotations

from lightning.trainer.stages import Added, StepStage, StepTaken

from lightning_record.exchanges import why_not_replayable


class ReplayableStage(StepStage):
    """Adds the metric `not_replayable`: how many rollouts of the step's groups cannot be replayed from their record."""

    api, before = 1, ("advice",)

    async def taken(self, step: StepTaken) -> Added:
        """Count the rollouts of the step's groups that cannot be replayed, as the metric `not_replayable`."""
        members = [member for group in step.groups for member in group.trajectories]
        lost = sum(bool(why_not_replayable((*each.transitions, *each.refused), each.tool_events)) for each in members)
        return Added({"not_replayable": float(lost)})
