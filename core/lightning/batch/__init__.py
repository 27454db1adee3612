"""Trajectories become training rows."""

from __future__ import annotations

from lightning.batch.build import Normalization, build_samples
from lightning.batch.digest import sampler_logprobs, span_digest, transition_digest
from lightning.batch.flaws import Flaw, find_flaw, first_flaw, is_trained
from lightning.batch.sample import FloatArray, IntArray, Sample, TokenSpan
from lightning.batch.trajectory import Group, Trajectory

__all__ = [
    "Flaw",
    "FloatArray",
    "Group",
    "IntArray",
    "Normalization",
    "Sample",
    "TokenSpan",
    "Trajectory",
    "build_samples",
    "find_flaw",
    "first_flaw",
    "is_trained",
    "sampler_logprobs",
    "span_digest",
    "transition_digest",
]
