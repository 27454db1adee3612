"""Where metrics and finished rollouts go besides the store.

The invariant: training neither waits for a tracker nor fails with one.
"""

from __future__ import annotations

from lightning.tracking.protocol import AttemptRecord, RolloutTracker, Tracker
from lightning.tracking.trackers import Trackers

__all__ = ["AttemptRecord", "RolloutTracker", "Tracker", "Trackers"]
