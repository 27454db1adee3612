"""Trackers of other systems, from TensorBoard to W&B. Each is imported when a run begins that asks for it."""
