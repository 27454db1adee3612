"""Algorithms: finished groups in, training rows and a loss out."""

from __future__ import annotations

from lightning.algorithms.protocol import Algorithm, Batch

__all__ = ["Algorithm", "Batch"]
