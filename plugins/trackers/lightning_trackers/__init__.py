"""Trackers that send a run's metrics and rollouts to other systems, such as TensorBoard or W&B. A tracker's library is imported
only when a run uses it."""
