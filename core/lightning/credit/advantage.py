"""Estimators without values of states: the advantages of a group's rollouts from their returns.

The invariant: each estimator maps shape (G,) to (G,) in float64 (bfloat16 could not tell the rewards 0.999 and 1.0 apart), and
returns that are all equal give advantages that are all 0.
"""

from __future__ import annotations

import numpy as np

from lightning.credit.protocol import Returns

ROUNDING = 1e-12
"""Two numbers whose relative difference is at most this differ by rounding alone."""


def grpo(returns: Returns, *, eps: float = 1e-4) -> Returns:
    """Return (r - mean) / (std + eps), arXiv 2402.03300; std is the sample deviation (G - 1), as in TRL and verl. Equal returns
    give 0, also without `eps`."""
    centred = centre(returns)
    if len(centred) < 2 or not centred.any():
        return centred
    deviation = float(np.sqrt(np.square(centred).sum() / (len(centred) - 1)))
    return centred / (deviation + eps)


def centre(returns: Returns) -> Returns:
    """Return r - mean: GRPO without dividing by the deviation, which would favour groups that are nearly solved or nearly
    hopeless (Dr. GRPO, arXiv 2503.20783)."""
    values = np.asarray(returns, dtype=np.float64)
    return np.zeros_like(values) if all_equal(values) else values - values.mean()


def rloo(returns: Returns) -> Returns:
    """Return r minus the mean of the *other* rollouts, an unbiased baseline (arXiv 2402.14740): (r - mean) · G / (G - 1)."""
    centred = centre(returns)
    return centred * (len(centred) / (len(centred) - 1)) if len(centred) > 1 else centred


def all_equal(returns: Returns, *, beside: float = 0.0) -> bool:
    """Whether the returns differ by rounding alone. The rounding is relative to the largest of them, or to `beside` if that is
    larger: the size of the numbers from which the returns were computed."""
    values = np.asarray(returns, dtype=np.float64)
    return not len(values) or bool(np.ptp(values) <= ROUNDING * max(np.abs(values).max(), beside))
