"""What a run begins with, or goes on with: its config epochs, and the training state that its engine loads.

The invariant: the state on disk is the one that the run's committed steps lead to, each under its own settings; nothing is
changed for a run that cannot begin.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from lightning.trainer.checkpoints import Checkpoints
from lightning.trainer.epochs import Epoch
from lightning.trainer.plan import task_ids
from lightning.trainer.run_stages import BringForward, RunLine, Start
from lightning.trainer.runs import changes_of, describe_algorithm, plan_epochs
from lightning.trainer.teacher import Teacher

logger = logging.getLogger(__name__)


async def prepare(
    start: Start, line: RunLine, parent: str | None, teacher: Teacher | None = None
) -> tuple[Start, list[Epoch], BringForward | None]:
    """What the run begins with: its start, with the model; its epochs; and what takes its recorded steps again, if anything
    does. `parent` is the run to fork, if any.

    Raises `ConfigError` for a parent that a run cannot have, and what `RunLine.bring_forward` does.
    """
    run, model, described, store = start.run, start.model, dict(start.described), start.store
    records = await store.steps(run.id)
    if (begun := await line.begun(start, parent)) is not None:
        run, model = replace(run, config={**run.config, **begun.described}), begun.model
        described |= begun.described
    else:
        Checkpoints(start.folder / "checkpoints", keep=1).discard(0)  # of a fork that did not begin
    described["head"] = described["head"] or run.config.get("head", "")
    algorithms = [(first, describe_algorithm(algorithm)) for first, algorithm in start.phases]
    epochs = await plan_epochs(store, run, described, algorithms)
    for epoch in epochs[1:]:
        if records and epoch.first == len(records) + 1:
            changed = "\n  ".join(changes_of(epochs, epoch.number))
            start.reporter.say(f"config epoch {epoch.number} begins with step {epoch.first}:\n  {changed}")
            warn_of_tasks(epochs[epoch.number - 1], epoch)
    start = replace(start, run=run, model=model)
    return start, epochs, await line.bring_forward(start, records, epochs, teacher)


def warn_of_tasks(before: Epoch, after: Epoch) -> None:
    """Say that a run goes on with other training tasks."""
    old, new = task_ids(before), task_ids(after)
    given = after.setting("trainer", "order") == "given"
    if not old or old == new or (not given and set(old) == set(new)):
        return
    moved = "" if set(old) != set(new) else ", and they stand in another order"
    rule = (
        "trainer.order = given goes on at its place in the list, so tasks that moved may come twice in a pass or not at all"
        if given
        else "what a pass has taken comes no second time in it, and new ones join it where their turn is still to come"
    )
    logger.warning(
        "the training tasks changed: %d added, %d removed%s; %s",
        len(set(new) - set(old)),
        len(set(old) - set(new)),
        moved,
        rule,
    )
