"""Turns finished trajectories and their advantages into the training rows of an optimizer step."""

from __future__ import annotations

from lightning.batch.build import (
    Advantages,
    Normalization,
    PerToken,
    build_samples,
    given_rows,
    state_rows,
    with_values,
)
from lightning.batch.masks import Ragged, SamplingMask, mask_of
from lightning.batch.sample import (
    FloatArray,
    IntArray,
    Sample,
    TokenSpan,
    sampler_logprobs,
    span_digest,
    transition_digest,
)
from lightning.batch.trajectory import (
    Flaw,
    Group,
    Trajectory,
    begins_at,
    branched_at,
    find_flaw,
    first_flaw,
    is_prefix,
    is_trained,
    turns,
)

__all__ = [
    "Advantages",
    "Flaw",
    "FloatArray",
    "Group",
    "IntArray",
    "Normalization",
    "PerToken",
    "Ragged",
    "Sample",
    "SamplingMask",
    "TokenSpan",
    "Trajectory",
    "begins_at",
    "branched_at",
    "build_samples",
    "find_flaw",
    "first_flaw",
    "given_rows",
    "is_prefix",
    "is_trained",
    "mask_of",
    "sampler_logprobs",
    "span_digest",
    "state_rows",
    "transition_digest",
    "turns",
    "with_values",
]
