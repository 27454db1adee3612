"""Where metrics go besides the store.

The invariant: training neither waits for a tracker nor fails with one.
"""

from __future__ import annotations

from lightning.tracking.protocol import Tracker
from lightning.tracking.trackers import Trackers

__all__ = ["Tracker", "Trackers"]
