"""The policies of a run that has several: how each is trained, the measures of each in a step, and those of a rollout's calls.

The invariant: names and versions are those of the records. A run with one policy shows nothing of this.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from lightning.errors import ConfigError
from lightning.trainer.context import RESTING, Epoch
from lightning.trainer.model import policy_set_of
from lightning.types import POLICY, StepRecord, Transition

from lightning_console.blocks import Cell, Column, Table
from lightning_console.pages.words import NONE, count, number, share


def policies_table(epoch: Epoch, metrics: Mapping[str, float], record: StepRecord | None = None) -> list[Table]:
    """Return the table of the policies of a config epoch, with the metrics of a step and, of its `record`, the policies that
    rested in it; nothing for a run with one policy."""
    try:
        several = policy_set_of(epoch.config)
    except ConfigError:  # settings of another release: the page shows them as they are
        return []
    if several is None:
        return []
    resting = () if record is None else record.context.get(RESTING) or ()

    def row(name: str, told: str) -> list[Cell]:
        def known(metric: str) -> float | None:
            return metrics.get(f"policy/{name}/{metric}")

        rested = isinstance(resting, Sequence) and name in resting
        text = f"{told}; it rested in this step" if rested else told
        return [
            Cell(name),
            Cell(text, tone="muted" if rested or name not in several.adapters else ""),
            Cell(number(known("loss"))),
            Cell(number(known("grad_norm"))),
            Cell(share(known("gradient_share"))),
            Cell(count(known("tokens"))),
            Cell(number(known("entropy"))),
        ]

    columns = [
        Column("policy"),
        Column("agents and training"),
        Column("loss", "number"),
        Column("norm of the gradient", "number", "before it was clipped, which each policy is by itself"),
        Column("gradient share", "number", "share of the squared norm of all policies' gradients"),
        Column("trained tokens", "number"),
        Column("entropy", "number", "nats"),
    ]
    note = f"{NONE} of a policy that was not trained in the step; metrics policy/NAME/..."
    return [Table(columns, [row(*each) for each in several.described.items()], title="Policies", note=note)]


def versions_of(calls: Iterable[Transition]) -> str:
    """Format the policy versions of the tokens of calls, such as `3` or `3 to 4`, or by policy if a run has several: `editor
    3, judge 0`. Empty without a known version."""
    found: dict[str, set[int]] = {}
    for run in (run for call in calls for run in call.versions):
        found.setdefault(run.policy, set()).add(run.version)
    spans = {name: f"{min(own)} to {max(own)}" if len(own) > 1 else str(*own) for name, own in found.items()}
    return ", ".join(span if name == POLICY else f"{name} {span}" for name, span in sorted(spans.items()))
