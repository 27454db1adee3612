"""The states of the calls that a step may train: what a critic is asked to value before credit is assigned.

The invariant: the rows are those that the step will train on, merged in the same way, so valuing a state costs no more than
a forward pass over tokens that are computed anyway.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from lightning.batch.build import build_samples
from lightning.batch.flaws import first_flaw
from lightning.batch.sample import Sample
from lightning.batch.trajectory import Group, Trajectory

StateValues = Mapping[tuple[str, int, int], float]
"""The value of each call's state, by the call's key `(rollout, attempt, seq)`."""


def state_rows(groups: Sequence[Group]) -> tuple[Sample, ...]:
    """Rows with a span for each call that can be trained; rollouts with a flawed call are absent."""
    whole = [member for group in groups for member in group.trajectories if first_flaw(member) is None]
    return build_samples(whole, [np.zeros(len(member.transitions)) for member in whole])


def with_values(groups: Sequence[Group], values: StateValues) -> list[Group]:
    """The groups with `Trajectory.values` set: NaN for calls that `values` does not have."""
    return [
        replace(group, trajectories=tuple(_valued(member, values) for member in group.trajectories)) for group in groups
    ]


def _valued(member: Trajectory, values: StateValues) -> Trajectory:
    return replace(member, values=tuple(values.get(call.key, float("nan")) for call in member.transitions))
