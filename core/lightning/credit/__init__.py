"""Trajectory credit: how a rollout's return is spread over its calls."""
